"""Evaluates the policy during training: it plays whole episodes with its most likely actions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.policies.evaluation import run_episodes
from lockstep.torch_engine.nets import distributions, nets
from lockstep.torch_engine.nets.memory import on_host
from lockstep.torch_engine.nets.shards import aligned, by_shard
from lockstep.torch_engine.rollout import normalized
from lockstep.torch_engine.session import Session


def evaluate_policy(session: Session) -> np.ndarray:
    """Runs an evaluation; returns return, length, success and score of each episode, ``[episodes, 4]``.

    Actions are the most likely ones. Each shard's episodes go through the networks as one batch of fixed shape,
    whatever the world size.
    """
    state, envs, net = session.state, session.eval_envs(), session.state.net
    device, shards = state.parameters.flat.device, session.plan.local_num_shards
    recurrent_state = torch.zeros((shards, envs.num_envs // shards, net.state_size), device=device)

    def mode_actions(x: Tensor, recurrent_state: Tensor) -> tuple[Tensor, Tensor]:
        weights = state.parameters.expanded(len(x))
        if net.core is None:
            return distributions.mode(net, nets.actor(net, weights, x)), recurrent_state
        none = torch.zeros((len(x), 1, x.shape[1]), device=device)
        output, _, after = nets.unroll(net, weights, x.unsqueeze(1), recurrent_state, none, actor_only=True)
        return distributions.mode(net, output[:, 0]), after[:, 0]

    def act(observations: np.ndarray) -> np.ndarray:
        with torch.inference_mode() if on_host(device) else torch.no_grad():  # environments may take gradients
            return inferred(observations)

    def inferred(observations: np.ndarray) -> np.ndarray:
        nonlocal recurrent_state
        lost = torch.from_numpy(envs.buffers.lost).to(device)  # a lost life ends an episode for the learner
        recurrent_state = torch.where(lost.view(shards, -1, 1), 0.0, recurrent_state)
        x = aligned(normalized(net.observation, observations, state.observation_normalizer), device)
        x = x.view(shards, -1, x.shape[-1])
        actions, recurrent_state = by_shard("loop", mode_actions, x, recurrent_state)
        return net.squash(actions.flatten(0, 1).cpu().numpy())

    episodes = run_episodes(envs, act, session.config.eval.max_steps)
    rows = torch.from_numpy(episodes).unflatten(0, (shards, -1))
    return session.communicator.gather_shards(rows).flatten(0, 1).numpy()

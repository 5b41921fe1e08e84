"""Evaluates the policy during training: it plays whole episodes with its most likely actions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from lockstep.jax_engine.distributed.processes import gather_json, wait_for_all
from lockstep.jax_engine.session import Session
from lockstep.policies.evaluation import COLUMNS, run_episodes


def evaluate_policy(session: Session) -> np.ndarray:
    """Runs an evaluation; returns return, length, success and score of each episode, ``[episodes, 4]``.

    Actions are the most likely ones. Each shard's episodes go through the networks as one batch of fixed shape,
    whatever the number of devices.
    """
    policy, envs = session.policy, session.eval_envs()
    shards, net = session.plan.local_num_shards, session.program.net
    parameters, scale = policy.local_parameters(session.state), policy.local_scale(session.state)
    recurrent_state, owned = jnp.zeros((shards, envs.num_envs // shards, net.state_size)), jnp.int32(shards)

    def act(rows: np.ndarray) -> np.ndarray:
        nonlocal recurrent_state
        lost = envs.buffers.lost.reshape(shards, -1)  # a lost life ends an episode for the learner
        actions, recurrent_state = policy.most_likely(
            parameters, scale, rows.reshape(shards, -1, rows.shape[-1]), recurrent_state, lost, owned
        )
        return np.asarray(actions).reshape(len(rows), *actions.shape[2:])

    episodes = run_episodes(envs, act, session.config.eval.max_steps)
    wait_for_all(f"evaluated {session.iteration}")
    return np.array([row for rows in gather_json(episodes.tolist()) for row in rows], np.float64).reshape(-1, COLUMNS)

"""Behaviour cloning (Pomerleau 1991): trains the policy's networks on recorded actions by maximum likelihood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.normalizers import ObservationNormalizer, RunningMoments, shard_moments
from lockstep.core.shards import keyed_generator
from lockstep.core.spaces import layouts_from_json
from lockstep.networks.checks import check_initial_std
from lockstep.policies.cloning import CloneSettings
from lockstep.policies.recordings import Recording
from lockstep.runs.checkpoint import NORMALIZERS, POLICY
from lockstep.torch_engine.nets import distributions, nets
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.nets.parameters import FlatParameters
from lockstep.torch_engine.state import check_custom, initial_parameters, make_net

MAX_GRAD_NORM = 1.0


def learnt_episodes(recording: Recording, validation: float) -> int:
    """Returns how many episodes, counted from the first, are trained on; the others are held out.

    Raises:
        ValueError: if that is none; the message is one line.
    """
    episodes = len(recording.table)
    learnt = round((1 - validation) * episodes)
    if learnt == 0:
        raise ValueError(f"validation: {validation} holds out all {episodes} episodes; use less, or record more")
    return learnt


def check_recording(config: Config, recording: Recording) -> PolicyNet:
    """Makes the networks that are to learn a recording.

    Raises:
        ValueError: if they can't learn it; the message is one line.
    """
    if config.network.recurrent is not None:
        raise ValueError(f"network.recurrent: {config.network.recurrent} learns no single steps; give another --like")
    if config.network.squash:
        raise ValueError("network.squash: recorded actions are what came out of the tanh; give another --like")
    facts = recording.facts["environment"]
    net = make_net(config, *layouts_from_json(facts["observation"], facts["action"]))
    check_initial_std(config, net)
    check_custom(config, net)
    return net


def train_clone(
    config: Config, recording: Recording, settings: CloneSettings, log: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Trains networks on a recording, on this process's CPU; ``log`` receives one record per epoch.

    Returns:
        The arrays of a checkpoint by name, in which the critic has its initial parameters, and the last epoch's
        numbers.
    """
    torch.set_num_threads(config.threads)
    net = check_recording(config, recording)
    parameters = FlatParameters(net.shapes(), torch.device("cpu"))
    parameters.load(parameters.flat, initial_parameters(config, net))
    actions = torch.from_numpy(recording.actions)
    held_out = recording.episodes >= learnt_episodes(recording, settings.validation)
    rows, arrays = _normalized(config, net, recording.observations, ~held_out)
    learnt, tested = (np.flatnonzero(which) for which in (~held_out, held_out))
    optimizer = torch.optim.Adam([parameters.flat.requires_grad_()], settings.learning_rate, eps=1e-5)
    epochs, minibatches = settings.passes(len(learnt))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs * minibatches)
    last: dict[str, Any] = {}
    for epoch in range(epochs):
        order = learnt[keyed_generator(settings.seed, "clone", epoch).permutation(len(learnt))]
        losses = []
        for part in np.array_split(order, minibatches):
            loss = _loss(net, parameters, rows[part], actions[part])[0]
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([parameters.flat], MAX_GRAD_NORM)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        last = {"loss": float(np.mean(losses)), **_tested(net, parameters, rows, actions, tested, settings.batch)}
        log({"iteration": epoch + 1, "global_step": 0, **{f"clone/{name}": value for name, value in last.items()}})
    learned = parameters.arrays(parameters.flat)
    return arrays | {POLICY + name: array for name, array in learned.items()}, last


def _normalized(
    config: Config, net: PolicyNet, rows: np.ndarray, learnt: np.ndarray
) -> tuple[Tensor, dict[str, np.ndarray]]:
    """Normalises rows by the moments of the ``learnt`` ones; returns them, and the normaliser's arrays if it is on."""
    if not config.normalize.observations:
        return torch.from_numpy(rows), {}
    rows, size = rows.copy(), net.observation.vector_size
    moments = RunningMoments.empty(size)
    vectors = net.observation.floats(rows)[..., :size]
    moments.merge(int(learnt.sum()), *shard_moments(vectors[learnt]))
    vectors[...] = ObservationNormalizer(moments, config.normalize.clip_observations)(vectors)
    named = {f"{NORMALIZERS}observations.{name}": array for name, array in moments.arrays().items()}
    return torch.from_numpy(rows), named


def _loss(net: PolicyNet, parameters: FlatParameters, rows: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the mean negative log-probability of the actions, and which are the most likely ones, bool ``[n]``."""
    weights = nets.expand(parameters.split(parameters.flat), 1)
    output = nets.actor(net, weights, rows.unsqueeze(0)).float()
    log_prob, _ = distributions.log_prob_and_entropy(net, weights, output, actions.unsqueeze(0))
    alike = (distributions.mode(net, output)[0] == actions).flatten(1 if actions.dim() > 1 else 0)
    return -log_prob.mean(), alike.all(1) if alike.dim() > 1 else alike


@torch.no_grad()
def _tested(
    net: PolicyNet, parameters: FlatParameters, rows: Tensor, actions: Tensor, which: np.ndarray, batch: int
) -> dict[str, float | None]:
    """Computes the loss on held-out steps, and for indices the share of most likely actions; None without steps."""
    if not len(which):
        return {"validation_loss": None, "accuracy": None}
    split = np.array_split(which, -(-len(which) // batch))
    parts = [_loss(net, parameters, rows[part], actions[part]) for part in split]
    sizes = np.array([len(alike) for _, alike in parts])
    loss = float(np.average([loss.item() for loss, _ in parts], weights=sizes))
    accuracy = float(torch.cat([alike for _, alike in parts]).float().mean()) if net.discrete else None
    return {"validation_loss": loss, "accuracy": accuracy}

"""What training changes: parameters, moments, normalisers, counters; and their names in a checkpoint."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.episodes import EpisodeCounter, RecentEpisodes
from lockstep.core.normalizers import ObservationNormalizer, RewardNormalizer, RunningMoments
from lockstep.core.shards import ShardPlan, keyed_seed
from lockstep.core.spaces import ActionLayout, ObservationLayout
from lockstep.envs.description import EnvDescription
from lockstep.networks.initial import initial_parameters
from lockstep.networks.spec import net_options
from lockstep.torch_engine.nets.custom import load_custom
from lockstep.torch_engine.nets.nets import PolicyNet, expand
from lockstep.torch_engine.plain.adam import MOMENTS, HostAdam
from lockstep.torch_engine.plain.policy import PlainPolicy, derivable

if TYPE_CHECKING:
    from lockstep.torch_engine.distributed.sharded import ShardedParameters

POLICY, OPTIMIZER, NORMALIZERS = "policy/", "optimizer/", "normalizers/"


class FlatParameters:
    """All parameters in one float32 vector ``[P]``, and views of it by name."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        self.shapes = shapes
        self.sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        self.flat = torch.zeros(sum(self.sizes.values()), device=device)
        self.views = self.split(self.flat)
        self._expanded: dict[int, dict[str, Tensor]] = {}

    def expanded(self, num_shards: int) -> dict[str, Tensor]:
        """The views with a leading shard axis (:func:`.nets.nets.expand`), made once per number."""
        if num_shards not in self._expanded:
            self._expanded[num_shards] = expand(self.views, num_shards)
        return self._expanded[num_shards]

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a vector ``[P]`` by parameter name."""
        parts = torch.split(flat, list(self.sizes.values()))
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def arrays(self, flat: Tensor) -> dict[str, np.ndarray]:
        """Copies of a vector's parts on the host."""
        host = flat.detach().cpu()
        return {name: part.numpy().copy() for name, part in self.split(host).items()}

    def load(self, flat: Tensor, arrays: dict[str, np.ndarray]) -> None:
        """Copy arrays into a vector's parts; the names and shapes must be these."""
        for name, view in self.split(flat).items():
            view.copy_(
                torch.from_numpy(np.ascontiguousarray(arrays[name])).view(view.shape)
            )  # NumPy adds an axis to none


@dataclass
class TrainState:
    """The whole state of training on one rank; all of it but ``counter`` and ``running`` is the same on every rank.

    Attributes:
        net: shapes of the networks.
        parameters: their weights; ``optimizer`` is Adam over the flat vector.
        observations: normaliser of observations, or None.
        rewards: normaliser of rewards, or None.
        counter: live episodes' returns and lengths, local environments.
        recent: the last hundred episodes.
        carry: what a recurrent policy carries from step to step, float32 ``[E, carry_size]``, or None.
        reference: parameters of GRPO's reference policy, or None.
        plain: the policy in NumPy, where it is plain and on a CPU, or None; ``host_adam`` its optimiser.
        sharded: this rank's slices of parameters and moments, with FSDP; ``parameters`` then has memory only between
            :func:`gather_parameters` and :func:`release_parameters`.
        learning_rate: as the adaptive schedule left it.
        iteration: iterations done; ``global_step`` environment steps, ``optimizer_steps`` optimiser steps.
    """

    net: PolicyNet
    parameters: FlatParameters
    optimizer: torch.optim.Adam
    observations: ObservationNormalizer | None
    rewards: RewardNormalizer | None
    counter: EpisodeCounter
    learning_rate: float
    recent: RecentEpisodes = field(default_factory=RecentEpisodes)
    carry: np.ndarray | None = None
    reference: FlatParameters | None = None
    plain: PlainPolicy | None = None
    host_adam: HostAdam | None = None
    sharded: ShardedParameters | None = None
    iteration: int = 0
    global_step: int = 0
    optimizer_steps: int = 0


def make_net(config: Config, observation: ObservationLayout, action: ActionLayout) -> PolicyNet:
    """The networks that a config asks for.

    Raises:
        ValueError: they don't fit the spaces; one line.
    """
    network = config.network
    net = PolicyNet(**net_options(config, observation, action))
    if network.custom is None:
        return net
    custom = load_custom(network.custom, network.custom_kwargs, net, keyed_seed(config.seed, "init/custom"))
    return replace(net, custom=custom, core=None, shared=False)


def optimizer_options(config: Config) -> dict[str, Any]:
    """Adam's settings."""
    ppo = config.ppo
    return {"lr": ppo.learning_rate, "betas": ppo.adam_betas, "eps": ppo.adam_eps}


def make_optimizer(flat: Tensor, config: Config) -> torch.optim.Adam:
    """Adam over the flat parameters, its moments in place from the start."""
    flat.grad = torch.zeros_like(flat)
    optimizer = torch.optim.Adam([flat], fused=True, **optimizer_options(config))
    step = torch.zeros((), device=flat.device)
    optimizer.state[flat] = {"step": step, "exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)}
    return optimizer


def check_networks(config: Config, description: EnvDescription) -> PolicyNet:
    """The networks that a config asks for, if they and all that goes with them can be had here.

    Raises:
        ValueError: networks or normalisers don't fit the spaces, or nothing can compile them; one line.
    """
    net = make_net(config, description.observation, description.action)
    if config.normalize.observations and not net.observation.vector_size:
        raise ValueError(
            f"normalize.observations: {description.id} observes no numbers (images are scaled to 0 … 1 and indices "
            "become one-hot vectors anyway); leave it out"
        )
    compilers = (os.environ.get("CXX", "g++"), "clang++")
    if config.compile and config.device == "cpu" and not any(shutil.which(name) for name in compilers):
        raise ValueError(
            "compile: needs a C++ compiler and there is none (CXX, g++, clang++); install one or leave it out"
        )
    return net


def init_state(config: Config, description: EnvDescription, plan: ShardPlan, device: torch.device) -> TrainState:
    """The state before the first iteration.

    Raises:
        ValueError: networks or normalisers don't fit the spaces; one line.
    """
    net = check_networks(config, description)
    parameters = FlatParameters(net.shapes(), device)
    parameters.load(parameters.flat, initial_parameters(config, net))
    observations = rewards = None
    if config.normalize.observations:
        moments = RunningMoments.empty(net.observation.vector_size)
        observations = ObservationNormalizer(moments, config.normalize.clip_observations)
    if config.normalize.returns:
        moments = RunningMoments.empty(1)
        rewards = RewardNormalizer(moments, config.normalize.clip_rewards, config.ppo.gamma, plan.local_num_envs)
    optimizer, plain = make_optimizer(parameters.flat, config), plain_policy(config, net, parameters)
    return TrainState(
        net=net,
        parameters=parameters,
        optimizer=optimizer,
        observations=observations,
        rewards=rewards,
        counter=EpisodeCounter(plan.local_num_envs),
        carry=np.zeros((plan.local_num_envs, net.carry_size), np.float32) if net.core else None,
        plain=plain,
        host_adam=None if plain is None else HostAdam(optimizer),
        learning_rate=config.ppo.learning_rate,
    )


def plain_policy(config: Config, net: PolicyNet, parameters: FlatParameters) -> PlainPolicy | None:
    """The policy in NumPy, on the same memory, if that can be."""
    if config.device != "cpu" or config.precision != "fp32" or not derivable(net) or config.fsdp or config.compile:
        return None
    return PlainPolicy(net, {name: view.numpy() for name, view in parameters.views.items()})


def carried(state: TrainState) -> dict[str, np.ndarray]:
    """What each local environment carries from step to step besides its own state, arrays ``[E, …]``."""
    out = {} if state.rewards is None else {"discounted": state.rewards.running}
    return out if state.carry is None else out | {"carry": state.carry}


def moments_of(state: TrainState) -> dict[str, Tensor]:
    """Adam's state: ``step`` scalar, ``exp_avg`` and ``exp_avg_sq`` ``[P]``; with FSDP a collective, of copies."""
    if state.sharded is None:
        return state.optimizer.state[state.parameters.flat]
    sharded = state.sharded
    full = {name: sharded.full(sharded.moments(state.optimizer, name)) for name in MOMENTS}
    return {"step": state.optimizer.state[sharded.slices[0]]["step"], **full}


def gather_parameters(state: TrainState) -> None:
    """With FSDP: give ``state.parameters`` the memory of a whole copy, on every rank; a collective."""
    if state.sharded is not None:
        state.sharded.gather(state.parameters.flat)


def release_parameters(state: TrainState) -> None:
    """With FSDP: free the whole copy."""
    if state.sharded is not None:
        state.sharded.release(state.parameters.flat)


def policy_arrays(state: TrainState) -> dict[str, np.ndarray]:
    """Parameters and normalisers by name, of :func:`state_arrays`; with FSDP between gather and release only."""
    arrays = {POLICY + name: array for name, array in state.parameters.arrays(state.parameters.flat).items()}
    return arrays | _normalizer_arrays(state)


def state_arrays(state: TrainState) -> dict[str, np.ndarray]:
    """Every array of the training state by name: what is saved is what is fingerprinted is what is compared.

    With FSDP the slices of all ranks are put together: a collective, and every rank gets whole arrays.
    """
    flat, adam, sharded = state.parameters, moments_of(state), state.sharded
    parameters = flat.flat if sharded is None else sharded.full(sharded.slices)
    arrays = {POLICY + name: array for name, array in flat.arrays(parameters).items()}
    for moment in MOMENTS:
        arrays |= {f"{OPTIMIZER}{moment}/{name}": array for name, array in flat.arrays(adam[moment]).items()}
    arrays[OPTIMIZER + "step"] = adam["step"].detach().cpu().numpy().reshape(1).copy()
    return arrays | _normalizer_arrays(state)


def _normalizer_arrays(state: TrainState) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for name, normalizer in (("observations", state.observations), ("returns", state.rewards)):
        if normalizer is not None:
            arrays |= {f"{NORMALIZERS}{name}.{k}": v for k, v in normalizer.moments.arrays().items()}
    return arrays


def _below(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}


def load_state_arrays(state: TrainState, arrays: dict[str, np.ndarray]) -> None:
    """The reverse of :func:`state_arrays`.

    Raises:
        ValueError: names or shapes are not those of this config.
    """
    mine = {name: array.shape for name, array in state_arrays(state).items()}
    theirs = {name: array.shape for name, array in arrays.items()}
    for name in [*mine, *theirs]:
        if mine.get(name) != theirs.get(name):
            raise ValueError(
                f"the checkpoint doesn't fit this config: {name} is {theirs.get(name, 'missing')} there and "
                f"{mine.get(name, 'missing')} here"
            )
    _load_vectors(state, arrays, float(arrays[OPTIMIZER + "step"][0]))
    for name, normalizer in (("observations", state.observations), ("returns", state.rewards)):
        if normalizer is not None:
            normalizer.moments = RunningMoments.from_arrays(_below(arrays, f"{NORMALIZERS}{name}."))
    if state.observations is not None:
        state.observations.freeze()


def _load_vectors(state: TrainState, arrays: dict[str, np.ndarray], step: float) -> None:
    """Parameters and moments; with FSDP this rank's slices of them."""
    flat, sharded = state.parameters, state.sharded
    if sharded is None:
        flat.load(flat.flat, _below(arrays, POLICY))
        adam = moments_of(state)
        for moment in MOMENTS:
            flat.load(adam[moment], _below(arrays, f"{OPTIMIZER}{moment}/"))
        adam["step"].fill_(step)
        return
    whole = torch.empty(flat.flat.shape, device=flat.flat.device)
    for prefix, slices in (
        (POLICY, sharded.slices),
        *((f"{OPTIMIZER}{moment}/", sharded.moments(state.optimizer, moment)) for moment in MOMENTS),
    ):
        flat.load(whole, _below(arrays, prefix))
        sharded.take(slices, whole)
    for piece in sharded.slices:
        state.optimizer.state[piece]["step"].fill_(step)
    release_parameters(state)

"""The state that training changes (parameters, moments, normalisers, counters) and its names in a checkpoint."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.episodes import EpisodeCounter, RecentEpisodes
from lockstep.core.normalizers import ObservationNormalizer, RewardNormalizer, RunningMoments
from lockstep.core.shards import ShardPlan, keyed_seed
from lockstep.core.spaces import ActionLayout, ObservationLayout
from lockstep.envs.description import EnvDescription
from lockstep.networks.checks import check_initial_std, check_normalizable
from lockstep.networks.initial import initial_parameters
from lockstep.networks.spec import net_options
from lockstep.runs.checkpoint import NORMALIZERS, OPTIMIZER, POLICY, below, check_names_and_shapes
from lockstep.torch_engine.nets.autograd import AutogradFunctions
from lockstep.torch_engine.nets.custom import load_custom
from lockstep.torch_engine.nets.custom_trial import check_made_alike, check_trainable
from lockstep.torch_engine.nets.functions import PolicyFunctions
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.nets.parameters import MOMENTS, FlatParameters, Optimizer, WholeAdam, fused_adam
from lockstep.torch_engine.plain.adam import host_adam
from lockstep.torch_engine.plain.functions import PlainFunctions, RecurrentFunctions
from lockstep.torch_engine.plain.policy import derivable
from lockstep.torch_engine.plain.recurrent import derivable_recurrent
from lockstep.torch_engine.setup import accelerator
from lockstep.training.schedules import scheduled_coefficients


@dataclass
class TrainState:
    """The whole state of training on one rank; all of it is the same on every rank, except what live episodes carry.

    Attributes:
        parameters: weights; with FSDP they have memory only between :func:`gather_parameters` and
            :func:`release_parameters`.
        policy: computes with the parameters; ``optimizer`` changes them; both are chosen once.
        observation_normalizer: None if observations are not normalised; ``return_normalizer``: None if rewards are not.
        counter: returns and lengths of the live episodes of local environments.
        learning_rate: as the adaptive schedule left it.
        coefficients: the scheduled coefficients of the loss by name: float32 ``[]`` on the device, always in the same
            memory, which :func:`lockstep.torch_engine.update.begin_update` fills.
        recent: the last hundred episodes.
        recurrent_state: of a recurrent policy, float32 ``[E, size]``, else None; with an accelerator it stays there
            between iterations.
        reference: GRPO's reference policy, or None.
    """

    net: PolicyNet
    parameters: FlatParameters
    policy: PolicyFunctions
    optimizer: Optimizer
    observation_normalizer: ObservationNormalizer | None
    return_normalizer: RewardNormalizer | None
    counter: EpisodeCounter
    learning_rate: float
    recent: RecentEpisodes = field(default_factory=RecentEpisodes)
    recurrent_state: np.ndarray | Tensor | None = None
    reference: AutogradFunctions | None = None
    coefficients: dict[str, Tensor] = field(default_factory=dict)
    iteration: int = 0
    global_step: int = 0
    optimizer_steps: int = 0


def make_net(
    config: Config, observation: ObservationLayout, action: ActionLayout, custom_class: type | None = None
) -> PolicyNet:
    """Makes the networks that a config asks for.

    ``custom_class`` is the class that ``network.custom`` names, if the caller has it; None: it is found by its name.

    Raises:
        ValueError: if they don't fit the spaces; the message is one line.
    """
    network = config.network
    net = PolicyNet(**net_options(config, observation, action))
    if network.custom is None:
        return net
    seed = keyed_seed(config.seed, "init/custom")
    custom = load_custom(network.custom, network.custom_kwargs, net, seed, custom_class)
    return replace(net, custom=custom, core=None, shared=False)


def check_custom(config: Config, net: PolicyNet) -> None:
    """Checks that a user's own network, if the config has one, can be trained, and is the same each time it is made.

    Raises:
        ValueError: it can't, or it isn't; the message is one line.
    """
    if net.custom is not None:
        name = f"network.custom: {config.network.custom}"
        check_trainable(name, net.custom, net)
        check_made_alike(name, net.custom, make_net(config, net.observation, net.action).custom, net)


def optimizer_options(config: Config) -> dict[str, Any]:
    """Returns Adam's settings without the learning rate, by PyTorch's names."""
    return {"betas": config.ppo.adam_betas, "eps": config.ppo.adam_eps}


def check_networks(config: Config, description: EnvDescription) -> PolicyNet:
    """Makes the networks that a config asks for, and checks that they can be trained as it says.

    Raises:
        ValueError: if networks or normalisers don't fit the spaces, or nothing here can compile or capture them; the
            message is one line.
    """
    net = make_net(config, description.observation, description.action)
    check_custom(config, net)
    check_initial_std(config, net)
    check_normalizable(config, net, description.id)
    if config.cuda_graphs is True:
        accelerator.check_accelerator(config.device, 1, graphs=True)
    if config.compile:
        _check_compiler(config.device)
    return net


def _check_compiler(device: str) -> None:
    """Checks that the compiler which ``torch.compile`` calls for a device is installed.

    Raises:
        ValueError: it isn't; one line.
    """
    if device == "cpu":
        variable, names, kind = "CXX", ("clang++" if sys.platform == "darwin" else "g++",), "C++"
    else:
        variable, names, kind = "CC", ("gcc", "clang"), "C"
    names = (os.environ[variable],) if variable in os.environ else names
    if not any(shutil.which(name) for name in names):
        raise ValueError(
            f"compile: needs a {kind} compiler, and PyTorch looks for {' or '.join(names)}, which isn't here; install "
            f"one, name another in the environment variable {variable} (one word), or leave compile out"
        )


def init_state(config: Config, description: EnvDescription, plan: ShardPlan, device: torch.device) -> TrainState:
    """Makes the state before the first iteration.

    Raises:
        ValueError: if networks or normalisers don't fit the spaces; the message is one line.
    """
    net = check_networks(config, description)
    parameters = FlatParameters(net.shapes(), device)
    parameters.load(parameters.flat, initial_parameters(config, net))
    observations = returns = None
    if config.normalize.observations:
        moments = RunningMoments.empty(net.observation.vector_size)
        observations = ObservationNormalizer(moments, config.normalize.clip_observations)
    if config.normalize.returns:
        moments = RunningMoments.empty(1)
        returns = RewardNormalizer(moments, config.normalize.clip_rewards, config.ppo.gamma, plan.local_num_envs)
    policy, optimizer = make_policy(config, net, parameters)
    return TrainState(
        net=net,
        parameters=parameters,
        policy=policy,
        optimizer=optimizer,
        observation_normalizer=observations,
        return_normalizer=returns,
        counter=EpisodeCounter(plan.local_num_envs),
        recurrent_state=np.zeros((plan.local_num_envs, net.state_size), np.float32) if net.core else None,
        learning_rate=config.ppo.learning_rate,
        coefficients={name: torch.tensor(x, device=device) for name, x in scheduled_coefficients(config, 0).items()},
    )


def make_policy(config: Config, net: PolicyNet, parameters: FlatParameters) -> tuple[PolicyFunctions, Optimizer]:
    """Chooses what computes: NumPy for plain and recurrent policies in float32 on a CPU, else PyTorch."""
    by_hand = config.device == "cpu" and config.precision == "fp32" and not config.fsdp and not config.compile
    by_hand = by_hand and config.ppo.loss is None  # autograd computes the gradient of a user's own loss
    if by_hand and derivable(net):
        rule = partial(host_adam, betas=config.ppo.adam_betas, epsilon=config.ppo.adam_eps)
        return PlainFunctions(net, parameters), WholeAdam(parameters, rule)
    rule = partial(fused_adam, options=optimizer_options(config))
    if by_hand and derivable_recurrent(net):
        return RecurrentFunctions(net, parameters), WholeAdam(parameters, rule)
    return AutogradFunctions(net, parameters, config), WholeAdam(parameters, rule)


def carried(state: TrainState) -> dict[str, np.ndarray]:
    """Returns what local environments carry from step to step besides their own state, arrays ``[E, …]`` by name."""
    out = {} if state.return_normalizer is None else {"discounted": state.return_normalizer.running}
    carry = state.recurrent_state
    if carry is None:
        return out
    return out | {"carry": carry.cpu().numpy() if isinstance(carry, Tensor) else carry}


def gather_parameters(state: TrainState) -> None:
    """Gives ``state.parameters`` the memory of a whole copy on every rank, if FSDP slices them; then a collective."""
    state.optimizer.gather()


def release_parameters(state: TrainState) -> None:
    """Frees the whole copy that :func:`gather_parameters` made."""
    state.optimizer.release()


def policy_arrays(state: TrainState) -> dict[str, np.ndarray]:
    """Copies parameters and normalisers by name, as :func:`state_arrays`; with FSDP only between gather and release."""
    arrays = {POLICY + name: array for name, array in state.parameters.arrays(state.parameters.flat).items()}
    return arrays | _normalizer_arrays(state)


def state_arrays(state: TrainState) -> dict[str, np.ndarray]:
    """Copies every array of the training state by name; these are what is saved, fingerprinted and compared.

    With FSDP it is a collective that puts the slices of all ranks together, and every rank gets whole arrays.
    """
    flat, adam = state.parameters, state.optimizer.moments()
    arrays = {POLICY + name: array for name, array in flat.arrays(state.optimizer.parameters()).items()}
    for moment in MOMENTS:
        arrays |= {f"{OPTIMIZER}{moment}/{name}": array for name, array in flat.arrays(adam[moment]).items()}
    arrays[OPTIMIZER + "step"] = adam["step"].detach().cpu().numpy().reshape(1).copy()
    return arrays | _normalizer_arrays(state)


def _normalizer_arrays(state: TrainState) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for name, normalizer in _normalizers(state):
        if normalizer is not None:
            arrays |= {f"{NORMALIZERS}{name}.{k}": v for k, v in normalizer.moments.arrays().items()}
    return arrays


def _normalizers(state: TrainState) -> tuple[tuple[str, ObservationNormalizer | RewardNormalizer | None], ...]:
    """Returns the normalisers with their names in checkpoints."""
    return ("observations", state.observation_normalizer), ("returns", state.return_normalizer)


def load_state_arrays(state: TrainState, arrays: dict[str, np.ndarray]) -> None:
    """Copies arrays into the state: the reverse of :func:`state_arrays`.

    Raises:
        ValueError: if names or shapes are not those of this config.
    """
    check_names_and_shapes(state_arrays(state), arrays)
    moments = {moment: below(arrays, f"{OPTIMIZER}{moment}/") for moment in MOMENTS}
    state.optimizer.load(below(arrays, POLICY), moments, float(arrays[OPTIMIZER + "step"][0]))
    for name, normalizer in _normalizers(state):
        if normalizer is not None:
            normalizer.moments = RunningMoments.from_arrays(below(arrays, f"{NORMALIZERS}{name}."))
    if state.observation_normalizer is not None:
        state.observation_normalizer.freeze()

"""The self-check at the start: whether this run, on this machine, batches shards or calls them one by one."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.life import life
from lockstep.core.shards import ShardPlan, keyed_generator
from lockstep.envs.gymnasium.random_policy import draw_actions, random_actions
from lockstep.torch_engine.nets.autograd import AutogradFunctions
from lockstep.torch_engine.nets.encoders import float_columns
from lockstep.torch_engine.nets.functions import DROPOUT_SEED, ShardGradients, shard_gradients
from lockstep.torch_engine.nets.memory import on_host
from lockstep.torch_engine.nets.shards import Mode, ShardFunction, to_shards
from lockstep.torch_engine.setup.mapped_operations import OtherOperations
from lockstep.torch_engine.setup.self_check import shard_invariant
from lockstep.training.losses import loss_settings

if TYPE_CHECKING:
    from lockstep.torch_engine.distributed.communicator import Communicator
    from lockstep.torch_engine.nets.custom import CustomNet
    from lockstep.torch_engine.nets.nets import PolicyNet
    from lockstep.torch_engine.state import TrainState

SELF_CHECK_DRAWS = 3
MOST_DRAWS = 8
"""The most draws for gradients of images."""
LOOP, ALONE, PAIRS = range(3)
"""How networks may be called: shard by shard, for several shards at once, or so with a lone shard as one of two."""
FEW_OPERATIONS = 2e9
"""A shard's minibatch gradient of no more than this takes an accelerator longer to launch than to compute. A lone shard
may then be computed twice, which decides its bits, so it depends on the run alone; several go side by side."""


def choose_mode(state: TrainState, config: Config, communicator: Communicator) -> Mode:
    """Chooses to batch shards if that can't change their bits on this machine, else one by one; all ranks alike."""
    if config.reduction == "fast":
        return "batched"
    if config.compile:
        return "loop"  # only the function of one shard is compiled
    if state.net.custom is not None and config.shards == 1:
        return "loop"  # there is only one shard
    if state.net.custom is not None:
        return _mode_of_custom(state, state.net.custom, config, communicator)
    if state.net.convolutional:
        return "loop"  # the number of images decides a convolution's kernel
    if state.net.bf16 and on_host(state.parameters.flat.device):
        return "loop"  # the number of shards decides the order of sums, and rounding hides it nearly everywhere
    if not isinstance(state.policy, AutogradFunctions):
        return _agreed(shards_invariant_here(state, config), communicator)
    return _mode_of_policy(state, state.policy, config, communicator)


def _mode_of_policy(state: TrainState, policy: AutogradFunctions, config: Config, communicator: Communicator) -> Mode:
    """Chooses whether shards are batched and a lone one is computed as one of two, the same on all ranks."""
    flat, passed = state.parameters.flat, LOOP
    paired = not on_host(flat.device) and takes_few_operations(flat.numel(), config)
    for how in (ALONE, PAIRS) if paired else (ALONE,):
        policy.pairs = how == PAIRS
        if shards_invariant_here(state, config):
            passed = how
            break
    ranks = communicator.gather_ranks(torch.tensor([passed]))
    batched = bool((ranks != LOOP).all())
    policy.pairs = batched and bool((ranks == PAIRS).any())
    if state.reference is not None:
        state.reference.pairs = policy.pairs
    return "batched" if batched else "loop"


def takes_few_operations(parameters: int, config: Config) -> bool:
    """Returns whether the gradient of a shard's minibatch takes at most :data:`FEW_OPERATIONS`."""
    return 6 * parameters * _samples(config) <= FEW_OPERATIONS


def choose_rollout_mode(state: TrainState, config: Config, communicator: Communicator, mode: Mode) -> Mode:
    """Chooses to batch shards of images in rollouts, even if the update loops over them; an environment has one a step.

    Calls on many images at a time, as the update's, gain nothing from more images.
    """
    net = state.net
    if mode == "batched" or not net.convolutional or net.custom is not None:
        return mode
    if net.bf16 and on_host(state.parameters.flat.device):
        return mode  # see choose_mode
    return _agreed(rollouts_invariant_here(state, config), communicator)


IMAGES_TOGETHER = 256
BYTES_TOGETHER = IMAGES_TOGETHER * 4 * 84 * 84
"""Bytes of images in one call: enough shards share its cost, and what lies between layers is still small."""


def choose_together(state: TrainState, config: Config, communicator: Communicator, mode: Mode) -> int:
    """Chooses the most shards of images whose gradients one call computes if ``mode`` is to loop; a power of two."""
    net = state.net
    if mode == "batched" or not net.convolutional or net.custom is not None or net.bf16 or config.compile:
        return 1
    if not on_host(state.parameters.flat.device):
        return 1
    if _samples(config) // config.ppo.gradient_accumulation == 1:
        return 1  # kernels for a lone image are others than for several, and sometimes differ in their numbers
    together = shards_that_fit(net, config)
    return together if _all_pass(gradients_invariant_here(state, config, together), communicator) else 1


def shards_that_fit(net: PolicyNet, config: Config) -> int:
    """Returns how many shards' minibatches of images one call should take at most, a power of two."""
    images = max(1, min(IMAGES_TOGETHER, BYTES_TOGETHER // net.observation.image_bytes))
    fit = min(config.shards, max(1, images // _samples(config)))
    return 1 << fit.bit_length() - 1


class Modes(NamedTuple):
    """Holds how a rank's shards go through the networks; see :class:`lockstep.torch_engine.session.Session`."""

    mode: Mode
    rollout_mode: Mode
    together: int


def expected_modes(config: Config, net: PolicyNet, platform: str) -> Modes:
    """Returns what is chosen if all checks pass, for plans: without a state, and whatever the machine.

    Custom networks count as called shard by shard; so do, on a GPU, networks too large to compute a lone shard twice.
    """
    on_cpu, half = platform == "cpu", config.precision == "bf16"
    loops = net.convolutional or net.custom is not None or config.compile or (on_cpu and half)
    if not on_cpu:  # on which a lone shard has other bits
        loops = loops or not takes_few_operations(sum(map(math.prod, net.shapes().values())), config)
    if config.reduction == "fast" or not loops:
        return Modes("batched", "batched", 1)
    if not net.convolutional or net.custom is not None or (on_cpu and half):
        return Modes("loop", "loop", 1)
    lone = _samples(config) // config.ppo.gradient_accumulation == 1
    return Modes("loop", "batched", 1 if lone or config.compile or not on_cpu else shards_that_fit(net, config))


def _mode_of_custom(state: TrainState, custom: CustomNet, config: Config, communicator: Communicator) -> Mode:
    """Chooses how a custom network is called, the same on all ranks; it keeps the choice, and why it isn't batched."""
    ranks = communicator.gather_ranks(torch.tensor([_how_it_maps(state, custom, config)]))
    mapped = bool((ranks != LOOP).all())
    custom.map_over_shards(mapped, mapped and bool((ranks == PAIRS).any()))
    if not mapped and custom.one_by_one is None:
        custom.one_by_one = "didn't pass the self-check on another rank"
    return "batched" if mapped else "loop"


def _how_it_maps(state: TrainState, custom: CustomNet, config: Config) -> int:
    """Returns how a custom network may be called for several shards at once, so that each keeps its own bits."""
    if state.net.convolutional:
        custom.one_by_one = "sees images"
    elif state.net.bf16:
        custom.one_by_one = "computes in bfloat16"
    elif not on_host(state.parameters.flat.device):
        custom.one_by_one = "is on an accelerator"
    if custom.one_by_one is not None:
        return LOOP
    others = OtherOperations()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "There is a performance drop")  # PyTorch maps it by a loop
            for how in (ALONE, PAIRS):
                custom.map_over_shards(True, how == PAIRS)
                with others:
                    passed = shards_invariant_here(state, config)
                if passed and shards_invariant_here(state, config):  # compiled code runs only unwatched
                    break
            else:
                how = LOOP
    except Exception as error:  # the user's code may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        custom.one_by_one = f"can't be mapped over shards, tried on random observations ({reason})"
        return LOOP
    finally:
        custom.set_dropout(False)  # a failure may have left it on
    if others.names:
        custom.one_by_one = f"uses {', '.join(sorted(others.names))}, which may round a number by its place in memory"
        return LOOP
    if how == LOOP:
        custom.one_by_one = "batched would change a shard's bits on this machine"
    return how


def _all_pass(passed: bool, communicator: Communicator) -> bool:
    return bool(communicator.gather_ranks(torch.tensor([passed])).all())


def _agreed(passed: bool, communicator: Communicator) -> Mode:
    return "batched" if _all_pass(passed, communicator) else "loop"


def shards_invariant_here(state: TrainState, config: Config) -> bool:
    """Compares this run's action, evaluation and gradient, at its shapes on keyed random data, alone and batched."""
    plan = ShardPlan(config.envs, config.shards)
    if plan.num_shards == 1:
        return True
    return all(_shards_invariant(state, config, plan, draw) for draw in range(SELF_CHECK_DRAWS))


@torch.no_grad()
def rollouts_invariant_here(state: TrainState, config: Config) -> bool:
    """Compares one step of this run's actor, at its shapes on keyed random data, alone and batched."""
    plan = ShardPlan(config.envs, config.shards)
    draws = [_Draws(state, config, plan.num_shards, number) for number in range(SELF_CHECK_DRAWS)]
    return plan.num_shards == 1 or all(_steps_invariant(state, plan, draw) for draw in draws)


def gradients_invariant_here(state: TrainState, config: Config, together: int) -> bool:
    """Compares gradients of as many shards as calls take with one's, at the run's shapes on keyed random data."""
    return all(
        _gradients_invariant(state, config, 1 << power, number)
        for power in range(1, together.bit_length())
        for number in range(draws_of(_samples(config) << power))
    )


def draws_of(images: int) -> int:
    """Returns the number of draws for so many images: with few images, one draw shows less."""
    return max(1, min(MOST_DRAWS, IMAGES_TOGETHER // images))


def _gradients_invariant(state: TrainState, config: Config, shards: int, number: int) -> bool:
    """Compares one draw of gradients of ``shards`` shards at once."""
    draws = _Draws(state, config, shards, shards * MOST_DRAWS + number)
    observations, actions = draws.observations(_samples(config)), draws.actions(_samples(config))
    gradients, columns, size = _gradient_of_minibatch(state, config, draws, observations, actions)

    def in_place(part: dict[str, Tensor]) -> Tensor:
        return gradients(part, 1, state.parameters.flat.new_empty((len(part["actions"]), size)))

    return invariant(in_place, shards, columns, sizes=[shards])


def invariant(function: ShardFunction, num_shards: int, *arguments: Any, **more: Sequence[int]) -> bool:
    """Calls :func:`shard_invariant`, and counts each call as progress, because it may take long and ranks wait."""
    counted = functools.wraps(function)(lambda *parts: (life.progressed(), function(*parts))[1])
    return shard_invariant(counted, num_shards, *arguments, **more)


class _Draws:
    """Draws keyed random data in this run's shapes."""

    def __init__(self, state: TrainState, config: Config, shards: int, number: int) -> None:
        self._generator = keyed_generator(config.seed, "self-check", number)
        self._shards, self._layout, self._action = shards, state.net.observation, state.net.action
        self._device = state.parameters.flat.device

    def normal(self, *shape: int) -> Tensor:
        """Draws standard normal numbers ``[num_shards, …]``."""
        drawn = self._generator.standard_normal((self._shards, *shape)).astype("float32")
        return torch.from_numpy(drawn).to(self._device)

    def actions(self, count: int) -> Tensor:
        """Draws actions ``[num_shards, count, …]``."""
        drawn = draw_actions(self._generator, self._action, (self._shards, count))
        return torch.from_numpy(drawn).to(self._device)

    def observations(self, count: int) -> Tensor:
        """Draws rows ``[num_shards, count, width]``; indices are drawn within their choices, all bytes are pixels."""
        layout = self._layout
        floats = self.normal(count, layout.float_size)
        for leaf in layout.leaves:
            for n, choices in enumerate(leaf.choices):
                floats[..., leaf.start + n] = (floats[..., leaf.start + n].abs() * choices).floor() % choices
        if not layout.image_bytes:
            return floats
        shape = (self._shards, count, layout.width)
        rows = torch.from_numpy(self._generator.integers(0, 256, shape, "uint8")).to(self._device)
        float_columns(layout, rows)[...] = floats
        return rows


def _shards_invariant(state: TrainState, config: Config, plan: ShardPlan, number: int) -> bool:
    """Compares one draw: raw outputs, because actions would hide their last bits."""
    net, draws = state.net, _Draws(state, config, plan.num_shards, number)
    rows, steps = plan.envs_per_shard, config.num_steps
    observations = draws.observations((steps + 1) * rows)
    random = torch.from_numpy(random_actions(config, plan, net.action)).to(observations.device)
    actions = to_shards(random, plan.num_shards)
    with torch.no_grad():
        if net.core is None:
            first = observations[:, :rows].contiguous()
            passed = all(invariant(state.policy.output, plan.num_shards, seen) for seen in (first, observations))
            passed = passed and invariant(state.policy.evaluate, plan.num_shards, observations, actions)
        else:
            sequence = (observations.unflatten(1, (steps + 1, rows)), actions.unflatten(1, (steps, rows)))
            carried, resets = draws.normal(rows, net.carry_size), (draws.normal(steps + 1, rows) > 1.5).float()
            passed = invariant(state.policy.unroll, plan.num_shards, *sequence, carried, resets) and invariant(
                state.policy.step, plan.num_shards, sequence[0][:, 0].contiguous(), carried
            )
        if not passed:
            return False
        gradients, columns, _ = _gradient_of_minibatch(state, config, draws, observations, actions)
        return invariant(lambda part: gradients(part, 1), plan.num_shards, columns)


def _steps_invariant(state: TrainState, plan: ShardPlan, draws: _Draws) -> bool:
    """Compares one step of the actor: its output, and the state after it."""
    net, rows = state.net, plan.envs_per_shard
    observations = draws.observations(rows)
    if net.core is None:
        return invariant(state.policy.output, plan.num_shards, observations)
    return invariant(state.policy.step, plan.num_shards, observations, draws.normal(rows, net.carry_size))


def _gradient_of_minibatch(
    state: TrainState, config: Config, draws: _Draws, observations: Tensor, actions: Tensor
) -> tuple[ShardGradients, dict[str, Tensor], int]:
    """Returns a function that computes gradients, a minibatch of random data (its count is 1), and the width of rows.

    Takes observations ``[k, n, width]`` and actions ``[k, n, …]`` of at least as many samples as a minibatch has.
    """
    net, length, shards = state.net, config.sequence_length, len(observations)
    count = _samples(config) // length
    shape = (count, length) if net.core else (count,)

    def first(x: Tensor) -> Tensor:
        return x[:, : count * length].reshape(shards, *shape, *x.shape[2:]).contiguous()

    columns = {"observations": first(observations), "actions": first(actions)}
    names = ["log_probs", "advantages", *(("values", "returns") if net.critic else ())]
    columns |= {name: draws.normal(*shape) for name in names}
    if not net.critic or config.env.backend == "envpool":
        columns["valid"] = (draws.normal(*shape) > -1.0).float()
    if state.reference is not None:
        columns["reference_log_probs"] = draws.normal(*shape)
    if net.custom is not None:
        columns[DROPOUT_SEED] = torch.zeros((shards, 1), dtype=torch.int64)
    if net.core:
        columns["recurrent_state"] = draws.normal(count, net.carry_size)
        columns["resets"] = (draws.normal(*shape) > 1.5).float()
    # A user's own loss is called for each shard alone anyway, so only the networks are checked here.
    settings = replace(loss_settings(config).scheduled(state.coefficients), loss=None)
    gradients = shard_gradients(state.policy, settings, config.ppo.gradient_accumulation)
    return gradients, columns, state.parameters.flat.numel() + len(settings.terms)


def _samples(config: Config) -> int:
    """Counts the samples of a shard in a minibatch."""
    return config.num_steps * ShardPlan(config.envs, config.shards).envs_per_shard // config.ppo.num_minibatches

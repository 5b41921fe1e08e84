"""Chooses how a rank's shards go through the networks: batched, one by one, or some at a time."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch

from lockstep.config.run import Config
from lockstep.torch_engine.nets.autograd import AutogradFunctions
from lockstep.torch_engine.nets.memory import on_host
from lockstep.torch_engine.nets.shards import Mode
from lockstep.torch_engine.setup.invariance import (
    gradients_invariant_here,
    rollouts_invariant_here,
    samples_of_minibatch,
    shards_invariant_here,
)
from lockstep.torch_engine.setup.mapped_operations import OtherOperations

if TYPE_CHECKING:
    from lockstep.torch_engine.distributed.communicator import Communicator
    from lockstep.torch_engine.nets.custom import CustomNet
    from lockstep.torch_engine.nets.nets import PolicyNet
    from lockstep.torch_engine.state import TrainState

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
    return 6 * parameters * samples_of_minibatch(config) <= FEW_OPERATIONS


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
    if samples_of_minibatch(config) // config.ppo.gradient_accumulation == 1:
        return 1  # kernels for a lone image are others than for several, and sometimes differ in their numbers
    together = shards_that_fit(net, config)
    return together if _all_pass(gradients_invariant_here(state, config, together), communicator) else 1


def shards_that_fit(net: PolicyNet, config: Config) -> int:
    """Returns how many shards' minibatches of images one call should take at most, a power of two."""
    images = max(1, min(IMAGES_TOGETHER, BYTES_TOGETHER // net.observation.image_bytes))
    fit = min(config.shards, max(1, images // samples_of_minibatch(config)))
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
    lone = samples_of_minibatch(config) // config.ppo.gradient_accumulation == 1
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

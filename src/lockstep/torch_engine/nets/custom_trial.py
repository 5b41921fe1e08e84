"""Tries whether a custom network can be trained as it is written, before anything starts."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.user_code.errors import error_line, users_line
from lockstep.networks.draws import host_generators, keyed_by_nothing, made_otherwise
from lockstep.networks.trial_rows import trial_rows
from lockstep.torch_engine.nets.custom import CustomNet, check_float32, check_outputs_of


def check_trainable(name: str, custom: CustomNet, net: Any) -> None:
    """Tries a user's module; policies trained before a check existed can still be loaded.

    Raises:
        ValueError: if it isn't float32, isn't a function of parameters and observations, can't be called in training,
            or has nothing to train; one line that begins with ``name``.
    """
    check_float32(name, custom.module)
    check_function(name, custom, net)
    _check_gradient(name, custom, net)


def check_made_alike(name: str, custom: CustomNet, again: CustomNet, net: Any) -> None:
    """Compares a user's module with one that was made ``again`` under the same key.

    Only what the constructor draws from PyTorch's generator is keyed.

    Raises:
        ValueError: parameters, buffers or what they compute differ; one line that begins with ``name``.
    """
    mine, other = (dict(each.module.named_parameters()) for each in (custom, again))
    if key := next((key for key in mine if key not in other), None):
        raise made_otherwise(name, key, "torch's generator")
    mine, other = mine | dict(custom.module.named_buffers()), other | dict(again.module.named_buffers())
    for key, x in other.items():
        if key not in mine or not _same(x, mine[key]):
            raise made_otherwise(name, key, "torch's generator")
    copied = _copied(custom)
    if copied is None:
        return
    rows = torch.from_numpy(trial_rows(net.observation)[0]).unsqueeze(0)
    parameters = {key: torch.from_numpy(x).unsqueeze(0) for key, x in custom.initial_parameters().items()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            mine, other = (each(parameters, net.observation, rows) for each in (copied, again))
    except Exception:  # an environment may be unable to observe such numbers
        return
    if not _all_same(mine, other):
        raise made_otherwise(name, "in what it computes", "torch's generator")


def check_function(name: str, custom: CustomNet, net: Any) -> None:
    """Calls a user's module again, as in rollouts and as in training, on observations of zeros; a copy of it on others.

    A module that draws unkeyed numbers, or keeps some from call to call, would depend on which shards a rank computes,
    and on where a run was resumed. It may keep what its first call makes.

    Raises:
        ValueError: if it draws or keeps such numbers, can't be called in training, or can't be called with a single
            observation; one line that begins with ``name``.
    """
    rows = torch.from_numpy(net.observation.zeros(2)).unsqueeze(0)
    parameters = {key: torch.from_numpy(x).unsqueeze(0) for key, x in custom.initial_parameters().items()}

    def called(training: bool) -> tuple[Tensor, ...]:
        custom.set_dropout(training)
        try:
            return custom(parameters, net.observation, rows)
        except Exception as error:  # raised by the user's code
            when = ": in training" if training else ""
            raise ValueError(f"{name}{when}: {error_line(error)}{users_line(error)}") from error
        finally:
            custom.set_dropout(False)

    with torch.random.fork_rng(devices=[]):
        first, _ = called(False), called(True)
        buffers = {key: x.clone() for key, x in custom.module.named_buffers()}
        drawn, host = torch.get_rng_state(), host_generators()
        again = called(False)
        if not torch.equal(drawn, torch.get_rng_state()):
            raise ValueError(
                f"{name} draws random numbers outside of training too, where none are keyed, so that ranks would show; "
                "draw them only if self.training is set, as nn.Dropout does"
            )
        called(True)
    if host_generators() != host:
        raise keyed_by_nothing(name, "torch's generator, if self.training is set,")
    for key, x in custom.module.named_buffers():
        if key not in buffers or not _same(x, buffers[key]):
            instead = ", or use weight_norm" if key.endswith(("_u", "_v")) else ""  # of spectral_norm
            raise ValueError(
                f"{name} changes its buffer {key} when it is called, which would then depend on the ranks and on where "
                f"a run was resumed; keep buffers as the constructor makes them{instead}"
            )
    if not _all_same(first, again):
        raise _other_numbers(name)
    copied = _copied(custom)
    if copied is not None:
        _check_single_row(name, copied, net)
        _check_keeps_nothing(name, copied, net)


def _copied(custom: CustomNet) -> CustomNet | None:
    """Copies a module, which more calls might change; None if it can't be copied, or would be compiled once more."""
    if any(hasattr(part, "_orig_mod") for part in custom.module.modules()):  # of torch.compile
        return None
    try:
        return CustomNet(copy.deepcopy(custom.module))
    except Exception:  # such as of a tensor with a gradient that it keeps
        return None


def _check_single_row(name: str, custom: CustomNet, net: Any) -> None:
    """Refuses a module that drops the axis of observations if there is only one; policies are called like that."""
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in custom.module.modules()):
        return  # needs several
    rows = torch.from_numpy(net.observation.zeros(1)).unsqueeze(0)
    parameters = {key: torch.from_numpy(x).unsqueeze(0) for key, x in custom.initial_parameters().items()}
    with torch.random.fork_rng(devices=[]):
        try:
            output, values = custom.returned(parameters, net.observation, rows)
        except Exception as error:  # raised by the user's code
            raise ValueError(f"{name}: with a single observation: {error_line(error)}{users_line(error)}") from error
    check_outputs_of(name, net, output, values, 1)


def _check_keeps_nothing(name: str, custom: CustomNet, net: Any) -> None:
    """Refuses a module whose numbers depend on the observations of earlier calls, which zeros wouldn't show."""
    bits, large = (torch.from_numpy(rows).unsqueeze(0) for rows in trial_rows(net.observation))
    parameters = {key: torch.from_numpy(x).unsqueeze(0) for key, x in custom.initial_parameters().items()}

    def called(training: bool, rows: Tensor) -> tuple[Tensor, ...]:
        custom.set_dropout(training)
        with torch.random.fork_rng(devices=[]):  # so that each call draws the same numbers
            return custom(parameters, net.observation, rows)

    def before_and_after(training: bool) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        first = called(training, bits)
        with suppress(Exception):
            called(training, large)
        return first, called(training, bits)

    host = host_generators()
    try:
        (first, again), in_training = before_and_after(False), before_and_after(True)
        last = called(False, bits)
    except Exception:  # an environment may be unable to observe such numbers
        return
    if host_generators() != host:
        raise keyed_by_nothing(name, "torch's generator, if self.training is set,")
    if not _all_same(first, again):
        raise _other_numbers(name)
    if not _all_same(*in_training):
        raise ValueError(
            f"{name} gave other numbers in training when it was called again with the same observations and random "
            "numbers, so it keeps something from call to call, by which ranks would show; keep nothing, or, for "
            "running statistics of observations, use normalize.observations"
        )
    if not _all_same(first, last):  # what it keeps in training is of use outside of it
        raise _other_numbers(name)


def _other_numbers(name: str) -> ValueError:
    return ValueError(
        f"{name} gave other numbers when it was called again with the same observations; outside of training it "
        "must be a function of them and of its parameters alone, without numbers drawn or kept"
    )


def _check_gradient(name: str, custom: CustomNet, net: Any) -> None:
    """Refuses a module that could never make an action more likely, whatever its critic learns."""
    if net.log_std_shape:  # a parameter of ours beside the module can learn
        return
    rows = torch.from_numpy(net.observation.zeros(2)).unsqueeze(0)
    initial = custom.initial_parameters()
    parameters = {key: torch.from_numpy(x).unsqueeze(0).requires_grad_() for key, x in initial.items()}
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        custom.set_dropout(True)
        try:
            output, _ = custom(parameters, net.observation, rows)
        except Exception as error:  # the user's code may fail if parameters have gradients
            raise ValueError(f"{name}: in training: {error_line(error)}{users_line(error)}") from error
        finally:
            custom.set_dropout(False)
    if not output.requires_grad:
        raise ValueError(
            f"{name} has nothing to train: no parameter has a gradient by its actor's output ({len(custom.frozen)} of "
            f"{len(initial)} have requires_grad False); leave it True for some of those that the output is computed "
            "with, and don't detach it"
        )


def _all_same(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return all(_same(a, b) for a, b in zip(some, others, strict=True))


def _same(a: Tensor, b: Tensor) -> bool:
    """Returns whether tensors are equal; NaNs, as in uninitialised memory, count as equal."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())

"""What a backward pass added to gradients, if another one before it failed."""

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.core.errors import UnreducedGradientError
from lockstep.integrations.attach.increments import Increments, current_pass


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")


def test_what_a_failed_pass_added_and_the_script_took_away_is_no_mistake_of_the_next():
    first, second, passes = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), []
    increments = Increments([first, second], ["first", "second"], lambda: passes.append(current_pass()))
    last = Failing.apply(second)  # made first, so its gradient comes last
    with pytest.raises(RuntimeError, match="out of memory"):
        (last + 2.0 * first).sum().backward()
    assert first.grad is not None
    failed, first.grad = passes[-1], None

    (3.0 * second).sum().backward()
    assert passes[-1] != failed
    increments.pass_ends(passes[-1])
    assert set(increments.added) == {1}


def test_a_gradient_that_is_taken_away_within_its_pass_is_named():
    parameter, passes = nn.Parameter(torch.ones(2)), []
    increments = Increments([parameter], ["weight"], lambda: passes.append(current_pass()))
    (2.0 * parameter).sum().backward()
    parameter.grad = None
    with pytest.raises(UnreducedGradientError, match="the gradient of weight was taken away"):
        increments.pass_ends(passes[-1])

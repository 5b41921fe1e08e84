"""What backward passes added to gradients, if one before failed, or something else changed the gradients."""

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


@pytest.mark.parametrize("first", [None, torch.ones(2)], ids=["from None", "upon reduced"])
def test_a_gradient_that_holds_what_is_not_reduced_may_be_zeroed_and_not_changed(first):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = first
    increments = Increments([parameter], ["weight"], lambda: None)
    (2.0 * parameter).sum().backward()
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)
    for use in (lambda: increments.increment(0), (3.0 * parameter).sum().backward):
        with pytest.raises(UnreducedGradientError, match="the gradient of weight was changed before it was reduced"):
            use()
    parameter.grad.zero_()
    (3.0 * parameter).sum().backward()
    assert increments.increment(0).tolist() == [3.0, 3.0]
    parameter.grad.zero_()
    assert increments.increment(0).tolist() == [0.0, 0.0]


def test_a_hook_that_changes_a_gradient_in_its_own_pass_is_noticed():
    parameter = nn.Parameter(torch.ones(2))
    increments = Increments([parameter], ["weight"], lambda: None)

    def clip(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.clamp_(max=1.0)

    parameter.register_post_accumulate_grad_hook(clip)
    (2.0 * parameter).sum().backward()
    with pytest.raises(UnreducedGradientError, match="by the script, a hook"):
        increments.increment(0)


def test_gradients_that_are_parts_of_one_tensor_are_added_to():
    """As of a bias that a model concatenates of two parameters: their gradients count each other's changes."""
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    increments = Increments([first, second], ["first", "second"], lambda: None)
    for _ in range(2):
        (3.0 * torch.cat((first, second))).sum().backward()
    for index in range(2):
        assert increments.increment(index).tolist() == [6.0, 6.0]

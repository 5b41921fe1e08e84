"""The compiled loss: what is compiled, when, and that nothing but one shard goes in."""

import pytest
import torch
from small_runs import alone, described, joined, random_batch, small_config, small_state

from lockstep.torch_engine.gradients import exact_gradient, fast_gradient
from lockstep.torch_engine.nets.autograd import AutogradFunctions, minibatch_loss
from lockstep.torch_engine.nets.compiled import compiled
from lockstep.torch_engine.setup.choose_mode import choose_mode
from lockstep.torch_engine.update import begin_update


@pytest.fixture
def compilations(monkeypatch):
    """Calls of ``torch.compile`` that compile nothing: the options, and the shapes of the actions that go in."""
    seen = []

    def compile_nothing(function, **options):
        shapes = []
        seen.append((options, shapes))

        def run(weights, columns):
            shapes.append(tuple(columns["actions"].shape))
            return function(weights, columns)

        return run

    monkeypatch.setattr(torch, "compile", compile_nothing)
    return seen


def gradient_of(config, make):
    state = small_state(config, described())
    columns, source = random_batch(config, state.net).columns(), make(state, config)
    return [joined(source(columns, count)) for count in (32, 16)]


def exactly(state, config):
    return exact_gradient(state, config, alone(config), choose_mode(state, config, alone(config)))


def fast(state, config):
    return fast_gradient(state, config, alone(config))


@pytest.mark.parametrize("make", [exactly, fast])
@pytest.mark.parametrize("activation", ["tanh", "silu"])
def test_shards_go_through_one_compiled_function_one_by_one(compilations, activation, make):
    settings = {"network": {"activation": activation}, "reduction": "exact" if make is exactly else "fast"}
    compiled_ones = gradient_of(small_config(**settings, compile=True), make)
    ((options, shapes),) = compilations  # another count is not compiled anew
    assert options == {"dynamic": False, "fullgraph": True}
    assert set(shapes) == ({(1, 4)} if make is exactly else {(1, 32)})
    for one, other in zip(compiled_ones, gradient_of(small_config(**settings), make), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert len(compilations) == 1
    assert not torch.allclose(compiled_ones[0], compiled_ones[1])


def test_compiled_shards_are_never_batched(compilations):
    config = small_config(compile=True)
    state = small_state(config, described())
    assert isinstance(state.policy, AutogradFunctions)
    assert choose_mode(state, config, alone(config)) == "loop"
    loss = compiled(minibatch_loss, config)
    columns = random_batch(config, state.net).columns()
    with pytest.raises(AssertionError, match="one shard at a time"):
        loss(state.net, state.parameters.expanded(8), columns, None)
    assert compiled(minibatch_loss, small_config()) is minibatch_loss


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cuda_graphs": True}, "cuda_graphs: true, but device is cpu, which has no graphs; leave it out"),
        ({"cuda_graphs": True, "device": "cuda", "network": {"custom": "a:B"}}, "but network.custom a:B is keyed by"),
        ({"cuda_graphs": True, "device": "cuda", "reduction": "fast", "fsdp": True}, "but with fsdp the host takes"),
        ({"cuda_graphs": True, "device": "xpu", "reduction": "fast", "sync_period": 2}, "but with sync_period 2"),
        ({"sync_period": 2}, "sync_period: 2 makes the agent depend on the number of ranks"),
        ({"fsdp": True}, "fsdp: true sums gradients in an order that depends on the ranks"),
        ({"fsdp": True, "sync_period": 2, "reduction": "fast"}, "fsdp shards them; leave one out"),
    ],
)
def test_what_makes_no_sense_together_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        small_config(**settings)
    small_config(**(settings | {"reduction": "fast", "fsdp": False, "cuda_graphs": False}))


def test_scheduled_coefficients_are_not_compiled_in(compilations):
    """One function is compiled for all iterations, and follows what their update fills in."""
    ppo = {"entropy_coef": 0.1, "entropy_schedule": "linear", "clip_schedule": "linear"}
    config = small_config(compile=True, total_steps=1000, ppo=ppo)
    state = small_state(config, described())
    columns, source = random_batch(config, state.net).columns(), exactly(state, config)
    begin_update(state, config)
    first = joined(source(columns, 32))
    state.global_step = 900
    begin_update(state, config)
    assert not torch.allclose(first, joined(source(columns, 32)), rtol=1e-3)
    assert len(compilations) == 1

"""What an update decides on the device: the same as the host does, by looking at nothing."""

from typing import Any

import numpy as np
import pytest
import recorded_graph
import torch
import torch.distributed as dist
from small_runs import (
    alone,
    described,
    not_normalised,
    plan_of,
    random_batch,
    reduced,
    small_config,
    small_state,
    statistics_of,
)
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.core.errors import NonFiniteError
from lockstep.torch_engine.accelerated import graphs
from lockstep.torch_engine.accelerated.decisions import adapted_learning_rate, clip
from lockstep.torch_engine.accelerated.update import AcceleratedUpdate
from lockstep.torch_engine.gradients import Gradient, data_parallel_gradient, exact_gradient, fast_gradient
from lockstep.torch_engine.minibatches import minibatch_indices
from lockstep.torch_engine.setup.accelerator import CaptureError
from lockstep.torch_engine.state import TrainState
from lockstep.torch_engine.statistics import SharedStatistics
from lockstep.torch_engine.update import UpdateResult, update
from lockstep.torch_engine.update import adapted_learning_rate as on_host
from lockstep.training.losses import TERMS

KL, NAN = TERMS.index("approx_kl"), float("nan")


def source(state: TrainState, kls: list[float], gradients: list[float]):
    """Gradients of one number, and loss terms with these KLs."""
    calls: list[int] = []

    def scripted(columns: Any, count: Any) -> Gradient:
        number = len(calls)
        calls.append(number)
        terms = torch.arange(len(TERMS)).float()
        terms[KL] = kls[number]
        return reduced(torch.full_like(state.parameters.flat, gradients[number]), terms)

    return scripted


def placed(indices: np.ndarray) -> Tensor:
    """Minibatches' indices as they go up."""
    return torch.from_numpy(np.ascontiguousarray(indices))


def shared_of(config: Any) -> SharedStatistics:
    empty: Any = np.zeros(0)
    fit = torch.zeros((config.shards, 2, 2), dtype=torch.float64)
    return SharedStatistics(torch.zeros(0), fit, empty, empty, 0, 0, empty, False)


def both(
    use: Any, config: Any, kls: list[float], gradients: list[float]
) -> tuple[tuple[UpdateResult, TrainState], tuple[UpdateResult, TrainState]]:
    """An update by the host, and one by a device that the CPU plays; of the same networks."""
    plan, results = plan_of(config), []
    indices = minibatch_indices(config, plan, 0)
    state = small_state(config, described())
    batch = random_batch(config, state.net)
    by_host = update(state, batch, indices, not_normalised(config), config, plan, source(state, kls, gradients))
    results.append((by_host, state))
    use("played")
    config = config.model_copy(update={"device": "xpu"})
    other = small_state(config, described())
    launch = AcceleratedUpdate(other, config, plan, source(other, kls, gradients))
    by_device = launch(batch, placed(indices), not_normalised(config), shared_of(config)).result()
    return (by_host, state), (by_device, other)


@pytest.mark.parametrize(
    ("settings", "kls"),
    [
        ({}, [0.0, 10.0, 0.0, 0.0]),
        ({"target_kl": 0.01}, [0.02, 0.0, 0.0, 0.0]),
        ({"target_kl": 0.01}, [0.0, 0.01, 0.016, 0.0]),
        ({"target_kl": 0.01}, [0.0, 0.0, 0.0, 0.02]),
        ({"schedule": "adaptive", "desired_kl": 0.01}, [0.03, 0.001, 0.0, 0.01]),
        ({"schedule": "adaptive", "desired_kl": 0.01, "target_kl": 0.05}, [0.03, 0.03, 0.2, 0.0]),
        ({"schedule": "adaptive", "desired_kl": 0.01, "target_kl": 0.01}, [0.001, 0.017, 0.0, 0.0]),
        ({"schedule": "adaptive", "desired_kl": 0.01}, [1e-15, 9e-9, 1.1e-8, 0.01]),
        ({"max_grad_norm": None}, [0.0] * 4),
        ({"target_kl": 0.01}, [0.0, 0.02, NAN, 0.0]),  # the host doesn't come to what follows the stop
        ({"schedule": "adaptive", "desired_kl": 0.01, "target_kl": 0.01}, [0.02, NAN, 0.03, 0.03]),
    ],
)
def test_a_device_decides_as_the_host_does(settings, kls, use):
    (expected, state), (result, other) = both(use, small_config(ppo=settings), kls, [1.0, -0.5, 2.0, 0.01])
    np.testing.assert_allclose(result.terms, expected.terms, rtol=1e-12)
    assert (result.evaluated, result.steps, result.stopped_by_kl) == (
        expected.evaluated,
        expected.steps,
        expected.stopped_by_kl,
    )
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
    assert other.optimizer_steps == state.optimizer_steps == int(other.optimizer.moments()["step"])
    assert other.learning_rate == pytest.approx(state.learning_rate, rel=1e-6)
    torch.testing.assert_close(other.parameters.flat, state.parameters.flat, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_nothing_is_applied_from_a_number_on_that_is_none(broken, number, use):
    use("played")
    config = small_config(device="xpu")
    kls, gradients = [0.0] * 4, [1.0] * 4
    (kls if broken == "loss" else gradients)[number] = float("nan")
    plan, state = plan_of(config), small_state(config, described())
    before: list[Tensor] = []
    inner = source(state, kls, gradients)

    def watched(columns: Any, count: Any) -> Gradient:
        before.append(state.parameters.flat.clone())
        return inner(columns, count)

    batch = random_batch(config, state.net)
    launch = AcceleratedUpdate(state, config, plan, watched)
    sent = launch(batch, placed(minibatch_indices(config, plan, 0)), not_normalised(config), shared_of(config))
    where = f"iteration 1, epoch {number // 2 + 1}, minibatch {number % 2 + 1}"
    with pytest.raises(NonFiniteError, match=where):
        sent.result()
    assert len(before) == 4
    assert torch.equal(state.parameters.flat, before[number])
    assert bool(torch.isfinite(state.parameters.flat).all())
    assert int(state.optimizer.moments()["step"]) == number


def test_of_two_numbers_that_are_none_the_first_is_told(use):
    """Nothing after it counts, whatever it is: neither steps nor rates."""
    use("played")
    config = small_config(device="xpu", ppo={"schedule": "adaptive", "desired_kl": 0.01})
    state, plan = small_state(config, described()), plan_of(config)
    launch = AcceleratedUpdate(state, config, plan, source(state, [0.01, 0.5, NAN, 0.03], [1.0, NAN, 1.0, 1.0]))
    batch, indices = random_batch(config, state.net), minibatch_indices(config, plan, 0)
    rate = state.learning_rate
    sent = launch(batch, placed(indices), not_normalised(config), shared_of(config))
    with pytest.raises(NonFiniteError, match=r"iteration 1, epoch 1, minibatch 2 \(.*approx_kl 0\.5"):
        sent.result()
    assert int(state.optimizer.moments()["step"]) == 1
    assert state.learning_rate == rate


@pytest.mark.parametrize("kl", [-1.0, 0.0, 0.001, 0.004, 0.01, 0.019, 0.021, 1.0])
@pytest.mark.parametrize("rate", [1e-5, 1.2e-5, 3e-4, 8e-3, 1e-2])
def test_the_rate_is_adapted_as_on_the_host(kl, rate):
    adapted = adapted_learning_rate(torch.tensor(rate), torch.tensor(kl, dtype=torch.float64), 0.01)
    assert adapted.dtype == torch.float32
    assert float(adapted) == pytest.approx(on_host(rate, kl, 0.01), rel=1e-6)


def test_a_gradient_is_clipped_only_above_the_limit():
    for length, limit in ((2.0, 0.5), (0.4, 0.5), (3.0, None)):
        vector = torch.full((4,), length / 2)
        clipped = clip(vector.clone(), torch.linalg.vector_norm(vector), limit)
        assert float(torch.linalg.vector_norm(clipped)) == pytest.approx(min(length, limit or length), rel=1e-5)


@pytest.fixture
def one_rank():
    """PyTorch's process group, of this process alone."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("pieces", [1, 2])
def test_gradients_behind_ddp_are_those_of_autograd_alone(pieces, use):
    use("played")
    config = small_config(device="xpu", reduction="fast", ppo={"gradient_accumulation": pieces, "learning_rate": 0.01})
    communicator, plan, ends = alone(config), plan_of(config), []
    communicator.data_parallel = lambda module, find_unused_parameters=False: DistributedDataParallel(module)
    for choose in (fast_gradient, data_parallel_gradient):
        state = small_state(config, described())
        before = state.parameters.flat.clone()
        launch = AcceleratedUpdate(state, config, plan, choose(state, config, communicator))
        batch, indices = random_batch(config, state.net), minibatch_indices(config, plan, 0)
        assert launch(batch, placed(indices), statistics_of(config, batch), shared_of(config)).result().steps == 4
        assert not torch.allclose(state.parameters.flat, before, atol=1e-3)
        ends.append(state.parameters.flat)
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_step_that_is_replayed_has_the_bits_of_one_that_is_called(epochs, minibatches, use, monkeypatch):
    use("played")
    replays: list[int] = []

    def capture(device: Any, work: Any) -> Any:
        replay = recorded_graph.capture(device, work)
        return lambda: (replays.append(1), replay())

    monkeypatch.setattr(graphs, "capture", capture)
    counts = {"num_epochs": epochs, "num_minibatches": minibatches}
    config = small_config(device="xpu", ppo={"schedule": "adaptive", "learning_rate": 0.01, **counts})
    plan, ends = plan_of(config), []
    for graphed in (False, True):
        state = small_state(config, described())
        launch = AcceleratedUpdate(
            state, config, plan, exact_gradient(state, config, alone(config), "batched"), graphed
        )
        for seed in range(2):
            batch, indices = random_batch(config, state.net, seed), minibatch_indices(config, plan, seed)
            launch(batch, placed(indices), statistics_of(config, batch), shared_of(config)).result()
        ends.append(state)
    assert len(replays) == 2 * epochs * minibatches
    assert ends[0].optimizer_steps == ends[1].optimizer_steps == len(replays)
    assert torch.equal(ends[0].parameters.flat, ends[1].parameters.flat)
    assert ends[0].learning_rate == ends[1].learning_rate != 0.01


def test_steps_that_cannot_be_captured_are_launched_with_a_warning(use, monkeypatch, capsys):
    use("played")

    def capture(device: Any, work: Any) -> Any:
        for _ in range(4):
            work()
        raise CaptureError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "capture", capture)
    config = small_config(device="xpu", ppo={"learning_rate": 0.01})
    plan, ends, said = plan_of(config), [], []
    for graphed in (False, True):
        state = small_state(config, described())
        source = exact_gradient(state, config, alone(config), "batched")
        launch = AcceleratedUpdate(state, config, plan, source, graphed)
        for seed in range(2):
            batch, indices = random_batch(config, state.net, seed), minibatch_indices(config, plan, seed)
            launch(batch, placed(indices), statistics_of(config, batch), shared_of(config)).result()
        ends.append(state.parameters.flat)
        said.append(capsys.readouterr().err)
    assert torch.equal(*ends)
    assert said[0] == ""
    (line,) = said[1].splitlines()  # of two updates
    assert line.startswith("lockstep: warning: an optimiser step can't be captured as a graph here")
    assert "(operation not permitted when stream is capturing)" in line


def test_graphs_that_were_asked_for_and_cannot_be_had_are_an_error(use, monkeypatch):
    use("played")

    def capture(device: Any, work: Any) -> Any:
        raise CaptureError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "capture", capture)
    config = small_config(device="xpu").model_copy(update={"cuda_graphs": True})
    asked = config.model_copy(update={"cuda_graphs": None})
    state, plan = small_state(asked, described()), plan_of(config)
    launch = AcceleratedUpdate(state, config, plan, source(state, [0.0] * 4, [1.0] * 4), graphed=True)
    batch = random_batch(config, state.net)
    with pytest.raises(ValueError) as caught:
        launch(batch, placed(minibatch_indices(config, plan, 0)), not_normalised(config), shared_of(config))
    assert str(caught.value) == (
        "cuda_graphs: true, but an optimiser step can't be captured here (operation not permitted when stream is "
        "capturing); use cuda_graphs false"
    )

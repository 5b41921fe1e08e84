"""Steps of rollouts that are captured once and replayed: array environments and the policy, on their own memory."""

from typing import Any

import accelerated_runs
import numpy as np
import pytest
import recorded_graph
import torch
from accelerated_runs import LSTM, config_of, opened, trained
from emulated_accelerator import DOWN, UP, WAITS, counted

from lockstep.config.run import Config
from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.shards import ShardPlan
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS
from lockstep.envs.host_envs import WantedEnvs
from lockstep.runs.checkpoint import checkpoint_of
from lockstep.torch_engine import session as sessions
from lockstep.torch_engine.accelerated import graphs
from lockstep.torch_engine.accelerated.graphed_rollout import GraphedCollector
from lockstep.torch_engine.envs.tensor_arrays import TensorArrays
from lockstep.torch_engine.envs.tensor_envs import TensorEnvs
from lockstep.torch_engine.envs.tensor_rollout import TensorCollector
from lockstep.torch_engine.nets import distributions
from lockstep.torch_engine.nets.shards import independently
from lockstep.torch_engine.setup import choose_mode
from lockstep.torch_engine.setup.accelerator import CaptureError
from lockstep.torch_engine.setup.devices import uses_graphs

PENDULUM = {"id": "lockstep/Pendulum-v1", "backend": "tensor", "max_episode_steps": 3}
BOTH = {"observations": True, "returns": True}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("tensor environments", {}),
    "normalised": ("tensor environments, normalised", {}),
    "GRU": ("tensor environments, GRU", {}),
    "LSTM, normalised": ("tensor environments, normalised", {"network": LSTM}),
    "squashed, normalised": ("tensor environments", {"env": PENDULUM, "network": {"squash": True}, "normalize": BOTH}),
    "continuous, fast": ("tensor environments", {"env": PENDULUM, "reduction": "fast"}),
    "GRPO": ("GRPO", {"env": {"backend": "tensor"}}),
    "images": ("images", {"env": {"backend": "tensor"}}),
    "host": ("plain", {}),
    "host, normalised": ("continuous, normalised", {}),
    "host, LSTM": ("LSTM", {}),
    "host, images": ("images", {}),
    "host, indices": ("indices", {}),
    "host, GRPO": ("GRPO", {}),
    "host, halves": ("LSTM", {"env": {"workers": 2}}),
}


@pytest.fixture
def graphed(use, monkeypatch):
    """Turns graphs on and off; on, they are recorded operations."""
    use("played")
    monkeypatch.setattr(graphs, "capture", recorded_graph.capture)

    def turn(on: bool) -> None:
        monkeypatch.setattr(sessions, "uses_graphs", lambda config: on)

    return turn


def network_of(name: str) -> dict[str, Any]:
    """Networks small enough for an array environment's observations."""
    return {"image": {"kind": "simple", "width": 0.25, "depth": 1}} if name == "lockstep/GridWorldPixels-v0" else {}


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name], err_msg=name)


@pytest.mark.parametrize("run", RUNS)
def test_replayed_steps_have_the_bits_of_launched_ones(run, graphed, capsys):
    case, changes = RUNS[run]
    config, ends = config_of(case, **changes), []
    for on in (False, True):
        graphed(on)
        ends.append(trained(config, 3))
    (launched, records), (replayed, seen) = ends
    assert_same(replayed, launched)
    assert [str(record) for record in seen] == [str(record) for record in records]
    assert "can't be captured" not in capsys.readouterr().err


LOOPED = {"plain": [4, 4], "GRU": [4, 4], "host": [4, 4], "host, LSTM": [4, 4], "host, images": [4], "images": [4]}
"""Branches of the graphs of a rollout's step and of an optimiser step; a rollout's step takes all images at once."""


@pytest.mark.parametrize("run", LOOPED)
def test_shards_that_are_called_one_by_one_are_branches_in_any_order(run, graphed, monkeypatch):
    case, changes = RUNS[run]
    config, ends = config_of(case, num_shards=4, **changes), []
    invariant = case == "images"
    monkeypatch.setattr(accelerated_runs, "_checked_once", lambda state, config: invariant)
    for on in (False, True):
        recorded_graph.forks.clear()
        graphed(on)
        ends.append(trained(config, 3)[0])
    assert_same(*ends)
    assert recorded_graph.forks == LOOPED[run]


@pytest.mark.parametrize(("operations", "branches"), [(6 * 55 * 3, [4, 4]), (6 * 55 * 3 - 1, [4])])
def test_gradients_of_large_minibatches_are_no_branches(operations, branches, graphed, monkeypatch):
    monkeypatch.setattr(accelerated_runs, "_checked_once", lambda state, config: False)
    monkeypatch.setattr(choose_mode, "FEW_OPERATIONS", operations)
    recorded_graph.forks.clear()
    graphed(True)
    config = config_of("plain", num_shards=4)
    with opened(config) as (session, trainer, _):
        assert session.state.parameters.flat.numel() == 55
        assert config.num_steps // config.ppo.num_minibatches == 3  # samples of a shard's one environment
        trainer.iterate()
        trainer.finish_record()
    assert recorded_graph.forks == branches


@pytest.mark.parametrize("name", ARRAY_ENVIRONMENTS)
def test_steps_of_every_array_environment_are_captured(name, graphed, capsys):
    env = {"id": name, "backend": "tensor", "max_episode_steps": 3}
    config, ends = config_of("fast", env=env, network=network_of(name)), []
    for on in (False, True):
        graphed(on)
        ends.append(trained(config)[0])
    assert_same(*ends)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ARRAY_ENVIRONMENTS)
@pytest.mark.usefixtures("emulated")
def test_nothing_goes_up_in_a_step_of_an_array_environment(name):
    passed = []
    for steps in (6, 9):
        env = {"id": name, "backend": "tensor"}
        with opened(config_of("fast", env=env, network=network_of(name), num_steps=steps)) as (session, _, _):
            session.collect()
            with counted() as now:
                session.collect()
            passed.append((now[UP], now[DOWN], now[WAITS]))
    assert passed[0] == passed[1]


def test_a_step_is_captured_once_and_the_host_steps_nothing_after(graphed, monkeypatch):
    graphed(True)
    stepped: list[int] = []
    step = TensorArrays.step
    monkeypatch.setattr(TensorArrays, "step", lambda self, actions: (stepped.append(1), step(self, actions))[1])
    with opened(config_of("tensor environments")) as (session, trainer, _):
        assert type(session.collector) is GraphedCollector
        assert isinstance(session.envs, TensorEnvs)
        groups = len(session.envs.arrays)
        for _ in range(3):
            trainer.iterate()
        trainer.finish_record()
    assert len(stepped) == 4 * groups  # three times to warm up, once to be recorded


@pytest.mark.parametrize(("run", "graphs_taken"), [("host, LSTM", 2), ("host, halves", 3)])
def test_sampling_is_captured_once_for_each_half_of_the_environments(run, graphs_taken, graphed, monkeypatch):
    case, changes = RUNS[run]
    taken: list[int] = []
    monkeypatch.setattr(
        graphs, "capture", lambda device, work: (taken.append(1), recorded_graph.capture(device, work))[1]
    )
    graphed(True)
    trained(config_of(case, **changes), 3)
    assert len(taken) == graphs_taken  # of them one is of optimiser steps


def test_a_resumed_run_goes_on_with_the_bits_of_one_that_was_not_stopped(graphed):
    graphed(True)
    config = config_of("tensor environments, normalised", network=LSTM)
    whole, _ = trained(config, 4)
    with opened(config) as (session, trainer, _):
        for _ in range(2):
            trainer.iterate()
        trainer.finish_record()
        checkpoint = checkpoint_of(session.checkpoint_files({"wall_time": 0.0}), "here")
    with opened(config, checkpoint) as (session, trainer, _):
        for _ in range(2):
            trainer.iterate()
        trainer.finish_record()
        assert_same(session.arrays(), whole)


def test_what_is_not_put_back_after_the_capture_is_seen(graphed, monkeypatch):
    config = config_of("tensor environments")
    graphed(False)
    launched, _ = trained(config)
    graphed(True)
    captured = graphs.captured
    monkeypatch.setattr(
        "lockstep.torch_engine.accelerated.graphed_rollout.captured",
        lambda device, work, kept, what, asked: captured(device, work, kept[:1], what, asked),
    )
    spoiled, _ = trained(config)
    assert any(not np.array_equal(values, spoiled[name]) for name, values in launched.items())


def test_state_that_moves_between_steps_is_seen(graphed, monkeypatch):
    config = config_of("tensor environments")
    graphed(False)
    launched, _ = trained(config)
    graphed(True)
    monkeypatch.setattr(TensorArrays, "move_to", lambda self, memory: None)
    spoiled, _ = trained(config)
    assert any(not np.array_equal(values, spoiled[name]) for name, values in launched.items())


def test_environments_that_look_at_a_number_are_launched_with_a_warning(graphed, monkeypatch, capsys):
    config = config_of("tensor environments")
    graphed(False)
    launched, _ = trained(config)
    step = TensorArrays.step
    monkeypatch.setattr(TensorArrays, "step", lambda self, actions: (bool(actions.any()), step(self, actions))[1])
    graphed(True)
    ends, _ = trained(config)
    assert_same(ends, launched)
    (line,) = capsys.readouterr().err.splitlines()
    raised = recorded_graph.refused.__code__.co_firstlineno + 2
    assert line == (
        "lockstep: warning: a step of a rollout can't be captured as a graph here, and is launched (environments "
        "(lockstep/CartPole-v1) raised in step: RuntimeError: CUDA error: operation not permitted when stream is "
        f"capturing (recorded_graph.py:{raised})); --no-cuda-graphs leaves this out"
    )


def test_sampling_that_looks_at_a_number_is_launched_with_one_warning(graphed, monkeypatch, capsys):
    case, changes = RUNS["host, halves"]
    config = config_of(case, **changes)
    graphed(False)
    launched, _ = trained(config)
    sample = distributions.sample
    monkeypatch.setattr(distributions, "sample", lambda *words: (bool(words[3].any()), sample(*words))[1])
    graphed(True)
    ends, _ = trained(config)
    assert_same(ends, launched)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "lockstep: warning: the sampling of actions can't be captured as a graph here, and is launched"
    )
    with opened(config) as (session, trainer, _):
        session.collector._staged._inner._asked = True  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ValueError, match="cuda_graphs: true, but the sampling of actions can't be captured here"):
            trainer.iterate()


def test_graphs_that_were_asked_for_are_an_error_where_a_step_looks(graphed, monkeypatch):
    step = TensorArrays.step
    monkeypatch.setattr(TensorArrays, "step", lambda self, actions: (bool(actions.any()), step(self, actions))[1])
    graphed(True)
    with opened(config_of("tensor environments")) as (session, trainer, _):
        session.collector._config = session.config.model_copy(update={"cuda_graphs": True})  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ValueError) as caught:
            trainer.iterate()
    assert str(caught.value).startswith(
        "cuda_graphs: true, but a step of a rollout can't be captured here (environments"
    )


def test_a_failure_of_an_environment_stays_its_own(graphed, monkeypatch, capsys):
    def broken(self: Any, actions: torch.Tensor) -> Any:
        raise KeyError("speed")

    monkeypatch.setattr(TensorArrays, "step", broken)
    graphed(True)
    with opened(config_of("tensor environments")) as (_, trainer, _), pytest.raises(EnvironmentFailureError) as caught:
        trainer.iterate()
    assert "raised in step: KeyError: 'speed'" in str(caught.value)
    assert "can't be captured" not in capsys.readouterr().err


def test_an_error_of_the_warm_up_is_not_hidden_by_putting_back(monkeypatch):
    """After some errors of CUDA nothing can be launched any more, not even a copy."""

    def capture(device: Any, work: Any) -> Any:
        held.resize_(0)  # what is copied there would be an error of its own
        raise KeyError("speed")

    held = torch.zeros(3)
    monkeypatch.setattr(graphs, "capture", capture)
    with pytest.raises(KeyError, match="speed"):
        graphs.captured(torch.device("cpu"), lambda: None, [held], "a step", asked=False)


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({}, True),
        ({"cuda_graphs": False}, False),
        ({"device": "xpu"}, False),
        ({"device": "xpu", "cuda_graphs": True}, True),
        ({"device": "cpu"}, False),
        ({"network": {"custom": "users_nets:Shifted"}}, False),
        ({"reduction": "fast", "sync_period": 2}, False),
        ({"reduction": "fast", "fsdp": True}, False),
    ],
)
def test_where_graphs_are_used(changes, used):
    config = Config.model_validate({"env": {"id": "CartPole-v1"}, "device": "cuda", **changes})
    assert uses_graphs(config) == used


def test_rollouts_of_several_ranks_are_captured_and_their_updates_are_not(use, monkeypatch):
    use("played")
    monkeypatch.setattr(sessions, "uses_graphs", lambda config: True)
    config = config_of("tensor environments")
    with opened(config) as (session, _, _):
        of_two = ShardPlan(config.envs, config.shards, 2, 0)
        update = sessions.make_update(session.state, config, of_two, session.source)
        alone = sessions.make_update(session.state, config, session.plan, session.source)
        assert update is not None
        assert alone is not None
        assert (update.graphed, alone.graphed) == (False, True)
        wanted = WantedEnvs(config.env, session.description, config.seed, of_two.env_ids, shard_size=2)
        envs = TensorEnvs(wanted, torch.device("cpu"))
        assert type(sessions.make_collector(config, of_two, session.state, envs, "loop")) is GraphedCollector


@pytest.mark.parametrize("case", ["tensor environments", "plain"])
def test_without_graphs_or_array_environments_steps_are_launched(case, graphed):
    graphed(case == "plain")
    with opened(config_of(case)) as (session, _, _):
        assert not isinstance(session.collector, GraphedCollector)
        assert isinstance(session.collector, TensorCollector) == (case != "plain")


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.add_(torch.tensor(1.0)),
        lambda x: x.add_(torch.from_numpy(np.ones(3, np.float32))),
        lambda x: x.add_(torch.asarray(np.ones(3, np.float32))),
        lambda x: x[x > 0.0],
        lambda x: x.tolist(),
        lambda x: x.add_(float(x.sum())),
    ],
)
def test_the_recorder_refuses_what_passes_between_host_and_device(work):
    x = torch.zeros(3)
    with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
        recorded_graph.capture(torch.device("cpu"), lambda: work(x))


def test_the_recorder_tells_branches_that_need_one_another():
    x = torch.ones(2)

    def work():
        x.fill_(1.0)
        independently.get()([lambda: x.add_(1.0), lambda: x.mul_(3.0)])

    replay = recorded_graph.capture(torch.device("cpu"), work)
    work()
    assert x.tolist() == [6.0, 6.0]
    replay()
    assert x.tolist() == [4.0, 4.0]

"""Whole iterations with the policy on a device whose memory the host can't see, and what passes in them."""

import numpy as np
import pytest
import torch
from accelerated_runs import BY_HOST, CASES, config_of, opened, trained
from emulated_accelerator import DOWN, UP, WAITS, counted
from variants import variants

from lockstep.runs.checkpoint import checkpoint_of, to_files
from lockstep.torch_engine.accelerated.rollout import StagedRollout
from lockstep.torch_engine.envs.tensor_envs import TensorEnvs
from lockstep.torch_engine.evaluation import evaluate_policy
from lockstep.torch_engine.rollout import Rollout

FEW = ["plain", "LSTM", "tensor environments, normalised"]
"""Those that are always run; the others are long."""


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


def trained_alike(case, use):
    """What a case leaves, and its records, on the device and by the same path in the host's memory."""
    use("emulated")
    ours, records = trained(config_of(case))
    use("played")
    theirs, others = trained(config_of(case))
    assert_same(ours, theirs)
    assert records == others
    return ours, records


@pytest.mark.parametrize("case", variants(CASES, FEW))
def test_the_device_has_the_bits_of_the_same_path_in_the_hosts_memory(case, use):
    _, records = trained_alike(case, use)
    assert len(records) == 2


@pytest.mark.parametrize("case", variants(BY_HOST, ["apart", "FSDP"]))
def test_a_device_whose_host_takes_part_in_each_step_has_the_cpus_agent_but_for_rounding(case, use):
    ours, records = trained_alike(case, use)
    assert all(record["train/explained_variance"] is not None for record in records)
    by_cpu, _ = trained(config_of(case, device="cpu"))
    for name, array in ours.items():
        np.testing.assert_allclose(array, by_cpu[name], rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    "case",
    variants(CASES, ["plain", "adaptive, with a KL stop", "scheduled coefficients", "own loss", "GRPO"]),
)
def test_one_iteration_is_that_of_the_cpu_but_for_rounding(case, use):
    use("played")
    ours, (record,) = trained(config_of(case), 1)
    theirs, (other,) = trained(config_of(case, device="cpu"), 1)
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], rtol=2e-3, atol=2e-5, err_msg=name)
    assert record.keys() == other.keys()
    for name, value in record.items():
        close = None if other[name] is None else pytest.approx(other[name], rel=1e-3, abs=1e-5)
        assert value == close, name
    again = trained(config_of(case, device="cpu", seed=1), 1)[0]
    name = next(name for name in ours if name.startswith("policy/"))
    assert not np.allclose(ours[name], again[name], rtol=2e-3, atol=2e-5)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("case", variants(["plain", "LSTM"], ["LSTM"]))
def test_environments_that_are_stepped_in_halves_change_nothing(case):
    halves = config_of(case, env={"workers": 2})
    with opened(halves) as (session, _, _):
        assert len(session.envs.parts) == 2
    ours, records = trained(halves)
    theirs, others = trained(config_of(case))
    assert_same(ours, theirs)
    assert records == others


# --- what passes ------------------------------------------------------------------------------------------------------


def reads_of_update(config, spoil=lambda session: None):
    """What passes in an update, the second one of a run."""
    with opened(config) as (session, trainer, _):
        trainer.iterate()
        spoil(session)
        drawn = trainer.draw_indices()
        finished = trainer.collect()
        trainer.finish_record()
        batch, indices = trainer.make_batch(), drawn()
        shared, statistics = trainer.share(batch, indices, finished)
        assert session.update is not None
        assert isinstance(indices, torch.Tensor)
        session.update.report.send = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
        with counted() as passed:
            session.update(batch, indices, statistics, shared)
    return passed


def reads_of_iteration(config):
    """What passes in an iteration, the second one of a run."""
    with opened(config) as (_, trainer, _):
        trainer.iterate()
        with counted() as passed:
            trainer.iterate()
    return passed


def copies_of_step(config, spoil=lambda session: None):
    """What passes in a step of a rollout, of which the second is taken off the third."""
    totals = []
    for steps in (6, 9):
        with opened(config.model_copy(update={"num_steps": steps})) as (session, _, _):
            session.collect()
            spoil(session)
            with counted() as passed:
                session.collect()
            totals.append(passed)
    return {name: (totals[1][name] - totals[0][name]) / 3 for name in (UP, DOWN, WAITS)}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("case", variants(CASES, ["plain", "GRPO"]))
def test_the_host_reads_nothing_in_an_update(case):
    passed = reads_of_update(config_of(case))
    assert (passed[DOWN], passed[WAITS]) == (0, 0)
    assert passed[UP] == 0
    assert passed["operations"] > 100


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("case", variants(CASES, ["plain", "tensor environments, normalised"]))
def test_the_host_reads_one_vector_an_iteration_besides_the_actions(case):
    config = config_of(case)
    passed = reads_of_iteration(config)
    on_host = config.env.backend != "tensor"
    assert passed[DOWN] == (config.num_steps + 1 if on_host else 2)
    assert passed[WAITS] == 0


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("case", variants(CASES, ["LSTM", "tensor environments"]))
def test_a_step_takes_one_copy_up_and_one_down_or_none_where_the_environments_are_there(case):
    config = config_of(case)
    expected = 0 if config.env.backend == "tensor" else 1
    config = config.model_copy(update={"ppo": config.ppo.model_copy(update={"num_minibatches": 1})})
    assert copies_of_step(config) == {UP: expected, DOWN: expected, WAITS: 0}


@pytest.mark.usefixtures("emulated")
def test_a_run_that_is_timed_waits_for_the_end_of_each_part():
    assert reads_of_iteration(config_of("plain", log={"timing": True}))[WAITS] == 2


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("emulated")
def test_a_tensor_of_the_host_in_the_loss_is_caught():
    def spoil(session):
        source = session.update._source
        session.update._source = lambda columns, count: source(
            {**columns, "advantages": columns["advantages"].cpu()}, count
        )

    with pytest.raises(RuntimeError, match="a tensor in the host's memory met one on the device"):
        reads_of_update(config_of("plain"), spoil)


@pytest.mark.usefixtures("emulated")
def test_a_look_at_a_number_of_the_update_is_caught():
    def spoil(session):
        source = session.update._source

        def looking(columns, count):
            gradient = source(columns, count)
            assert gradient.norm.item() >= 0.0
            return gradient

        session.update._source = looking

    assert reads_of_update(config_of("plain"), spoil)[DOWN] == 4  # one a step


@pytest.mark.usefixtures("emulated")
def test_a_copy_in_every_step_is_caught():
    def spoil(session):
        assert isinstance(session.envs, TensorEnvs)
        advance = session.envs.advance
        session.envs.advance = lambda actions: advance(actions.cpu().to(actions.device))

    assert copies_of_step(config_of("tensor environments"), spoil) == {UP: 1, DOWN: 1, WAITS: 1}


@pytest.mark.usefixtures("emulated")
def test_a_copy_of_truncated_episodes_that_is_waited_for_is_caught(monkeypatch):
    passed = reads_of_iteration(config_of("plain"))
    assert passed[WAITS] == 0
    without = reads_of_iteration(config_of("plain", env={"max_episode_steps": 50}))
    assert passed[UP] == without[UP] + 3  # rows, steps and environments
    monkeypatch.setattr(StagedRollout, "final_rows", Rollout.final_rows)
    assert reads_of_iteration(config_of("plain"))[WAITS] == 4  # two blocks of each shard's two environments


@pytest.mark.usefixtures("emulated")
def test_noise_of_the_hosts_generator_is_caught_where_it_is_used():
    with opened(config_of("tensor environments")) as (session, _, _):
        assert isinstance(session.envs, TensorEnvs)
        actor = session.state.policy.actor(session.plan, session.mode)
        noise = torch.rand((4, 2), generator=torch.Generator().manual_seed(0))
        with pytest.raises(RuntimeError, match="a tensor in the host's memory met one on the device"):
            actor.tensors(session.envs.observations, noise)


@pytest.mark.usefixtures("emulated")
def test_a_checkpoint_of_the_devices_tensors_is_caught():
    with opened(config_of("plain")) as (session, _, _):
        views = {f"policy/{name}": view for name, view in session.state.parameters.views.items()}
        with pytest.raises(TypeError, match="NumPy can't look at a device's memory"):
            to_files(views, {}, {})  # pyright: ignore[reportArgumentType]
        files = to_files(session.arrays(), {}, {})
    assert files


# --- beyond the iteration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", variants(["plain", "LSTM", "tensor environments, normalised"], ["LSTM"]))
def test_a_checkpoint_goes_on_with_the_same_bits_and_on_a_cpu_and_back(case, use):
    use("emulated")
    whole, records = trained(config_of(case), 3)
    with opened(config_of(case)) as (session, trainer, _):
        trainer.iterate()
        trainer.finish_record()
        checkpoint = checkpoint_of(session.checkpoint_files({"wall_time": 0.0}), "here")
    with opened(config_of(case), checkpoint) as (session, trainer, log):
        trainer.iterate()
        trainer.iterate()
        log.log(trainer.finish_record())
        assert_same(session.arrays(), whole)
    assert log.records[-1]["train/policy_loss"] == records[-1]["train/policy_loss"]
    with opened(config_of(case, device="cpu"), checkpoint) as (session, trainer, _):
        assert_same(session.arrays(), checkpoint.arrays)
        trainer.iterate()
        trainer.finish_record()
        back = checkpoint_of(session.checkpoint_files({"wall_time": 0.0}), "there")
    with opened(config_of(case), back) as (session, trainer, _):
        assert_same(session.arrays(), back.arrays)
        trainer.iterate()
        assert session.state.iteration == 3


@pytest.mark.parametrize("case", variants(["plain", "LSTM"], ["plain"]))
def test_an_evaluation_has_the_episodes_of_the_cpu(case, use):
    use("emulated")
    changes = {"eval": {"interval": 1, "episodes": 2}, "env": {"max_episode_steps": 8}}
    tables = []
    for device in ("xpu", "cpu"):
        with opened(config_of(case, device=device, **changes)) as (session, _, _):
            tables.append(evaluate_policy(session))
    np.testing.assert_array_equal(tables[0], tables[1])
    assert tables[0][:, 1].min() > 0

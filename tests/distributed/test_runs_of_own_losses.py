"""Losses of the user's own: the same run on any ranks and devices, and through a stop."""

import itertools
import os
import sys
import time

import pytest
from command_line import CARTPOLE, SMALL, copy_of, error_line, lockstep, resume, run_words, same
from device_runs import CARTPOLE as IN_JAX
from device_runs import JAX, devices, same_agent

from lockstep.report.reading import read_run
from lockstep.report.settings import configs_of, differing

PENALISED = ("--ppo.loss", "users_losses:penalised")
FALLING = ("--ppo.clip-schedule", "linear", "--ppo.entropy-schedule", "linear", "--ppo.entropy-coef", 0.05)
SPO = ("--ppo.loss", "users_losses:spo", *FALLING)
HALF = ("--stop-at-step", 512)
EDITED = """
def mine(sample):
    return sample.ppo() + {weight} * (sample.actor_output**2).sum(-1)
"""

SECONDS = itertools.count(2, 2)


def write_losses(directory, text):
    """Writes the module anew; Python tells what it has compiled of it apart by its size and its second."""
    path = directory / "my_losses.py"
    path.write_text(text)
    when = time.time() + next(SECONDS)
    os.utime(path, (when, when))


def test_ranks_and_a_stop_in_the_middle_change_nothing(trained, tmp_path):
    whole = trained(*CARTPOLE, *PENALISED)
    stopped = trained(*CARTPOLE, *PENALISED, *HALF, "--nproc", 3)
    same(whole, resume(copy_of(stopped, tmp_path / "run"), "--nproc", 2))
    assert whole.agent != trained(*CARTPOLE).agent


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("--network.custom", "users_nets:Tiny"),
        ("--network.recurrent", "gru", "--network.recurrent-size", 8, "--network.sequence-length", 4),
        ("--algorithm", "grpo", "--grpo.group-size", 2, "--grpo.kl-coef", 0.1, "--num-envs", 16),
        ("--compile", "--num-envs", 4),
    ],
    ids=["custom network", "GRU", "GRPO", "compiled"],
)
def test_ranks_change_nothing_of_other_runs(trained, words):
    one, two = (trained(*CARTPOLE, *PENALISED, *words, *ranks) for ranks in ((), ("--nproc", 2)))
    same_agent(one, two)


@pytest.mark.long
@pytest.mark.parametrize("loss", ["penalised", "policy_gradient"])
@pytest.mark.parametrize("words", [(), ("--fsdp",), ("--sync-period", 2)], ids=["DDP", "FSDP", "local steps"])
def test_fast_reductions_start_as_the_exact_one(trained, loss, words):
    """The critic of a plain policy gradient has none."""
    base = (*CARTPOLE, "--ppo.loss", f"users_losses:{loss}")
    exact, fast = trained(*base), trained(*base, *words, "--reduction", "fast", "--nproc", 2)
    assert fast.ended.stderr == ""
    close = 0.3 if "--sync-period" in words else 1e-4
    assert fast.metrics[0]["train/loss"] == pytest.approx(exact.metrics[0]["train/loss"], rel=close, abs=0.05 * close)


def test_a_loss_may_leave_networks_alone_in_the_middle_of_a_fast_run(trained):
    run = trained(
        *CARTPOLE, "--ppo.loss", "users_losses:actor_alone_later", *FALLING, "--reduction", "fast", "--nproc", 2
    )
    exact = trained(*CARTPOLE, "--ppo.loss", "users_losses:actor_alone_later", *FALLING)
    assert run.metrics[-1]["train/loss"] == pytest.approx(exact.metrics[-1]["train/loss"], rel=0.05, abs=0.01)


@pytest.mark.long
@pytest.mark.parametrize("words", [IN_JAX, ("gated:GatedCartPole-v0", *SMALL, *JAX)], ids=["inside", "host"])
def test_devices_and_a_stop_in_the_middle_change_nothing(trained, tmp_path, words):
    whole = trained(*words, *SPO, *devices(1))
    stopped = trained(*words, *SPO, *HALF, *devices(3))
    same_agent(whole, resume(copy_of(stopped, tmp_path / "run"), *devices(2)))


@pytest.mark.long
def test_each_seed_of_one_program_is_that_of_its_own_run(trained):
    many = trained(*IN_JAX, *PENALISED, *devices(1), "--seed", 5, "--num-seeds", 2)
    one = trained(*IN_JAX, *PENALISED, *devices(1), "--seed", 6)
    assert many.summary["seeds"][1]["params_sha256"] == one.summary["params_sha256"]


def test_a_mean_is_refused_before_anything_starts(tmp_path):
    line = error_line(lockstep("train", *CARTPOLE, "--nproc", 2, "--ppo.loss", "users_losses:mean", cwd=tmp_path))
    assert "ppo.loss: users_losses:mean returned a single number for 29 samples; return the loss of each sample" in line
    assert not list(tmp_path.iterdir())


def test_seeds_and_runs_of_an_edited_function_are_told_apart(tmp_path):
    words = (*CARTPOLE, "--ppo.loss", "my_losses:mine", "--quiet")
    for name, weight in (("one", 1e-3), ("two", 1e-3), ("three", 2e-3)):
        write_losses(tmp_path, EDITED.format(weight=weight))
        assert lockstep("train", *words, "--name", name, cwd=tmp_path).code == 0
    runs = [f"runs/{name}" for name in ("one", "two", "three")]
    text = lockstep("compare", *runs, "--trust", "--episodes", 2, cwd=tmp_path).stdout
    loss = "my_losses:mine, function"
    assert f'ppo.loss: "{loss} 1" (one), "{loss} 1" (two), "{loss} 2" (three)' in text
    read = [read_run(tmp_path / run, run) for run in runs]
    assert differing(configs_of(read)) == [("ppo.loss", [f"{loss} 1", f"{loss} 1", f"{loss} 2"])]
    assert differing(configs_of(read[:2])) == []


def test_settings_that_a_loss_is_computed_from_are_no_other_function(trained, tmp_path):
    runs = [trained(*CARTPOLE, *PENALISED, *more).path for more in ((), ("--ppo.clip-range", 0.1))]
    text = lockstep("compare", *runs, "--trust", "--episodes", 2, cwd=tmp_path).stdout
    assert "ppo.clip_range: 0.2 (" in text
    assert "ppo.loss" not in text


def test_a_run_is_not_called_verified_by_another_function(tmp_path):
    words = ("train", *CARTPOLE, "--ppo.loss", "my_losses:mine", "--name", "run", "--stop-at-step", 128)
    verify = ("verify", "runs/run", "--world-sizes", "1,2", "--iterations", 1)
    write_losses(tmp_path, EDITED.format(weight=1e-3))
    assert lockstep(*words, cwd=tmp_path).code == 0
    write_losses(tmp_path, EDITED.format(weight=1e-1))
    ended = lockstep(*verify, cwd=tmp_path)
    assert "nothing is kept of this beside the run: ppo.loss: my_losses:mine isn't what runs/run was" in ended.stderr
    assert not (tmp_path / "runs" / "run" / "verify.json").exists()


def test_ranks_of_different_functions_end_in_a_line(tmp_path):
    by_rank = "__import__('os').environ.get('RANK', '0')"
    write_losses(tmp_path, f"weight = 1e-3 * (1 + int({by_rank}))\n{EDITED.format(weight='weight')}")
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "lockstep", "train", *CARTPOLE)
    ended = run_words([sys.executable, *map(str, words), "--ppo.loss", "my_losses:mine"], tmp_path)
    assert ended.code != 0
    assert "ppo.loss: my_losses:mine is another function on rank 1 than on rank 0: it gives a gradient" in ended.stderr


def test_a_seed_is_not_begun_with_a_function_that_was_edited_after_another(tmp_path):
    first_is_done = "(__import__('pathlib').Path('runs/group/seed_0/summary.json').exists() + 1)"
    write_losses(tmp_path, f"weight = {first_is_done}\n{EDITED.format(weight='weight')}")
    group = ("--seeds", "0-1", "--seeds-at-once", 1, "--name", "group", "--total-steps", 512)
    ended = lockstep("train", *CARTPOLE, *group, "--ppo.loss", "my_losses:mine", cwd=tmp_path)
    assert ended.code == 1
    assert (
        "seed_1: ppo.loss: my_losses:mine isn't what step_512 of seed_0 was trained with any more: it" in ended.stderr
    )
    assert not list((tmp_path / "runs" / "group" / "seed_1" / "checkpoints").glob("*"))


def test_a_policy_that_is_not_trained_is_said(tmp_path):
    told = lockstep("train", *CARTPOLE, "--ppo.loss", "users_losses:of_values", "--stop-at-step", 128, cwd=tmp_path)
    assert "ppo.loss: users_losses:of_values has no gradient by log_prob or actor_output" in told.stdout


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_run_is_not_resumed_with_a_function_that_was_edited(tmp_path, engine):
    words = ("--ppo.loss", "my_losses:mine", "--name", "run", "--engine", engine)
    write_losses(tmp_path, EDITED.format(weight=1e-3))
    started = lockstep("train", *CARTPOLE, *words, *HALF, cwd=tmp_path)
    assert started.code == 0, started.stderr
    run = tmp_path / "runs" / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    write_losses(tmp_path, EDITED.format(weight=2e-3))
    for ranks in ((), ("--nproc", 2)) if engine == "torch" else ((),):
        line = error_line(lockstep("train", "--resume", "runs/run", "--trust", *ranks, cwd=tmp_path))
        assert "ppo.loss: my_losses:mine isn't what step_512 was trained with any more: it gives a gradient" in line
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    write_losses(tmp_path, EDITED.format(weight="0.002 / 2") + "# another comment\n")
    ended = lockstep("train", "--resume", "runs/run", "--trust", cwd=tmp_path)
    assert ended.code == 0, ended.stderr

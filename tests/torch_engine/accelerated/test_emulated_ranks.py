"""Whole commands on the emulated device: two ranks through gloo, evaluation, video, and a run that is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_port

MODULES = Path(__file__).parents[2] / "modules"
WORDS = (
    *("CartPole-v1", "--device", "xpu", "--num-envs", "4", "--num-shards", "2", "--num-steps", "6"),
    *("--total-steps", "48", "--ppo.num-epochs", "1", "--ppo.num-minibatches", "2", "--network.hidden-sizes", "4"),
    *("--network.activation", "gelu", "--env.max-episode-steps", "5", "--log.no-tensorboard", "--proof.interval", "1"),
)


def commands(directory: Path, name: str, ranks: int, *words: str, device: str = "emulated") -> dict:
    """A run of so many ranks, each a process of its own that meets the others as under torchrun; its summary."""
    command = [sys.executable, str(MODULES / f"{device}_accelerator.py"), "train", *WORDS, "--name", name, *words]
    started, port = [], free_port()
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        alone = {} if ranks == 1 else {key: str(value) for key, value in place.items()}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=directory, env={**os.environ, **alone}, **pipes))
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(said)
    return json.loads((directory / "runs" / name / "summary.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("collectives", ["backend", "auto"])
def test_two_ranks_have_the_bits_of_one(collectives, tmp_path):
    one = commands(tmp_path, "one", 1)
    two = commands(tmp_path, "two", 2, "--collectives", collectives)
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert two["collectives"] == {"backend": "gloo", "auto": "shared memory"}[collectives]
    assert one["state_sha256"] == two["state_sha256"]


@pytest.mark.long
def test_two_ranks_train_fast(tmp_path):
    one, two = (commands(tmp_path, str(n), n, "--reduction", "fast", "--backend", "gloo") for n in (1, 2))
    assert two["device"] == "an emulated accelerator"
    assert (one["iteration"], two["iteration"]) == (2, 2)
    returns = [summary["final_return"] for summary in (one, two)]
    assert returns[0] == pytest.approx(returns[1], rel=0.2)


@pytest.mark.long
def test_two_ranks_train_fast_behind_ddp(tmp_path):
    words = ("--reduction", "fast", "--collectives", "backend")
    one, two = (commands(tmp_path, str(n), n, *words, device="played") for n in (1, 2))
    assert (two["world_size"], two["collectives"]) == (2, "gloo")
    assert (one["iteration"], two["iteration"]) == (2, 2)
    rows = [json.loads((tmp_path / "runs" / n / "metrics.jsonl").read_text().splitlines()[0]) for n in ("1", "2")]
    for name in ("train/policy_loss", "train/value_loss", "train/grad_norm"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-4), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("emulated", ("--sync-period", "2")),
        ("emulated", ("--sync-period", "2", "--collectives", "backend")),
        ("played", ("--fsdp", "--collectives", "backend")),  # FSDP resizes storages, which the emulation can't
    ],
)
def test_two_ranks_whose_hosts_take_part_in_each_step(device, words, tmp_path):
    summary = commands(tmp_path, "run", 2, "--reduction", "fast", *words, device=device)
    assert (summary["world_size"], summary["iteration"]) == (2, 2)
    rows = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["train/explained_variance"] is not None for row in rows)


@pytest.mark.long
def test_a_run_is_evaluated_filmed_and_kept(tmp_path):
    words = ("--eval.interval", "1", "--eval.episodes", "2", "--eval.record-video", "--checkpoint.interval", "1")
    summary = commands(tmp_path, "run", 1, *words)
    run = tmp_path / "runs" / "run"
    assert summary["last_evaluation"]["return_mean"] > 0
    assert list((run / "videos").iterdir())
    assert len(list((run / "checkpoints").iterdir())) == 2
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert all("eval/return_mean" in row and "train/policy_loss" in row for row in rows)

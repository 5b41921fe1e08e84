"""torchrun starts all ranks again when one is killed, and they go on: the same agent, and nobody waits for the dead."""

import os
import signal
import subprocess
import sys
import uuid

import pytest
from command_line import (
    CARTPOLE,
    GATED,
    NEEDS_PROC,
    TIMEOUT,
    Ended,
    Run,
    assert_no_orphans,
    marked,
    metrics_of,
    run_words,
    same,
    surroundings,
    wait_until,
)
from free_ports import free_port
from variants import variants

pytestmark = NEEDS_PROC


def torchrun(*words):
    own = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
    return [*own, "--monitor-interval", "0.1", "--master-port", str(free_port()), "-m", "lockstep", *map(str, words)]


@pytest.mark.parametrize(
    ("rank", "collectives"),
    variants([(0, "auto"), (1, "auto"), (0, "backend"), (1, "backend")], [(1, "auto")]),
)
def test_a_killed_rank_is_started_again_with_all_others(trained, tmp_path, rank, collectives):
    gate, path, mark = tmp_path / "gate", tmp_path / "runs" / "run", uuid.uuid4().hex
    gate.touch()
    words = torchrun("train", *GATED, "--name", path.name, "--resume", "auto", "--collectives", collectives, "--quiet")
    variables = surroundings(mark, {"GATE": str(gate), "OMP_NUM_THREADS": "1"})
    process = subprocess.Popen(
        words, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: len(metrics_of(path)) == 4, "the run doesn't reach the gate")
        wait_until((path / "checkpoints" / "step_384").is_dir, "no checkpoint of the third iteration")
        (victim,) = marked(mark, f"RANK={rank}", "TORCHELASTIC_RESTART_COUNT=0")
        os.kill(victim, signal.SIGKILL)
        gate.unlink()
        stdout, stderr = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 0, stderr[-3000:]
    ended = Ended(0, stdout, stderr, mark)
    same(trained(*CARTPOLE), Run(path, ended))
    assert_no_orphans(ended)


@pytest.mark.long
@pytest.mark.parametrize("whom", ["rank", "torchrun"])
def test_an_announced_end_leaves_a_checkpoint_of_the_iteration(trained, tmp_path, whom):
    gate, path, mark = tmp_path / "gate", tmp_path / "runs" / "run", uuid.uuid4().hex
    gate.touch()
    words = torchrun("train", *GATED, "--name", path.name, "--resume", "auto", "--quiet")
    variables = surroundings(mark, {"GATE": str(gate), "OMP_NUM_THREADS": "1"})
    said = tmp_path / "said"
    with said.open("wb") as file:
        process = subprocess.Popen(words, cwd=tmp_path, env=variables, stdout=file, stderr=file)
    try:
        wait_until(lambda: len(metrics_of(path)) == 4, "the run doesn't reach the gate")
        if whom == "rank":
            (told,) = marked(mark, "RANK=1")
            os.kill(told, signal.SIGTERM)
        else:
            process.terminate()
            wait_until(lambda: said.read_text().count("closing signal SIGTERM") == 2, "torchrun doesn't stop its ranks")
        gate.unlink()
        wait_until((path / "checkpoints" / "step_640").is_dir, "no checkpoint of the fifth iteration")
        process.wait(TIMEOUT)
    finally:
        process.kill()
    if whom == "torchrun":
        assert process.returncode != 0
        run = Run(path, Ended(1, "", "", mark))
        assert run.summary["status"] == "stopped by signal 15"
        assert len(run.metrics) == 5
        ended = run_words(words, tmp_path)
        assert ended.code == 0, ended.stderr[-3000:]
    else:  # 0 would have ended the run for torchrun, which starts the ranks again
        assert process.returncode == 0, said.read_text()[-3000:]
        ended = Ended(0, "", "", mark)
    same(trained(*CARTPOLE), Run(path, ended))
    assert_no_orphans(ended)

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
    same,
    surroundings,
    wait_until,
)
from variants import variants

pytestmark = NEEDS_PROC


def torchrun(*words):
    own = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
    return [*own, "--monitor-interval", "0.1", "--master-port", "29431", "-m", "lockstep", *map(str, words)]


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

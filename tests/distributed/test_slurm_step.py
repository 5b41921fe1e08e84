"""Tasks of a Slurm step are ranks; as a user would start them, but for Slurm itself, whose variables are set here."""

import subprocess
import uuid

from command_line import CARTPOLE, Run, command, metrics_of, same, surroundings

TASKS = 2


def test_the_tasks_of_a_step_give_the_same_agent(trained, tmp_path):
    step = {
        "SLURM_JOB_ID": str(uuid.uuid4().int % 4096),
        "SLURM_STEP_NODELIST": "node07",
        "SLURM_STEP_TASKS_PER_NODE": str(TASKS),
        "SLURM_NTASKS": str(TASKS),
        "SLURM_NODEID": "0",
    }
    words, mark, pipe = command("train", *CARTPOLE, "--name", "run"), uuid.uuid4().hex, subprocess.PIPE
    processes = []
    try:
        for task in range(TASKS):
            place = surroundings(mark, step | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)})
            processes.append(subprocess.Popen(words, cwd=tmp_path, env=place, stdout=pipe, stderr=pipe, text=True))
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * TASKS, outputs
    assert "2 ranks × 4 shards" in outputs[0][0]
    assert outputs[1][0] == ""
    reference = trained(*CARTPOLE)
    run = Run(tmp_path / "runs" / "run", reference.ended)
    assert run.summary["world_size"] == TASKS
    assert metrics_of(run.path)
    same(reference, run)

"""``lockstep.train`` in a notebook: its own classes on two ranks, progress in the cell, an interrupt that saves."""

import os
import signal
import threading
import time
from pathlib import Path

import nbclient
import nbclient.exceptions
import nbformat
import pytest

from lockstep import load_run

ENVIRONMENT = """
import gymnasium, numpy as np, lockstep
class Reach(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-2.0, 2.0, (1,))
    action_space = gymnasium.spaces.Discrete(3)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = float(self.np_random.uniform(-1, 1)), 0
        return np.array([self.place], np.float32), {}
    def step(self, action):
        self.place, self.steps = float(np.clip(self.place + 0.1 * (int(action) - 1), -2, 2)), self.steps + 1
        return np.array([self.place], np.float32), -abs(self.place), False, self.steps == 20, {}
"""
TRAIN = """
class Count(lockstep.BaseCallback):
    seen = 0
    def on_iteration(self, record):
        self.seen += 1
        return self.seen < 4
count = Count()
run = lockstep.train(Reach, nproc=2, callbacks=[count], num_steps=16, total_steps=8192, name="cell")
print(count.seen, run.status, run.policy([0.5]) in (0, 1, 2), run.evaluate(2)["episodes"])
"""
ENDLESS = 'lockstep.train(Reach, nproc=2, num_steps=16, total_steps=10**9, name="endless")'
AFTER = """
run = lockstep.load_run("endless", env=Reach)
print(run.status, run.checkpoints[0].name == f"step_{run.summary['global_step']}")
"""


def text_of(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.fixture
def notebook(tmp_path):
    cells = [nbformat.v4.new_code_cell(code) for code in (ENVIRONMENT, TRAIN, ENDLESS, AFTER)]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells), timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    )
    with client.setup_kernel():
        yield client


def interrupted_once(client, ready: Path):
    """Interrupts the kernel once a file is there."""
    deadline = time.monotonic() + 600
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(client.km.provisioner.pid, signal.SIGINT)


def test_a_notebook_trains_what_it_defines_and_may_be_interrupted(notebook, tmp_path):
    first, train, endless, after = notebook.nb.cells
    notebook.execute_cell(first, 0)
    notebook.execute_cell(train, 1)
    said = text_of(train)
    assert "2 ranks" in said
    assert "step 512/8,192" in said  # progress in the cell
    assert said.splitlines()[-1] == "4 stopped by a callback True 2"
    begun = tmp_path / "runs" / "endless" / "metrics.jsonl"
    thread = threading.Thread(target=interrupted_once, args=(notebook, begun))
    thread.start()
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="KeyboardInterrupt"):
        notebook.execute_cell(endless, 2)
    thread.join()
    notebook.execute_cell(after, 3)
    assert text_of(after) == "stopped by signal 2 True\n"
    assert load_run(tmp_path / "runs" / "endless").summary["environment"] == "python:Reach"

"""A run whose ``total_steps`` was edited in its ``config.json``: resuming it says so, as if it had been given."""

import json

import pytest
from command_line import CARTPOLE, lockstep, train


@pytest.mark.parametrize(("schedule", "warned"), [("linear", True), ("constant", False)])
def test_a_length_that_was_edited_is_said_when_the_run_is_resumed(tmp_path, schedule, warned):
    run = train(tmp_path, *CARTPOLE, "--ppo.schedule", schedule, "--stop-at-step", 512)
    file = run.path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"total_steps": 768}))
    ended = lockstep("train", "--resume", run.path, cwd=tmp_path)
    assert ended.code == 0
    change = "total_steps was 1024 and is 768 from here on"
    said = f"warning: {change}; schedules follow it, so a new run of this config.json is another run"
    assert ended.stderr == f"lockstep: {said if warned else change}\n"
    again = lockstep("train", "--resume", run.path, cwd=tmp_path)  # its checkpoint knows it now
    assert (again.code, again.stderr) == (0, "")
    assert bool(json.loads((run.path / "summary.json").read_text())["lengths"]) == warned

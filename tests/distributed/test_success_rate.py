"""The success rate: there where the environment says whether a task was solved, the same for every number of ranks."""

import json
from pathlib import Path

import pytest
from command_line import CARTPOLE, SMALL, copy_of, resume, same

TELLING = ("telling:Telling-v0", *SMALL, "--eval.interval", 4)
PUSH = ("lockstep/PushCube-v0", *SMALL, "--env.max-episode-steps", 6, "--eval.interval", 4)


def rates(run, name="rollout/success_rate"):
    return [record[name] for record in run.metrics if name in record]


def test_the_rate_rises_with_ones_and_the_evaluation_has_one_too(trained):
    run = trained(*TELLING)
    assert len(rates(run)) == 8
    assert 0.4 < rates(run)[0] < 0.9  # a coin that falls three times in six: 0.66
    assert len(rates(run, "eval/success_rate")) == 2
    assert set(rates(run, "eval/success_rate")) <= {0.0, 1.0}  # one start, one policy without chance
    assert run.summary["final_success_rate"] == rates(run)[-1]


@pytest.mark.parametrize("words", [TELLING, PUSH], ids=["Gymnasium", "arrays"])
def test_ranks_and_a_resume_leave_it_as_it_is(trained, tmp_path, words):
    stopped = trained(*words, "--stop-at-step", 512, "--nproc", 2)
    resumed = resume(copy_of(stopped, tmp_path / "run"), "--nproc", 4)
    same(trained(*words), resumed)
    assert rates(resumed) == rates(trained(*words))
    assert len(rates(resumed)) == 8


def test_an_environment_that_says_nothing_has_none(trained):
    run = trained(*CARTPOLE)
    assert rates(run) == []
    assert "final_success_rate" not in run.summary


def test_a_checkpoint_from_before_there_were_successes_goes_on(trained, tmp_path):
    stopped = copy_of(trained(*CARTPOLE, "--stop-at-step", 512), tmp_path / "run")
    (checkpoint,) = Path(stopped, "checkpoints").glob("step_512")
    recent = json.loads((checkpoint / "state.json").read_text())["recent_episodes"]
    assert all(len(row) == 2 for row in recent["window"])  # nothing was said, so nothing is written
    same(trained(*CARTPOLE), resume(stopped))

"""Environments that observe what is none of their choices, or forbid every action, end what they are stepped in."""

import csv
import json

import pytest
from command_line import error_line, lockstep

from lockstep.core.shards import keyed_seed

ENGINES = pytest.mark.parametrize("engine", ["torch", "jax"])
ID = "straying:Straying-v0"
SAID = {
    "plain": "observation 6 (component 0), none of the 5 choices from 1 to 5, ",
    "grid": "observation 3 in 'grid' (component 1), none of the 3 choices from 0 to 2, ",
    "mask": "an action mask that allows nothing ",
    "masks": "an action mask that allows nothing of index 1 (allow every choice of an index that doesn't matter) ",
}
MASKED = {"mask", "masks"}


def train(tmp_path, kind, stray, *more, **settings):
    kwargs = json.dumps({"kind": kind, "stray": stray, **settings})
    words = ("--num-envs", 4, "--num-steps", 8, "--total-steps", 64, "--env.kwargs", kwargs, "--name", "run")
    masked = ("--env.action-mask", "legal") if kind in MASKED else ()
    return lockstep("train", ID, *words, *masked, *more, cwd=tmp_path)


@ENGINES
@pytest.mark.parametrize("kind", ["plain", "grid"])
def test_an_index_that_is_none_of_its_choices_ends_a_run(tmp_path, kind, engine):
    line = error_line(train(tmp_path, kind, keyed_seed(0, "reset", 1, 0), "--engine", engine))
    assert f"environment 1 ({ID}) gave {SAID[kind]}in step 3 of iteration 1; lockstep check {ID} looks for" in line


@ENGINES
@pytest.mark.parametrize("kind", ["mask", "masks"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_mask_that_allows_nothing_ends_a_run(tmp_path, kind, workers, engine):
    words = ("--engine", engine, "--env.workers", workers)
    line = error_line(train(tmp_path, kind, keyed_seed(0, "reset", 1, 0), *words))
    assert f"environment 1 ({ID}) gave {SAID[kind]}in step 3 of iteration 1; lockstep check {ID} looks for" in line


@ENGINES
@pytest.mark.parametrize("workers", [0, 2])
def test_it_is_named_where_the_environment_refuses_the_action(tmp_path, workers, engine):
    """And not what the environment raised for an action that nobody could choose better."""
    words = ("--engine", engine, "--env.workers", workers)
    line = error_line(train(tmp_path, "mask", keyed_seed(0, "reset", 1, 0), *words, refuses=True))
    assert f"environment 1 ({ID}) gave {SAID['mask']}in step 3 of iteration 1; lockstep check {ID} looks for" in line


def test_it_is_named_where_a_step_is_timed_to_choose_workers(tmp_path):
    line = error_line(train(tmp_path, "mask", None, "--env.workers", "auto", refuses=True))
    assert f"gave {SAID['mask']}in step 3" in line


@ENGINES
@pytest.mark.parametrize("refuses", [False, True])
def test_it_ends_the_random_actions_before_a_run(tmp_path, refuses, engine):
    words = ("--engine", engine, "--env.workers", 0, "--normalize.returns", "true")
    line = error_line(train(tmp_path, "mask", keyed_seed(0, "reset", 1, 0), *words, refuses=refuses))
    assert f"gave {SAID['mask']}in step 3 of the random actions before the first iteration; lockstep check" in line


@ENGINES
@pytest.mark.parametrize("kind", ["plain", "mask", "masks"])
def test_so_it_does_an_evaluation(tmp_path, kind, engine):
    stray = keyed_seed(0, "eval", 1)
    assert train(tmp_path, kind, stray, "--engine", engine).code == 0
    line = error_line(lockstep("eval", "run", "--episodes", 4, cwd=tmp_path))
    assert f"environment {ID} gave {SAID[kind]}in step 3 of episode 1; lockstep check {ID} looks for" in line


@pytest.mark.parametrize("workers", [0, 2])
def test_masks_of_episodes_that_do_not_count_end_no_evaluation(tmp_path, workers):
    """Shorter episodes are followed by others, until the longest is over."""
    (tmp_path / "once.yaml").write_text(
        f"env: {{id: {ID}, action_mask: legal, workers: {workers}, kwargs: {{kind: mask, stray: -1, once: true}}}}"
    )
    ended = lockstep("eval", "once.yaml", "--policy", "random", "--episodes", 6, "--csv", "out.csv", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    lengths = [int(row["length"]) for row in csv.DictReader((tmp_path / "out.csv").open())]
    assert lengths == [3 + keyed_seed(0, "eval", episode) % 4 for episode in range(6)]
    assert len(set(lengths)) > 1


@pytest.mark.parametrize("kind", ["plain", "grid", "mask", "masks", "refused"])
def test_a_check_says_it(tmp_path, kind):
    settings = {"kind": "mask", "refuses": True} if kind == "refused" else {"kind": kind}
    masked = ("--env.action-mask", "legal") if settings["kind"] in MASKED else ()
    words = ("--steps", 20, "--env.kwargs", json.dumps(settings), *masked)
    ended = lockstep("check", ID, *words, cwd=tmp_path)
    assert ended.code == 1
    said = f"environment 0 ({ID}) gave {SAID[settings['kind']]}in step 3 of random actions"
    assert any("PROBLEM" in line and said in line for line in ended.stdout.splitlines()), ended.stdout

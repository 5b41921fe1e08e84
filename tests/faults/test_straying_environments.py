"""Environments that observe what is none of their choices, or forbid every action, end what they are stepped in."""

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
}


def train(tmp_path, kind, stray, *more):
    kwargs = json.dumps({"kind": kind, "stray": stray})
    words = ("--num-envs", 4, "--num-steps", 8, "--total-steps", 64, "--env.kwargs", kwargs, "--name", "run")
    masked = ("--env.action-mask", "legal") if kind == "mask" else ()
    return lockstep("train", ID, *words, *masked, *more, cwd=tmp_path)


@ENGINES
@pytest.mark.parametrize("kind", ["plain", "grid"])
def test_an_index_that_is_none_of_its_choices_ends_a_run(tmp_path, kind, engine):
    line = error_line(train(tmp_path, kind, keyed_seed(0, "reset", 1, 0), "--engine", engine))
    assert f"environment 1 ({ID}) gave {SAID[kind]}in step 3 of iteration 1; lockstep check {ID} looks for" in line


@ENGINES
def test_a_mask_that_allows_nothing_ends_a_run(tmp_path, engine):
    line = error_line(train(tmp_path, "mask", keyed_seed(0, "reset", 1, 0), "--engine", engine))
    assert f"environment 1 ({ID}) raised in step: ValueError: the action mask allows nothing (" in line


@ENGINES
@pytest.mark.parametrize("kind", ["plain", "mask"])
def test_so_it_does_an_evaluation(tmp_path, kind, engine):
    stray = keyed_seed(0, "eval", 1)
    assert train(tmp_path, kind, stray, "--engine", engine).code == 0
    line = error_line(lockstep("eval", "run", "--episodes", 4, cwd=tmp_path))
    if kind == "mask":
        assert f"environment 1 ({ID}) raised in step: ValueError: the action mask allows nothing (" in line
    else:
        assert f"environment {ID} gave {SAID[kind]}in step 3 of episode 1; lockstep check {ID} looks for" in line


@pytest.mark.parametrize("kind", ["plain", "grid", "mask"])
def test_a_check_says_it(tmp_path, kind):
    masked = ("--env.action-mask", "legal") if kind == "mask" else ()
    words = ("--steps", 20, "--env.kwargs", json.dumps({"kind": kind}), *masked)
    ended = lockstep("check", ID, *words, cwd=tmp_path)
    assert ended.code == 1
    said = {
        "mask": "raised in step: ValueError: the action mask allows nothing",
        "plain": f"environment 0 ({ID}) gave {SAID['plain']}in step 3 of random actions",
        "grid": f"environment 0 ({ID}) gave {SAID['grid']}in step 3 of random actions",
    }[kind]
    assert any("PROBLEM" in line and said in line for line in ended.stdout.splitlines()), ended.stdout

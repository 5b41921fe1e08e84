"""What only shows at ends: numbers of the last observations, and what environments remember from episode to episode."""

import json

import pytest
from command_line import error_line, lockstep

ENGINES = pytest.mark.parametrize("engine", ["torch", "jax"])
WORDS = ("--num-envs", 8, "--num-steps", 16, "--total-steps", 1024)


@ENGINES
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("UnseenAtTheEnd", "gave observation nan (component 0) in step 16 of iteration 1; "),
        ("UnseenWhenTruncated", "(component 0) in step 6 of iteration 1; "),
    ],
)
def test_a_last_observation_that_is_none_is_named(tmp_path, name, said, engine):
    normalize = ("--normalize.observations",) if name == "UnseenWhenTruncated" else ()
    ended = lockstep(
        *("train", f"remembering:{name}-v0", *WORDS, "--engine", engine, "--env.workers", 0, *normalize),
        cwd=tmp_path,
    )
    line = error_line(ended)
    assert said in line
    assert f"environment 0 (remembering:{name}-v0) gave observation " in line
    assert "learning_rate" not in line


def summary_of(path):
    return json.loads((path / "summary.json").read_text())


@ENGINES
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_what_hooks_keep_is_there_after_a_resume_and_evaluations_know_nothing_of_each_other(
    tmp_path, algorithm, workers, engine
):
    words = ("train", "remembering:Wearing-v0", *WORDS, "--engine", engine, "--env.workers", workers)
    words += ("--eval.interval", 1, "--eval.episodes", 8, "--algorithm", algorithm, "--num-shards", 2)
    words += ("--grpo.group-size", 4) if algorithm == "grpo" else ()
    whole = lockstep(*words, "--name", "whole", cwd=tmp_path)
    assert whole.code == 0, whole.stderr
    assert lockstep(*words, "--name", "parts", "--stop-at-step", 512, cwd=tmp_path).code == 0
    ended = lockstep("train", "--resume", "parts", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    one, other = (summary_of(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert one["state_sha256"] == other["state_sha256"]
    assert other["restarted_environments"] == []
    rows = [
        [json.loads(line)["eval/return_mean"] for line in (tmp_path / "runs" / name / "metrics.jsonl").open()]
        for name in ("whole", "parts")
    ]
    assert rows[0] == rows[1]


def test_arrays_that_hooks_share_with_the_environment_are_those_of_the_first_evaluation(tmp_path):
    words = ("train", "remembering:WearingInPlace-v0", *WORDS, "--eval.interval", 1, "--eval.episodes", 8)
    returns = []
    for workers in (0, 2):
        ended = lockstep(*words, "--num-shards", 2, "--env.workers", workers, "--name", f"w{workers}", cwd=tmp_path)
        assert ended.code == 0, ended.stderr
        rows = (tmp_path / "runs" / f"w{workers}" / "metrics.jsonl").read_text().splitlines()
        returns.append([json.loads(row)["eval/return_mean"] for row in rows])
    assert len(returns[0]) > 2
    assert returns[0] == returns[1]

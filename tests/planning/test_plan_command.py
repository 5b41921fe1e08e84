"""``lockstep plan`` as a user meets it."""

import json

import pytest
from command_line import error_line, lockstep

from lockstep.cli import main

SMALL = ("CartPole-v1", "--num-envs", 8, "--num-steps", 16, "--ppo.num-minibatches", 2, "--network.hidden-sizes", 8, 8)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned")
    words = ("plan", *SMALL, "--on", "h100:8", "--on", "cpu:2", "--iters", 2, "--price", "h100:8=98.32")
    ended = lockstep(*words, "--name", "small", cwd=folder)
    assert ended.code == 0, ended.stderr
    return folder / "runs" / "small", ended.stdout


def test_a_table_for_each_target(planned):
    out = planned[1]
    assert "h100:8: 8 x NVIDIA H100 SXM, engine torch" in out
    assert "cores of this machine, engine torch" in out
    for words in ("largest num_envs that fits:", "collectives of an iteration: ", "its time: ", "of the peak"):
        assert words in out, words


def test_the_file_has_every_target_and_prediction(planned):
    plan = json.loads((planned[0] / "plan.json").read_text())
    h100, cpu = plan["targets"]
    assert [x["devices"] for x in h100["predictions"]] == [1, 2, 4, 8]
    assert [x["devices"] for x in cpu["predictions"]] == [1, 2]
    for one in h100["predictions"]:
        assert one["fits"]
        assert {"parameters", "moments", "gradients", "rollout", "activations"} <= set(one["memory"])
        rates = one["steps_per_second"]
        assert rates["worst"] < rates["likely"] < rates["best"]
        assert one["dollars"][0] < one["dollars"][1] < one["dollars"][2]
        assert one["limited_by"]
    assert h100["predictions"][0]["collectives"] == []
    assert h100["predictions"][1]["collectives"][0]["kind"] == "all-gather"
    assert h100["predictions"][0]["efficiency"] == 1.0
    assert min(h100["flops"], h100["bytes"], h100["kernels"]) > 0
    # two networks of 4, 8, 8 and 2 or 1 units: 112 + 18 and 112 + 9 numbers
    assert h100["predictions"][0]["memory"]["parameters"] == 4 * (112 + 18 + 112 + 9)
    assert plan["config"]["env.id"] == "CartPole-v1"
    assert plan["table"]["chips"]["h100"]["sources"]


def test_the_picture_is_drawn(planned):
    assert (planned[0] / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_else_is_left(planned):
    assert sorted(path.name for path in planned[0].parent.iterdir()) == ["small"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "on: nothing to plan for; give --on h100:8"),
        (("--on", "b300:8"), "on: 'b300' is no chip of the table"),
        (("--on", "tpu:v5e:5x5"), "TPU v5e has no slice 5x5"),
        (("--on", "h100:8", "--world-sizes", "1,9"), "world-sizes: 9 is more than any target has"),
        (("--on", "h100:8", "--mode", "both"), "mode: 'both' is none of weak, strong"),
        (("--on", "h100:8", "--link", "fast"), "link: 'fast' is no rate"),
        (("--on", "h100:8", "--price", "free"), "price: 'free' is no price"),
        (("--on", "h100:8", "--total-hours", "3"), "--total-hours: unknown option"),
        (("--on", "h100:8", "--nproc", "3"), "nproc: plan starts its own runs"),
        (("--on", "h100:8", "--iters", "0"), "0 is below 1"),
        (("--on", "h100:8", "--env.backend", "envpool", "--algorithm", "grpo"), "algorithm: grpo needs groups of"),
    ],
)
def test_errors_are_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "CartPole-v1", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not list(tmp_path.iterdir())


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    ended = lockstep("plan", *SMALL, "--on", "h100:8", "--name", "mine", cwd=tmp_path)
    assert (ended.code, error_line(ended)) == (
        2,
        "lockstep: error: name: runs/mine exists already and is no plan; choose another --name",
    )

"""``lockstep verify`` passes what is in lockstep, and catches the three mistakes that make agents depend on ranks."""

import json
import re

import pytest
from command_line import SMALL, error_line, lockstep

from lockstep.cli import main
from lockstep.commands.verify import print_table
from lockstep.config.run import Config
from lockstep.proof.verify import Comparison, Trace

SHORT = ("--iterations", 2)


def verify(cwd, env_id, *words):
    return lockstep("verify", env_id, *SMALL, *SHORT, *words, cwd=cwd)


def rows(ended):
    return {row["world_size"]: row for row in json.loads(ended.stdout)}


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    assert not any(tmp_path.iterdir()), "verify leaves nothing behind"


@pytest.mark.parametrize(("iterations", "said"), [(1, ", 1 iteration, "), (3, ", 3 iterations, ")])
def test_the_table_says_how_much_was_compared(iterations, said, capsys):
    print_table(Config(), [Comparison(Trace(1, None, [{"a": "1", "b": "2"}], []), True, "")], iterations)
    assert said in capsys.readouterr().out


def test_one_rank_two_and_three_are_the_same(folder):
    ended = verify(folder, "CartPole-v1", "--world-sizes", "1,2,3")
    assert ended.code == 0, ended.stdout
    assert ended.stderr == ""
    assert "CartPole-v1, seed 0, 2 iterations, reduction exact" in ended.stdout
    table = [line.split("│") for line in ended.stdout.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row[1:-1]] for row in table]
    assert cells == [[ranks, "yes", cells[0][2], ""] for ranks in "123"]
    assert int(cells[0][2]) == 37  # 12 weights, two moments of each, Adam's step
    assert ended.stdout.endswith("verified: every tensor and every metric has the same bytes at every iteration\n")


def test_one_world_size_twice_is_asked_whether_a_run_repeats(folder):
    ended = verify(folder, "CartPole-v1", "--world-sizes", "1,1", "--json")
    assert ended.code == 0, ended.stdout
    assert [(row["world_size"], row["equal"]) for row in json.loads(ended.stdout)] == [(1, True), (1, True)]


def test_a_loss_that_bypasses_the_reduction_is_caught(folder):
    ended = verify(folder, "unreduced:CartPole-v1", "--world-sizes", "1,2")
    assert ended.code == 1
    assert ended.stderr == ""
    text = " ".join(" ".join(line.split("│")[-2].split()) for line in ended.stdout.splitlines() if "│" in line)
    assert "out of sync after iteration 1: rank 1 of 2" in text
    assert "first policy/actor.0.weight" in text
    assert ended.stdout.splitlines()[-1].startswith("NOT VERIFIED")


@pytest.mark.long
def test_seeding_by_rank_is_caught(folder):
    ended = verify(folder, "seeded_by_rank:CartPole-v1", "--world-sizes", "2,1", "--json")
    assert ended.code == 1
    row = rows(ended)[2]
    assert row["equal"] is False
    assert "out of sync at the start: rank 1 of 2" in row["difference"]
    assert "first policy/actor.0.weight" in row["difference"]


@pytest.mark.long
def test_shuffling_by_rank_is_caught(folder):
    ended = verify(folder, "shuffled_by_rank:CartPole-v1", "--world-sizes", "1,2", "--json")
    assert ended.code == 1
    assert rows(ended)[1] == {"world_size": 1, "equal": True, "difference": ""}
    row = rows(ended)[2]
    assert row["equal"] is False
    assert row["difference"].startswith("iteration 1: ")
    assert "first policy/" in row["difference"]
    assert "metric train/loss: " in row["difference"]


def test_one_world_size_alone_is_no_comparison(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert main(["verify", "CartPole-v1", "--world-sizes", "2"]) == 2
    assert "world-sizes: 2 has nothing to be compared with" in capsys.readouterr().err


def test_the_first_world_size_is_the_reference_and_all_are_checked_before_any_is_started(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert main(["verify", "CartPole-v1", "--num-shards", "8", "--world-sizes", "1,2,9"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nproc: 9 ranks can't share 8 shards, at least one each; use at most 8" in captured.err


def test_the_setup_is_shown_and_nothing_is_trained(tmp_path):
    words = ("verify", "lockstep/CartPole-v1", "--num-envs", 16, "--setup", "--world-sizes")
    ended = lockstep(*words, "2,3", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "lockstep/CartPole-v1 · torch · 2 processes of 1 thread · 16 environments in 8 shards of 2 · exact",
        "  rank 0, cpu: shards 0 to 3, environments 0 to 7",
        "  rank 1, cpu: shards 4 to 7, environments 8 to 15",
        "lockstep/CartPole-v1 · torch · 3 processes of 1 thread · 16 environments in 8 shards of 2 · exact",
        "  rank 0, cpu: shards 0 to 2, environments 0 to 5",
        "  rank 1, cpu: shards 3 to 5, environments 6 to 11",
        "  rank 2, cpu: shards 6 to 7, environments 12 to 15",
    ]
    ended = lockstep(*words, "4,2x1", "--engine", "jax", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 1 + 4 + 1 + 2
    assert "4 devices [cpu], mesh batch 4 × fsdp 1 · 16 environments in 8 shards of 2" in lines[0]
    assert re.match(r"  process 0, \S*3\S*: shards 6 to 7, environments 12 to 15$", lines[4])
    assert re.match(r"  process 1, \S*1\S*: shards 4 to 7, environments 8 to 15$", lines[7])
    assert list(tmp_path.iterdir()) == []


def test_a_setup_that_cant_be_is_one_line(tmp_path):
    ended = lockstep("verify", "CartPole-v1", "--device", "cuda", "--setup", "--world-sizes", "2", cwd=tmp_path)
    assert error_line(ended).startswith("lockstep: error: device: cuda")


@pytest.mark.parametrize("section", [{"env": {"id": "python:Maze"}}, {"ppo": {"loss": "python:mine"}}])
def test_what_no_other_process_can_import_is_one_line_and_no_verdict(tmp_path, section):
    (tmp_path / "config.json").write_text(json.dumps({"env": {"id": "CartPole-v1"}} | section))
    line = error_line(lockstep("verify", "config.json", "--world-sizes", "1,2", cwd=tmp_path))
    assert "was handed to lockstep.train as an object, which other runs can't import; put it into a module" in line


WORLD = """
import gymnasium


class Scaled(gymnasium.RewardWrapper):
    def reward(self, reward):
        return {gain} * reward


gymnasium.register("Scaled-v0", lambda: Scaled(gymnasium.make("CartPole-v1").unwrapped), max_episode_steps=500)
"""


def test_a_run_whose_environment_was_edited_since_is_not_called_verified(tmp_path):
    module = tmp_path / "edited_world.py"
    module.write_text(WORLD.format(gain=1.0))
    words = ("train", "edited_world:Scaled-v0", *SMALL, "--name", "run", "--stop-at-step", 512, "--nproc", 2)
    assert lockstep(*words, cwd=tmp_path).code == 0
    again = ("verify", "runs/run", "--world-sizes", "1,2", *SHORT)
    ended = lockstep(*again, cwd=tmp_path)
    assert (ended.code, ended.stderr) == (0, "")
    (tmp_path / "runs" / "run" / "verify.json").unlink()
    module.write_text(WORLD.format(gain=-3.0))
    ended = lockstep(*again, cwd=tmp_path)
    assert ended.code == 0
    assert "nothing is kept of this beside the run: iteration 1: rollout/episode_return_mean is" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "runs" / "run" / "verify.json").exists()

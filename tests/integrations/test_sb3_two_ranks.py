"""``lockstep.integrations.sb3`` on two ranks: one agent, one set of files, and what it takes to be that.

All of it is one spawn of ``tests/modules/sb3_ranks.py``, whose ranks write down what they see.
"""

import csv
import json
import os
from typing import Any

import numpy as np
import pytest
import stable_baselines3
from command_line import lockstep
from sb3_features import FEATURES, SMALL, cartpoles, digest
from stable_baselines3.common.monitor import load_results

RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    ended = lockstep("run", "--nproc", RANKS, "-m", "sb3_ranks", path, cwd=path)
    assert ended.code == 0, ended.stderr
    (path / "stdout").write_text(ended.stdout)
    return path


@pytest.fixture(scope="module")
def ranks(folder):
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture
def case(ranks, request):
    """What the ranks wrote of the case that the test is named after."""
    name = request.node.originalname.removeprefix("test_")
    name = "used_environments" if name.startswith("used_environments") else name
    facts = [rank[name] for rank in ranks]
    assert not any("error of the case" in one for one in facts), facts
    return facts


def same(case, *names) -> Any:
    """A fact that all ranks share."""
    first, *others = ([one[name] for name in names] for one in case)
    assert all(other == first for other in others), case
    return first[0] if len(first) == 1 else first


# --- features ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_gives_one_agent(name, ranks):
    facts = [rank[name] for rank in ranks]
    assert not any("error" in one for one in facts), facts
    assert same(facts, "digest") != digest(stable_baselines3.PPO("MlpPolicy", cartpoles(), **SMALL))
    assert same(facts, "steps") > 0


STOPPING = {"a_function_as_callback": 72, "a_limit_of_episodes": None}


def test_steps_are_those_of_all_ranks(ranks):
    steps = {name: ranks[0][name]["steps"] for name in FEATURES if name not in STOPPING}
    assert set(steps.values()) == {64, 128, 192}
    assert (
        ranks[0]["a_function_as_callback"]["steps"] == 72
    )  # the first multiple of two ranks' two environments from 70
    assert ranks[0]["a_limit_of_episodes"]["steps"] < 128


# --- updates ----------------------------------------------------------------------------------------------------


def test_one_update(case):
    """Two halves with one mean and deviation are the whole; with one each they are not."""
    for name in ("globally", "locally"):
        assert same(case, f"moved {name}") > 1e-3
        assert same(case, f"loss {name}", f"value_loss {name}", f"entropy_loss {name}") == pytest.approx(
            [0] * 3, abs=1e-5
        )
        assert same(case, f"explained_variance {name}") < 1e-6
    assert same(case, "globally") < 1e-6
    assert same(case, "locally") > 1e-5
    assert min(one["explained_variance alone"] for one in case) > 1e-4


def test_divergence(case):
    """Ranks stop at the same minibatch, though they wouldn't alone."""
    agreed = same(case, "agreed")
    assert any(agreed)
    assert not all(agreed)
    assert case[0]["alone"] != case[1]["alone"]
    assert same(case, "limit") == 4e-3


def test_a_divergence_judged_alone(case):
    assert all("Error" in one["error"] and "collective" in one["error"] for one in case)


def test_own_updates(case):
    """A subclass that doesn't call our ``train`` is told before its first step; one that calls it may step on."""
    told = same(case, "error")
    assert told.startswith("UnsynchronizedUpdateError: OwnUpdate.train steps the policy without super().train()")
    assert same(case, "steps", "moved") == [64, False]
    assert same(case, "other") == [True, 128]
    assert same(case, "unwatched") is None
    same(case, "digest")


def test_a2c(case):
    assert same(case, "steps") == 80
    assert same(case, "digest") != same(case, "locally")


def test_repeated(case):
    first, second = same(case, "digests")
    assert first == second


# --- environments and statistics --------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["model", "environments"])
def test_seeds(case, whose):
    """Ranks see the environments of one process with all of them, and draw other actions."""
    assert same(case, f"of the {whose}")
    assert not same(case, f"actions of the {whose}")
    assert same(case, "actions unseparated")
    same(case, f"parameters of the {whose}")


def alike(case, name):
    """How many of the second rank's environments start as one of the first rank's."""
    first, second = (one[name] for one in case)
    return sum(observation in first for observation in second)


USED = ("reset_first", "evaluated_first", "used_on_one_rank", "seeded_before_they_are_wrapped", "seeded_in_processes")


@pytest.mark.parametrize("how", USED)
def test_used_environments(case, how):
    """Environments that were seeded alike and used before ``learn`` are told apart; the first rank's go on."""
    assert alike(case, how) == 0
    assert case[0][how] == case[0][f"{how}, unseparated"]
    if how in ("reset_first", "seeded_before_they_are_wrapped", "seeded_in_processes"):
        assert alike(case, f"{how}, unseparated") == 2
    if how in ("reset_first", "evaluated_first", "seeded_in_processes"):
        assert case[1][how] == case[1]["of global ids"]


def test_used_environments_go_on_if_the_script_seeds_them_by_rank(case):
    for one in case:
        assert one["seeded_by_rank"] == one["seeded_by_rank, unseparated"]
    assert alike(case, "seeded_by_rank") == 0


SEEDING_THEMSELVES = ("levels", "levels, monitored", "generators", "generators in processes", "used levels")


@pytest.mark.parametrize("which", SEEDING_THEMSELVES)
def test_environments_that_seed_themselves(case, which):
    """They are alike again after each reset: whoever goes on learning doesn't end their episodes, and is told once."""
    begun = [one[which] for one in case]
    assert begun[0] == begun[1] == ([2, 2, 2, 3] if which == "used levels" else [1, 1, 1, 2])
    assert [one[f"{which}, lines"] for one in case] == [1, 0]


def test_environments_that_are_set_later(case):
    """They are told apart like the first ones."""
    assert alike(case, "first") == 0
    assert alike(case, "later") == 0
    assert case[1]["later"] == case[1]["of global ids"]
    assert [one["lines"] for one in case] == [0, 0]


def test_normalizers(case):
    assert same(case, "merged")["from the whole"] < 1e-5
    assert same(case, "merged")["between ranks"] == 0
    assert same(case, "merged")["returns"] == pytest.approx(2 * 64, abs=1e-3)
    assert case[0]["unmerged"]["from the whole"] > 1
    assert case[0]["unmerged"]["between ranks"] > 0


def test_normalizers_go_on(case):
    """64 steps and four first observations; then 64 more and the two that the second rank saw by itself."""
    assert same(case, "counts") == pytest.approx([68, 68 + 64 + 2], abs=1e-3)
    same(case, "mean")


def test_episodes(case):
    """In the order of steps, then of global environment ids: two of each rank at once."""
    told = same(case, "returns")
    assert len(told) == 4 * 2
    mine = [one["mine"] for one in case]
    assert told == mine[0][:2] + mine[1][:2] + mine[0][2:] + mine[1][2:]
    assert mine[0] != mine[1]


# --- callbacks --------------------------------------------------------------------------------------------------


def test_one_rank_stops(case):
    assert same(case, "steps", "updates", "ended") == [20 * 2 * RANKS, 2, "training end"]
    same(case, "digest")


def test_evaluation(case, folder):
    """One rank evaluates, all stop, all know what it found."""
    assert same(case, "steps") == 20 * 2 * RANKS
    assert same(case, "best") > 0
    assert [one["evaluated"] for one in case] == [1, 0]
    assert {file.name for file in (folder / "cases" / "evaluation").iterdir()} == {"best_model.zip", "evaluations.npz"}


def test_own_callbacks_on_one_rank(case):
    assert [one["calls"] for one in case] == [16, 0]
    assert same(case, "steps", "seen") == [64, 16]


def test_progress_bar(case):
    assert [one["bars"] for one in case] == [[[128, 128]], []]


def test_progress(case):
    assert same(case, "left") == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert same(case, "steps") == list(range(4, 257, 4))
    assert [one["log"] for one in case] == [os.environ["SB3_LOGDIR"], None]  # what tests leave goes with them


# --- models and files -------------------------------------------------------------------------------------------


def test_saving(case, folder):
    assert same(case, "there", "same") == [True, True]
    same(case, "actions")
    assert {file.name for file in (folder / "cases" / "saving").iterdir()} == {"late.zip", "alone.zip"}


def test_saving_on_one_rank_before(case):
    """The file that ranks wait for is the one of this call, not one that the first rank saved alone."""
    assert same(case, "loaded") == same(case, "trained") == 192


def test_saving_on_one_rank_while_learning(case):
    assert same(case, "files") == []


def test_parameters_on_one_rank(case):
    assert case[0]["before"] != case[1]["before"]
    same(case, "moved")
    assert "optimizer" in same(case, "error")
    assert "same checkpoint, on every rank" in same(case, "error")


def test_other_settings(case):
    assert "n_steps: rank 1 has 32 and rank 0 has 16" in same(case, "n_steps")
    assert "total_timesteps: rank 1 has 65 and rank 0 has 64" in same(case, "steps")


def test_an_environment_fails(case):
    told = "PeerFailureError: rank 1 failed, so rank 0 ends too: OSError: the simulator is gone"
    assert [one["error"] for one in case] == [told, "OSError: the simulator is gone"]
    same(case, "after")


# --- one set of files -------------------------------------------------------------------------------------------


def events(folder):
    """TensorBoard's files below a folder, and the processes that wrote them."""
    found = list(folder.rglob("events.out.tfevents.*"))
    return found, {file.name.split(".")[5] for file in found}


def test_one_log(folder):
    place = folder / "features" / "a_logger" / "logger"
    found, writers = events(place)
    assert len(found) == len(writers) == 1
    assert {file.name for file in place.iterdir()} == {"log.txt", "progress.csv", "progress.json", found[0].name}
    with open(place / "progress.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["time/total_timesteps"]) for row in rows] == [64, 128]
    assert all(float(row["time/global_fps"]) > 0 for row in rows)
    place = folder / "features" / "tensorboard" / "tensorboard"
    assert [run.name for run in place.iterdir()] == ["first_1"]
    assert [len(part) for part in events(place)] == [2, 1]  # of two calls of learn


@pytest.mark.parametrize(
    ("feature", "name"),
    [
        ("monitored_environments", "monitor/0.monitor.csv"),
        ("monitored_environments", "monitor/1.monitor.csv"),
        ("environments_in_processes", "processes/0.monitor.csv"),
        ("stacked_and_monitored_environments", "whole.monitor.csv"),
    ],
)
def test_one_monitor(folder, feature, name):
    """A monitor's file has one header and whole rows: one process wrote it."""
    lines = (folder / "features" / feature / name).read_text().splitlines()
    assert [n for n, line in enumerate(lines) if line.startswith("#")] == [0]
    assert lines[1] == "r,l,t"
    assert len(lines) > 2
    assert all(len(line.split(",")) == 3 for line in lines[1:])


def test_a_monitors_folder_is_read_by_the_library(folder):
    lengths = load_results(str(folder / "features" / "monitored_environments" / "monitor"))["l"]
    assert lengths.tolist() == [7] * 8


def test_callbacks_wrote_once(folder):
    place = folder / "features" / "callbacks"
    checkpoints = {file.name for file in (place / "checkpoints").iterdir()}
    assert checkpoints == {f"rl_model_{kind}{n}_steps.{end}" for n in (64, 128) for kind, end in KINDS}
    assert {file.name for file in (place / "evaluation").iterdir()} == {"best_model.zip", "evaluations.npz"}
    assert np.load(place / "evaluation" / "evaluations.npz")["timesteps"].tolist() == [80]


KINDS = (("", "zip"), ("vecnormalize_", "pkl"))


def test_a_saved_model_is_the_librarys(folder):
    """The zip of two ranks, loaded by the library itself, acts as they do, and learns on alone."""
    file = folder / "cases" / "saving" / "late"
    model = stable_baselines3.PPO.load(file, env=cartpoles(), device="cpu")
    expected = json.loads((folder / "rank_0.json").read_text())["saving"]["actions"]
    assert model.predict(np.ones((3, 4)), deterministic=True)[0].tolist() == expected
    assert model.num_timesteps == 128
    assert model.learn(32, reset_num_timesteps=False).num_timesteps == 160

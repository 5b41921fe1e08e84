"""Which callbacks run on which rank, as the tree of them is rebuilt before ``learn``."""

from typing import Any

import numpy as np
import pytest
from sb3_features import SMALL, Seen, cartpoles
from stable_baselines3.common.callbacks import (
    CallbackList,
    CheckpointCallback,
    ConvertCallback,
    EvalCallback,
    EveryNTimesteps,
    ProgressBarCallback,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnRewardThreshold,
)

from lockstep.integrations.sb3 import PPO, OneRankCallback
from lockstep.integrations.sb3.callbacks import Elsewhere, GlobalProgressBar, SynchronizedCallback, of_this_rank

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def evaluation():
    return EvalCallback(cartpoles(1), StopTrainingOnRewardThreshold(1.0), best_model_save_path="nowhere")


def tree(callback, writer, progress_bar=False) -> Any:
    return of_this_rank(callback, progress_bar, writer, 2)


def kinds(callback):
    """The classes of a tree of callbacks, as nested lists."""
    if isinstance(callback, CallbackList):
        return [kinds(child) for child in callback.callbacks]
    if isinstance(callback, EveryNTimesteps):
        return {"every": kinds(callback.callback)}
    return type(callback).__name__


def given():
    every = EveryNTimesteps(10, CheckpointCallback(1, "nowhere"))
    return [Seen(), every, CallbackList([evaluation(), StopTrainingOnMaxEpisodes(1)]), OneRankCallback([Seen()])]


def test_a_rank_that_writes_runs_everything():
    expected = ["Seen", {"every": "CheckpointCallback"}, ["EvalCallback", "StopTrainingOnMaxEpisodes"], ["Seen"]]
    assert kinds(tree(given(), writer=True)) == expected


def test_others_run_what_writes_nothing():
    expected = ["Seen", {"every": "Elsewhere"}, ["Elsewhere", "StopTrainingOnMaxEpisodes"], "Elsewhere"]
    once = tree(given(), writer=False)
    assert kinds(once) == expected
    assert kinds(tree(once, writer=False)) == expected


def test_the_scripts_list_is_left_alone():
    callbacks = given()
    before = list(callbacks)
    tree(callbacks, writer=False)
    assert callbacks == before


def test_functions_and_nothing_and_a_bar():
    assert isinstance(tree(lambda *_: True, writer=False), ConvertCallback)
    assert isinstance(tree(None, writer=False), ConvertCallback)
    assert kinds(tree(None, writer=True, progress_bar=True)) == ["ConvertCallback", "GlobalProgressBar"]
    assert kinds(tree(None, writer=False, progress_bar=True)) == ["ConvertCallback", "Elsewhere"]

    class Mine(ProgressBarCallback):
        pass

    assert isinstance(tree(Mine(), writer=True), Mine)
    assert issubclass(GlobalProgressBar, ProgressBarCallback)


def test_what_an_evaluation_found_is_told_to_its_stand_ins():
    evaluating, standing_in = tree(given(), writer=True), tree(given(), writer=False)
    found, known = SynchronizedCallback(evaluating, 2), SynchronizedCallback(standing_in, 2)
    evaluating.callbacks[2].callbacks[0].best_mean_reward = 7.0
    assert found.evaluations == [{"best_mean_reward": 7.0, "last_mean_reward": -np.inf}]
    known.evaluations = found.evaluations
    assert standing_in.callbacks[2].callbacks[0].callback.best_mean_reward == 7.0


def test_a_script_may_give_callbacks_to_one_rank_only():
    found = SynchronizedCallback(tree(None, writer=False), 2)
    found.evaluations = [{"best_mean_reward": 7.0, "last_mean_reward": 7.0}]
    assert found.evaluations == []


def test_a_stand_in_counts_and_never_stops(tmp_path):
    checkpoint = CheckpointCallback(1, str(tmp_path / "never"))
    PPO("MlpPolicy", cartpoles(), **SMALL).learn(64, callback=Elsewhere(checkpoint))
    assert (checkpoint.n_calls, checkpoint.num_timesteps) == (32, 64)
    assert not (tmp_path / "never").exists()

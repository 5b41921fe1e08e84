"""How Stable-Baselines3's own update is made to decide and normalise over ranks; with one rank, as it does itself."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sb3_features import SMALL, cartpoles
from stable_baselines3.common.utils import explained_variance as of_the_library

from lockstep.integrations.sb3 import PPO, update
from lockstep.integrations.sb3.update import (
    AgreedLimit,
    GloballyNormalized,
    explained_variance,
    merge_metrics,
    of_all_ranks,
)


@pytest.fixture
def model():
    return PPO("MlpPolicy", cartpoles(), **SMALL, target_kl=0.5).learn(32)


@pytest.mark.parametrize(("kl", "over"), [(0.1, False), (0.16, True), (float("nan"), False)])
def test_a_limit_is_compared_as_the_update_compares_it(kl, over, monkeypatch):
    """``kl`` is this rank's; the others' shift the mean."""
    assert (np.array(kl, np.float32) > 1.5 * AgreedLimit(0.1)) is over
    monkeypatch.setattr(update, "all_mean", lambda x: x + 1.0)
    assert (np.array(kl, np.float32) > 1.5 * AgreedLimit(0.1)) is not np.isnan(kl)


def test_minibatches_keep_everything_but_the_advantages(model, monkeypatch):
    monkeypatch.setattr(update, "normalize", lambda x: x + 100)
    np.random.seed(0)
    plain = list(model.rollout_buffer.get(16))
    np.random.seed(0)
    shifted = list(GloballyNormalized(model.rollout_buffer).get(16))
    assert len(plain) == len(shifted) == 2
    for mine, theirs in zip(shifted, plain, strict=True):
        assert torch.equal(mine.advantages, theirs.advantages + 100)
        assert torch.equal(mine.observations, theirs.observations)
        assert torch.equal(mine.returns, theirs.returns)
    assert GloballyNormalized(model.rollout_buffer).values is model.rollout_buffer.values


def test_what_is_changed_for_an_update_is_put_back(model):
    def fails():
        with of_all_ranks(model):
            assert not model.normalize_advantage
            assert isinstance(model.rollout_buffer, GloballyNormalized)
            assert isinstance(model.target_kl, AgreedLimit)
            raise KeyError

    before = model.rollout_buffer, model.normalize_advantage, model.target_kl
    with pytest.raises(KeyError):
        fails()
    assert (model.rollout_buffer, model.normalize_advantage, model.target_kl) == before


def test_local_normalisation_is_left_to_the_library(model):
    model.normalize_advantage_locally = True
    with of_all_ranks(model):
        assert model.normalize_advantage
        assert not isinstance(model.rollout_buffer, GloballyNormalized)


def test_explained_variance_of_one_rank_is_the_librarys(model):
    values, returns = model.rollout_buffer.values.ravel(), model.rollout_buffer.returns.ravel()
    found = explained_variance(model, lambda x: x[None])
    assert found == pytest.approx(float(of_the_library(values, returns)), abs=1e-5)
    assert found != pytest.approx(float(of_the_library(values[::-1], returns)), abs=1e-3)
    model.rollout_buffer.returns[:] = 2.0
    assert np.isnan(explained_variance(model, lambda x: x[None]))


def test_words_that_were_logged_stay_and_numbers_are_means():
    class TwoRanks:
        def gather_json(self, mine):
            return [mine, {name: value + 2.0 for name, value in mine.items()}]

    logged = {"train/stage": "warm-up", "train/loss": np.float32(1.0), "train/n_updates": 4, "time/fps": 9}
    model = SimpleNamespace(logger=SimpleNamespace(name_to_value=logged))
    merge_metrics(cast("Any", model), cast("Any", TwoRanks()))
    assert logged == {"train/stage": "warm-up", "train/loss": 2.0, "train/n_updates": 5.0, "time/fps": 9}

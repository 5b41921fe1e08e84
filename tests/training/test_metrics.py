"""The metrics record that both engines write."""

import pytest

from lockstep.config.run import Config
from lockstep.core.episodes import RecentEpisodes
from lockstep.training.losses import TERMS, LossSettings, loss_settings
from lockstep.training.metrics import episode_metrics, update_metrics

COUNTS = ("train/grad_norm", "train/optimizer_steps")


def update(settings, **changed):
    totals = {"terms": [2.0, 4.0, 6.0, 0.2, 0.4], "evaluated": 2, "grad_norm": 3.0, "steps": 1}
    return update_metrics(settings, **(totals | {"stopped_by_kl": True, "learning_rate": 1e-3} | changed))


def test_terms_are_means_over_minibatches_and_norms_over_steps():
    record = update(LossSettings(0.2, None, entropy_coef=0.5, value_coef=0.25, count=8))
    assert list(record) == [
        "train/loss",
        *(f"train/{name}" for name in TERMS),
        "train/grad_norm",
        "train/learning_rate",
        "train/optimizer_steps",
        "train/stopped_by_kl",
    ]
    assert [record[f"train/{name}"] for name in TERMS] == [1.0, 2.0, 3.0, 0.1, 0.2]
    assert record["train/loss"] == 1.0 + 0.25 * 2.0 - 0.5 * 3.0
    assert (record["train/grad_norm"], record["train/optimizer_steps"], record["train/stopped_by_kl"]) == (3.0, 1, 1)


def test_a_reference_policy_has_its_part_of_the_loss():
    with_reference = LossSettings(0.2, None, 0.0, 0.0, 8, kl_coef=2.0)
    record = update(with_reference, terms=[2.0, 0.0, 0.0, 0.0, 0.0, 8.0])
    assert record["train/reference_kl"] == 4.0
    assert record["train/loss"] == 1.0 + 2.0 * 4.0
    with pytest.raises(ValueError, match="longer"):
        update(LossSettings(0.2, None, 0.0, 0.0, 8), terms=[0.0] * 6)


def test_an_update_that_was_stopped_at_once_divides_by_one():
    record = update(LossSettings(0.2, None, 0.0, 0.5, 8), terms=[0.0] * 5, evaluated=0, steps=0, grad_norm=0.0)
    assert record.pop("train/learning_rate") == 1e-3
    assert record.pop("train/stopped_by_kl") == 1
    assert record == dict.fromkeys(["train/loss", *(f"train/{name}" for name in TERMS), *COUNTS], 0.0)


def test_a_record_begins_with_its_counters():
    recent = RecentEpisodes()
    assert episode_metrics(3, 384, recent)["rollout/episode_return_mean"] is None
    recent.extend_newest([(2.0, 5, 0)], 1)
    record = episode_metrics(3, 384, recent)
    assert list(record)[:2] == ["iteration", "global_step"]
    assert (record["global_step"], record["rollout/episode_return_mean"], record["rollout/episodes"]) == (384, 2.0, 1)


def test_settings_are_those_of_the_config():
    values = {"num_envs": 8, "num_steps": 16, "ppo": {"num_minibatches": 4, "clip_range": 0.3}}
    ppo = loss_settings(Config.model_validate(values))
    assert (ppo.clip_range, ppo.count, ppo.kl_coef, ppo.terms) == (0.3, 32, 0.0, TERMS)
    grpo = Config.model_validate(values | {"algorithm": "grpo", "grpo": {"kl_coef": 0.1}})
    assert loss_settings(grpo, 7).count == 7
    assert loss_settings(grpo).terms == (*TERMS, "reference_kl")


def test_scheduled_coefficients_are_told_and_make_the_loss():
    settings = LossSettings(0.2, 0.4, entropy_coef=0.5, value_coef=0.25, count=8)
    scheduled = {"entropy_coef": 0.125, "clip_range": 0.1, "value_clip_range": 0.2}
    record = update(settings, coefficients=scheduled)
    assert record["train/loss"] == 1.0 + 0.25 * 2.0 - 0.125 * 3.0
    assert record.keys() - update(settings).keys() == {"train/entropy_coef", "train/clip_range"}
    assert (record["train/entropy_coef"], record["train/clip_range"]) == (0.125, 0.1)

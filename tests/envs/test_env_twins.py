"""Gymnasium ids that the JAX engine steps inside its program: which, when, and what the user is told."""

import sys

import pytest

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.launch.request import request_of
from lockstep.launch.resume import resumed_config

TWINS = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0")
JAX = ("--engine", "jax")


def asked(*words):
    request = request_of([*words])
    return request.config.env.id, request.note


@pytest.mark.parametrize("env_id", TWINS)
def test_an_id_with_a_twin_is_stepped_inside_the_program(env_id):
    assert asked(env_id, *JAX) == (
        f"lockstep/{env_id}",
        f"engine jax: {env_id} is stepped inside the compiled program as lockstep/{env_id} (the same physics in "
        "float32); --env.backend gymnasium steps Gymnasium's own",
    )
    assert asked(env_id) == (env_id, None)  # the torch engine's is Gymnasium's


def test_its_settings_are_those_of_the_id_that_was_given():
    plain, inside = request_of(["Pendulum-v1"]).config, request_of(["Pendulum-v1", *JAX]).config
    assert inside.model_copy(update={"env": plain.env, "engine": "torch"}) == plain
    limited = request_of(["Pendulum-v1", *JAX, "--env.max-episode-steps", "50"]).config.env
    assert (limited.id, limited.max_episode_steps) == ("lockstep/Pendulum-v1", 50)


@pytest.mark.parametrize(
    "words",
    [
        ("--env.backend", "gymnasium"),
        ("--env.workers", "2"),
        ("--env.frame-stack", "2"),
        ("--env.frame-skip", "2"),
        ("--env.sticky-actions", "0.25"),
        ("--env.kwargs", '{"sutton_barto_reward": true}'),
    ],
)
def test_what_only_gymnasiums_own_has_keeps_it(words):
    assert asked("CartPole-v1", *JAX, *words) == ("CartPole-v1", None)


@pytest.mark.parametrize("env_id", ["lockstep/CartPole-v1", "HalfCheetah-v5"])
def test_ids_without_a_twin_stay(env_id):
    assert asked(env_id, *JAX) == (env_id, None)


def test_a_run_is_resumed_by_the_id_that_it_was_asked_for_with(tmp_path):
    config = resolve(Config.model_validate({"env": "lockstep/CartPole-v1", "engine": "jax"}))
    (tmp_path / "config.json").write_text(config.model_dump_json())
    assert resumed_config(tmp_path, {"env": {"id": "CartPole-v1"}}) == config
    workers = resumed_config(tmp_path, {"env": {"id": "CartPole-v1", "workers": 2}}).env
    assert (workers.id, workers.workers) == ("lockstep/CartPole-v1", 2)  # of which the start says what is wrong
    with pytest.raises(ValueError, match=r"^env\.frame_skip: run .* can't be resumed with 2"):
        resumed_config(tmp_path, {"env": {"id": "CartPole-v1", "frame_skip": 2}})
    with pytest.raises(ValueError, match=r"^env\.id: run .* can't be resumed with lockstep/Pendulum-v1"):
        resumed_config(tmp_path, {"env": {"id": "Pendulum-v1"}})
    (tmp_path / "config.json").write_text(config.model_copy(update={"engine": "torch"}).model_dump_json())
    with pytest.raises(ValueError, match=r"^env\.id: .* can't be resumed with CartPole-v1"):
        resumed_config(tmp_path, {"env": {"id": "CartPole-v1"}})


def test_a_setting_that_is_secret_is_refused_without_being_said(tmp_path):
    config = resolve(Config.model_validate({"env": {"id": "CartPole-v1", "kwargs": {"api_key": "geheim", "size": 1}}}))
    (tmp_path / "config.json").write_text(config.model_dump_json())
    with pytest.raises(ValueError, match=r"^env\.kwargs: run .* can't be resumed with .*'size': 2") as caught:
        resumed_config(tmp_path, {"env": {"kwargs": {"api_key": "anders", "size": 2}}})
    assert "geheim" not in str(caught.value)
    assert "anders" not in str(caught.value)


def test_the_change_is_announced_only_by_an_engine_that_is_there(monkeypatch):
    """Without it the error that follows is the only line."""
    assert asked("CartPole-v1", *JAX)[1] is not None
    monkeypatch.setitem(sys.modules, "jax", None)
    assert asked("CartPole-v1", *JAX) == ("lockstep/CartPole-v1", None)

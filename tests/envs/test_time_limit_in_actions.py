"""The time limit that a run speaks of counts actions, each of which may be several of an environment's own steps."""

import pytest

from lockstep.config.run import Config, EnvConfig
from lockstep.envs.describe import describe
from lockstep.envs.examine import in_words
from lockstep.envs.gymnasium.make import make_environment
from lockstep.training.announcement import grpo_notes


def episode_length(config):
    env = make_environment(config)
    env.reset(seed=1)
    steps, over = 0, False
    while not over:
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        steps, over = steps + 1, terminated or truncated
    env.close()
    return steps


@pytest.mark.parametrize("skip", [1, 3, 4])
def test_skipped_steps_are_the_environments(skip):
    config = EnvConfig(id="Pendulum-v1", frame_skip=skip)
    assert describe(config).max_episode_steps == episode_length(config) == -(-200 // skip)


def test_frames_of_an_atari_game_are_too():
    pytest.importorskip("ale_py")
    atari = {"enabled": True, "frame_skip": 5, "noop_max": 0, "fire_reset": False}
    config = EnvConfig.model_validate({"id": "ALE/Pong-v5", "max_episode_steps": 42, "atari": atari})
    assert describe(config).max_episode_steps == episode_length(config) == 9


@pytest.mark.parametrize(("num_steps", "said"), [(50, []), (49, ["lets them last 50"])])
def test_what_grpo_and_check_say_of_it(num_steps, said):
    env = EnvConfig(id="Pendulum-v1", frame_skip=4)
    description = describe(env)
    notes = grpo_notes(Config(algorithm="grpo", num_steps=num_steps, env=env), description.max_episode_steps)
    assert [note.partition("the environment ")[2] for note in notes] == said
    assert in_words(description).endswith("at most 50 steps")

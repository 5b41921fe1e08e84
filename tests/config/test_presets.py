import copy
import math
from pathlib import Path

import gymnasium
import pytest

from lockstep.config.checks import resolve
from lockstep.config.command_line import read_request
from lockstep.config.keys import validate
from lockstep.config.presets import GRPO_PRESETS, PRESETS, defaults_for, has_preset, preset_for, with_version
from lockstep.config.run import Config, EnvConfig
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium.make import make_environment

CLASSIC = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1")
TOY_TEXT = ("FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", "Blackjack-v1")
MUJOCO = ("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum")
MUJOCO += ("Pusher", "Reacher", "Swimmer", "Walker2d")
BOX2D = ("LunarLander-v3", "LunarLanderContinuous-v3", "BipedalWalker-v3")
NEEDED = {"-v5": "mujoco", **dict.fromkeys(BOX2D, "Box2D"), "MiniGrid": "minigrid"}
"""Packages that environments need, by a part of the id."""
WORLD_SIZES = (1, 2, 4, 8)


def config_of(settings):
    return validate(Config, settings, "preset")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("env_id", [*sorted(PRESETS), "ALE/Pong-v5", "PongNoFrameskip-v4"])
def test_every_preset_is_a_run_for_1_2_4_and_8_ranks(env_id, world_size):
    config = resolve(config_of(preset_for(env_id)), world_size)
    assert config.env.id == env_id
    assert config.shards == 8


@pytest.mark.parametrize("env_id", sorted(PRESETS))
def test_no_preset_fixes_the_shards_of_environments_of_each_rank(env_id):
    """16 ranks with environments of their own are 16 shards, or a multiple."""
    settings = preset_for(env_id) | {"num_envs": None, "num_envs_per_rank": 64}
    assert resolve(config_of(settings), 16).shards % 16 == 0


def test_the_page_on_cleanrl_says_how_presets_differ_from_its_files():
    page = (Path(__file__).parents[2] / "docs" / "coming-from" / "cleanrl.md").read_text()
    row, games = (
        next(line for line in page.splitlines() if line.startswith(f"| `{file}` |"))
        for file in ("ppo_continuous_action.py", "ppo_atari.py")
    )
    assert "`lockstep train PongNoFrameskip-v4`" in games  # as there, without sticky actions
    atari, cheetah = preset_for("PongNoFrameskip-v4"), preset_for("HalfCheetah-v5")
    assert (atari["num_envs"], atari["num_steps"]) == (8, 128)  # as in ppo_atari.py
    assert f"{cheetah['num_envs']} environments x {cheetah['num_steps']} steps for 1 x 2048" in row
    as_there = resolve(read_request(["HalfCheetah-v5", "--num-envs", "1", "--num-steps", "2048"]).config)
    assert (as_there.envs, as_there.num_steps, as_there.ppo.num_minibatches) == (1, 2048, 32)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Swimmer-v5"])
def test_the_page_on_presets_says_how_rollouts_differ_from_the_zoos(env_id):
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| ") and env_id in line)
    settings = preset_for(env_id)
    assert "4 environments x 1024 steps" in row
    assert f"{settings['num_envs']} x {settings['num_steps']}" in row


def test_a_preset_that_does_not_fit_is_found():
    settings = preset_for("Pendulum-v1")
    with pytest.raises(ValueError, match="4 environments make 4 shards by default and 8 ranks need one each"):
        resolve(config_of({**settings, "num_envs": 4}), 8)
    with pytest.raises(ValueError, match=r"ppo\.num_minibatches: 64 doesn't divide"):
        resolve(config_of({**settings, "num_steps": 100}), 1)


@pytest.mark.parametrize("env_id", [*CLASSIC, *TOY_TEXT, *(f"{name}-v5" for name in MUJOCO), *BOX2D])
def test_presets_are_of_environments_that_there_are(env_id):
    assert env_id in gymnasium.registry
    assert env_id in PRESETS


@pytest.mark.parametrize("env_id", ARRAY_ENVIRONMENTS)
def test_array_environments_have_presets_and_share_those_of_gymnasiums(env_id):
    assert env_id in PRESETS
    twin = ARRAY_ENVIRONMENTS[env_id].gymnasium_id
    assert (twin is None) == (env_id.removeprefix("lockstep/") not in PRESETS)
    assert twin is None or PRESETS[env_id] is PRESETS[twin]


@pytest.mark.parametrize("env_id", sorted(env_id for env_id in PRESETS if "/" not in env_id))
def test_gymnasium_makes_every_environment_that_has_a_preset(env_id):
    needed = next((package for part, package in NEEDED.items() if part in env_id), None)
    if needed is not None:
        pytest.importorskip(needed)
    make_environment(config_of(preset_for(env_id)).env).close()


@pytest.mark.filterwarnings("ignore:.*The environment Taxi-v3 is out of date")
def test_what_gymnasium_refuses_has_no_preset():
    with pytest.raises(ValueError, match="Please use `Taxi-v4` instead"):
        make_environment(EnvConfig(id="Taxi-v3"))
    assert not has_preset("Taxi-v3")
    assert with_version("Taxi") == "Taxi-v4"


@pytest.mark.parametrize("env_id", ["ALE/Breakout-v5", "BreakoutNoFrameskip-v4", "ALE/Zaxxon-v5", "ale_py:ALE/Pong-v5"])
def test_every_atari_id_has_the_atari_preset(env_id):
    assert has_preset(env_id)
    expected = preset_for("ALE/Pong-v5")
    assert preset_for(env_id) == {**expected, "env": {**expected["env"], "id": env_id}}
    assert expected["env"]["atari"] == {"enabled": True}
    assert preset_for(env_id)["ppo"]["clip_range"] == 0.1


@pytest.mark.parametrize("env_id", ["Breakout-v4", "ALE/Breakout-ram-v5", "MyNoFrameskip-v41", "Unknown-v0"])
def test_other_ids_have_none(env_id):
    assert not has_preset(env_id)
    assert preset_for(env_id) == {"env": {"id": env_id}}


def test_a_preset_may_set_the_environment_too_and_is_never_changed():
    assert preset_for("CliffWalking-v1")["env"] == {"max_episode_steps": 200, "id": "CliffWalking-v1"}
    before = copy.deepcopy(PRESETS)
    preset_for("CliffWalking-v1")["env"]["max_episode_steps"] = 7
    defaults_for(continuous=True, images=False)[0]["ppo"]["gamma"] = 0.5
    assert before == PRESETS
    assert "gamma" not in defaults_for(continuous=True, images=False)[0]["ppo"]


def test_hopper_walker_and_half_cheetah_train_by_cleanrls_values():
    # ppo_continuous_action.py: 2,048 steps, 32 minibatches, 10 epochs, lr 3e-4 to 0, clipping 0.2 (values too).
    for name in ("Hopper-v5", "Walker2d-v5", "HalfCheetah-v5"):
        config = resolve(config_of(preset_for(name)))
        assert (config.steps_per_iteration, config.ppo.num_minibatches, config.ppo.num_epochs) == (2048, 32, 10)
        assert (config.ppo.learning_rate, config.ppo.schedule, config.ppo.adam_eps) == (3e-4, "linear", 1e-5)
        assert (config.ppo.gamma, config.ppo.gae_lambda) == (0.99, 0.95)
        assert (config.ppo.clip_range, config.ppo.value_clip_range) == (0.2, 0.2)
        assert (config.ppo.value_coef, config.ppo.entropy_coef, config.ppo.max_grad_norm) == (0.5, 0.0, 0.5)
        assert (config.network.hidden_sizes, config.network.activation) == ((64, 64), "tanh")
        assert config.normalize.observations
        assert config.normalize.returns
        assert config.normalize.clip_observations == config.normalize.clip_rewards == 10
        assert config.total_steps == 1_000_000


@pytest.mark.parametrize("env_id", [*sorted(PRESETS), "ALE/Pong-v5"])
def test_every_preset_has_a_form_for_grpo(env_id):
    config = resolve(read_request([env_id, "--algorithm", "grpo"]).config, 8)
    assert config.shards == 8
    assert config.envs % (8 * config.grpo.group_size) == 0
    assert not config.normalize.returns
    ppo = config_of(preset_for(env_id))
    assert config.env == ppo.env
    assert config.normalize.observations == ppo.normalize.observations


def test_grpos_own_presets_see_whole_episodes():
    for env_id in GRPO_PRESETS:
        config = read_request([env_id, "--algorithm", "grpo"]).config
        assert config.num_steps >= (describe(config.env).max_episode_steps or math.inf)
        assert config != read_request([env_id]).config


def test_what_is_given_goes_before_grpos_presets():
    given = read_request(["CartPole-v1", "--algorithm", "grpo", "--num-steps", "64", "--num-envs", "32"]).config
    assert (given.num_steps, given.num_envs, given.total_steps) == (64, 32, 800_000)

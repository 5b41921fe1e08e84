"""Settings for an environment without a preset, by its spaces, and the line that says which nobody gave; targets."""

import json
import re
import types

import gymnasium
import numpy as np
import pytest

from lockstep.config.checks import resolve
from lockstep.config.command_line import read_request
from lockstep.config.presets import preset_for
from lockstep.config.run import Config, RunOptions
from lockstep.core.topology import Topology
from lockstep.envs.gymnasium.make import version_note
from lockstep.launch import request as request_module
from lockstep.launch.jax_start import start_jax
from lockstep.launch.request import described_run, request_of, split_target
from lockstep.launch.seeds.making import make_seeds
from lockstep.runs.making import create_run
from tests.command_line import train


@pytest.fixture
def unknown():
    """Registers an environment under an id that has no preset."""
    made = []

    def register(entry_point):
        env_id = f"Unknown{len(made)}-v0"
        gymnasium.register(env_id, entry_point, max_episode_steps=100)
        made.append(env_id)
        return env_id

    yield register
    for env_id in made:
        del gymnasium.registry[env_id]


@pytest.mark.parametrize(("engine", "chosen"), [("torch", "cuda"), ("jax", "tpu"), ("torch", "cpu")])
def test_device_auto_becomes_what_this_machine_has(engine, chosen, monkeypatch):
    door = types.SimpleNamespace(chosen_device=lambda: chosen)
    monkeypatch.setattr(request_module, "engine_module", lambda name: door if name == engine else None)
    request = request_of(["CartPole-v1", "--engine", engine, "--device", "auto"])
    assert request.config.device == chosen
    assert request.overrides["device"] == chosen
    assert request_of(["CartPole-v1", "--engine", engine]).config.device == "cpu"


CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
PENDULUM = "gymnasium.envs.classic_control.pendulum:PendulumEnv"


def images(**_):
    env = gymnasium.make("CartPole-v1")
    env.observation_space = gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    return env


def test_continuous_actions_are_normalised_and_the_line_says_so(unknown):
    env_id = unknown(PENDULUM)
    request = request_of([env_id, "--num-steps", "64"])
    assert request.config.normalize.observations
    assert request.config.normalize.returns
    assert (request.config.num_steps, request.config.ppo.num_minibatches) == (64, 32)
    assert request.note == (
        f"no preset for {env_id}: defaults for continuous actions (as for MuJoCo): total_steps 1000000, num_envs 8, "
        "normalize.observations True, normalize.returns True, ppo.learning_rate 0.0003, ppo.num_epochs 10, "
        "ppo.num_minibatches 32, ppo.value_clip_range 0.2"
    )
    assert resolve(request.config, 8).shards == 8


def test_discrete_actions_have_the_configs_own_defaults(unknown):
    env_id = unknown(CARTPOLE)
    request = request_of([env_id])
    plain = Config.model_validate({"env": env_id, "num_envs": 8})
    assert request.config == plain
    assert request.note is not None
    assert request.note.startswith(f"no preset for {env_id}: defaults for discrete actions: num_envs 8, num_steps 128")


def test_a_default_that_another_setting_takes_the_place_of_is_not_said(unknown):
    words = ("--num-envs-per-rank", "4", "--total-iterations", "5", "--ppo.batch-size", "64")
    request = request_of([unknown(PENDULUM), *words])
    assert request.note is not None
    assert not [name for name in ("num_envs", "total_steps", "num_minibatches") if f"{name} " in request.note]
    assert "ppo.num_epochs 10" in request.note
    assert (request.config.num_envs, request.config.num_envs_per_rank) == (None, 4)


def test_an_old_version_is_named_once_however_many_ranks_make_it(tmp_path):
    run = train(tmp_path, "CartPole-v0", "--nproc", 2, "--total-steps", 256, "--num-steps", 16)
    said = run.ended.stdout + run.ended.stderr
    assert said.count("out of date") == 1
    assert "CartPole-v0 is out of date: there is CartPole-v1\n" in said


@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "module:CartPole-v1", "Nobody/Knows-v3", "a:B()"])
def test_nothing_is_said_of_the_newest_version_or_of_an_unknown_id(env_id):
    assert version_note(env_id) is None


def test_an_id_without_a_version_is_said_to_be_the_newest():
    assert version_note("CartPole") == "CartPole: taken as CartPole-v1"
    assert version_note("module:CartPole-v0") == "module:CartPole-v0 is out of date: there is CartPole-v1"


def test_images_have_ataris_values(unknown):
    request = request_of([unknown(images)])
    assert request.config.ppo == Config.model_validate(preset_for("ALE/Pong-v5")).ppo
    assert request.note is not None
    assert "image observations" in request.note


def blind(**_):
    env = gymnasium.make("Pendulum-v1")
    env.observation_space = gymnasium.spaces.Tuple(
        [gymnasium.spaces.Discrete(3), gymnasium.spaces.MultiDiscrete([2, 4])]
    )
    return env


def test_observations_without_numbers_are_not_normalised(unknown):
    request = request_of([unknown(blind)])
    assert not request.config.normalize.observations
    assert request.config.normalize.returns
    assert "normalize.observations False, normalize.returns True" in str(request.note)


def test_grpo_takes_its_sizes_and_no_normalised_returns(unknown):
    request = request_of([unknown(PENDULUM), "--algorithm", "grpo"])
    assert (request.config.num_envs, request.config.ppo.num_minibatches) == (64, 4)
    assert (request.config.normalize.observations, request.config.normalize.returns) == (True, False)
    assert "num_envs 64" in str(request.note)
    assert "normalize.returns" not in str(request.note)


def test_nothing_is_said_where_nothing_was_chosen(unknown, tmp_path):
    assert request_of(["CartPole-v1"]).note is None
    assert request_of(["NeverRegistered-v0"]).note is None
    first = request_of([unknown(PENDULUM)])
    assert first.note is not None
    path = tmp_path / "config.json"
    path.write_text(resolve(first.config).model_dump_json())
    again = request_of([str(path)])
    assert again.note is None
    assert again.config == resolve(first.config)


def test_the_environment_is_looked_at_with_its_own_arguments(unknown):
    def either(continuous=False, **_):
        return gymnasium.make("Pendulum-v1" if continuous else "CartPole-v1")

    env_id = unknown(either)
    assert not request_of([env_id]).config.normalize.returns
    assert request_of([env_id, "--env.kwargs", '{"continuous": true}']).config.normalize.returns


def test_a_command_line_is_read_without_a_look_at_any_environment(unknown, monkeypatch):
    env_id, seen = unknown(PENDULUM), []
    monkeypatch.setattr(request_module, "describe", lambda env: seen.append(env.id))
    assert read_request([env_id]).config == Config.model_validate({"env": env_id})
    request_of(["CartPole-v1"])
    request_of([env_id, "--resume", "runs/x"])
    assert seen == []
    request_of([env_id])
    assert seen == [env_id]


def test_a_run_of_that_name_is_resumed_if_it_has_begun(unknown, tmp_path):
    words = [unknown(PENDULUM), "--runs-dir", str(tmp_path), "--name", "x", "--resume", "auto"]
    started = request_of(words)
    assert (started.options.resume, started.options.name) == (None, "x")
    assert started.config.normalize.returns  # defaults by its spaces, as without --resume
    (tmp_path / "x").mkdir()
    assert request_of(words).options.resume is None  # it was killed before it had a config
    (tmp_path / "x" / "config.json").touch()
    assert request_of(words).options.resume is None  # or before it was on the disk
    (tmp_path / "x" / "config.json").write_text('{"env": {}}')
    resumed = request_of(words)
    assert (resumed.options.resume, resumed.options.name) == (str(tmp_path / "x"), None)


def test_whether_it_has_begun_is_known_by_its_name():
    with pytest.raises(ValueError, match="resume: auto goes on with the run of a name; give --name"):
        request_of(["CartPole-v1", "--resume", "auto"])
    with pytest.raises(ValueError, match="a config file or an environment id is needed"):
        request_of(["--name", "x", "--resume", "auto"])


@pytest.mark.parametrize("run", ["runs/a", "file:///mirror/a"])
def test_a_resumed_run_keeps_its_name_wherever_it_is(run):
    with pytest.raises(ValueError, match=rf"name: 'x' with resume '{run}'; a resumed run keeps its name$"):
        request_of(["--resume", run, "--name", "x"])


def test_a_name_that_file_systems_refuse():
    assert request_of(["CartPole-v1", "--name", "é" * 100]).options.name == "é" * 100
    with pytest.raises(ValueError, match=r"name: 201 bytes; a run's name has at most 200$"):
        request_of(["CartPole-v1", "--name", "é" * 100 + "e"])


@pytest.mark.parametrize("name", ["a\nb", "a\0b", "a\tb", " ", "\u2028"])
def test_a_name_that_lines_of_output_cannot_hold(name):
    with pytest.raises(ValueError, match=r"a run's name is text on one line, and more than blanks$") as refusal:
        request_of(["CartPole-v1", "--name", name])
    assert f"name: {name!r}: " in str(refusal.value)
    assert request_of(["CartPole-v1", "--name", "mit Leerzeichen é"]).options.name == "mit Leerzeichen é"


def test_what_was_seen_is_handed_on(unknown):
    description = request_of([unknown(PENDULUM)]).description
    assert description is not None
    assert description.observation.vector_size == 3
    assert request_of(["CartPole-v1"]).description is None


@pytest.mark.parametrize(
    "words",
    [
        ("CartPole-v1", "--seed", "3", "--log.no-tensorboard"),
        ("--seed", "3", "CartPole-v1", "--log.no-tensorboard"),
        ("--seed", "3", "--log.no-tensorboard", "CartPole-v1"),
        ("--seed", "3", "--log.no-tensorboard", "--config", "CartPole-v1"),
        ("--log.no-tensorboard", "CartPole-v1", "--seed", "3"),
    ],
)
def test_what_a_command_is_about_stands_anywhere_among_options(words):
    target, rest = split_target("verify", words)
    assert target == "CartPole-v1"
    assert sorted(rest) == ["--log.no-tensorboard", "--seed", "3"]
    assert rest.index("3") == rest.index("--seed") + 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "a config file or an environment id is needed, e.g. lockstep verify CartPole-v1"),
        (("--seed", "3"), "a config file or an environment id is needed"),
        (("CartPole-v1", "--seed", "3", "Acrobot-v1"), "'Acrobot-v1': one config file or environment id is enough"),
        (("CartPole-v1", "--sede", "3"), "--sede: unknown option; did you mean --seed"),
    ],
)
def test_a_command_is_about_one_thing(words, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        split_target("verify", words)


@pytest.mark.parametrize(
    ("seeds", "listed", "count"), [((0, 1, 2), "0-2", "3 seeds"), ((3, 5), "3,5", "2 seeds"), ((7,), "7", "1 seed")]
)
def test_a_group_is_no_config_of_a_single_run_unless_a_seed_is_given(tmp_path, seeds, listed, count):
    path = tmp_path / "a group"
    group = create_run(str(tmp_path), path.name, resolve(Config(seed=seeds[0])), seeds)
    make_seeds(group, resolve(Config(seed=seeds[0])), seeds, trust=True)
    group.unlock()
    said = (
        f"{path} is a group of {count}; --seeds {listed} trains a new one with its config, --seed {seeds[0]} a single "
        f"run, and --resume '{path}' in its place goes on with it"
    )
    for more in ((), ("--name", "x", "--resume", "auto")):
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            request_of([str(path), *more], trains=True)
    for works in (("--seeds", listed), ("--seed", "9"), ("--num-seeds", "2"), ("--resume", str(path))):
        assert request_of([str(path), *works], trains=True).config.env.id == "CartPole-v1"
    assert request_of([str(path / f"seed_{seeds[0]}")], trains=True).config.seed == seeds[0]
    assert request_of([str(path)]).config.seed == seeds[0]  # what verify and --print-config take


@pytest.mark.parametrize("command", ["verify", "check", "bench", "plan"])
def test_a_command_about_a_run_says_which_for_a_checkpoint(tmp_path, command):
    checkpoint = tmp_path / "my run" / "checkpoints" / "step_64"
    checkpoint.mkdir(parents=True)
    (checkpoint.parents[1] / "config.json").write_text('{"env": {}}')
    said = f"{checkpoint} is a checkpoint; lockstep {command} takes its run, '{tmp_path / 'my run'}'"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        split_target(command, [str(checkpoint)])


def test_a_run_may_lie_in_a_folder_that_is_called_as_checkpoints_are(tmp_path):
    run = tmp_path / "checkpoints" / "foo"
    run.mkdir(parents=True)
    (run / "config.json").write_text('{"env": {}}')
    assert split_target("check", [str(run)]) == (str(run), [])


def test_a_device_of_the_other_engine_is_said_to_be_its():
    with pytest.raises(ValueError, match=r"^device: xpu is for engine torch; use --engine torch, or device cpu, cuda"):
        start_jax(request_of(["CartPole-v1", "--engine", "jax", "--device", "xpu"]).config, RunOptions(), Topology())


def test_a_run_that_has_lost_its_config_is_no_environment(tmp_path):
    checkpoint = tmp_path / "demo" / "checkpoints" / "step_64"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(json.dumps({"format": 1, "files": {}, "config": {"env": {}}}))
    with pytest.raises(ValueError, match=r"demo has lost its config.json; copy it there from the config in a"):
        described_run("verify", str(tmp_path / "demo"), [])

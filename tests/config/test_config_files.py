import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.config.command_line import read_request
from lockstep.config.files import read_file
from lockstep.config.run import Config

SETTINGS = {
    "env": {"id": "Pendulum-v1", "kwargs": {"g": 9.5}},
    "seed": 3,
    "num_envs": 16,
    "nproc": 2,
    "quiet": True,
    "ppo": {"learning_rate": 0.002, "schedule": "constant", "adam_betas": [0.8, 0.99]},
    "network": {"hidden_sizes": [32, 16]},
    "normalize": {"observations": True},
}

YAML = """
env: {id: Pendulum-v1, kwargs: {g: 9.5}}
seed: 3
num-envs: 16
nproc: 2
quiet: true
ppo:
  learning_rate: 2e-3
  schedule: constant
  adam_betas: [0.8, 0.99]
network.hidden_sizes: [32, 16]
normalize.observations: true
"""

TOML = """
env.id = "Pendulum-v1"
env.kwargs = {g = 9.5}
seed = 3
n_envs = 16
world_size = 2
quiet = true
lr = 0.002
"ppo.adam_betas" = [0.8, 0.99]

[ppo]
schedule = "constant"

[network]
hidden_sizes = [32, 16]

[normalize]
observations = true
"""


@pytest.fixture
def write(tmp_path):
    def write_file(name, content):
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return str(tmp_path / name)

    return write_file


# ---- one config, three languages


def test_yaml_json_and_toml_give_the_same_request(write):
    from_json = read_request([write("a.json", SETTINGS)])
    assert from_json.config.env.kwargs == {"g": 9.5}
    assert from_json.config.ppo.adam_betas == (0.8, 0.99)
    assert from_json.config.network.hidden_sizes == (32, 16)
    assert (from_json.options.nproc, from_json.options.quiet) == (2, True)
    assert (from_json.config.seed, from_json.config.num_envs) == (3, 16)
    for name, content in (("a.yaml", YAML), ("b.yml", YAML), ("c.toml", TOML)):
        read = read_request([write(name, content)])
        assert (read.config, read.options) == (from_json.config, from_json.options), name
    changed = read_request([write("d.yaml", YAML.replace("seed: 3", "seed: 4"))])
    assert changed.config != from_json.config


def test_nested_and_dotted_keys_mean_the_same(write):
    nested = {"env": {"id": "CartPole-v1", "kwargs": {"a": 1}}, "ppo": {"gamma": 0.9, "num_epochs": 2}}
    dotted = {"env.id": "CartPole-v1", "env.kwargs": {"a": 1}, "ppo.gamma": 0.9, "ppo": {"num-epochs": 2}}
    config = read_request([write("nested.json", nested)]).config
    assert read_request([write("dotted.json", dotted)]).config == config
    assert (config.ppo.gamma, config.ppo.num_epochs) == (0.9, 2)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.yaml", "env: Hopper-v5"),
        ("a.json", {"env": "Hopper-v5"}),
        ("a.toml", "env = 'Hopper-v5'"),
        ("b.yaml", "env_id: Hopper-v5"),
        ("b.json", {"env.id": "Hopper-v5"}),
    ],
)
def test_an_environment_is_named_by_its_id_alone(write, name, content):
    config = read_request([write(name, content)]).config
    assert config == read_request(["Hopper-v5"]).config
    assert config.ppo.num_minibatches == 32  # of its preset


def test_the_shorthand_goes_with_other_settings_of_the_environment(write):
    config = read_request([write("a.yaml", "env: Hopper-v5\nenv.workers: 2\nenv.kwargs: {frame_skip: 2}")]).config
    assert (config.env.id, config.env.workers, config.env.kwargs) == ("Hopper-v5", 2, {"frame_skip": 2})


PONG = "env: {id: ALE/Pong-v5, atari: true}"
IMPALA = "env: CartPole-v1\nnetwork: {image: impala}"


@pytest.mark.parametrize(
    ("text", "option", "read"),
    [
        (PONG, "--env.atari.noop-max=0", {"env.atari.enabled": True, "env.atari.noop_max": 0}),
        (IMPALA, "--network.image.width=2", {"network.image.kind": "impala", "network.image.width": 2.0}),
        (f"{IMPALA}\nnetwork.image.width: 2", "", {"network.image.kind": "impala", "network.image.width": 2.0}),
        (f"network.image.width: 2\n{IMPALA}", "", {"network.image.kind": "impala", "network.image.width": 2.0}),
        (f"{PONG}\nenv.atari.noop_max: 0", "", {"env.atari.enabled": True, "env.atari.noop_max": 0}),
        (
            "env: lockstep/GridWorldPixels-v0\nnetwork: {image: impala}",
            "",
            {"network.image.kind": "impala", "network.image.width": 0.5, "network.image.depth": 1},  # of its preset
        ),
    ],
)
def test_a_section_given_by_one_value_keeps_its_other_settings(write, text, option, read):
    config = read_request([write("a.yaml", text), *([option] if option else [])]).config
    assert {path: functools.reduce(getattr, path.split("."), config) for path in read} == read


def test_a_section_given_by_one_value_is_not_given_another(write):
    with pytest.raises(
        ValueError, match=r"network\.image\.kind nature given together with network\.image impala; give"
    ):
        read_request([write("a.yaml", f"{IMPALA}\nnetwork.image.kind: nature")])


def test_yaml_never_executes_anything(write, tmp_path):
    bait = tmp_path / "executed"
    path = write("a.yaml", f"seed: !!python/object/apply:os.mkdir ['{bait}']\n")
    with pytest.raises(ValueError, match="can't be read"):
        read_request([path])
    assert not bait.exists()


# ---- aliases


def test_aliases_stand_for_their_settings_at_the_top(write):
    aliased = {"env": "CartPole-v1", "lr": 0.1, "gamma": 0.5, "n_steps": 16, "n_envs": 4, "timesteps": 99}
    aliased |= {"ent_coef": 0.2, "num_workers": 1, "log_jsonl": "m.jsonl", "n_epochs": 3}
    full = {"env": {"id": "CartPole-v1", "workers": 1}, "num_steps": 16, "num_envs": 4, "total_steps": 99}
    full |= {"ppo": {"learning_rate": 0.1, "gamma": 0.5, "entropy_coef": 0.2, "num_epochs": 3}}
    full |= {"log": {"jsonl": "m.jsonl"}}
    assert read_request([write("a.json", aliased)]).config == read_request([write("b.json", full)]).config


def test_a_name_inside_a_section_is_that_sections_own(write):
    path = write("a.json", {"env": "CartPole-v1", "ppo": {"gamma": 0.5, "gae_lambda": 0.25, "max_grad_norm": 0.125}})
    ppo = read_request([path]).config.ppo
    assert (ppo.gamma, ppo.gae_lambda, ppo.max_grad_norm) == (0.5, 0.25, 0.125)
    with pytest.raises(ValueError, match=r"normalize\.lr: unknown key"):
        read_request([write("b.json", {"env": "CartPole-v1", "normalize": {"lr": 0.5}})])


# ---- layers


def test_preset_then_file_then_command_line(write):
    preset = read_request(["CartPole-v1"]).config
    path = write("a.yaml", "env: CartPole-v1\nppo: {gamma: 0.5, num_epochs: 2}\nseed: 5")
    from_file = read_request([path]).config
    from_all = read_request([path, "--gamma", "0.25", "--total-steps", "64"]).config
    assert (preset.ppo.gamma, from_file.ppo.gamma, from_all.ppo.gamma) == (0.98, 0.5, 0.25)
    assert from_file.ppo.gae_lambda == preset.ppo.gae_lambda == 0.8  # a section is overlaid, not replaced
    assert (from_all.ppo.num_epochs, from_all.seed, from_all.total_steps) == (2, 5, 64)


def test_the_preset_is_that_of_the_environment_of_the_last_layer(write):
    path = write("a.yaml", "env: CartPole-v1\nseed: 5")
    config = read_request([path, "--env.id", "Acrobot-v1"]).config
    assert (config.env.id, config.num_envs, config.seed) == ("Acrobot-v1", 16, 5)


def test_environment_arguments_are_replaced_whole(write):
    path = write("a.json", {"env": {"id": "CartPole-v1", "kwargs": {"a": 1, "b": {"c": 2}}}})
    assert read_request([path]).config.env.kwargs == {"a": 1, "b": {"c": 2}}
    assert read_request([path, "--env.kwargs", '{"b": {"d": 3}}']).config.env.kwargs == {"b": {"d": 3}}


def sizes(*words):
    config = read_request(words).config
    return config.num_envs, config.num_envs_per_rank


def test_of_the_two_ways_to_size_a_run_the_last_layer_wins(write):
    per_rank = write("a.yaml", "env: Acrobot-v1\nnum_envs_per_rank: 4")
    in_all = write("b.yaml", "env: Acrobot-v1\nnum_envs: 24")
    assert sizes("Acrobot-v1") == (16, None)
    assert sizes(per_rank) == (None, 4)
    assert sizes(per_rank, "--num-envs", "32") == (32, None)
    assert sizes(in_all) == (24, None)
    assert sizes(in_all, "--num-envs-per-rank", "2") == (None, 2)
    assert sizes("Acrobot-v1", "--num-envs-per-rank", "2") == (None, 2)
    assert sizes(in_all, "--num-envs-per-rank", "2", "--num-envs", "8") == (8, 2)  # resolve() refuses this one


def test_a_size_of_none_pushes_nothing_out():
    assert sizes("Acrobot-v1", "--num-envs-per-rank", "none") == (16, None)


def test_the_request_remembers_what_was_given_and_not_the_preset(write):
    path = write("a.yaml", "env: CartPole-v1\nlr: 0.5\nnproc: 2")
    assert read_request([path, "--seed", "1"]).overrides == {
        "env": {"id": "CartPole-v1"},
        "ppo": {"learning_rate": 0.5},
        "seed": "1",
    }
    assert read_request(["CartPole-v1"]).overrides == {"env": {"id": "CartPole-v1"}}


@pytest.mark.parametrize(
    ("file", "words", "left"),
    [
        ("total_iterations: 5", ["--total-steps", "20480"], {"total_steps": "20480"}),
        ("total_steps: 9000", ["--total-iterations", "5"], {"total_iterations": "5"}),
        ("ppo: {batch_size: 64}", ["--ppo.num-minibatches", "8"], {"ppo": {"num_minibatches": "8"}}),
        ("num_envs: 8", ["--num-envs-per-rank", "16"], {"num_envs_per_rank": "16"}),
    ],
)
def test_what_the_command_line_says_in_another_way_is_not_left_of_the_file(write, file, words, left):
    """Otherwise a resumed run would take the file's, where the run that began had the command line's."""
    path = write("a.yaml", f"env: CartPole-v1\n{file}")
    overrides = read_request([path, *words]).overrides
    assert {key: value for key, value in overrides.items() if key != "env" and value} == left


def test_reading_a_file_twice_gives_the_same(write):
    """Layers are merged in place somewhere: neither file nor preset may keep what another request overlaid."""
    path = write("a.yaml", "env: CartPole-v1\nppo: {gamma: 0.5}")
    before = (read_request([path]), read_request(["CartPole-v1"]), read_file(Path(path)))
    read_request([path, "--gamma", "0.1", "--ppo.num-epochs", "7"])
    read_request(["CartPole-v1", "--gamma", "0.1"])
    assert (read_request([path]), read_request(["CartPole-v1"]), read_file(Path(path))) == before


def test_resuming_needs_no_environment_and_anything_else_does():
    request = read_request(["--resume", "runs/x"])
    assert request.options.resume == "runs/x"
    assert request.config == Config()
    with pytest.raises(ValueError, match="config file or an environment id is needed"):
        read_request(["--seed", "3"])
    assert read_request(["--env", "Hopper-v5"]).config.env.id == "Hopper-v5"


def test_a_file_is_utf_8_whatever_the_locale_says(write):
    path = write("a.yaml", "env: CartPole-v1\nname: größe")
    code = "import sys; from pathlib import Path; from lockstep.config.files import read_file\n"
    code += "print(ascii(read_file(Path(sys.argv[1]))['name']))"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=os.environ | ascii_only, capture_output=True, text=True
    )
    assert done.stdout == ascii("größe") + "\n", done.stderr


@pytest.mark.parametrize("name", ["a.yaml", "a.json", "a.toml"])
def test_a_file_may_begin_with_the_mark_that_editors_on_windows_add(tmp_path, name):
    text = {"a.yaml": "seed: 3", "a.json": '{"seed": 3}', "a.toml": "seed = 3"}[name]
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_file(tmp_path / name) == {"seed": 3}


def test_a_suffix_in_capitals_is_that_of_a_config_file(write):
    assert read_request([write("CONF.YAML", "env: Hopper-v5\nseed: 3")]).config.seed == 3


@pytest.mark.parametrize("empty", ["ppo:", "network:\n  image:", "env.kwargs:", "grpo:\nnormalize:\nlog:"])
def test_a_section_with_nothing_in_it_means_its_defaults(tmp_path, empty):
    (tmp_path / "c.yaml").write_text(f"env.id: CartPole-v1\n{empty}\n")
    assert read_request([str(tmp_path / "c.yaml")]).config == read_request(["CartPole-v1"]).config


def test_but_an_environment_with_nothing_in_it_is_none(tmp_path):
    (tmp_path / "c.yaml").write_text("env:\n")
    with pytest.raises(ValueError, match=r"env\.id: None"):
        read_request([str(tmp_path / "c.yaml")])

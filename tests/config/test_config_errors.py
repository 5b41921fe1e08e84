"""Every complaint about a config is one line: where, which key, which value, and the nearest thing that works."""

import json
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lockstep.config.checks import resolve
from lockstep.config.command_line import read_request
from lockstep.config.files import config_text
from lockstep.config.run import Config
from lockstep.core.shards import check_shards, check_world_size


def complaint(*words):
    with pytest.raises(ValueError) as caught:
        read_request(words)
    assert not isinstance(caught.value, ValidationError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def flag_complaint(*words):
    return complaint("CartPole-v1", *words)


@pytest.fixture
def file_complaint(tmp_path):
    def complain(content, name="config.yaml"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps({"env": "CartPole-v1"} | content))
        text = complaint(str(path))
        assert text.startswith(f"{path}: ")
        return text.removeprefix(f"{path}: ")

    return complain


# ---- unknown keys


@pytest.mark.parametrize(
    ("settings", "wrong", "right"),
    [
        ({"ppo": {"gama": 0.9}}, "ppo.gama", "ppo.gamma"),
        ({"ppo.gama": 0.9}, "ppo.gama", "ppo.gamma"),
        ({"learning_rat": 1}, "learning_rat", "ppo.learning_rate"),
        ({"num_env": 1}, "num_env", "num_envs"),
        ({"normalise": {"observations": True}}, "normalise", "normalize"),
        ({"normalize": {"observation": True}}, "normalize.observation", "normalize.observations"),
        ({"grpo": {"lr": 0.1}}, "grpo.lr", "ppo.learning_rate"),
    ],
)
def test_an_unknown_key_in_a_file(file_complaint, settings, wrong, right):
    text = file_complaint(settings)
    assert text.startswith(f"{wrong}: unknown key")
    assert f"did you mean {right}" in text


def test_a_switch_that_is_neither_on_nor_off(file_complaint):
    assert file_complaint({"anneal_lr": "maybe"}) == "anneal_lr: 'maybe' is neither true nor false"


def test_an_unknown_key_like_no_other_gets_no_suggestion(file_complaint):
    assert file_complaint({"qwertz": 1}) == "qwertz: unknown key"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--ppo.gama", "--ppo.gamma"),
        ("--lerning-rate", "--learning-rate"),
        ("--num-env", "--num-envs"),
        ("--log.no-tensorbord", "--log.no-tensorboard?"),
        ("--no-log.tensorboard", "--log.no-tensorboard?"),
        ("--no-tensorboard", "--log.no-tensorboard?"),
        ("--no-fsd", "--no-fsdp?"),
        ("--no-eval.interval", "--eval.interval?"),
    ],
)
def test_an_unknown_option(wrong, right):
    text = flag_complaint(wrong, "1")
    assert text.startswith(f"{wrong}: unknown option")
    assert f"did you mean {right}" in text
    assert "--help" in text


def test_an_unknown_option_like_no_other_gets_no_suggestion():
    text = flag_complaint("--xyzzy")
    assert text.startswith("--xyzzy: unknown option")
    assert "did you mean" not in text


# ---- wrong values


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({"num_envs": "ten"}, "num_envs", "'ten'"),
        ({"seed": 1.5}, "seed", "1.5"),
        ({"seed": -1}, "seed", "-1"),
        ({"lr": -0.001}, "ppo.learning_rate", "-0.001"),
        ({"lr": 0}, "ppo.learning_rate", "0"),
        ({"gamma": 1.5}, "ppo.gamma", "1.5"),
        ({"ppo": {"num_epochs": [1]}}, "ppo.num_epochs", "[1]"),
        ({"ppo": 3}, "ppo", "3"),
        ({"ppo": []}, "ppo", "[]"),
        ({"log": {"tensorboard": "perhaps"}}, "log.tensorboard", "'perhaps'"),
        ({"network.hidden_sizes": ["x"]}, "network.hidden_sizes", "'x'"),
        ({"env": {"id": "CartPole-v1", "kwargs": [1]}}, "env.kwargs", "[1]"),
        ({"env": ""}, "env.id", "''"),
        ({"env": None}, "env.id", "None"),
        ({"total_steps": None}, "total_steps", "None"),
        ({"resume": 3}, "resume", "3"),
        ({"name": "a/b"}, "name", "'a/b'"),
        ({"nproc": 0}, "nproc", "0"),
    ],
)
def test_a_wrong_value_in_a_file(file_complaint, settings, key, value):
    text = file_complaint(settings)
    assert text.startswith(key)
    assert value in text


@pytest.mark.parametrize("environment", [3, 1.5, True, ["a"], {"id": 3}, {"id": ["a"]}])
def test_an_environment_id_that_is_no_text(file_complaint, environment):
    assert file_complaint({"env": environment}).startswith("env.id: ")


@pytest.mark.parametrize("settings", [{"seed": True}, {"lr": True}, {"num_envs": True}, {"hidden_sizes": [True, 64]}])
def test_true_is_no_number(file_complaint, settings):
    assert "True" in file_complaint(settings)


def test_infinite_and_missing_numbers(file_complaint):
    assert file_complaint("env: CartPole-v1\nlr: .inf").startswith("ppo.learning_rate: inf: ")
    assert file_complaint("env: CartPole-v1\nlr: .nan").startswith("ppo.learning_rate: nan: ")


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--lr", "-1"], "ppo.learning_rate", "'-1'"),
        (["--seed", "x"], "seed", "'x'"),
        (["--seed="], "seed", "''"),
        (["--env.kwargs", "[1]"], "env.kwargs", "[1]"),
        (["--network.hidden-sizes", "8", "x"], "network.hidden_sizes", "'x'"),
        (["--ppo.adam-betas", "0.1", "0.2", "0.3"], "ppo.adam_betas", "'0.3'"),
        (["--ppo.adam-betas", "0.1"], "ppo.adam_betas", "'0.1'"),
        (["--stop-at-step", "0"], "stop_at_step", "'0'"),
        (["--nproc", "0"], "nproc", "0"),
    ],
)
def test_a_wrong_value_on_the_command_line(words, key, value):
    text = flag_complaint(*words)
    assert text.startswith(f"command line: {key}")
    assert value in text


@pytest.mark.parametrize("value", ["two", "1.5", "automatic"])
def test_a_number_of_ranks_that_is_none(value):
    text = flag_complaint("--nproc", value)
    assert text.startswith(f"command line: nproc: '{value}'")
    assert "auto" in text


@pytest.mark.parametrize("value", ["many", "1.5", "-1"])
def test_a_number_of_workers_that_is_none(value):
    text = flag_complaint("--env.workers", value)
    assert text == f"command line: env.workers: '{value}': a number of processes a rank, 0 for none, or auto"


@pytest.mark.parametrize("words", [["0.9"], ["0.9", "0.99", "0.999"], ["0.9", "x"], ["none"]])
def test_two_numbers_are_wanted(words):
    text = flag_complaint("--ppo.adam-betas", *words)
    assert text.startswith("command line: ppo.adam_betas: ")
    assert text.endswith(": two numbers are wanted, e.g. 0.9 0.999")
    assert read_request(["CartPole-v1", "--ppo.adam-betas", "0.9", "0.99"]).config.ppo.adam_betas == (0.9, 0.99)
    assert flag_complaint("--env.reward-clip", "1").endswith(": two numbers are wanted, e.g. -1 1")


@pytest.mark.parametrize("value", ["0-4", "-1", "x", "1.5"])
def test_a_seed_is_one_number(value):
    wanted = "one whole number from 0 on, of at most 40 digits, is wanted; several seeds are --seeds 0-4"
    assert flag_complaint("--seed", value) == f"command line: seed: {value!r}: {wanted}"


@pytest.mark.parametrize(("device", "variable"), [("cuda:1", "CUDA_VISIBLE_DEVICES"), ("xpu:1", "ZE_AFFINITY_MASK")])
def test_which_device_is_chosen_by_a_variable(device, variable):
    kind = device.partition(":")[0]
    said = f"write {kind}; {variable}=1 before the command chooses which"
    assert flag_complaint("--device", device) == f"command line: device: {device!r}: {said}"
    assert read_request(["CartPole-v1", "--device", "gpu"]).config.device == "cuda"


def test_choices_are_listed():
    choices = "'cpu', 'cuda', 'xpu', 'tpu' or 'auto'"
    assert flag_complaint("--device", "npu") == f"command line: device: 'npu': input should be {choices}"
    text = flag_complaint("--network.activation", "swish")
    assert "'swish'" in text
    assert "'silu'" in text


def test_a_device_without_float64_is_refused():
    text = flag_complaint("--device", "mps")
    assert text.startswith("command line: device: mps has")
    assert "no float64" in text
    assert "use cpu" in text


def test_the_number_of_further_problems_is_told():
    assert flag_complaint("--lr", "-1", "--gamma", "2").endswith("(and 1 more: ppo.gamma)")
    assert not flag_complaint("--lr", "-1").endswith(")")


def test_a_missing_value():
    assert flag_complaint("--seed") == "--seed: needs a value"
    assert flag_complaint("--seed", "--quiet") == "--seed: needs a value"
    none = flag_complaint("--network.hidden-sizes", "--quiet")
    assert none == "--network.hidden-sizes: needs a value; --network.hidden-sizes=[] is a list of none"
    assert read_request(["CartPole-v1", "--network.hidden-sizes=[]"]).config.network.hidden_sizes == ()


def test_environment_arguments_that_are_not_json():
    text = flag_complaint("--env.kwargs", "{g: 1}")
    assert text.startswith("--env.kwargs: '{g: 1}' is not JSON, e.g. ")
    assert flag_complaint("--network.custom-kwargs", "{g: 1}").endswith("""is not JSON, e.g. '{"name": 0.1}'""")
    assert "did you mean --help?" in flag_complaint("--hlep")
    example = re.findall(r"e\.g\. '(.*)'$", text)[0]
    assert read_request(["CartPole-v1", "--env.kwargs", example]).config.env.kwargs == json.loads(example)


def test_a_second_target():
    assert complaint("CartPole-v1", "Hopper-v5").startswith("'Hopper-v5': one ")


def test_the_layer_that_is_wrong_is_the_one_that_is_named(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"env": "CartPole-v1", "nproc": "many"}))
    assert complaint(str(path), "--quiet").startswith(f"{path}: nproc")
    path.write_text(json.dumps({"env": "CartPole-v1", "seed": "many"}))
    assert complaint(str(path), "--gamma", "0.5").startswith(f"{path}: seed")
    path.write_text(json.dumps({"env": "CartPole-v1"}))
    assert complaint(str(path), "--seed", "many").startswith("command line: seed")


# ---- files


@pytest.mark.parametrize("content", ["", "# env: CartPole-v1"])
def test_a_file_without_settings(file_complaint, content):
    assert file_complaint(content) == "holds no settings; write env: CartPole-v1, or the like, into it"


def test_where_a_file_is_no_yaml(file_complaint):
    said = file_complaint("env: CartPole-v1\n\tppo: 1\n")
    assert "cannot start any token in line 2, column 1" in said
    assert "unicode" not in said


def test_a_missing_file_suggests_its_neighbour(tmp_path):
    (tmp_path / "cartpole.yaml").write_text("env: CartPole-v1")
    (tmp_path / "cartpole.txt").write_text("")
    text = complaint(str(tmp_path / "cartpole.yml"))
    assert text == f"{tmp_path / 'cartpole.yml'}: no such config file; did you mean {tmp_path / 'cartpole.yaml'}?"
    assert complaint(str(tmp_path / "nowhere" / "a.yaml")).endswith("a.yaml: no such config file")


def test_a_missing_file_does_not_suggest_what_is_nothing_like_it(tmp_path):
    (tmp_path / "hopper.yaml").write_text("env: Hopper-v5")
    assert complaint(str(tmp_path / "q.json")) == f"{tmp_path / 'q.json'}: no such config file"


def test_what_is_no_regular_file_is_called_what_it_is(tmp_path):
    """A name is never suggested in its own place."""
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "link.yaml").symlink_to(tmp_path / "gone.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")  # which would be waited for
    for name, said in (
        ("folder.yaml", "a directory, not a config file"),
        ("link.yaml", f"a link to {tmp_path / 'gone.yaml'}, which isn't there"),
        ("pipe.yaml", "no regular file; write the config into one"),
    ):
        assert complaint(str(tmp_path / name)) == f"{tmp_path / name}: {said}"


@pytest.mark.parametrize("name", ["conf.txt", "conf"])
def test_a_file_without_a_configs_suffix_is_taken_for_no_environment(tmp_path, name):
    (tmp_path / name).write_text("env: CartPole-v1")
    said = f"{tmp_path / name}: a config file ends in .yaml, .yml, .json, .toml"
    assert complaint(str(tmp_path / name)) == said


def test_a_file_with_an_environments_name_is_not_in_its_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "CartPole-v1").write_text("")
    assert read_request(["CartPole-v1"]).config.env.id == "CartPole-v1"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.yaml", "env: [CartPole-v1\nseed: 3\n"),
        ("a.yaml", "env: CartPole-v1\n\tseed: 3\n"),
        ("a.yaml", "env: \x00"),
        ("a.json", '{"env": "CartPole-v1",\n "seed": }'),
        ("a.toml", "env = \nseed = 3"),
        ("a.toml", "seed = 1\nseed = 2"),
    ],
)
def test_a_file_that_does_not_parse(file_complaint, name, content):
    assert file_complaint(content, name).startswith("can't be read: ")


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00\x80")
    assert complaint(str(tmp_path / "a.yaml")).startswith(f"{tmp_path / 'a.yaml'}: can't be read: ")


@pytest.mark.parametrize(("name", "content"), [("a.yaml", "- 1"), ("a.yaml", "x"), ("a.json", "[1]")])
def test_a_file_that_is_no_mapping(file_complaint, name, content):
    assert "a config is a mapping of keys to values, not " in file_complaint(content, name)


# ---- what is offered works


@given(st.integers(1, 200), st.integers(1, 70))
def test_shard_numbers_that_an_error_offers_work(num_envs, num_shards):
    try:
        check_shards(num_envs, num_shards)
    except ValueError as error:
        text = str(error)
    else:
        assert num_envs % num_shards == 0
        return
    shards, _, environments = text.partition("nearest that work: num_shards ")[2].partition(", or num_envs ")
    assert re.findall(r"\d+", shards)
    for number in re.findall(r"\d+", shards):
        check_shards(num_envs, int(number))
    assert re.findall(r"\d+", environments)
    for number in re.findall(r"\d+", environments):
        check_shards(int(number), num_shards)


@given(st.integers(1, 70), st.integers(1, 40))
def test_world_sizes_that_an_error_offers_work(world_size, num_shards):
    try:
        check_world_size(world_size, num_shards)
    except ValueError as error:
        offered = re.fullmatch(r".*; use at most (\d+), or for a new run --num-shards (\d+) or more .*", str(error))
        assert offered
        most, shards = map(int, offered.groups())
        check_world_size(most, num_shards)
        check_world_size(world_size, shards)
        with pytest.raises(ValueError, match=r"can't share"):
            check_world_size(most + 1, num_shards)
    else:
        assert 1 <= world_size <= num_shards


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 4))
def test_numbers_offered_where_nobody_has_chosen_the_shards_work(num_envs, world_size, group_size):
    num_envs *= group_size
    settings = {"num_envs": num_envs, "ppo": {"num_minibatches": 1}}
    if group_size > 1:
        settings |= {"algorithm": "grpo", "grpo": {"group_size": group_size}}
    config = Config.model_validate(settings)
    try:
        resolve(config, world_size)
    except ValueError as error:
        text = str(error)
    else:
        return
    found = re.search(r"use (?:num_envs (\d+) with )?--num-shards (\d+), or at most (\d+) of them$", text)
    assert found, text
    envs, shards, most = (int(n) if n else num_envs for n in found.groups())
    resolve(config.model_copy(update={"num_envs": envs, "num_shards": shards}), world_size)
    resolve(config, most)
    with pytest.raises(ValueError, match="by default"):
        resolve(config, most + 1)


@pytest.mark.parametrize(
    ("name", "content", "twice"),
    [
        ("a.yaml", "env: CartPole-v1\nppo: {gamma: 0.9}\nseed: 1\nppo:\n  num_epochs: 3\n", "ppo"),
        ("a.yaml", "env: CartPole-v1\nppo:\n  gamma: 0.9\n  gamma: 0.8\n", "gamma"),
        ("a.json", '{"env": "CartPole-v1", "env": "Acrobot-v1"}', "env"),
    ],
)
def test_a_key_that_stands_twice(file_complaint, name, content, twice):
    assert file_complaint(content, name).startswith(f"can't be read: {twice} stands twice in one mapping")


def test_a_key_that_replaces_a_merged_one_stands_once(tmp_path):
    (tmp_path / "a.yaml").write_text("env: CartPole-v1\nppo: &base {gamma: 0.9}\ngrpo: {}\n")
    assert read_request([str(tmp_path / "a.yaml")]).config.ppo.gamma == 0.9
    merged = "env: CartPole-v1\nppo:\n  <<: {gamma: 0.9, num_epochs: 3}\n  gamma: 0.8\n"
    (tmp_path / "b.yaml").write_text(merged)
    ppo = read_request([str(tmp_path / "b.yaml")]).config.ppo
    assert (ppo.gamma, ppo.num_epochs) == (0.8, 3)


def test_a_file_without_an_environment(tmp_path):
    (tmp_path / "a.yaml").write_text("num_envs: 16\n")
    assert complaint(str(tmp_path / "a.yaml")).startswith(f"{tmp_path / 'a.yaml'}: names no environment")
    assert read_request([str(tmp_path / "a.yaml"), "--env-id", "Acrobot-v1"]).config.env.id == "Acrobot-v1"


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(("section", "key"), [("env", "kwargs"), ("network", "custom_kwargs"), ("ppo", "loss_kwargs")])
def test_numbers_that_a_runs_config_cannot_keep(section, key, number):
    """JSON has none of them: the run would be resumed with null."""
    given: dict[str, dict[str, object]] = {"env": {"id": "CartPole-v1"}}
    given[section] = {**given.get(section, {}), key: {"limits": [number]}}
    with pytest.raises(ValueError, match=rf"^{section}\.{key}: .* is more than JSON can hold"):
        resolve(Config.model_validate(given))


@pytest.mark.parametrize(
    ("flag", "value", "limit"),
    [
        ("threads", "100000", "1024"),
        ("threads", "10000000000", "1024"),
        ("env.timeout", "1e300", "100000000"),
    ],
)
def test_what_no_machine_can_do_is_refused_with_its_limit(flag, value, limit):
    said = flag_complaint(f"--{flag}", value)
    assert said == f"command line: {flag}: {value!r}: input should be less than or equal to {limit}"


def test_a_learning_rate_beyond_float32_is_refused():
    said = flag_complaint("--ppo.learning-rate", "1e39")
    assert said == "command line: ppo.learning_rate: 1e+39 is beyond float32, which holds numbers up to 3.403e+38"


def test_a_key_twice_in_the_arguments_of_an_environment_is_refused():
    said = "--env.kwargs: a stands twice in one mapping; put it together, or leave one out"
    assert flag_complaint("--env.kwargs", '{"a": 1, "a": 2}') == said
    assert flag_complaint("--env.kwargs", '{"a": {"b": 1, "b": 1}}').startswith("--env.kwargs: b stands twice")
    assert "is not JSON" in flag_complaint("--env.kwargs", '{"a": 1, "a"')


def test_arguments_of_no_custom_network_are_not_ignored():
    given = {"env": {"id": "CartPole-v1"}, "network": {"custom_kwargs": {"units": 3}}}
    with pytest.raises(
        ValueError, match=r"^network\.custom_kwargs: {'units': 3}, but there is no network\.custom .*Mine$"
    ):
        resolve(Config.model_validate(given))
    given["network"]["custom"] = "my_nets:Wide"
    assert resolve(Config.model_validate(given)).network.custom_kwargs == {"units": 3}


def test_settings_of_grpo_are_not_ignored_by_ppo(tmp_path):
    said = "but algorithm is ppo; add --algorithm grpo, or leave it out"
    assert flag_complaint("--grpo.reference", "nosuch") == f"grpo.reference: nosuch, {said}"
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"env": "CartPole-v1", "grpo": {"kl_coef": 0.1}}))
    assert complaint(str(file)) == f"grpo.kl_coef: 0.1, {said}"


def test_a_file_of_grpo_may_train_ppo_and_a_printed_one_reads_again(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"env": "CartPole-v1", "algorithm": "grpo", "grpo": {"kl_coef": 0.1}}))
    config = read_request([str(file), "--algorithm", "ppo"]).config
    assert config.algorithm == "ppo"
    (tmp_path / "b.yaml").write_text(config_text(read_request(["CartPole-v1"]).config))
    assert read_request([str(tmp_path / "b.yaml")]).config.algorithm == "ppo"
    assert read_request(["--resume", "a", "--grpo.kl-coef", "0.1"]).config.grpo.kl_coef == 0.1  # the run's is GRPO

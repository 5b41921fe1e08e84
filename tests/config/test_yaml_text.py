"""What YAML says is what a reader of the file would say: numbers as YAML 1.2 writes them, and the same back again."""

import pytest
import yaml

from lockstep.config.command_line import read_request
from lockstep.config.files import config_text
from lockstep.config.yaml_text import read_yaml, write_yaml


@pytest.fixture
def request_of(tmp_path):
    def read(text):
        (tmp_path / "a.yaml").write_text(f"env: CartPole-v1\n{text}\n")
        return read_request([str(tmp_path / "a.yaml")])

    return read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2:8", "2:8"),
        ("190:20:30", "190:20:30"),
        ("1:30.5", "1:30.5"),
        ("010", 10),
        ("-08", -8),
        ("0x1f", 31),
        ("0o17", 15),
        ("1_000", 1000),
        ("1e-3", 1e-3),
        ("-1E+3", -1e3),
        (".5", 0.5),
        ("1.5e3", 1500.0),
        ("'1e-3'", "1e-3"),
        ("v1", "v1"),
        ("yes", True),
    ],
)
def test_numbers_are_those_of_yaml_1_2(text, value):
    found = read_yaml(f"a: {text}")["a"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("value", ["2:8", "1e-3", "010", "08", "0o7", "1_0", "1.", "off", "~", 5, -3, 1e-5, 1e22, 0.25])
def test_what_is_written_is_read_back_here_and_elsewhere(value):
    text = write_yaml({"a": value})
    for found in (read_yaml(text)["a"], yaml.safe_load(text)["a"]):
        assert (found, type(found)) == (value, type(value))


def test_a_range_of_ranks_is_no_time_of_day(request_of):
    assert request_of("nproc: 2:8").options.nproc == "2:8"


def test_arguments_of_the_users_own_get_numbers(request_of):
    text = "env.kwargs: {g: 1e-3}\nnetwork.custom_kwargs: {eps: 1e-5}\nppo.loss_kwargs: {weights: [1e2, '1e2']}"
    config = request_of(text).config
    assert config.env.kwargs == {"g": 1e-3}
    assert config.network.custom_kwargs == {"eps": 1e-5}
    assert config.ppo.loss_kwargs == {"weights": [100.0, "1e2"]}


def test_whole_numbers_may_have_an_exponent(request_of):
    config = request_of("total_steps: 1e6\nseed: 010\nnum_envs: 1_6").config
    assert (config.total_steps, config.seed, config.num_envs) == (1_000_000, 10, 16)
    assert isinstance(config.total_steps, int)


def test_a_printed_config_reads_the_same(request_of, tmp_path):
    kwargs = "{version: '1e-3', ratio: '2:8', mode: '010', g: 1e-3, state: 'off'}"
    config = request_of(f"env.kwargs: {kwargs}\nlr: 1e-5\ntotal_steps: 1e6").config
    (tmp_path / "b.yaml").write_text(config_text(config))
    assert read_request([str(tmp_path / "b.yaml")]).config == config


def test_a_printed_config_keeps_a_number_of_environments_that_a_preset_would_give(tmp_path):
    config = read_request(["MiniGrid-Empty-8x8-v0", "--num-envs", "none"]).config
    (tmp_path / "b.yaml").write_text(config_text(config))
    assert config.num_envs is None
    assert read_request([str(tmp_path / "b.yaml")]).config == config


@pytest.mark.parametrize("text", ["off", "'off'", "OFF", "no", "false"])
def test_off_is_a_value_where_there_is_one(request_of, text):
    found = request_of(f"ppo.advantage_normalization: {text}\nquiet: yes\nlog: {{tensorboard: off}}")
    assert found.config.ppo.advantage_normalization == "off"
    assert (found.options.quiet, found.config.log.tensorboard) == (True, False)


def test_on_isn_t(request_of):
    with pytest.raises(ValueError, match=r"ppo\.advantage_normalization: True: a number or text is wanted"):
        request_of("ppo: {advantage_normalization: on}")

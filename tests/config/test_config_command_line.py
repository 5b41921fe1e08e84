import pytest

from lockstep.config.command_line import parse_arguments, read_request
from lockstep.config.keys import ALIASES, LEAVES
from lockstep.config.run import EnvConfig


def config_of(*words):
    return read_request(["CartPole-v1", *words]).config


def options_of(*words):
    return read_request(["CartPole-v1", *words]).options


# ---- values


def test_a_value_follows_its_option_or_an_equals_sign():
    assert config_of("--seed", "3") == config_of("--seed=3")
    assert config_of("--seed", "3").seed == 3
    assert config_of("--ppo.learning-rate=1e-4").ppo.learning_rate == 1e-4
    assert options_of("--name=a=b").name == "a=b"
    assert options_of("--nproc", "auto").nproc == "auto"


def test_options_before_and_behind_the_target():
    assert read_request(["--seed", "3", "CartPole-v1"]) == read_request(["CartPole-v1", "--seed", "3"])


def test_the_last_of_an_option_given_twice_counts():
    assert config_of("--seed", "3", "--seed", "4").seed == 4


def test_underscores_and_hyphens_are_alike():
    assert (
        config_of("--ppo.learning_rate", "0.5") == config_of("--ppo.learning-rate", "0.5") == config_of("--lr", "0.5")
    )
    assert config_of("--lr", "0.5") != config_of()


def test_none_switches_off_what_can_be_off():
    assert config_of().ppo.max_grad_norm == 0.5
    assert config_of("--ppo.max-grad-norm", "none").ppo.max_grad_norm is None
    assert config_of("--max-grad-norm=None").ppo.max_grad_norm is None
    assert config_of("--target-kl", "null").ppo.target_kl is None
    with pytest.raises(ValueError, match=r"ppo\.gamma: None"):
        config_of("--gamma", "none")


def test_a_negative_number_is_a_value_and_no_option():
    assert config_of("--network.log-std-init", "-0.5").network.log_std_init == -0.5


@pytest.mark.parametrize("path", sorted(LEAVES))
def test_an_option_sets_its_own_setting_and_no_other(path):
    leaf = LEAVES[path]
    word = {"flag": "true", "list": "1", "json": "{}", "value": "x"}[leaf.kind]
    expected = {"flag": "true", "list": ["1"], "json": {}, "value": "x"}[leaf.kind]
    _, settings = parse_arguments([f"--{path.replace('_', '-')}", word])
    for part in path.split("."):
        assert list(settings) == [part]
        settings = settings[part]
    assert settings == expected


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_an_alias_is_its_setting(alias):
    assert ALIASES[alias] in LEAVES
    flag = "--" + alias.replace("_", "-")
    full = "--" + ALIASES[alias].replace("_", "-")
    assert parse_arguments([flag, "1"]) == parse_arguments([full, "1"])


# ---- flags


def test_flags_alone_negated_and_with_a_word():
    assert not options_of().quiet
    assert options_of("--quiet").quiet
    assert options_of("--quiet", "true").quiet
    assert options_of("--quiet=True").quiet
    assert not options_of("--quiet", "false").quiet
    assert not options_of("--quiet", "--no-quiet").quiet
    assert options_of("--no-quiet", "--quiet").quiet


def test_flags_inside_a_section():
    assert config_of().log.tensorboard
    assert not config_of("--log.no-tensorboard").log.tensorboard
    assert not config_of("--log.tensorboard", "false").log.tensorboard
    assert not config_of().normalize.observations
    assert config_of("--normalize.observations", "true").normalize.observations
    assert config_of("--normalize.observations").normalize.observations
    assert not config_of("--normalize.observations", "--normalize.no-observations").normalize.observations


def test_a_flag_takes_no_other_word_from_the_rest():
    request = read_request(["--quiet", "CartPole-v1"])
    assert request.options.quiet
    assert request.config.env.id == "CartPole-v1"
    assert config_of("--log.no-tensorboard", "--seed", "3").seed == 3


def test_a_word_that_is_neither_true_nor_false_is_no_flag():
    with pytest.raises(ValueError, match=r"quiet: 'maybe'"):
        options_of("--quiet=maybe")
    with pytest.raises(ValueError, match=r"quiet"):
        options_of("--no-quiet=maybe")


def test_only_flags_can_be_negated():
    with pytest.raises(ValueError, match=r"--no-seed: unknown option; did you mean --seed\?"):
        options_of("--no-seed")


# ---- lists


def test_lists_in_words_and_with_commas():
    for words in (["64", "32"], ["64,32"], ["64,", "32"]):
        assert config_of("--network.hidden-sizes", *words).network.hidden_sizes == (64, 32)
    assert config_of("--network.hidden-sizes=64,32", "--seed", "1").network.hidden_sizes == (64, 32)
    assert config_of("--network.hidden-sizes", "16").network.hidden_sizes == (16,)
    assert config_of("--ppo.adam-betas", "0.5", "0.75", "--seed", "1").ppo.adam_betas == (0.5, 0.75)


@pytest.mark.parametrize(
    ("words", "tags"),
    [
        (("long run", "[wip]"), ("long run", "[wip]")),
        (("a,b c",), ("a", "b c")),
        (("[a, b c]",), ("a", "b c")),
        (("[]",), ()),
        (("none",), None),
        (("ablation", "none"), ("ablation", "none")),
    ],
)
def test_tags_stay_whole(words, tags):
    assert config_of("--log.tags", *words).log.tags == tags


def test_a_list_ends_at_the_next_option():
    config = config_of("--network.hidden-sizes", "8", "4", "--seed", "3")
    assert (config.network.hidden_sizes, config.seed) == ((8, 4), 3)


# ---- JSON


def test_environment_arguments_are_json():
    config = config_of("--env.kwargs", '{"g": 9.8, "lr": [1, null]}')
    assert config.env == EnvConfig(id="CartPole-v1", kwargs={"g": 9.8, "lr": [1, None]})
    assert config_of('--env.kwargs={"a": "b=c"}').env.kwargs == {"a": "b=c"}
    assert config_of("--env.kwargs", '{"a": 1}', "--env.kwargs", '{"b": 2}').env.kwargs == {"b": 2}


def test_a_word_that_is_too_long_for_a_file_name_is_none():
    word = "a" * 300
    assert config_of(f'env.kwargs={{"a": "{word}"}}').env.kwargs == {"a": word}
    assert read_request([word]).config.env.id == word
    with pytest.raises(ValueError, match=r"aaa\.yaml: no such config file$"):
        read_request([f"{word}.yaml"])

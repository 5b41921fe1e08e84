import re

import pytest

from lockstep.cli import main
from lockstep.config.command_line import parse_arguments, read_request
from lockstep.config.files import PRESET_NUMBERS
from lockstep.config.help import COMMON
from lockstep.config.keys import LEAVES
from lockstep.config.presets import PRESETS, defaults_for
from lockstep.config.run import Config
from lockstep.config.words import ALIASES, SWITCHES
from lockstep.runs.trackers.service import flattened


@pytest.fixture
def help_of(capsys, monkeypatch):
    """What ``lockstep train WORDS --help-all`` prints."""
    monkeypatch.setenv("COLUMNS", "80")

    def read(*words):
        assert main(["train", *words, "--help-all"]) == 0
        return capsys.readouterr().out

    return read


def entries(text):
    """Each option's spellings and what is said about it, by its setting's path; with boxes around or without."""
    found, path = {}, None
    for line in text.partition("\noptions:")[2].splitlines():
        content = line.strip("│| ")
        if re.match("--[a-z]", content):
            spellings = [word for word in re.split("[ ,]+", content) if word.startswith("--")]
            path = spellings[0][2:].replace("-", "_")
            found[path] = (spellings, content.partition(spellings[-1])[2])
        elif path is not None:
            spellings, said = found[path]
            found[path] = (spellings, f"{said} {content}")
    return found


def default_of(text, path):
    return re.findall(r"\(default: ([^()]*)\)", entries(text)[path][1])[-1]


def test_every_setting_is_listed(help_of):
    text = help_of()
    missing = [path for path in LEAVES if not re.search(rf"--{path.replace('_', '-')}\b", text)]
    assert missing == []
    assert not re.search(r"--no-such-thing\b", text)


def test_every_option_has_a_meaning_and_a_default(help_of):
    listed = entries(help_of())
    assert len(listed) > 40
    for path, (_, said) in listed.items():
        meaning, found, _ = said.partition("(default: ")
        assert found or "default" in meaning, path
        assert said.count("(default") <= 1, path
        assert len(meaning.split()) > 2, path


def test_every_option_listed_is_accepted_and_sets_what_it_says(help_of):
    words = {"flag": "true", "list": "1", "json": "{}", "value": "1"}
    for path, (spellings, _) in entries(help_of()).items():
        for spelling in spellings:
            negated = spelling.rpartition(".")[2].removeprefix("--").startswith("no-")
            given = [] if negated else [words[LEAVES[path].kind]]
            _, value = parse_arguments([spelling, *given])
            for part in path.split("."):
                value = value[part]
            assert (value == "false") == negated, spelling
    with pytest.raises(ValueError, match="unknown option"):
        parse_arguments(["--no-such-thing", "1"])


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Hopper-v5"])
def test_every_default_printed_may_be_given_and_changes_nothing(help_of, env_id):
    plain, text = read_request([env_id]), help_of(env_id)
    for path in entries(text):
        if path == "num_envs_per_rank":
            continue  # it goes with num_envs or without
        if "default" in LEAVES[path].description:
            continue  # it is said in words
        words = [env_id, "--" + path, *default_of(text, path).split()]
        given = read_request(words)
        assert (given.config, given.options) == (plain.config, plain.options), words


def test_defaults_are_those_of_the_preset_and_of_the_other_words(help_of):
    general, hopper = help_of(), help_of("Hopper-v5")
    assert default_of(general, "ppo.num_minibatches") == "4"
    assert default_of(hopper, "ppo.num_minibatches") == "32"
    assert default_of(general, "normalize.observations") == "False"
    assert default_of(hopper, "normalize.observations") == "True"
    assert default_of(hopper, "env.id") == "Hopper-v5"
    assert default_of(hopper, "seed") == "0"
    given = help_of("Hopper-v5", "--seed", "7", "--nproc", "2")
    assert (default_of(given, "seed"), default_of(given, "nproc")) == ("7", "2")


def test_help_needs_no_environment(help_of):
    assert default_of(help_of("--seed", "7"), "seed") == "7"


def test_aliases_in_the_help_are_aliases(help_of):
    named = re.findall(r"--[a-z][\w-]*", help_of().partition("Stable-Baselines3")[2].partition("-h, --help")[0])
    assert len(named) > 4
    for alias in named:
        assert alias[2:].replace("-", "_") in {*ALIASES, *SWITCHES}


@pytest.mark.parametrize(("columns", "longest"), [("50", 50), ("200", 120)])
def test_the_help_says_what_train_takes_in_lines_that_fit(capsys, monkeypatch, columns, longest):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["train", "--help"]) == 0
    prose = capsys.readouterr().out.partition("  -h, --help")[0]
    assert "Options of Stable-Baselines3, CleanRL and rsl_rl" in " ".join(prose.split())
    assert longest - 15 < max(map(len, prose.splitlines())) <= longest


def test_the_short_help_shows_the_common_options_and_where_the_others_are(capsys, help_of):
    assert main(["train", "Hopper-v5", "-h"]) == 0
    text = capsys.readouterr().out
    assert list(entries(text)) == list(COMMON)
    assert "--help-all" in text
    assert len(text.splitlines()) < 75
    everything = entries(help_of("Hopper-v5"))
    assert all(everything[path] == entry for path, entry in entries(text).items() if path != COMMON[-1])


def test_a_config_is_printed_as_a_file_that_says_the_same(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["Hopper-v5", "--batch-size", "256", "--max-grad-norm", "none", "--total-iters", "3", "--seed", "7"]
    assert main(["train", *words, "--print-config"]) == 0
    assert not any(tmp_path.iterdir())
    file = tmp_path / "c.yaml"
    file.write_text(capsys.readouterr().out)
    assert read_request([str(file)]).config == read_request(words).config


def test_a_printed_config_says_none_over_every_presets_number(capsys, tmp_path):
    words = ["HalfCheetah-v5", "--no-clip-vloss"]
    assert main(["train", *words, "--print-config"]) == 0
    text = capsys.readouterr().out
    assert "  value_clip_range: null\n" in text
    (tmp_path / "c.yaml").write_text(text)
    assert read_request([str(tmp_path / "c.yaml")]).config.ppo.value_clip_range is None
    layers = [*PRESETS.values(), *(defaults_for(*kind)[0] for kind in ((True, False), (False, True), (False, False)))]
    defaults = flattened(Config().model_dump())
    set_by_presets = {key for layer in layers for key in flattened(layer) if defaults.get(key, 0) is None}
    assert set_by_presets == {*PRESET_NUMBERS}


def test_choices_are_listed(help_of):
    listed = entries(help_of())
    assert listed["reduction"][1].split()[0] == "{exact,fast}"
    assert listed["ppo.schedule"][1].split()[0] == "{constant,linear,adaptive}"

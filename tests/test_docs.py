"""Documentation names only what is there: linked files and headings, source paths, modules, commands and options."""

import contextlib
import io
import re
import shlex
from argparse import ArgumentParser
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.commands.parser import CommandParser
from lockstep.config.command_line import parse_arguments
from lockstep.launch.resume import CHANGEABLE

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lockstep"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ON_GITHUB = re.compile(
    r"https://(?:github\.com/lockstep-rl/lockstep/(?:blob|tree)|raw\.githubusercontent\.com/lockstep-rl/lockstep)/main/"
)
"""Before the path of a file of the repository."""
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|c|yaml)|[\w.-]+(?:/[\w.-]+)*/")
"""A file of the repository with its folder, or a folder."""
PLAIN_FILE = re.compile(r"\w+\.(?:py|c)")
WRITTEN = re.compile(r"^```\w*\n# ([\w.-]+\.\w+)\n", re.MULTILINE)
"""A file that a page shows whole, by its first line."""
CLEANRL = tuple(
    f"ppo_{name}.py" for name in ("atari", "continuous_action", "atari_lstm", "atari_envpool", "atari_multigpu")
)
"""Files of another project: the presets' values come from some."""
DOTTED = re.compile(r"lockstep(?:\.\w+)+")
ROOTS = (ROOT, SOURCE, SOURCE / "jax_engine", SOURCE / "torch_engine")
MADE = ("runs/", "tensorboard/", "checkpoints/", "envs/shard", "videos/", "logs/", "seed_", "~", "lockstep/", "build/")
"""What a run makes, and ids of environments."""
OUTSIDE = re.compile(r"/work/(?:shared|main)\b|\b(?:DESIGN|STYLE)(?:\.md|:| wants| says)")
"""Places that the repository doesn't have."""
COMMAND = re.compile(r"(?:^|\s)lockstep ([a-z]+ .+)")


def heading_of(line: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
    return text.replace(" ", "-")


def prose(text: str) -> str:
    return FENCE.sub("", text)


def broken_links(text: str, page: Path) -> list[str]:
    """Links of a page into the repository, relative or through GitHub, that lead to no file or no heading."""
    out = []
    for target in LINK.findall(prose(text)):
        start = ON_GITHUB.match(target)
        if re.match(r"[a-z]+:", target) and not start:
            continue
        name, _, anchor = target[start.end() if start else 0 :].partition("#")
        file = ((ROOT if start else page.parent) / name).resolve() if name else page
        found = file.exists() and file.is_relative_to(ROOT)
        if found and anchor:
            lines = prose(file.read_text()).splitlines()
            found = anchor in {heading_of(line) for line in lines if line.startswith("#")}
        if not found:
            out.append(target)
    return out


def missing_files(text: str) -> list[str]:
    """Files and folders in code spans that neither the repository has nor the page shows."""
    spans = [span for span in SPAN.findall(prose(text)) if span not in WRITTEN.findall(text)]
    paths = [span for span in spans if FILE.fullmatch(span) and not span.startswith(MADE)]
    plain = [span for span in spans if PLAIN_FILE.fullmatch(span) and span not in CLEANRL]
    found = {path.name for path in (*SOURCE.rglob("*.py"), *SOURCE.rglob("*.c"), *ROOT.glob("examples/**/*.py"))}
    return [path for path in paths if not any((root / path).exists() for root in ROOTS)] + [
        name for name in plain if name not in found
    ]


def missing_names(text: str) -> list[str]:
    """Dotted names such as ``lockstep.runs.checkpoint.CheckpointError`` that no module holds."""
    out = []
    for name in DOTTED.findall(text):
        path, parts = SOURCE, name.split(".")[1:]
        while parts and (path / parts[0]).is_dir():
            path /= parts.pop(0)
        file = path / f"{parts[0]}.py" if parts and (path / f"{parts[0]}.py").is_file() else path / "__init__.py"
        parts = parts[1:] if file.name != "__init__.py" else parts
        if parts and not re.search(rf"\b{parts[0]}\b", file.read_text()):
            out.append(name)
    return out


def refers_outside(text: str) -> list[str]:
    """Mentions of what isn't in the repository."""
    return OUTSIDE.findall(text)


def commands_in(text: str) -> list[list[str]]:
    """The words after ``lockstep`` of every command line: in blocks of commands, and in code spans with arguments."""
    blocks = [body.replace("\\\n", " ") for language, body in FENCE.findall(text) if language in ("", "sh", "bash")]
    lines = [line.partition(" #")[0] for body in blocks for line in body.splitlines()]
    lines += [" ".join(span.split()) for span in SPAN.findall(prose(text))]
    found = [match[1] for line in lines if (match := COMMAND.search(line))]
    return [shlex.split(words) for words in found]


class ParsedError(Exception):
    """Carries what a command's own parser left for the parser of configs."""


def unknown(words: list[str]) -> str | None:
    """What the command itself says against a command line; None if it knows the command and each of its options."""

    def parse(parser: CommandParser, argv: list[str]) -> None:
        raise ParsedError(ArgumentParser.parse_known_args(parser, argv)[1])

    def parse_all(parser: CommandParser, argv: list[str]) -> None:
        rest = ArgumentParser.parse_known_args(parser, argv)[1]
        if rest:
            parser.error(f"unknown {rest}")
        raise ParsedError([])

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        patch.setattr(CommandParser, "parse_known_args", parse)
        patch.setattr(CommandParser, "parse_args", parse_all)
        help_asked = bool({"--help", "--help-all"} & set(words))
        words = [
            word for word in words if word not in ("--help", "--help-all", "--print-config", "--print-environment")
        ]
        try:
            rest = words[1:]
            if words[0] != "train" and not (help_asked and words[0] in cli.COMMANDS):
                cli.main(words)  # returns only if it has an objection
                return said.getvalue()
        except ParsedError as parsed:
            rest = parsed.args[0]
        try:
            parse_arguments(rest)
        except ValueError as error:
            return str(error)
    return None


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    assert broken_links(page.read_text(), page) == []


@pytest.mark.parametrize("name", NAMES)
def test_files_and_modules_that_are_named_exist(name):
    text = (ROOT / name).read_text()
    assert missing_files(text) == []
    assert missing_names(text) == []


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_their_options_exist(name):
    for words in commands_in((ROOT / name).read_text()):
        assert unknown(words) is None, words


def test_nothing_refers_to_what_is_not_here():
    folders = ("src", "tests", "docs", "examples", "benchmarks")
    files = [file for folder in folders for kind in ("py", "md", "c") for file in (ROOT / folder).rglob(f"*.{kind}")]
    here = [file for file in files if file != Path(__file__) and ".venv-peers" not in file.parts]
    assert len(here) > 300
    assert [file for file in here if refers_outside(file.read_text())] == []


def test_the_index_names_every_decision():
    folder = ROOT / "docs" / "decisions"
    numbered = sorted(path.name for path in folder.glob("[0-9]*.md"))
    linked = [target for target in LINK.findall((folder / "README.md").read_text()) if re.match(r"\d", target)]
    assert sorted(linked) == numbered
    assert len({name[:3] for name in numbered}) == len(numbered)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")), ids=lambda path: path.stem)
def test_a_decision_has_its_four_sections(path):
    headings = re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)
    assert headings == ["Context", "Decision", "Figures", "Consequences"]


def decided_on(text: str) -> str | None:
    """The day that a decision's third line says, below its numbered heading; None if it says none."""
    found = re.match(r"# \d{3}\. .+\n\nDecided (\d{4}-\d{2}-\d{2})\b", text)
    return found[1] if found else None


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")), ids=lambda path: path.stem)
def test_a_decision_says_when_it_was_taken(path):
    assert decided_on(path.read_text()) is not None


def not_named_as_changeable(text: str) -> list[str]:
    """Settings that a resumed run may change, but that a page's sentence about them leaves out."""
    sentence = re.search(r"may\s+change\s(.*?)[.;]\s", text, re.DOTALL)
    named = SPAN.findall(sentence[1]) if sentence else []
    here = {name.removesuffix(".*") for name in named}
    return [name for name in CHANGEABLE if name.removesuffix(".") not in here]


@pytest.mark.parametrize("name", ["docs/runs.md", "docs/decisions/015-resuming.md"])
def test_all_that_a_resumed_run_may_change_is_named(name):
    assert not_named_as_changeable((ROOT / name).read_text()) == []


def relative_links(text: str) -> list[str]:
    """Links and pictures that lead nowhere where a page stands alone, as on a package index."""
    targets = [*LINK.findall(prose(text)), *re.findall(r"(?:src|href)=\"([^\"]+)", prose(text))]
    return [target for target in targets if not target.startswith("https://")]


def pictures_of_pages(text: str) -> list[str]:
    """Pictures whose address is a page about them."""
    found = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text)
    return [target for target in found if not target.startswith("https://raw.githubusercontent.com/")]


def test_the_readme_reads_well_on_a_package_index():
    text = (ROOT / "README.md").read_text()
    assert relative_links(text) == []
    assert pictures_of_pages(text) == []
    assert len(LINK.findall(text)) > 20


def test_the_readme_begins_with_training_and_is_short():
    text = (ROOT / "README.md").read_text()
    commands = next(body for language, body in FENCE.findall(text) if language == "").splitlines()
    assert [line.split("#")[0].strip() for line in commands[:2]] == ["make train", "make test"]
    assert len(text.splitlines()) <= 130


# --- what the checks find ---------------------------------------------------------------------------------------------


def test_a_link_to_nothing_is_found():
    text = "[a](docs/running.md) [b](docs/nothing.md) [c](docs/running.md#presets) [d](docs/running.md#tpus) [e](https://x.y)"
    assert broken_links(text, ROOT / "README.md") == ["docs/nothing.md", "docs/running.md#tpus"]


def test_a_link_through_github_to_nothing_is_found():
    here = "https://github.com/lockstep-rl/lockstep/blob/main/docs"
    raw = "https://raw.githubusercontent.com/lockstep-rl/lockstep/main/docs"
    text = f"[a]({here}/running.md#presets) [b]({here}/running.md#tpus) [c]({raw}/nothing.png) ![d]({raw}/curves.png)"
    assert broken_links(text, ROOT / "README.md") == [f"{here}/running.md#tpus", f"{raw}/nothing.png"]


def test_a_link_that_a_package_index_breaks_is_found():
    text = '[a](docs/x.md) ![b](y.png) [c](#here) <img src="z.png"> [d](https://x.y)'
    assert relative_links(text) == ["docs/x.md", "y.png", "#here", "z.png"]
    assert pictures_of_pages("![a](https://github.com/x/y.png)") == ["https://github.com/x/y.png"]


def test_a_setting_that_a_resumed_run_may_change_is_missed():
    names = ", ".join(f"`{name}*`" if name.endswith(".") else f"`{name}`" for name in CHANGEABLE if name != "fsdp")
    assert not_named_as_changeable(f"It may\nchange {names}. `fsdp` is read.") == ["fsdp"]
    assert not_named_as_changeable("Resuming changes nothing.") == list(CHANGEABLE)


def test_a_decision_without_a_day_is_found():
    assert decided_on("# 001. Shards\n\nDecided 2026-11-20, 2026-11-21\n\n## Context\n") == "2026-11-20"
    assert decided_on("# 001. Shards\n\n## Context\nDecided 2026-11-20\n") is None
    assert decided_on("# 001. Shards\n\nDecided in November\n") is None
    assert decided_on("# 001: Shards\n\nDecided 2026-11-20\n") is None


def test_a_file_that_has_moved_is_found():
    text = "`launch/world.py` `launch/worlds.py` `src/lockstep/door.py` `nets/` `nest/` `cli.py` `door.py`"
    assert missing_files(text) == ["launch/worlds.py", "src/lockstep/door.py", "nest/", "door.py"]


def test_a_name_that_has_moved_is_found():
    text = "`lockstep.load_policy` `lockstep.runs.checkpoint.CheckpointError` `lockstep.checkpoint.CheckpointError`"
    assert missing_names(text) == ["lockstep.checkpoint.CheckpointError"]


def test_a_reference_to_another_place_is_found():
    assert len(refers_outside("as DESIGN.md has it, DESIGN wants it, see /work/shared")) == 3
    assert refers_outside("see docs/design.md; /workers") == []


def test_commands_are_found_in_blocks_and_spans():
    block = "```\n$ X=1 lockstep train A \\\n  --seed 3  # why\nlockstep doctor: said\n```\n"
    text = f"{block}and `lockstep\neval B --json`, `lockstep`"
    assert commands_in(text) == [["train", "A", "--seed", "3"], ["eval", "B", "--json"]]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("train CartPole-v1 --nporc 2", "--nporc"),
        ("train CartPole-v1 --ppo.epohcs 2", "--ppo.epohcs"),
        ("evla demo", "evla"),
        ("eval demo --episods 3", "--episods"),
        ("verify CartPole-v1 --worlds 1,2", "--worlds"),
        ("bench CartPole-v1 --num-env 8", "--num-env"),
        ("doctor --ranks 2 -- script.py", "--ranks"),
    ],
)
def test_an_option_that_does_not_exist_is_found(line, named):
    assert named in str(unknown(line.split()))

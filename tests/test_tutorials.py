"""README, docs/python.md and tutorials are run: files are written, commands run, their output compared in form.

Comments before a block say what the tests do otherwise, and don't show: ``<!-- tests: OLD => NEW -->`` puts smaller
numbers into it, ``<!-- tests: exits with 1 -->`` expects that; at a page's top ``<!-- tests: long -->`` and
``<!-- tests: needs MODULE -->``.
"""

import os
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from command_line import Ended, lockstep, run_words
from frameworks import installed

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "docs" / "tutorials", ROOT / "docs" / "coming-from")
PAGES = [ROOT / "README.md", ROOT / "docs" / "python.md"]
PAGES += sorted(page for folder in FOLDERS for page in folder.glob("*.md"))
BLOCK = re.compile(r"((?:^<!-- tests: [^\n]+ -->\n)*)^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SAID = re.compile(r"<!-- tests: (.+?) -->")
FILE = re.compile(r"# ([\w.-]+\.(?:py|yaml))\n")
SKIPPED = ("git ", "python3 -m venv", "pip ", "make ")
"""Commands that install."""
NUMBER = re.compile(r"\b[0-9a-f]{8,}\b|[-+]?\d[\d,.:]*%?|\bnan\b")


class PageError(AssertionError):
    """A page says something that isn't so."""


@dataclass
class Block:
    """A fenced block of a page.

    Attributes:
        language: ``sh`` or nothing (commands), ``python``, ``yaml`` or ``text``.
        body: what stands in it, with the numbers of the tests.
        code: the exit status of its commands.
    """

    language: str
    body: str
    code: int = 0


@dataclass
class Page:
    """A page as the tests run it.

    Attributes:
        blocks: in their order.
        long: whether ``make test`` leaves it out.
        needs: modules without which it is skipped.
    """

    blocks: list[Block]
    long: bool = False
    needs: list[str] = field(default_factory=list)


def read(text: str) -> Page:
    page = Page([], "<!-- tests: long -->" in text, re.findall(r"<!-- tests: needs (\w+) -->", text))
    for comments, language, body in BLOCK.findall(text):
        block = Block(language, body)
        for said in SAID.findall(comments):
            if match := re.fullmatch(r"exits with (\d+)", said):
                block.code = int(match[1])
            elif " => " in said:
                old, new = said.split(" => ")
                if old not in block.body:
                    raise PageError(f"{old!r} is to be {new!r} in the tests, and isn't there")
                block.body = block.body.replace(old, new)
            else:
                raise PageError(f"unknown: {said}")
        page.blocks.append(block)
    return page


def run_command(line: str, folder: Path) -> Ended:
    """A line of a block of commands, which find ``lockstep`` and ``python``, in a folder."""
    if re.match(r"lockstep [\w -]", line) and not re.search(r"[|>*;&]", line):
        return lockstep(*shlex.split(line)[1:], cwd=folder)
    tools = folder / ".tools"
    tools.mkdir(exist_ok=True)
    for name, words in (("python", ""), ("lockstep", " -m lockstep")):
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{words} "$@"\n')
        (tools / name).chmod(0o755)
    variables = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": _paths(), "OMP_NUM_THREADS": "1"}
    return run_words(["bash", "-c", line], folder, **variables)


def _paths() -> str:
    return os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))


def form(line: str) -> str:
    """A line without what differs from machine to machine."""
    return " ".join(NUMBER.sub("#", re.sub(r"[…┃│]", " ", line)).split())


def compare(shown: str, printed: str) -> None:
    """Every line of a block of output stands in what was printed, in this order and form."""
    lines = iter([form(line) for line in printed.splitlines()])
    for line in filter(None, map(form, shown.splitlines())):
        if line not in lines:  # takes lines up to the one that is found
            raise PageError(f"{line!r} isn't printed, or not here:\n{printed}")


def run_page(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Does what a page says, in a folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.syspath_prepend(str(folder))
    names: dict[str, object] = {"__name__": "__main__"}
    printed = ""
    for block in read(text).blocks:
        file = FILE.match(block.body)
        if block.language in ("python", "yaml") and file:
            (folder / file[1]).write_text(block.body)
        elif block.language == "python":
            exec(compile(block.body, "<page>", "exec"), names)
        elif block.language == "text":
            compare(block.body, printed)
        elif block.language in ("", "sh"):
            printed = ""
            for line in block.body.replace("\\\n", " ").splitlines():
                command = line.partition("  #")[0].strip()
                if not command or command.startswith(SKIPPED):
                    continue
                ended = run_command(command, folder)
                printed += ended.stdout + ended.stderr
                if ended.code != block.code:
                    raise PageError(f"{command}: exit status {ended.code}\n{ended.stdout}{ended.stderr}")


def param(page: Path) -> object:
    marks = [pytest.mark.long] if read(page.read_text()).long else []
    return pytest.param(page, id=page.relative_to(ROOT).with_suffix("").as_posix(), marks=marks)


@pytest.mark.parametrize("page", [param(page) for page in PAGES])
def test_a_page_does_what_it_says(page, tmp_path, monkeypatch):
    text = page.read_text()
    for module in ("torch", "matplotlib", "imageio", *read(text).needs):
        if not installed(module):
            pytest.skip(f"needs {module}")
    run_page(text, tmp_path, monkeypatch)


# --- what the checks find ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```sh\nlockstep list nowhere\n```\n", "exit status 2"),
        ("<!-- tests: exits with 1 -->\n```sh\ntrue\n```\n", "exit status 0"),
        ("```sh\npython -c 'import nothing_of_this_name'\n```\n", "No module named"),
        ("```sh\necho step 3 of 4\n```\n```text\nstep 1 of 2\n```\n```text\nsteps 1 of 2\n```\n", "'steps # of #'"),
        ("```sh\nprintf 'a\\nb\\n'\n```\n```text\nb\na\n```\n", "'a' isn't printed"),
        ("<!-- tests: 300 => 3 -->\n```sh\necho 200\n```\n", "'300' is to be '3'"),
        ("<!-- tests: as you like -->\n```sh\ntrue\n```\n", "unknown: as you like"),
    ],
)
def test_a_page_that_says_something_else_is_found(text, said, tmp_path, monkeypatch):
    with pytest.raises(PageError, match=re.escape(said)):
        run_page(text, tmp_path, monkeypatch)


def test_a_block_of_python_that_fails_is_found(tmp_path, monkeypatch):
    text = "```python\nx = 1\n```\n```python\nassert x == 2\n```\n"
    with pytest.raises(AssertionError):
        run_page(text, tmp_path, monkeypatch)


def test_files_are_written_and_blocks_follow_each_other(tmp_path, monkeypatch):
    text = (
        "```python\n# two.py\nvalue = 2\n```\n```python\nimport two\n```\n"
        "<!-- tests: 1000 => 2 -->\n```python\nassert two.value == 1000\n```\n"
        "```sh\npip install nothing\npython -c 'import two; print(two.value, \"steps/s\")'\n```\n"
        "```text\n…\n9 steps/s\n```\n"
    )
    run_page(text, tmp_path, monkeypatch)
    assert (tmp_path / "two.py").read_text() == "# two.py\nvalue = 2\n"

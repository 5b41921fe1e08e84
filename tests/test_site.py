"""The documentation as a site: what is made of the Markdown, and that a build fails where something leads nowhere."""

import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from frameworks import installed

from lockstep.config.keys import LEAVES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
API = sorted((DOCS / "reference").glob("*.md"))


def loaded(name: str) -> ModuleType:
    """A file of the site's own, under a name that nothing else has."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", DOCS / "_site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages, links = loaded("pages"), loaded("links")


def made(name: str, text: str) -> tuple[str, list[str]]:
    """A page of the site, and what was wrong with it."""
    said: list[str] = []
    return pages.page_of_site(name, text, said.append), said


def test_links_out_of_the_pages_lead_to_github():
    text = "[a](../README.md#install) [b](../examples/doctor) [c](running.md#presets) [d](#here) [e](https://x.y)\n"
    found, said = made("page", text)
    assert found == (
        "[a](https://github.com/lockstep-rl/lockstep/blob/main/README.md#install) "
        "[b](https://github.com/lockstep-rl/lockstep/tree/main/examples/doctor) "
        "[c](running.md#presets) [d](#here) [e](https://x.y)\n"
    )
    assert said == []


def test_a_link_to_a_file_that_is_gone_is_found():
    assert made("tutorials/page", "[a](../gone.md)\n")[1] == ["a link leads to nothing: ../gone.md"]
    assert made("page", "```\n[a](gone.md)\n```\n")[1] == []


def test_navigation_is_made_of_an_index():
    text = "# Top\n\n[z](z.md)\n\n## First\n\n- [One `x`](running.md), [again](running.md)\n\n## Second\n\nnone\n"
    contents = "```{toctree}\n:hidden:\n:caption: First\n\nOne x <running>\nagain <running>\n```\n"
    assert contents in made("index", text)[0]
    assert "toctree" not in made("page", text.replace("z.md", "jax.md"))[0]


def test_every_page_is_in_an_index():
    found = set()
    for name in pages.INDICES:
        text = made(name, (DOCS / f"{name}.md").read_text())[0]
        folder = (DOCS / name).parent
        found |= {(folder / path).resolve() for path in re.findall(r"^.+ <([\w./-]+)>$", text, re.MULTILINE)}
    there = {page.with_suffix("").resolve() for page in DOCS.rglob("*.md")}
    assert there - found == {DOCS / "index"}


@pytest.mark.parametrize("page", API, ids=lambda page: page.stem)
def test_an_api_page_lists_every_public_name(page):
    for name in ("torch", "jax", "stable_baselines3"):
        if not installed(name):
            pytest.skip(f"needs {name}")
    text, said = made(f"reference/{page.stem}", page.read_text())
    assert said == []
    assert text.count("```{eval-rst}") == len(re.findall(r"^\| \[`", page.read_text(), re.MULTILINE)) > 0


def test_a_public_name_that_no_table_has_is_found():
    pytest.importorskip("torch")
    text = (DOCS / "reference" / "python.md").read_text().replace("[`train`]", "[`learn`]")
    with pytest.raises(AttributeError, match="learn"):
        made("reference/python", text)
    row = re.compile(r"^\| \[`load_run`\].*\n", re.MULTILINE)
    said = made("reference/python", row.sub("", (DOCS / "reference" / "python.md").read_text()))[1]
    assert said == ["lockstep has public names that the page doesn't list: load_run"]


def test_the_page_of_settings_has_all_of_them():
    text, said = made("settings", (DOCS / "settings.md").read_text())
    assert said == []
    listed = re.findall(r"^\| `([\w.]+)` \| (.+) \| (.+) \|$", text, re.MULTILINE)
    assert sorted(path for path, _, _ in listed) == sorted(LEAVES)
    told = {path: (kind, meaning) for path, kind, meaning in listed}
    assert told["ppo.learning_rate"][0] == "`FLOAT`"
    assert told["reduction"][0] == "`{exact,fast}`"
    assert told["log.tensorboard"][0] == "true or false"
    assert "(default: 128)" in told["num_steps"][1]
    elsewhere = (DOCS / "settings.md").read_text().partition(pages.SETTINGS_HERE)[2]
    assert elsewhere.splitlines()[0] not in text
    assert "| `" not in made("settings", "# Settings\n")[0]


def test_a_setting_that_says_nothing_of_itself_is_found(monkeypatch):
    monkeypatch.setitem(LEAVES, "ppo.gamma", replace(LEAVES["ppo.gamma"], description=""))
    said = made("settings", (DOCS / "settings.md").read_text())[1]
    assert said == ["the setting ppo.gamma has no description"]


def test_texts_of_settings_are_markdown_that_shows_them_as_they_are():
    said = pages.escaped("with --log.timing, ppo.gamma and num_envs: a|b <c> *d* [e](f)")
    assert said == r"with `--log.timing`, `ppo.gamma` and `num_envs`: a\|b \<c\> \*d\* \[e\](f)"


def test_the_search_has_decision_records_last():
    if (node := shutil.which("node")) is None:
        pytest.skip("needs node")
    found = "[['decisions/001', '', '', '', 40], ['running', '', '', '', 5]]"
    script = (DOCS / "_site" / "scorer.js").read_text() + f"console.log({found}.map(Scorer.score).join())"
    done = subprocess.run([node, "-e", script], capture_output=True, text=True, check=True)
    decision, page = map(int, done.stdout.split(","))
    assert decision < page == 5


def test_links_between_built_pages_are_checked(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.html").write_text('<h1 id="top"></h1><a href="../two.html#end"></a><img src="none.png">')
    (tmp_path / "two.html").write_text('<a href="a/one.html#top"></a><a href="#gone"></a><a href="https://x.y/z"></a>')
    assert links.broken(tmp_path) == ["a/one.html: ../two.html#end", "a/one.html: none.png", "two.html: #gone"]


def build(docs: Path, out: Path) -> subprocess.CompletedProcess[str]:
    words = ["--fail-on-warning", "--keep-going", "--quiet", "-c", str(docs / "_site"), "-d", str(out / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *words, str(docs), str(out / "html")]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.long
def test_the_site_is_built_without_a_warning_and_fails_with_one(tmp_path):
    for name in ("furo", "myst_parser", "sphinx", "sphinx_copybutton", "torch", "jax", "stable_baselines3"):
        if not installed(name):
            pytest.skip(f"needs {name}")
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("src", "examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    docs = Path(shutil.copytree(DOCS, tmp_path / "docs", dirs_exist_ok=True))
    done = build(docs, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "lockstep.train" in (tmp_path / "html" / "reference" / "python.html").read_text()
    with (docs / "attach.md").open("a") as page:
        page.write("\n[nowhere](running.md#of-this-name)\n")
    done = build(docs, tmp_path)
    assert done.returncode != 0
    assert "of-this-name" in done.stderr

"""What stands beside the source: one version everywhere, the licence's text, and workflows that run what there is."""

import ast
import hashlib
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from frameworks import NEEDS, Missing, installed

from lockstep import __version__

ROOT = Path(__file__).parents[1]
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
RELEASE = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", re.MULTILINE)
METADATA = (
    "import sys; from setuptools import build_meta; "
    "print(build_meta.prepare_metadata_for_build_wheel(sys.argv[1]))"
)  # fmt: skip
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """What says the version, in a project of its own that holds nothing else."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src" / "lockstep", tmp_path / "src" / "lockstep", ignore=shutil.ignore_patterns("__py*"))
    return tmp_path


def python(root: Path, *words: str) -> str:
    """What Python prints at last, with the source of this project on its path and no other."""
    environment = {"PYTHONPATH": str(root / "src"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def versions(root: Path) -> dict[str, str]:
    """The version by who says it."""
    pytest.importorskip("setuptools", minversion="77")
    built = root / "built"
    built.mkdir()
    metadata = (built / python(root, "-c", METADATA, str(built)) / "METADATA").read_text()
    release = RELEASE.search((root / "CHANGELOG.md").read_text())
    return {
        "lockstep --version": python(root, "-m", "lockstep", "--version").removeprefix("lockstep "),
        "CITATION.cff": yaml.safe_load((root / "CITATION.cff").read_text())["version"],
        "CHANGELOG.md": release[1] if release else "none",
        "package": next(
            line.removeprefix("Version: ") for line in metadata.splitlines() if line.startswith("Version: ")
        ),
    }


def test_one_version_is_said_everywhere(copied):
    assert set(versions(copied).values()) == {__version__}


@pytest.mark.parametrize(
    ("file", "old", "new", "said_by"),
    [
        ("src/lockstep/__init__.py", '__version__ = "', '__version__ = "9', {"lockstep --version", "package"}),
        ("CITATION.cff", "\nversion: ", "\nversion: 9", {"CITATION.cff"}),
        ("CHANGELOG.md", "## [Unreleased]", "## [9.0.0] - 2030-01-01", {"CHANGELOG.md"}),
    ],
)
def test_a_version_that_is_changed_in_one_place_is_found(copied, file, old, new, said_by):
    text = (copied / file).read_text()
    assert text.count(old) == 1
    (copied / file).write_text(text.replace(old, new))
    assert {name for name, version in versions(copied).items() if version != __version__} == said_by


def test_the_release_has_one_date():
    released = RELEASE.search((ROOT / "CHANGELOG.md").read_text())
    assert released is not None
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["date-released"] == released[2]


def test_the_licence_is_apaches_to_the_letter():
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])


@pytest.mark.parametrize("form", [form for form in FORMS if form.name != "config.yml"], ids=lambda form: form.stem)
def test_issue_forms_have_what_they_need(form):
    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(content)
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)


def missing_words(workflow: dict[Any, Any], root: Path = ROOT) -> list[str]:
    """Targets of ``make``, files, folders and extras that a workflow names and that there aren't."""
    targets = set(re.findall(r"^([\w-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    extras = set(tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    lines = [*map(str, workflow.get("env", {}).values())]
    lines += [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    out = []
    for line in "\n".join(lines).splitlines():
        words = shlex.split(line)
        out += [word for word in words[1:] if words[0] == "make" and "=" not in word and word not in targets]
        out += [word for word in words if word.startswith("tests/") and not (root / word).exists()]
        asked = re.findall(r"\.\[([\w,-]+)\]", line)
        out += [extra for each in asked for extra in each.split(",") if extra not in extras]
    return out


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_there_is(path):
    workflow = yaml.safe_load(path.read_text())
    assert all(job["runs-on"] and job["timeout-minutes"] for job in workflow["jobs"].values())
    uses = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", name) for name in uses)
    assert missing_words(workflow) == []


def test_a_workflow_that_runs_what_there_is_not_is_found():
    steps = [{"run": "make test\nmake dinner PYTHON=python"}, {"run": "pip install -e '.[torch,teapot]'"}]
    workflow = {"env": {"WHERE": "tests/core tests/nowhere"}, "jobs": {"all": {"steps": steps}}}
    assert missing_words(workflow) == ["tests/nowhere", "dinner", "teapot"]


def test_hooks_run_the_linters_of_the_tests():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    ruff = next(repository for repository in hooks if repository["repo"].endswith("ruff-pre-commit"))
    assert f"ruff=={ruff['rev'].removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text()
    lint = (ROOT / "Makefile").read_text()
    ids = {hook["id"] for repository in hooks for hook in repository["hooks"]}
    assert ids == {"ruff-check", "ruff-format", "lint-imports", "pyright"}
    assert all(name.partition("-")[0] in lint for name in ids)


PYTHON_STUB = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && ln -s "$PWD/python" "$3/bin/python" && {venv} ;;
    "-m ensurepip") touch .venv/bin/pip ;;
    -c*) exec {python} -c "import sys; sys.version_info = ({version}, 0); $2" ;;
esac
"""


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Calls ``make`` in a folder of its own, with a Python that only does what making an environment asks of it."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    shutil.copy(ROOT / "Makefile", tmp_path)
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}

    def call(goal: str, version: str = "3, 11", venv: str = 'touch "$3/bin/pip"') -> subprocess.CompletedProcess[str]:
        stub = tmp_path / "python"
        stub.write_text(PYTHON_STUB.format(python=shlex.quote(sys.executable), version=version, venv=venv))
        stub.chmod(0o755)
        words = ["make", goal, "PYTHON=./python"]
        return subprocess.run(words, cwd=tmp_path, env=surroundings, capture_output=True, text=True, timeout=60)

    return call


@pytest.mark.parametrize("goal", ["train", "test", "test-all", "lint", "bench", "docs"])
def test_a_python_that_is_too_old_is_refused_before_anything_is_made(make, tmp_path, goal):
    made = make(goal, version="3, 10")
    line = f"Lockstep needs Python 3.11 or newer, and ./python is 3.10: make {goal} PYTHON=python3.12\n"
    assert (made.returncode, made.stderr.partition("make: ")[0]) == (2, line)
    assert not (tmp_path / ".venv").exists()


def test_an_environment_that_is_half_made_is_removed_and_made_anew(make, tmp_path):
    assert make(".venv/bin/pip", venv="exit 1").returncode == 2  # as without Debian's python3-venv
    assert not (tmp_path / ".venv").exists()
    assert make(".venv/bin/pip").returncode == 0
    assert (tmp_path / ".venv" / "bin" / "pip").exists()


def test_an_environment_without_pip_gets_it_and_keeps_what_it_has(make, tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(tmp_path / "python")
    assert make(".venv/bin/pip", venv="exit 1").returncode == 0
    assert [path.name for path in sorted((tmp_path / ".venv" / "bin").iterdir())] == ["pip", "python"]


def normalized(name: str) -> str:
    """A package's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def unconstrained(project: Mapping[str, Any], constraints: str) -> list[str]:
    """Packages that the project or one of its extras asks for, and that no line of the constraints pins."""
    asked = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    names = {normalized(re.split(r"[^\w.-]", line)[0]) for line in asked} - {project["name"]}
    return sorted(names - {normalized(line.partition("==")[0]) for line in constraints.splitlines() if "==" in line})


def test_every_extra_is_constrained_to_the_versions_of_the_tests():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert unconstrained(project, (ROOT / "constraints.txt").read_text()) == []


def test_an_extra_that_is_not_constrained_is_found():
    extras = {"net": ["torch>=2.10", "Tea_Pot[milk]>=1"], "all": ["us[net]", "cup; sys_platform == 'linux'"]}
    project = {"name": "us", "dependencies": ["numpy>=2.0"], "optional-dependencies": extras}
    assert unconstrained(project, "# torch==1\nnumpy==2.4\ntorch==2.13\n") == ["cup", "tea-pot"]


def missing_files(page: str) -> list[str]:
    """What a page names between backticks as a file or folder, of the repository or of the source, and isn't there."""
    named = set(re.findall(r"`([\w./-]+(?:\.(?:py|md|yml|toml|txt|json)|/))`", page))
    roots = (ROOT, ROOT / "src" / "lockstep", ROOT / "src" / "lockstep" / "envs" / "arrays")
    engines = [ROOT / "src" / "lockstep" / f"{engine}_engine" for engine in ("torch", "jax")]
    return sorted(name for name in named if not any((root / name).exists() for root in (*roots, *engines)))


def test_the_recipes_name_files_that_there_are():
    placeholders = ["docs/NAME.md", "envs/arrays/NAME.py", "runs/trackers/NAME.py", "tests/envs/test_NAME.py"]
    assert missing_files((ROOT / "CONTRIBUTING.md").read_text()) == placeholders


def test_a_recipe_that_names_a_file_that_is_gone_is_found():
    assert missing_files("`config/presets/by_id.py`, `config/magic.py` and `tests/nowhere/`") == [
        "config/magic.py",
        "tests/nowhere/",
    ]


def test_no_two_test_files_have_one_name():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))  # pytest imports them by name


ROOMS = (ROOT, ROOT / "src", ROOT / "tests", ROOT / "tests" / "modules", ROOT / "tests" / "golden")
FRAMEWORKS = {"torch": "torch", "jax": "jax", "equinox": "jax", "optax": "jax", "fsspec": "fsspec"}
"""Optional packages that a test file may import at its top, each with the name under which ``NEEDS`` has it."""


def imported(statements: list[ast.stmt]) -> Iterator[str]:
    """Names of the modules, and of what is taken from them, that statements import when they are run."""
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, (ast.If, ast.Try, ast.With)) and "TYPE_CHECKING" not in ast.unparse(node):
            yield from imported(node.body)


def sources(name: str) -> list[Path]:
    """The files of this repository that run when a module is imported: its own, and those of the packages above it."""
    parts = name.split(".")
    stems = [room.joinpath(*parts[:count]) for count in range(1, len(parts) + 1) for room in ROOMS]
    files = [file for stem in stems for file in (stem.with_suffix(".py"), stem / "__init__.py")]
    return [file for file in files if file.is_file()]


@cache
def names_in(file: Path) -> tuple[frozenset[str], frozenset[Path]]:
    """The frameworks that a file imports itself, and the files of this repository that it imports."""
    names = set(imported(ast.parse(file.read_text()).body))
    found = {framework for package, framework in FRAMEWORKS.items() for n in names if n.partition(".")[0] == package}
    return frozenset(found), frozenset(source for name in names for source in sources(name))


def loads(path: Path) -> frozenset[str]:
    """The frameworks that are loaded when a file is imported, by it or by what it imports of this repository."""
    found, seen, left = set(), set(), {path}
    while left:
        seen |= left
        frameworks, files = zip(*map(names_in, left), strict=True)
        found |= frozenset().union(*frameworks)
        left = frozenset().union(*files) - seen
    return frozenset(found)


def unlisted(tests: Path, needs: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """By test file the frameworks that it loads at its top, and without which neither it nor its folder is skipped."""
    out = {}
    for path in sorted(tests.rglob("test_*.py")):
        name = path.relative_to(tests)
        said = {each for above in (name, *name.parents) for each in needs.get(above.as_posix(), ())}
        if lacking := loads(path) - said:
            out[name.as_posix()] = sorted(lacking)
    return out


def test_test_files_that_import_a_framework_are_skipped_without_it():
    assert unlisted(ROOT / "tests", NEEDS) == {}
    assert [name for name in NEEDS if not (ROOT / "tests" / name).exists()] == []


def test_a_test_file_that_imports_a_framework_and_is_in_no_list_is_found(tmp_path):
    for name, line in {
        "core/test_a.py": "import torch",
        "core/test_b.py": "from lockstep.torch_engine.state import TrainState",
        "core/test_c.py": "try:\n    from jax import numpy\nexcept ImportError:\n    pass",
        "core/test_d.py": "def test_late():\n    import torch",
        "core/test_e.py": "from benchmarks import convolutions",
        "jax/nets/test_f.py": "import optax\nimport torch",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(line)
    assert unlisted(tmp_path, {"jax": ("jax",), "core/test_a.py": ("torch",)}) == {
        "core/test_b.py": ["torch"],
        "core/test_c.py": ["jax"],
        "core/test_e.py": ["jax"],
        "jax/nets/test_f.py": ["torch"],
    }


def test_a_folder_of_tests_is_not_taken_for_a_package_that_is_missing(monkeypatch):
    assert importlib.import_module("scaling").__file__ is None  # tests/scaling
    monkeypatch.delitem(sys.modules, "scaling")
    monkeypatch.setattr(sys, "meta_path", [Missing("scaling"), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'scaling'$"):
        importlib.import_module("scaling")
    assert not installed("scaling")
    assert "scaling" not in sys.modules

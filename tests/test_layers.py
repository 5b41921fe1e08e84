"""The import contracts of ``pyproject.toml``: the source keeps them, and what they forbid fails them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAND_ON_A_FRAMEWORK = {"torch_engine", "jax_engine", "jax", "integrations"}


def lint(root: Path, *contracts: str) -> tuple[int, str]:
    """Exit status and words of import-linter over the package in ``root/src``."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    command += [word for contract in contracts for word in ("--contract", contract)]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, re.sub(r"\s+", " ", done.stdout + done.stderr)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The source and its contracts, to be spoilt."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_source_keeps_its_contracts() -> None:
    code, said = lint(ROOT)
    assert code == 0, said


@pytest.mark.parametrize(
    ("contract", "file", "line", "said"),
    [
        ("layers", "core/new.py", "from lockstep.runs import directory", "core.new -> lockstep.runs.directory"),
        ("layers", "envs/new.py", "from lockstep.policies import policy", "envs.new -> lockstep.policies.policy"),
        ("layers", "launch/new.py", "from lockstep import cli", "launch.new -> lockstep.cli"),
        ("circles", "envs/arrays/new.py", "from lockstep.envs import registry", ".arrays -> .registry"),
        ("circles", "doctor/watch/new.py", "from lockstep.doctor.judge import report", ".watch -> .judge"),
        ("frameworks", "core/new.py", "import torch", "core.new -> torch"),
        ("frameworks", "runs/trackers/new.py", "def late(): import jax", "runs.trackers.new -> jax"),
        ("frameworks", "doctor/watch/new.py", "import torch", "doctor.watch.new -> torch"),
        ("frameworks", "doctor/new.py", "import jax", "doctor.new -> jax"),
        ("frameworks", "commands/new.py", "from lockstep.torch_engine import train", "commands.new -> lockstep.torch_"),
    ],
)
def test_a_new_file_fails_what_it_breaks(copy: Path, contract: str, file: str, line: str, said: str) -> None:
    before = lint(copy, contract)[1]
    (copy / "src" / "lockstep" / file).write_text(f'"""New."""\n\n{line}\n')
    code, after = lint(copy, contract)
    assert code == 1
    assert said in after
    assert said not in before


def listed(contract: str) -> set[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (names,) = (each["source_modules"] for each in contracts if each.get("id") == contract)
    return {name.removeprefix("lockstep.") for name in names}


def test_every_package_is_free_of_frameworks_or_stands_on_one_and_none_needs_ray() -> None:
    there = {path.stem for path in (ROOT / "src" / "lockstep").iterdir() if path.suffix == ".py" or path.is_dir()}
    there -= {"__init__", "__pycache__"}
    assert listed("frameworks") == there - STAND_ON_A_FRAMEWORK
    assert listed("ray") == there

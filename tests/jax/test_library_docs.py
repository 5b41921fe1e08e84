"""The page of the library, ``docs/jax.md``: its examples run, in a process that JAX has not started in."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from quick_compiler import OLDER_LOOPS, OPTIMIZED, has_older_loops

import lockstep.jax

ROOT = Path(__file__).parents[2]


def run_pytest(*arguments: str) -> str:
    """Run pytest in a fresh process; its output if every test passed."""
    flags = OLDER_LOOPS if has_older_loops() and not OPTIMIZED else ""
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def test_a_check_that_fails_is_noticed(tmp_path):
    (tmp_path / "failing.py").write_text("def test_it():\n    assert 1 + 1 == 3\n")
    with pytest.raises(AssertionError, match="1 failed"):
        run_pytest(str(tmp_path / "failing.py"))


def test_the_examples_of_the_docs():
    assert "1 passed" in run_pytest("--doctest-glob=*.md", "docs/jax.md")


def test_every_public_function_has_an_example():
    page = (ROOT / "docs" / "jax.md").read_text()
    more = page + (ROOT / "docs" / "environments.md").read_text()
    functions = [name for name in dir(lockstep.jax) if name.islower()]
    assert [name for name in functions if f"ljax.{name}(" not in page] == []
    assert [name for name in dir(lockstep.jax) if not re.search(rf"\b{name}\b", more)] == []


def test_all_public_names_are_imported_at_once():
    names: dict[str, object] = {}
    exec("from lockstep.jax import *", names)
    assert sorted(names.keys() - {"__builtins__"}) == dir(lockstep.jax) == sorted(lockstep.jax.__all__)


def test_importing_it_starts_no_framework():
    code = "import sys, lockstep.jax as j; assert not {'jax', 'torch'} & set(sys.modules); j.make_mesh; import jax"
    code += "; assert 'jax' in sys.modules and j.make_mesh is j.make_mesh"
    code += "; assert not hasattr(j, 'no_such_name')"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")})

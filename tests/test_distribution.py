"""A wheel that was built from the sdist has all it needs, and its command runs without an engine."""

import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from lockstep import __version__

pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"

pytestmark = pytest.mark.long


def run(*words: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(list(map(str, words)), cwd=cwd, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def files_of_the_project() -> list[str]:
    """The files that git knows or would add."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout.split("\0")
    return [name for name in listed if (ROOT / name).is_file()]


def copy_of_the_project(folder: Path) -> Path:
    """Its files elsewhere; builds leave their traces there and not in the working tree."""
    for name in files_of_the_project():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from what the sdist unpacks to."""
    if not (ROOT / ".git").exists():
        pytest.skip("which files belong to the project is git's to say")
    work = tmp_path_factory.mktemp("distribution")
    project = copy_of_the_project(work / "project")
    sdist = work / run(sys.executable, "-c", BUILD, "sdist", work, cwd=project).stdout.splitlines()[-1]
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    return work / run(sys.executable, "-c", BUILD, "wheel", work, cwd=unpacked).stdout.splitlines()[-1]


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {name.removeprefix("src/") for name in files_of_the_project() if name.startswith("src/lockstep/")}
    assert {"lockstep/py.typed", "lockstep/jax_engine/distributed/shared_memory.c"} <= names


def test_the_wheel_says_what_it_is(wheel):
    archive = zipfile.ZipFile(wheel)
    information = f"lockstep_rl-{__version__}.dist-info"
    said = Parser().parsestr(archive.read(f"{information}/METADATA").decode())
    assert (said["Name"], said["Version"], said["License-Expression"]) == ("lockstep-rl", __version__, "Apache-2.0")
    assert {line.partition(",")[0] for line in said.get_all("Project-URL", [])} >= {"Homepage", "Changelog", "Issues"}
    assert archive.read(f"{information}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "lockstep = lockstep.cli:command" in archive.read(f"{information}/entry_points.txt").decode()


def test_the_installed_command_runs_without_an_engine(wheel, tmp_path):
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    run(home / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    command = home / "bin" / "lockstep"
    assert run(command, "--version", cwd=tmp_path).stdout == f"lockstep {__version__}\n"
    assert "lockstep train CartPole-v1" in run(command, "--help", cwd=tmp_path).stdout

"""The peers' own virtual environment: made when it is first needed, with pinned versions."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = HERE / "peers"
VENV = HERE / ".venv-peers"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = ("requirements.txt", "requirements-jax.txt", "requirements-rejax.txt", "requirements-envpool.txt")


def prepare() -> list[str]:
    """Make the environment what the requirements say; returns what went wrong, one line for each file that failed.

    A peer that can't be installed fails when it is run; the others are not its hostages.
    """
    if not PYTHON.exists():
        print(f"making {VENV} for the peers", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    problems = []
    for name in REQUIREMENTS:
        stamp, digest = VENV / f"{name}.sha256", hashlib.sha256((PEERS / name).read_bytes()).hexdigest()
        if stamp.exists() and stamp.read_text() == digest:
            continue
        print(f"installing benchmarks/peers/{name}", flush=True)
        pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-r", str(PEERS / name)]
        result = subprocess.run(pip, capture_output=True, text=True)
        if result.returncode == 0:
            stamp.write_text(digest)
            continue
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        problems.append(f"{name} can't be installed: {errors[-1]}")
    return problems


def versions(python: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """Installed versions of distributions in some environment, by name; those that are missing are left out."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "out = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: out[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(out))"
    )
    result = subprocess.run([str(python), "-c", code, *packages], capture_output=True, text=True)
    return json.loads(result.stdout) if result.returncode == 0 else {}

"""Asks an engine what an iteration costs, in a separate process, because compilers print a lot and may crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from lockstep.config.engines import engine_module
from lockstep.config.run import Config
from lockstep.core.errors import RunError, one_line
from lockstep.core.topology import without_launcher
from lockstep.training.costs import Costs

TIMEOUT = 1800.0
LIBTPU = Path(sys.prefix) / "libtpu"
"""XLA's compiler for TPUs may be installed here, off the path: wherever JAX finds it, it looks for TPUs."""
REFUSED = 2


def can_compile(engine: str, platform: str) -> bool:
    """Returns whether an engine's compiler for a platform is installed."""
    beside = engine == "jax" and platform == "tpu" and LIBTPU.is_dir()
    return engine_module(engine).can_compile(platform) or beside


def count_costs(configs: Mapping[int, Config], platform: str, shape: str | None) -> Costs:
    """Returns the costs of an iteration on the first of the most devices, as counted by the engine.

    ``configs`` are those of one run, resolved for each number of devices.

    Raises:
        ValueError: one line, if the engine can't count this config.
        RunError: its process failed in another way, or took half an hour.
    """
    config = configs[max(configs)]
    question = json.dumps([{n: x.model_dump(mode="json") for n, x in configs.items()}, platform, shape])
    words = [sys.executable, "-P", "-c", f"from {__name__} import answer; answer()"]
    surroundings = without_launcher()
    if platform == "tpu" and LIBTPU.is_dir():
        surroundings["PYTHONPATH"] = os.pathsep.join(filter(None, [str(LIBTPU), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            words, input=question, capture_output=True, text=True, timeout=TIMEOUT, env=surroundings, check=False
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"counting what {config.env.id} costs on {platform} took more than {TIMEOUT:.0f} s") from None
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return Costs.of_json(json.loads(lines[-1]))
    if done.returncode == REFUSED and lines:
        raise ValueError(json.loads(lines[-1]))
    said = [x for x in done.stderr.splitlines() if x.strip()]
    raise RunError(f"counting what {config.env.id} costs on {platform} failed: {said[-1] if said else done.returncode}")


def answer() -> None:
    """Reads a question from standard input and prints the costs as JSON; runs in the separate process."""
    sys.path.insert(0, str(Path.cwd()))  # as the lockstep command does, for the user's environments
    fields, platform, shape = json.loads(sys.stdin.read())
    configs = {int(devices): Config.model_validate(values) for devices, values in fields.items()}
    engine = engine_module(configs[max(configs)].engine)
    try:
        engine.start_compiler(platform if shape is not None else "cpu")
        found = engine.costs(configs, platform, shape)
    except ValueError as error:
        print(json.dumps(one_line(error)))
        sys.exit(REFUSED)
    print(json.dumps(found.to_json()))

"""Run directories that were never trained, written by hand: what their files say is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.checks import resolve
from lockstep.config.presets import preset_for
from lockstep.config.run import Config
from lockstep.policies.results import write_json

PARAMS, STATE = "a1" * 32, "b2" * 32
ROWS = 40
MP4 = b"\x00\x00\x00\x20ftypisom"


def config_of(env_id: str = "CartPole-v1", **settings: Any) -> dict[str, Any]:
    """A resolved config, as ``config.json`` has it."""
    config = resolve(Config.model_validate(preset_for(env_id) | settings))
    return config.model_dump(mode="json")


def rows_of(scale: float = 1.0, evaluated: int = 10) -> list[dict[str, Any]]:
    """Rows of ``metrics.jsonl``; every so many have an evaluation."""
    rows = []
    for n in range(1, ROWS + 1):
        row: dict[str, Any] = {"iteration": n, "global_step": 256 * n, "rollout/episode_return_mean": scale * n}
        row |= {"train/entropy": 0.7 - 0.01 * n, "train/value_loss": 1.0 / n, "my/metric": 2.0 * n}
        if evaluated and n % evaluated == 0:
            facts = {"episodes": 8, "return_mean": 2.0 * scale * n, "return_std": 1.5, "return_min": 1.0}
            row |= {f"eval/{name}": value for name, value in (facts | {"return_max": 90.0}).items()}
        row |= {"time/t_rollout": 0.2, "time/t_learn": 0.5, "time/t_comm": 0.1, "time/t_wait": 0.05}
        row |= {"time/t_other": 0.15, "time/t_iter": 1.0, "time/world_size": 1 if n <= 10 else 2}
        rows.append(row)
    return rows


def summary_of(**more: Any) -> dict[str, Any]:
    """What ``summary.json`` holds."""
    return {
        "status": "finished",
        "started": "2026-01-31T12:00:00+00:00",
        "command": ["lockstep", "train", "CartPole-v1", "--nproc", "2"],
        "commit": "0123456789abcdef-dirty",
        "global_step": 256 * ROWS,
        "final_return": 40.5,
        "best_evaluation": {"step": 10240, "return_mean": 80.0},
        "params_sha256": PARAMS,
        "state_sha256": STATE,
        "wall_time": 3725.0,
        "steps_per_second": 1234.5,
        "num_shards": 8,
        "reduction": "exact",
        "restarted_environments": [],
        "missing_rows": [],
        "restarts": [],
        "engine": "torch",
        "world_size": 2,
        "cpu": "Some Processor (family 1)",
        "torch": "2.13.0+cpu",
    } | more


def make_run(path: Path, summary: dict[str, Any] | None = None, scale: float = 1.0, **settings: Any) -> Path:
    """Writes a run directory."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config_of(**settings)))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(scale)))
    (path / "summary.json").write_text(json.dumps(summary_of() if summary is None else summary))
    return path


def make_group(path: Path, seeds: int = 3) -> Path:
    """Writes the directory of a run of several seeds."""
    make_run(path, summary_of(final_return=60.0, final_return_interval=[20.0, 100.0], seeds=[]))
    (path / "metrics.jsonl").unlink()
    for seed in range(seeds):
        make_run(path / f"seed_{seed}", summary_of(params_sha256=f"{seed}f" * 32), scale=1.0 + seed, seed=seed)
    return path


def add_evaluation(run: Path, returns: list[float]) -> None:
    """Leaves beside a run what ``lockstep eval --json`` writes."""
    table = np.full((len(returns), 4), np.nan)
    table[:, 0], table[:, 1], table[:, 2] = returns, 7, 0
    facts = {"episodes": len(returns), "return_mean": float(np.mean(returns)), "length_mean": 7.0}
    write_json(
        run / "evaluation.json", facts | {"environment": "CartPole-v1", "stochastic": True, "global_step": 512}, table
    )


def add_timing(run: Path) -> None:
    """Leaves each rank's times."""
    row = {"t_rollout": [0.1, 0.3], "t_learn": [0.5, 0.5], "t_iter": [1.0, 1.2], "bytes": [1000, 2000]}
    rows = [{"iteration": n, **row, "peak_memory_mb": [100.0 + n, 200.0]} for n in (1, 2, 3)]
    (run / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def add_video(run: Path, step: int, size: int = 64) -> None:
    """Leaves bytes that begin as an mp4 file does."""
    (run / "videos").mkdir(exist_ok=True)
    (run / "videos" / f"step_{step}.mp4").write_bytes(MP4 + bytes(size))


def add_verification(run: Path, **more: Any) -> None:
    """Leaves what ``lockstep verify`` keeps."""
    rows = [{"label": str(n), "equal": True, "tensors": 37, "difference": ""} for n in (1, 2, 4)]
    said = {"verified": "2026-02-01T08:00:00+00:00", "equal": True, "iterations": 5, "world_sizes": rows}
    said |= {"machine": {"torch": "2.13.0+cpu"}, "config": json.loads((run / "config.json").read_text())} | more
    (run / "verify.json").write_text(json.dumps(said))

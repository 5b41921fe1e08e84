"""Records episodes, what a policy saw and did, as .npz or .safetensors; neither format can hold code."""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from lockstep.core.errors import one_line
from lockstep.core.files import check_suffix, check_writable, draft_of
from lockstep.envs.describe import describe
from lockstep.policies.baselines import Actor
from lockstep.policies.evaluation import play_batch, start_of

SUFFIXES = (".npz", ".safetensors")
ARRAYS = ("observations", "actions", "episodes", "table")
FACTS = "facts"
TOLD = ("policy", "config", "environment")
"""Facts that are required when a recording is read."""
FORMAT = 1
BATCH = 64
"""Episodes that are recorded at the same time."""


@dataclass(frozen=True)
class Recording:
    """Recorded episodes, one after the other.

    Attributes:
        observations: rows ``[steps, width]`` (:class:`lockstep.core.spaces.ObservationLayout`), not normalised.
        actions: the action after each observation, rows ``[steps, …]`` as in :class:`lockstep.envs.host_envs.Buffers`.
        episodes: the episode of each step, int64 ``[steps]``, ascending from 0.
        table: each episode's return, length, success and score, float64 ``[episodes, 4]``.
        facts: JSON: ``config`` of the environment and its policy, ``environment`` (spaces), ``policy`` (its name).
    """

    observations: np.ndarray
    actions: np.ndarray
    episodes: np.ndarray
    table: np.ndarray
    facts: dict[str, Any]


class Recorder:
    """Wraps an actor and keeps what it sees and does; see :class:`lockstep.policies.baselines.Actor`."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.config, self.global_step = actor.config, actor.global_step
        self.observation, self.action = actor.observation, actor.action
        self.seen: list[np.ndarray] = []
        self.done: list[np.ndarray] = []

    def reset(self, seed: int | None = None) -> None:
        """Begins episodes, and drops what was kept."""
        self._actor.reset(seed)
        self.seen, self.done = [], []

    def forget(self, rows: np.ndarray) -> None:
        """See :meth:`Actor.forget`."""
        self._actor.forget(rows)

    def native(self, observations: np.ndarray, deterministic: bool = True) -> np.ndarray:
        """See :meth:`Actor.native`."""
        actions = self._actor.native(observations, deterministic)
        self.seen.append(observations.copy())
        self.done.append(np.array(actions, self.action.row_dtype))
        return actions


def record(actor: Actor, name: str, episodes: int, seed: int | None = None, deterministic: bool = True) -> Recording:
    """Plays whole episodes with an evaluation's starts (seed None: the actor's own); returns what was seen and done."""
    recorder, start = Recorder(actor), start_of(actor, seed)
    recorder.reset(start)
    tables, seen, done = [], [], []
    for first in range(0, episodes, BATCH):
        table = play_batch(recorder, start, range(first, min(first + BATCH, episodes)), deterministic)
        for row, length in enumerate(table[:, 1].astype(int).tolist()):
            seen.append(np.stack([rows[row] for rows in recorder.seen[:length]]))
            done.append(np.stack([rows[row] for rows in recorder.done[:length]]))
        tables.append(table)
    whole = np.concatenate(tables)
    config = actor.config
    return Recording(
        observations=np.concatenate(seen),
        actions=np.concatenate(done),
        episodes=np.repeat(np.arange(episodes), whole[:, 1].astype(int)),
        table=whole,
        facts={
            "policy": name,
            "config": config.model_dump(mode="json"),
            "environment": asdict(describe(config.env, trains=False)),
            "seed": start,
            "stochastic": not deterministic,
        },
    )


def check_place(path: Path) -> None:
    """Raises a one-line ``ValueError`` if a file has a wrong suffix, can't be made, or would replace another kind."""
    check_suffix(path, SUFFIXES, "recording")
    if path.exists() and not (path.is_file() and (not path.stat().st_size or _is_recording(path))):
        raise ValueError(f"recording: {path} is there and no recording, and would be lost; name another file")
    check_writable(path, "out")


def _is_recording(path: Path) -> bool:
    try:
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as file:
                return {f"{name}.npy" for name in (*ARRAYS, FACTS)} <= set(file.namelist())
        with safe_open(path, framework="numpy") as file:
            return FACTS in (file.metadata() or {}) and set(ARRAYS) <= set(file.keys())
    except Exception:  # see read_recording
        return False


def write_recording(path: Path, recording: Recording) -> None:
    """Writes a recording in the format of its file's suffix, whole or not at all."""
    check_suffix(path, SUFFIXES, "recording")
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.ascontiguousarray(getattr(recording, name)) for name in ARRAYS}
    facts = json.dumps({"format": FORMAT, **recording.facts})
    with draft_of(path.resolve()) as draft:
        if path.suffix == ".npz":
            np.savez_compressed(draft, allow_pickle=False, **arrays, facts=np.array(facts))
        else:
            draft.write_bytes(save(arrays, {FACTS: facts}))  # save_file doesn't raise an OSError if the disk is full


def read_recording(path: Path) -> Recording:
    """Reads what :func:`write_recording` wrote.

    Raises:
        ValueError: there is no such file, or it isn't a recording; one line.
    """
    check_suffix(path, SUFFIXES, "recording")
    if not path.is_file():
        raise ValueError(f"recording: there is no file {path}; lockstep record RUN --out {path} makes one")
    try:
        arrays, facts = _read(path)
        found = json.loads(facts)
        if found.pop("format") != FORMAT or len(arrays["observations"]) != len(arrays["actions"]):
            raise ValueError("another format")
        if lacks := [name for name in TOLD if name not in found]:
            raise ValueError(f"its {FACTS} lack {lacks[0]}")
        return Recording(**arrays, facts=found)
    except Exception as error:  # damage shows as an error of zip, zlib, NumPy, JSON or memory
        raise ValueError(f"recording: {path} is none: {one_line(error)}") from None


def _read(path: Path) -> tuple[dict[str, np.ndarray], str]:
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as file:  # no member may be a pickle
            return {name: _member(file, name) for name in ARRAYS}, str(_member(file, FACTS))
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in ARRAYS}, file.metadata()[FACTS]


def _member(file: zipfile.ZipFile, name: str) -> np.ndarray:
    with file.open(f"{name}.npy") as content:
        return np.lib.format.read_array(content, allow_pickle=False)

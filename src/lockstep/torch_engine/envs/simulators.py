"""Drives simulators with Isaac Lab's and ManiSkill's interface: spaces as rows, global generators kept apart."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import EnvConfig
from lockstep.core.errors import EnvironmentFailureError, RunError, memory_full, one_line
from lockstep.core.life import life
from lockstep.core.spaces import ActionLayout, Leaf, ObservationLayout
from lockstep.envs.gymnasium.keyed import environment_failure
from lockstep.envs.gymnasium.step_info import SUCCESS_KEYS
from lockstep.envs.gymnasium.wrappers import HOOKS
from lockstep.envs.restore.snapshot import check_savable, named
from lockstep.envs.tensor import TensorEnvironment, load_factory
from lockstep.torch_engine.setup.accelerator import generator_state, set_generator_state

FINAL = ("final_observation", "final_obs")


def encode(layout: ObservationLayout, observation: Any, count: int) -> Tensor:
    """Converts an observation of tensors to rows ``[count, width]``, the same as :meth:`ObservationLayout.encode`.

    Raises:
        ValueError: if a part is no tensor, its size isn't what its space says, or an image has another shape, or pixels
            of floats.
    """
    floats, images = [], []
    for leaf in layout.leaves:
        values = observation
        for key in leaf.name.split("/") if leaf.name else ():
            values = values[key] if isinstance(values, Mapping) else values[int(key)]
        _check(leaf, values, count)
        rows = values.reshape(count, -1)
        if leaf.kind == "image":
            images.append(rows.to(torch.uint8))
        else:
            first = torch.tensor(leaf.first, device=rows.device) if any(leaf.first) else 0
            floats.append((rows - first).float() if any(leaf.first) else rows.float())
    joined = torch.cat(floats, 1) if floats else torch.zeros((count, 0), device=images[0].device)
    if not images:
        return joined
    pixels = torch.cat([joined.contiguous().view(torch.uint8), *images], 1)
    return torch.nn.functional.pad(pixels, (0, layout.width - pixels.shape[1]))


def _check(leaf: Leaf, values: Any, count: int) -> None:
    """Checks what the host knows of a part of ``count`` observations: that it is a tensor, its shape, an image's dtype.

    An image's axes of length 1 are left out, because they say nothing of the order.
    """
    what = f" part {leaf.name!r}" if leaf.name else ""
    if not isinstance(values, Tensor):
        advice = "wrap the simulator so that it returns torch.from_numpy(…), or train it by a Gymnasium id"
        raise ValueError(f"observation{what} must be a tensor, and is {type(values).__name__}; {advice}")
    given, wanted, image = tuple(values.shape), (count, *leaf.shape), leaf.kind == "image"
    fits = _long_axes(given[1:]) == _long_axes(wanted[1:]) if image else values.numel() == count * leaf.size
    if given[:1] != wanted[:1] or not fits:
        raise ValueError(f"observation{what} of shape {given}, its space says {wanted}")
    if image and (values.is_floating_point() or values.dtype == torch.bool):
        raise ValueError(f"observation{what} of dtype {str(values.dtype).removeprefix('torch.')}, its space says uint8")


def _long_axes(shape: tuple[int, ...]) -> list[int]:
    return [length for length in shape if length != 1]


class Step(NamedTuple):
    """Holds what a step gave, tensors on the device.

    Attributes:
        observation: rows ``[E, width]``; where an episode ended, those of the next one.
        reward: ``[E]``; ``terminated``, ``truncated`` bool ``[E]``.
        final: last observations of ended episodes, rows ``[E, width]``.
        success: whether each task is solved, bool ``[E]``, or int8 as ``successes``; None: nothing is said.
        final_missing: where ``final`` is the observation before the step, int8 ``[E]``; None: nowhere.
    """

    observation: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final: Tensor
    success: Tensor | None
    final_missing: Tensor | None = None

    @property
    def successes(self) -> Tensor | None:
        """The successes as in :class:`lockstep.envs.host_envs.Buffers`, int8 ``[E]``."""
        if self.success is None or self.success.dtype == torch.int8:
            return self.success
        return 2 * self.success.to(torch.int8) - 1


def joined(parts: Sequence[Step], observation: Tensor) -> Step:
    """Joins the steps of groups of environments; ``observation`` has all rows. Some may say nothing of success."""
    if len(parts) == 1:
        return parts[0]._replace(observation=observation)
    success, final_missing = (
        _joined(parts, marks) for marks in ([x.successes for x in parts], [x.final_missing for x in parts])
    )
    reward, terminated, truncated, final = (torch.cat(x) for x in zip(*(part[1:5] for part in parts), strict=True))
    return Step(observation, reward, terminated, truncated, final, success, final_missing)


def _joined(parts: Sequence[Step], marks: Sequence[Tensor | None]) -> Tensor | None:
    """Joins the groups' marks, int8, with zeros for groups that have none; returns None if no group has any."""
    if all(mark is None for mark in marks):
        return None
    none = (torch.zeros_like(part.terminated, dtype=torch.int8) for part in parts)
    return torch.cat([zeros if mark is None else mark for mark, zeros in zip(marks, none, strict=True)])


class NativeActions:
    """Maps rows of actions to what a batched environment takes ``[E, …]``, on the device."""

    def __init__(self, action: ActionLayout, device: torch.device) -> None:
        self._action = action
        self._low, self._high = (torch.tensor(x, dtype=torch.float32, device=device) for x in (action.low, action.high))
        self._first = torch.tensor(action.first, dtype=torch.int64, device=device)

    def __call__(self, rows: Tensor) -> Tensor:
        """Maps rows ``[E, …]``; continuous ones are clipped to their bounds."""
        if self._action.kind == "discrete":
            return rows + self._action.first[0]
        if self._action.kind == "multi_discrete":
            return (rows + self._first).reshape(len(rows), *self._action.shape)
        return torch.clamp(rows, self._low, self._high).reshape(len(rows), *self._action.shape)


class GlobalGenerators:
    """Keeps a stream of the global generators (PyTorch's, NumPy's, Python's) for one simulator, wherever it draws."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        saved = self._now()
        torch.manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)
        self._own = self._now()
        self._set(saved)

    def _now(self) -> tuple[Any, ...]:
        return torch.get_rng_state(), np.random.get_state(), random.getstate(), generator_state(self._device)

    def _set(self, states: tuple[Any, ...]) -> None:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        set_generator_state(self._device, states[3])

    def save(self) -> dict[str, np.ndarray]:
        """Copies the streams to arrays."""
        cpu, (_, words, position, has_gauss, gauss), (version, internal, following), device = self._own
        out = {
            "torch": cpu.numpy().copy(),
            "numpy": np.asarray(words, np.int64),
            "numpy.rest": np.array([position, has_gauss, gauss], np.float64),
            "python": np.array([version, *internal], np.int64),
            "python.rest": np.array([] if following is None else [following], np.float64),
        }
        return out if device is None else out | {"cuda": device.numpy().copy()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Sets the streams: the reverse of :meth:`save`."""
        position, has_gauss, gauss = arrays["numpy.rest"].tolist()
        version, *internal = arrays["python"].tolist()
        rest = arrays["python.rest"].tolist()
        self._own = (
            torch.from_numpy(arrays["torch"].copy()),
            ("MT19937", arrays["numpy"].astype(np.uint32), int(position), int(has_gauss), gauss),
            (version, tuple(internal), rest[0] if rest else None),
            torch.from_numpy(arrays["cuda"].copy()) if "cuda" in arrays else None,
        )

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Gives the global generators the simulator's stream within the block."""
        saved = self._now()
        self._set(self._own)
        try:
            yield
        finally:
            self._own = self._now()
            self._set(saved)


def _made(config: EnvConfig, count: int, device: torch.device, seed: int) -> TensorEnvironment:
    """Calls a simulator's factory.

    Raises:
        ValueError: if it raised; the message is one line.
        RunError: if memory is full, or if it raised after training had begun, as at the first evaluation; the message
            is one line.
    """
    factory = load_factory(config)
    try:
        return factory(count, str(device), seed, **copy.deepcopy(config.kwargs))
    except (Exception, SystemExit) as error:
        text = one_line(error)
        where, full = f"{count} on {device}", memory_full(error, device.type)
        if full is not None:
            raise RunError(f"env.id: {config.id} can't be made, {where}: {full}") from error
        if life.trains:
            raise environment_failure(f"environments ({config.id})", f"make, {where}", error) from error
        raise ValueError(f"env.id: {config.id} can't be made, {where}: {type(error).__name__}: {text}") from error


class Simulator:
    """Drives one simulator, for the environments of a shard or for all of a rank's.

    ``seed`` seeds the simulator, and the global generators while it works.
    """

    def __init__(
        self, config: EnvConfig, observation: ObservationLayout, count: int, device: torch.device, seed: int
    ) -> None:
        self._layout, self._count, self._device = observation, count, device
        self.generators = GlobalGenerators(seed, device)
        with self.generators():
            self.env: TensorEnvironment = _made(config, count, device, seed)
        if self.env.num_envs != count:
            text = f"env.id: {config.id} made {self.env.num_envs} environments where {count} were asked for"
            raise (EnvironmentFailureError if life.trains else ValueError)(text)
        self._before, self._final_missing = torch.zeros(0), torch.ones(count, dtype=torch.int8, device=device)

    def reset(self, seed: int) -> Tensor:
        """Begins every episode anew; returns observation rows."""
        self.generators = GlobalGenerators(seed, self._device)
        with self.generators():
            observation, _ = self.env.reset(seed=seed)
        self._before = self._rows(observation)
        return self._before

    def _rows(self, observation: Any) -> Tensor:
        return encode(self._layout, observation, self._count).clone()  # simulators reuse their buffers

    def step(self, actions: Tensor) -> Step:
        """Takes one step."""
        with self.generators():
            observation, reward, terminated, truncated, info = self.env.step(actions)
        last = self._last(info)
        final = self._before if last is None else last
        self._before = self._rows(observation)
        terminated, truncated = (ends.reshape(-1).bool() for ends in (terminated, truncated))
        final_missing = self._final_missing if last is None else None
        return Step(self._before, reward.reshape(-1), terminated, truncated, final, _success(info), final_missing)

    def _last(self, info: Mapping[str, Any]) -> Tensor | None:
        """Returns the last observations of ended episodes from ``info``, as rows; None if it has none."""
        name = next((name for name in FINAL if info.get(name) is not None), None)
        if name is None:
            return None
        try:
            return self._rows(info[name])
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise TypeError(
                f"info[{name!r}] must be as observations are, a tensor [{self._count}, …] or a dict of them; stack it, "
                f"or leave it out: {error}"
            ) from error

    @property
    def has_hooks(self) -> bool:
        """Whether the simulator has both hooks for its state."""
        return all(hasattr(self.env, name) for name in HOOKS)

    def save(self) -> dict[str, np.ndarray] | None:
        """Copies the simulator's state, arrays ``[count, …]``; None if it lacks one of the hooks, or gave none."""
        if not self.has_hooks:
            return None
        arrays: dict[str, np.ndarray] = {}
        for name, values in named(self.env.get_env_state()).items():  # pyright: ignore[reportAttributeAccessIssue]
            if not isinstance(values, Tensor) or values.shape[:1] != (self._count,):
                shape = f" of shape {tuple(values.shape)}" if hasattr(values, "shape") else ""
                raise TypeError(f"{name!r} must be a tensor [{self._count}, …], and is {type(values).__name__}{shape}")
            arrays[name] = values.detach().cpu().numpy().copy()
            check_savable(name, arrays[name])
        return arrays or None

    def load(self, state: dict[str, np.ndarray], rows: Tensor) -> None:
        """Sets the simulator's state, the reverse of :meth:`save`; ``rows`` are the observations in that state."""
        tensors = {name: torch.from_numpy(values.copy()).to(self._device) for name, values in state.items()}
        self.env.set_env_state(tensors)  # pyright: ignore[reportAttributeAccessIssue]
        self._before = rows.clone()

    def close(self) -> None:
        """Closes the simulator, if it can be closed."""
        close = getattr(self.env, "close", None)
        if close is not None:
            close()


def _success(info: Mapping[str, Any]) -> Tensor | None:
    places = [place for place in (info.get("final_info"), info) if isinstance(place, Mapping)]
    found = (place.get(name) for place in places for name in SUCCESS_KEYS)
    stated = next((values for values in found if isinstance(values, Tensor)), None)
    return None if stated is None else stated.reshape(-1) > 0.5

"""The environments of one rank as tensors on its device: array environments with PyTorch, or simulators.

They are kept in groups, each a function of its own keys: one a shard, so that a shard's bits don't depend on how many
shards a rank owns. Two kinds are one group for the whole rank: array environments on a GPU, whose kernels compute each
environment by itself, and simulators of which a process can hold only one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from lockstep.core.life import life
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS
from lockstep.envs.description import make_arrays
from lockstep.envs.gymnasium.keyed import environment_failure
from lockstep.envs.host_envs import HostEnvs, WantedEnvs, by_row
from lockstep.envs.tensor import check_resets, per_shard
from lockstep.torch_engine.envs.simulators import NativeActions, Simulator, Step, joined
from lockstep.torch_engine.envs.tensor_arrays import TensorArrays
from lockstep.torch_engine.nets.memory import on_host
from lockstep.torch_engine.setup import accelerator

GENERATORS = "generators."


class TensorEnvs(HostEnvs):
    """Steps environments with tensors; as :class:`HostEnvs` it copies to and from host buffers at every step.

    ``observations`` are the newest rows ``[E, width]``, on the device.
    """

    replayed = False

    def __init__(self, wanted: WantedEnvs, device: torch.device) -> None:
        super().__init__(wanted.description, wanted.env_ids)
        config, rows, keys = wanted.config, wanted.description.observation, wanted.keys
        self.device, self._wanted = device, wanted
        self._native = NativeActions(wanted.description.action, device)
        self._groups: list[TensorArrays] | list[Simulator] = []
        kind = ARRAY_ENVIRONMENTS.get(config.id)
        one = not on_host(device) if kind is not None else not per_shard(config)
        self._slices = wanted.slices(None if one else wanted.shard_size)
        if kind is not None:
            env = make_arrays(config)
            limit = wanted.description.max_episode_steps or env.max_episode_steps
            self._groups = [TensorArrays(env, wanted.seed, keys[part], limit, device) for part in self._slices]
        else:
            size = self._slices[0].stop
            self._groups = [Simulator(config, rows, size, device, self._start(part)) for part in self._slices]
            if wanted.purpose != "eval":  # an evaluation plays first episodes only
                check_resets(config, self._groups[0].env)
        dtype = torch.uint8 if rows.image_bytes else torch.float32
        self.observations = torch.zeros((self.num_envs, rows.width), dtype=dtype, device=device)
        self._restarted: set[int] = set()

    def _start(self, part: slice) -> int:
        """Returns the seed that a simulator starts with: that of its first environment's episode."""
        return self._wanted.episode_seed(part.start, self.buffers.episodes[part.start], "/simulator")

    @contextmanager
    def _told(self, where: str) -> Iterator[None]:
        """Turns a simulator's error into one that says where; leaves a reset's ValueError before training as it is."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if where == "reset" and isinstance(error, ValueError) and not life.trains:
                raise
            raise environment_failure(f"environments ({self.description.id})", where, error) from error

    def _begin(self, group: int) -> None:
        part, env = self._slices[group], self._groups[group]
        if isinstance(env, TensorArrays):
            rows = env.reset(torch.from_numpy(self.buffers.episodes[part].copy()).to(self.device))
        else:
            rows = env.reset(self._start(part))
        self.observations[part] = rows

    def begin(self) -> None:
        """Starts the episodes ``buffers.episodes`` in every environment; their observations stay on the device.

        Raises:
            EnvironmentFailureError: if a simulator raised.
        """
        with self._told("reset"):
            for group in range(len(self._groups)):
                self._begin(group)

    def advance(self, actions: Tensor) -> Step:
        """Steps every environment with rows of actions ``[E, …]``; nothing is copied to the host.

        Raises:
            EnvironmentFailureError: if a simulator raised.
        """
        native, parts = self._native(actions), []
        with self._told("step"):
            for part, env in zip(self._slices, self._groups, strict=True):
                parts.append(env.step(native[part]))
        for part, step in zip(self._slices, parts, strict=True):
            self.observations[part] = step.observation
        return joined(parts, self.observations)

    @property
    def arrays(self) -> list[TensorArrays]:
        """The groups of array environments; empty if a simulator steps them."""
        return [group for group in self._groups if isinstance(group, TensorArrays)]

    def reset(self) -> None:
        """See :meth:`HostEnvs.reset`."""
        self.begin()
        self.buffers.observations[:] = self.observations.cpu().numpy()

    def step(self) -> None:
        """See :meth:`HostEnvs.step`."""
        b = self.buffers
        step = self.advance(torch.from_numpy(b.actions).to(self.device))
        b.rewards[:] = step.reward.cpu().numpy()
        b.terminated[:], b.truncated[:] = step.terminated.cpu().numpy(), step.truncated.cpu().numpy()
        b.final_observations[:] = step.final.cpu().numpy()
        b.observations[:] = self.observations.cpu().numpy()
        successes = step.successes
        b.successes[:] = 0 if successes is None else successes.cpu().numpy()
        b.episodes += b.terminated | b.truncated

    def has_hooks(self) -> bool:
        """See :meth:`HostEnvs.has_hooks`; the state of array environments is that of their live episodes."""
        return any(isinstance(env, Simulator) and env.has_hooks for env in self._groups)

    def save_states(self) -> list[dict[str, np.ndarray] | None]:
        """See :meth:`HostEnvs.save_states`; None for a simulator without state hooks, whose episodes start anew."""
        self.buffers.observations[:] = self.observations.cpu().numpy()
        out: list[dict[str, np.ndarray] | None] = []
        for part, env in zip(self._slices, self._groups, strict=True):
            if isinstance(env, TensorArrays):
                self.buffers.episodes[part] = env.episodes.cpu().numpy()
                arrays: dict[str, np.ndarray] | None = {k: v.cpu().numpy().copy() for k, v in env.state.items()}
                arrays |= {"elapsed": env.elapsed.cpu().numpy().copy()}
            else:
                with self._told("get_env_state"):
                    arrays = env.save()
            out += [None] * (part.stop - part.start) if arrays is None else by_row(arrays, part.stop - part.start)
            if arrays is not None and isinstance(env, Simulator):
                first = out[part.start]
                assert first is not None
                first |= {GENERATORS + name: values for name, values in env.generators.save().items()}
        return out

    def restore(self, env: int, actions: np.ndarray, hashes: np.ndarray, state: dict[str, np.ndarray]) -> bool:
        """See :meth:`HostEnvs.restore`; a simulator without state hooks begins all its episodes anew."""
        number = next(n for n, part in enumerate(self._slices) if part.start <= env < part.stop)
        part, group = self._slices[number], self._groups[number]
        row = env - part.start
        if isinstance(group, TensorArrays):
            return self._restore_arrays(group, part, row, state)
        if not state:
            return self._restart(number, env)
        if row == 0:
            with self._told("reset"):
                group.reset(self._start(part))
            self._pending: dict[str, list[np.ndarray]] = {}
            streams = {k[len(GENERATORS) :]: v for k, v in state.items() if k.startswith(GENERATORS)}
            if streams:  # none if one simulator of all environments became several, which get new streams
                group.generators.load(streams)
        for name, value in state.items():
            if not name.startswith(GENERATORS):
                self._pending.setdefault(name, []).append(value)
        if env == part.stop - 1:
            self.observations[part] = torch.from_numpy(self.buffers.observations[part]).to(self.device)
            stacked = {name: np.stack(values) for name, values in self._pending.items()}
            with self._told("set_env_state"):
                group.load(stacked, self.observations[part])
        return True

    def _restore_arrays(self, group: TensorArrays, part: slice, row: int, state: dict[str, np.ndarray]) -> bool:
        if not group.state:
            group.reset(torch.from_numpy(self.buffers.episodes[part].copy()).to(self.device))
        group.elapsed[row], group.episodes[row] = int(state["elapsed"]), int(self.buffers.episodes[part.start + row])
        for name, values in group.state.items():
            values[row] = torch.from_numpy(np.asarray(state[name])).to(self.device)
        env = part.start + row
        self.observations[env] = torch.from_numpy(self.buffers.observations[env].copy()).to(self.device)
        return True

    def _restart(self, number: int, env: int) -> bool:
        part = self._slices[number]
        self.buffers.episodes[env] += 1
        if number not in self._restarted:
            self._restarted.add(number)
            with self._told("reset"):
                self._begin(number)
        self.buffers.observations[part] = self.observations[part].cpu().numpy()
        return False

    def close(self) -> None:
        """See :meth:`HostEnvs.close`."""
        for env in self._groups:
            if isinstance(env, Simulator):
                env.close()


def make_tensor_envs(wanted: WantedEnvs) -> TensorEnvs:
    """Makes :class:`TensorEnvs` on the device that ``wanted`` names."""
    return TensorEnvs(wanted, accelerator.current_device(wanted.device))

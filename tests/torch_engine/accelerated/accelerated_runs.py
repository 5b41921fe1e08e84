"""Small runs whose policy is on an accelerator, in this process, iteration by iteration."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from lockstep.config.checks import resolve
from lockstep.config.run import Config, RunOptions
from lockstep.core.topology import Topology
from lockstep.runs.checkpoint import Checkpoint
from lockstep.torch_engine.nets import memory
from lockstep.torch_engine.nets.autograd import AutogradFunctions
from lockstep.torch_engine.session import Session, open_session
from lockstep.torch_engine.setup import choose_mode
from lockstep.torch_engine.state import TrainState
from lockstep.torch_engine.train import Trainer
from lockstep.training.metrics import Record
from lockstep.training.stop import RUNNING, StopRequest

SMALL: dict[str, Any] = {
    "env": {"id": "CartPole-v1"},
    "device": "xpu",
    "num_envs": 4,
    "num_shards": 2,
    "num_steps": 6,
    "network": {"hidden_sizes": (4,)},
    "ppo": {"num_epochs": 2, "num_minibatches": 2, "learning_rate": 0.01, "schedule": "constant"},
}
LSTM = {"recurrent": "lstm", "recurrent_size": 4, "sequence_length": 3}
TENSORS = {"id": "lockstep/CartPole-v1", "backend": "tensor", "max_episode_steps": 3}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"env": {"max_episode_steps": 4}},
    "adaptive, with a KL stop": {"ppo": {"schedule": "adaptive", "target_kl": 0.02, "desired_kl": 1e-4}},
    "continuous, normalised": {
        "env": {"id": "Pendulum-v1", "max_episode_steps": 4},
        "normalize": {"observations": True, "returns": True},
    },
    "LSTM": {"network": LSTM, "env": {"max_episode_steps": 4}},
    "images": {
        "env": {"id": "lockstep/GridWorldPixels-v0"},
        "network": {"image": {"kind": "simple", "width": 0.25, "depth": 1}},
    },
    "indices": {"env": {"id": "FrozenLake-v1"}},
    "custom": {"network": {"custom": "users_nets:Shifted", "hidden_sizes": (64, 64)}},
    "GRPO": {
        "env": {"id": "lockstep/PushCube-v0", "max_episode_steps": 4},
        "algorithm": "grpo",
        "grpo": {"group_size": 2, "kl_coef": 0.1},
    },
    "tensor environments": {"env": TENSORS},
    "tensor environments, normalised": {"env": TENSORS, "normalize": {"observations": True, "returns": True}},
    "tensor environments, GRU": {"env": TENSORS, "network": {**LSTM, "recurrent": "gru"}},
    "fast": {"reduction": "fast"},
    "scheduled coefficients": {
        "total_steps": 72,
        "ppo": {
            **{"clip_schedule": "linear", "value_clip_range": 0.2},
            **{"entropy_schedule": "linear", "entropy_coef": 0.05},
        },
    },
    "own loss": {"ppo": {"loss": "users_losses:penalised"}},
    "in parts": {"ppo": {"gradient_accumulation": 3}},
}
BY_HOST: dict[str, dict[str, Any]] = {
    "apart": {"reduction": "fast", "sync_period": 2},
    "apart, adaptive": {"reduction": "fast", "sync_period": 3, "ppo": {"schedule": "adaptive", "desired_kl": 1e-4}},
    "FSDP": {"reduction": "fast", "fsdp": True},
    "FSDP, normalised": {"reduction": "fast", "fsdp": True, "normalize": {"observations": True, "returns": True}},
}
"""Those in whose updates the host takes part in every optimiser step."""


def config_of(case: str, **changes: Any) -> Config:
    """The config of a case, with groups laid over one another."""
    values = dict(SMALL)
    for more in ((CASES | BY_HOST)[case], changes):
        for name, value in more.items():
            values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    return resolve(Config.model_validate(values))


class Log:
    """Stands in for the recorder: keeps records, and asks for nothing."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.started, self.timing, self.fingerprints = 0.0, None, None
        self.audience = types.SimpleNamespace(waits=False)

    def asks(self) -> int:
        return RUNNING

    def log(self, record: Record) -> None:
        self.records.append(record)


_checked: dict[tuple[Any, ...], bool] = {}
_check = choose_mode.shards_invariant_here


def _checked_once(state: TrainState, config: Config) -> bool:
    """Remembers what the self-check said of a config on a device: half of a small run's time is its three draws."""
    device, policy = state.parameters.flat.device.type, state.policy
    if not isinstance(policy, AutogradFunctions):  # a user's network keeps more of what is tried
        return _check(state, config)
    key = config.model_dump_json(), device, frozenset(memory.HOST), policy.pairs
    if key not in _checked:
        _checked[key] = _check(state, config)
    return _checked[key]


@contextlib.contextmanager
def opened(config: Config, checkpoint: Checkpoint | None = None) -> Iterator[tuple[Session, Trainer, Log]]:
    """A session, the loop over its iterations, and what the loop logs."""
    with mock.patch.object(choose_mode, "shards_invariant_here", _checked_once):
        session, log = open_session(config, Topology(), checkpoint), Log()
    recorder: Any = log
    try:
        yield session, Trainer(session, recorder, RunOptions(), StopRequest()), log
    finally:
        session.close()


def trained(config: Config, iterations: int = 2) -> tuple[dict[str, np.ndarray], list[Record]]:
    """The arrays that some iterations leave, and their records but for the times."""
    with opened(config) as (session, trainer, log):
        for _ in range(iterations):
            trainer.iterate()
        log.log(trainer.finish_record())
        arrays = session.arrays()
    return arrays, [{k: v for k, v in record.items() if not k.startswith("time/")} for record in log.records]

"""What ``lockstep train … --print-environment`` shows of each engine."""

import pytest

from lockstep.config.run import Config, RunOptions
from lockstep.launch.variables import WITHIN_JAX, variable_lines


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in ("NCCL_ALGO", "NCCL_SOCKET_IFNAME", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def names(engine, device):
    config = Config.model_validate({"engine": engine, "device": device, "env": {"id": "CartPole-v1"}})
    return [line.partition("=")[0] for line in variable_lines(config, RunOptions())]


def test_engine_jax_tells_nccl_alone_and_that_its_processes_set_the_rest():
    assert names("jax", "cuda") == ["# one host", "NCCL_ALGO", "NCCL_SOCKET_IFNAME", WITHIN_JAX]
    assert names("jax", "cpu") == [WITHIN_JAX]

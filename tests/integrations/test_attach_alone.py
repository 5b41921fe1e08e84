"""With one rank, ``attach`` and its companions are what the script would have been without them."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep.integrations.attach.process_group import place
from lockstep.integrations.attach.rates import Rates

UNKNOWN: Any = "avg"
LINEAR: Any = nn.Linear(1, 1)
NUMBER: Any = 0.5
PLAIN_LIST: Any = [1.0, 2.0]
TEXT: Any = "no"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)


def hooks(module):
    """Every hook that a module and its parameters carry."""
    parts = [part._forward_pre_hooks for part in module.modules()]
    parameters = [p._backward_hooks for p in module.parameters()]
    accumulated = [getattr(p, "_post_accumulate_grad_hooks", None) for p in module.parameters()]
    return [found for found in (*parts, *parameters, *accumulated) if found]


def trained(attached):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(net.parameters())
    handle = lockstep.attach(net, optimizer) if attached else None
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(5, 3)).mean().backward()
        optimizer.step()
    return net, optimizer, handle


def test_nothing_is_hooked_and_nothing_changes():
    net, optimizer, handle = trained(attached=True)
    assert handle is not None
    assert hooks(net) == []
    assert not optimizer._optimizer_step_pre_hooks
    plain, _, _ = trained(attached=False)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))
    assert (handle.rank, handle.world_size, handle.reductions) == (0, 1, 0)
    with handle.no_sync():
        net(torch.randn(5, 3)).mean().backward()
    handle.detach()
    assert not torch.distributed.is_initialized()


def test_hooks_would_be_seen():
    net = nn.Linear(2, 1)
    net.weight.register_post_accumulate_grad_hook(lambda p: None)
    assert len(hooks(net)) == 1


def test_bypasses_are_none_with_one_rank():
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    lockstep.attach(net, optimizer)
    for p, g in zip(
        net.parameters(), torch.autograd.grad(net(torch.ones(3, 2)).sum(), [*net.parameters()]), strict=True
    ):
        p.grad = g
    before = net.bias.item()
    optimizer.step()
    assert net.bias.item() == pytest.approx(before - 0.3)


def test_companions_are_the_plain_formulas():
    x = torch.randn(50) * 3 + 1
    assert torch.equal(lockstep.normalize(x), (x - x.mean()) / (x.std() + 1e-8))
    assert torch.equal(lockstep.normalize(x, eps=0.5), (x - x.mean()) / (x.std() + 0.5))
    array = x.numpy().astype(np.float64)
    assert np.allclose(lockstep.normalize(array), (array - array.mean()) / array.std(ddof=1))
    assert torch.equal(lockstep.all_mean(x), x)
    backwards = array[::-1]
    assert np.allclose(lockstep.normalize(backwards), (backwards - array.mean()) / array.std(ddof=1))
    assert np.array_equal(lockstep.all_mean(backwards), backwards)
    assert lockstep.all_mean(2) == 2.0
    of_numpy = lockstep.all_mean(np.int64(2))  # pyright: ignore[reportArgumentType]
    assert (of_numpy, type(of_numpy)) == (2.0, float)
    assert lockstep.stop_if(1) is True
    assert lockstep.stop_if(torch.tensor(0.0)) is False
    assert lockstep.shard_seed(7) == 7
    assert lockstep.shard_seed(7, rank=0) != 7
    assert lockstep.is_writer()
    assert lockstep.join() == (0, 1)


def test_the_launcher_s_variables_say_who_writes(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert place() == (1, 2)
    assert not lockstep.is_writer()
    assert lockstep.shard_seed(7) == lockstep.shard_seed(7, rank=1) != lockstep.shard_seed(7, rank=0)


@pytest.mark.parametrize(
    ("error", "operation"),
    [
        ("reduction 'avg' is unknown", lambda: lockstep.attach(nn.Linear(1, 1), reduction=UNKNOWN)),
        ("broadcast_buffers: 'no' must be True", lambda: lockstep.attach(LINEAR, broadcast_buffers=TEXT)),
        ("check_phases: 'no' must be True or False", lambda: lockstep.attach(LINEAR, check_phases=TEXT)),
        (
            "attach every module that it trains",
            lambda: lockstep.attach(nn.Linear(1, 1), _optimizer_of(nn.Linear(1, 1))),
        ),
        ("no parameter of the module requires", lambda: lockstep.attach([nn.ReLU()])),
        ("attach the bare module", lambda: lockstep.attach(nn.DataParallel(nn.Linear(1, 1)))),
        ("parameter weight has no shape yet, in a lazy module", lambda: lockstep.attach(nn.LazyLinear(2))),
        ("buffer 1.pairs is sparse .*broadcast_buffers=False", lambda: lockstep.attach(with_sparse_buffer())),
        ("Parameter stands where an optimiser is wanted", lambda: lockstep.attach(LINEAR, LINEAR.parameters())),
        ("str stands where a torch.nn.Module is wanted", lambda: lockstep.attach(LINEAR.state_dict())),
        ("float stands where a torch.nn.Module is wanted", lambda: lockstep.attach(NUMBER)),
        ("at least 2 elements", lambda: lockstep.normalize(torch.ones(1))),
        ("normalize: list; a tensor, an array or a number is wanted", lambda: lockstep.normalize(PLAIN_LIST)),
        ("all_mean: list; a tensor, an array or a number is wanted", lambda: lockstep.all_mean(PLAIN_LIST)),
        ("torch.int64 values", lambda: lockstep.normalize(torch.ones(3, dtype=torch.int64))),
    ],
)
def test_mistakes_are_said_with_one_rank_too(error, operation):
    with pytest.raises(ValueError, match=error):
        operation()


def with_sparse_buffer():
    part = nn.Linear(1, 1)
    part.register_buffer("pairs", torch.eye(2).to_sparse())
    return nn.Sequential(nn.Linear(1, 1), part)


def test_a_sparse_buffer_that_is_not_broadcast_does_no_harm():
    lockstep.attach(with_sparse_buffer(), broadcast_buffers=False).detach()


def _optimizer_of(module):
    return torch.optim.SGD(module.parameters(), 0.1)


class Far(torch.Tensor):
    """A number on another device, which counts how often it was read."""

    reads = 0
    device = property(lambda self: torch.device("cuda"))  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

    def __float__(self):
        type(self).reads += 1
        return self.as_subclass(torch.Tensor).item()


def test_a_learning_rate_on_a_gpu_is_read_before_steps_once_after_each_change():
    rate = torch.tensor(0.5).as_subclass(Far)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    optimizer.param_groups[0]["lr"] = rate
    rates, digests = Rates([optimizer]), []
    for change in (None, None, 0.25, 0.25):
        if change is not None and float(rate.as_subclass(torch.Tensor)) != change:
            rate.fill_(change)
        digests.append(rates.digest())
        rates.compare([0, 0])
        rates.before_step(0)
    assert Far.reads == 2
    assert digests[0] != digests[2]


def test_importing_lockstep_loads_no_framework():
    code = "import sys, lockstep; lockstep.__all__; print([m for m in ('torch', 'jax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    loaded = code.replace("lockstep.__all__", "lockstep.attach")
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['torch']"


def test_unknown_names_are_no_attributes():
    with pytest.raises(AttributeError, match="no attribute 'attached'"):
        _ = lockstep.attached

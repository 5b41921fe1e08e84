"""Two stand-ins for an accelerator, as ``--device xpu``: a device that isn't there, and the CPU's own memory."""

import emulated_accelerator
import pytest
import torch

from lockstep.torch_engine.nets import memory
from lockstep.torch_engine.setup import accelerator


@pytest.fixture(autouse=True)
def _settings(monkeypatch):
    before = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # put back afterwards
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def emulated(monkeypatch):
    """A device whose memory the host can't see, and which counts what passes."""
    monkeypatch.setitem(accelerator.TYPES, "xpu", emulated_accelerator.NAME)


@pytest.fixture
def use(monkeypatch):
    """Chooses what ``--device xpu`` is: ``emulated``, or ``played`` by the CPU, whose tensors nothing looks at then."""

    def choose(which: str) -> None:
        monkeypatch.setitem(accelerator.TYPES, "xpu", {"emulated": emulated_accelerator.NAME, "played": "cpu"}[which])
        monkeypatch.setattr(torch.cpu, "current_device", lambda: 0)  # PyTorch's says "cpu"
        monkeypatch.setattr(memory, "HOST", {"cpu"} if which == "emulated" else set())

    return choose

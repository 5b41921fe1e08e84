"""Scripts whose tensors are on the emulated device: the doctor's hooks, and gradients that ``attach`` reduces."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from emulated_accelerator import DOWN, NAME, counted
from torch import nn

from lockstep.doctor.judge.traces import Moment, read_traces
from lockstep.doctor.watch.schedule import Schedule
from lockstep.doctor.watch.side_store import SideWriter
from lockstep.doctor.watch.torch.hooks import TorchWatch
from lockstep.doctor.watch.torch.values import digest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu_scripts" / "attached_gradients.py"


def test_the_doctors_hooks_see_what_is_on_the_device(tmp_path):
    watch = TorchWatch(SideWriter(tmp_path, 0), Schedule(first=2, interval=5))
    gradients = []
    try:
        net = nn.Linear(3, 2).to(NAME)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            net(torch.full((2, 3), float(step)).to(NAME)).pow(2).mean().backward()
            assert net.weight.grad is not None
            gradients.append(net.weight.grad.cpu().numpy().ravel())
            optimizer.step()
        watch.finish()
        watch._writer.flush()
    finally:
        watch.remove()
    trace = read_traces(tmp_path, [0])[0]
    assert trace.steps == {0: 3}
    for step in (1, 2):
        kept = trace.checks[Moment(0, step, "before")].parts["gradients"]["0.0"]
        np.testing.assert_array_equal(kept.numbers, gradients[step - 1])


def test_a_digest_of_the_devices_bits_is_one_read():
    host = torch.arange(7.0)
    with counted() as passed:
        first = digest(host.to(NAME))
    assert passed[DOWN] == 1
    assert first == digest(host.to(NAME))
    host[3] += 1e-6
    assert first != digest(host.to(NAME))


@pytest.mark.long
def test_attach_reduces_gradients_that_lie_on_the_device(tmp_path):
    runner = tmp_path / "runner.py"
    runner.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests' / 'modules')!r})\nimport emulated_accelerator, runpy\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(runner), NAME], capture_output=True, text=True, check=False, timeout=300)
    said = re.findall(r"backend (\w+) difference ([\d.e+-]*\d)", done.stdout)  # ends of lines of two ranks may mix
    assert done.returncode == 0, done.stderr
    assert len(said) == 2
    assert all(backend == "gloo" and float(difference) < 1e-5 for backend, difference in said)

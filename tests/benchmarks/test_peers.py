"""What the peers' scripts load and do, as far as it can be told without their environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peer_environment import PEERS

CASE = ["--env", "CartPole-v1", "--num-envs", "2", "--num-steps", "8", "--num-epochs", "3", "--num-minibatches", "4"]
CASE += ["--iterations", "2", "--learning-rate", "1e-3", "--entropy-coef", "0.01", "--threads", "3"]


def run(code: str, lines: Path) -> subprocess.CompletedProcess[str]:
    """Runs code where the peers' scripts are modules, with the case as its command line."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(PEERS)!r}); {code}", *CASE]
    return subprocess.run([*command, "--lines", str(lines)], capture_output=True, text=True, cwd=lines.parent)


def test_peers_in_jax_alone_load_no_pytorch(tmp_path):
    code = "sys.modules['torch'] = None; import settings; settings.{}(); print('read')"
    assert run(code.format("read_settings"), tmp_path / "lines").stdout == "read\n"
    refused = run(code.format("read_torch_settings"), tmp_path / "lines")
    assert "import of torch halted" in refused.stderr
    for name in ("rejax_ppo.py", "purejaxrl_ppo.py"):
        assert "torch" not in (PEERS / name).read_text()


def test_pytorch_gets_the_threads_of_the_case(tmp_path):
    pytest.importorskip("torch")
    code = "import settings; settings.read_torch_settings(); import torch; print(torch.get_num_threads())"
    assert run(code, tmp_path / "lines").stdout == "3\n"


COUNTING = """
import torch, cleanrl_ppo
counted, item = [], torch.Tensor.item

def count(tensor):
    if sys._getframe(1).f_code.co_filename == cleanrl_ppo.__file__:  # PyTorch's optimiser has its own
        counted.append(1)
    return item(tensor)

torch.Tensor.item = count
trainer = cleanrl_ppo.Trainer(cleanrl_ppo.read_torch_settings())
trainer.rollout()
counted.clear()
figures = trainer.update()
print(len(counted), sum(isinstance(x, torch.Tensor) for x in figures.values()))
trainer.log(figures)
print(len(counted))
"""


def test_cleanrl_waits_for_one_number_a_minibatch_and_for_the_rest_when_it_logs(tmp_path):
    for package in ("torch", "gymnasium", "tensorboard"):
        pytest.importorskip(package)
    done = run(f"exec({COUNTING!r})", tmp_path / "lines")
    assert done.stdout.split() == ["12", "5", "17"], done.stderr  # 3 epochs of 4 minibatches, and 5 losses

"""What a rank loads: neither the compiler nor FSDP, unless it is asked for them."""

import subprocess
import sys

import pytest

RUN = """
import sys
import torch
import lockstep.torch_engine.train
from lockstep.torch_engine.nets.parameters import WholeAdam, FlatParameters, fused_adam
if sys.argv[1] == "ours":
    parameters = FlatParameters({"w": (3,)}, torch.device("cpu"))
    optimizer = WholeAdam(parameters, lambda *its: fused_adam(*its, {"betas": (0.9, 0.999), "eps": 1e-5}))
    optimizer.step(torch.ones(3), 0.1)
    assert parameters.flat.sum() < 0
else:
    torch.optim.Adam([torch.zeros(3, requires_grad=True)]).step()
print(sorted({"torch._dynamo", "torch.distributed.fsdp"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("whose", "loaded"), [("ours", []), ("PyTorch's", ["torch._dynamo", "torch.distributed.fsdp"])]
)
def test_an_optimizer_step_loads_no_compiler(whose, loaded):
    """PyTorch's own optimisers load both."""
    ended = subprocess.run([sys.executable, "-c", RUN, whose], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str(loaded)

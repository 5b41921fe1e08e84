"""What a rank loads: neither the compiler nor FSDP, unless it is asked for them."""

import subprocess
import sys

import pytest

RUN = """
import sys
import torch
import lockstep.torch_engine.train
from lockstep.torch_engine.nets.parameters import WholeAdam, FlatParameters, fused_adam
from lockstep.torch_engine.setup.mapped_operations import OtherOperations
if sys.argv[1] == "ours":
    parameters = FlatParameters({"w": (3,)}, torch.device("cpu"))
    optimizer = WholeAdam(parameters, lambda *its: fused_adam(*its, {"betas": (0.9, 0.999), "eps": 1e-5}))
    optimizer.step(torch.ones(3), 0.1)
    assert parameters.flat.sum() < 0
    with OtherOperations() as others:
        torch.ones(3).sinh()
    assert others.names == {"sinh"}
else:
    torch.optim.Adam([torch.zeros(3, requires_grad=True)]).step()
print(sorted({"torch._dynamo", "torch.distributed.fsdp"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("whose", "loaded"), [("ours", []), ("PyTorch's", ["torch._dynamo", "torch.distributed.fsdp"])]
)
def test_a_step_and_a_look_at_operations_load_no_compiler(whose, loaded):
    """PyTorch's own optimisers load both, and so would what looks at a custom network's operations."""
    ended = subprocess.run([sys.executable, "-c", RUN, whose], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str(loaded)


def test_a_compiler_that_is_loaded_leaves_such_methods_alone():
    """As PyTorch would have it; whatever came before."""
    import torch._dynamo

    from lockstep.torch_engine.setup.mapped_operations import OtherOperations, leave_out_compiler

    method = OtherOperations.__torch_dispatch__
    raw = method.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    setattr(raw, "__dynamo_disable", raw)
    leave_out_compiler(method)
    assert not hasattr(raw, "__dynamo_disable")
    with OtherOperations() as others:
        torch.ones(3).sinh()
    assert others.names == {"sinh"}
    assert getattr(raw, "__dynamo_disable") is not raw

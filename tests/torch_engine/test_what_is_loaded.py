"""What a rank loads: neither the compiler nor FSDP, unless it is asked for them."""

import subprocess
import sys

import pytest
from command_line import run_words
from variants import variants

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


A_RUN = """
import sys
from lockstep.cli import main
try:
    main(sys.argv[1:])
finally:
    print(sorted({"torch._dynamo", "torch._inductor", "torch.distributed.fsdp"} & set(sys.modules)))
"""
OF_A_RUN = {
    "images": ("lockstep/GridWorldPixels-v0", "--total-steps", "256"),
    "LSTM": ("CartPole-v1", "--total-steps", "256", "--network.recurrent", "lstm"),
    "custom": ("CartPole-v1", "--total-steps", "256", "--network.custom", "users_nets:Tiny"),
    "loss": ("CartPole-v1", "--total-steps", "256", "--ppo.loss", "users_losses:penalised"),
}


@pytest.mark.parametrize("kind", variants(OF_A_RUN, ["custom"]))
def test_a_run_loads_no_compiler(tmp_path, kind):
    words = ("train", *OF_A_RUN[kind], "--engine", "torch", "--num-envs", "8", "--num-steps", "16", "--quiet")
    ended = run_words([sys.executable, "-c", A_RUN, *words], tmp_path)
    assert ended.stdout.splitlines()[-1] == "[]", ended.stderr
    assert list(tmp_path.glob("runs/*/summary.json"))


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

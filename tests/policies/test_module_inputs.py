"""What a policy as a PyTorch module takes: images that stay the caller's, masks apart from them, any indices."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from net_cases import DISCRETE, picture

from lockstep.config.run import Config
from lockstep.core.spaces import observation_layout
from lockstep.policies.exported import input_arrays
from lockstep.runs.checkpoint import POLICY
from lockstep.torch_engine.export.module import PolicyModule
from lockstep.torch_engine.export.onnx import write_onnx
from lockstep.torch_engine.export.program import program_of
from lockstep.torch_engine.state import make_net

CONFIG = Config.model_validate({"network": {"hidden_sizes": [8], "image": {"width": 0.125}}})


def module_of(space, mask_size=0):
    """A policy on a space with random parameters, and its observation layout."""
    layout = observation_layout(space, mask_size=mask_size)
    shapes, generator = make_net(CONFIG, layout, DISCRETE).shapes(), np.random.default_rng(0)
    arrays = {POLICY + name: generator.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    return PolicyModule(CONFIG, {"observation": asdict(layout), "action": asdict(DISCRETE)}, arrays), layout


@pytest.mark.parametrize("shape", [(9, 12, 3), (3, 9, 12), (1, 9, 12), (9, 12)], ids=str)
def test_an_image_stays_as_the_caller_has_it(shape):
    policy, _ = module_of(picture(*shape))
    pixels = torch.randint(0, 256, (4, *shape), generator=torch.Generator().manual_seed(0))
    floats = pixels.float()
    with torch.no_grad():
        wanted = policy(pixels.to(torch.uint8))["logits"]
        assert torch.equal(policy(floats)["logits"], wanted)
        assert torch.equal(floats, pixels.float())
    saliency = pixels.float().requires_grad_()
    policy(saliency)["logits"].square().sum().backward()
    assert saliency.grad is not None
    assert saliency.grad.any()


@pytest.mark.parametrize("keys", [("forward", "forward_"), ("training", "a.state_dict"), ("front.", ".front", "a..b")])
def test_an_image_may_have_any_name(keys):
    """Also those of a module's own attributes, and of nothing beside a dot."""
    space = Dict({key: picture(9, 12, 3) for key in keys})
    policy, layout = module_of(space)
    assert len(list(policy.parameters())) == len(make_net(CONFIG, layout, DISCRETE).shapes())
    found = {key: torch.zeros((2, 9, 12, 3), dtype=torch.uint8) for key in keys}
    with torch.no_grad():
        wanted = policy(found)["logits"]
        for key in keys:  # each reaches its own encoder
            found[key] = torch.full_like(found[key], 255)
            seen = policy(found)["logits"]
            assert not torch.equal(seen, wanted)
            wanted = seen
    program: Any = program_of(policy).module()
    given = (found[leaf.name] for leaf in layout.leaves)
    torch.testing.assert_close(program(*given)["logits"], wanted)


def test_parameters_keep_the_names_of_the_checkpoint_but_for_what_a_module_uses_itself():
    policy, _ = module_of(Dict({key: picture(9, 12, 3) for key in ("front", "a.b", "_a_", "forward", "forward_")}))
    images = {name.removeprefix("policy.actor.encoder.").rsplit(".", 2)[0] for name in policy.state_dict()}
    assert {"front", "a.b", "_a_", "forward_", "forward__"} <= images


def test_a_mask_comes_apart_from_an_image():
    policy, _ = module_of(picture(9, 12, 3), mask_size=3)
    board = torch.zeros((5, 9, 12, 3), dtype=torch.uint8)
    with torch.no_grad():
        assert policy(board)["action"].shape == (5,)
        assert policy(board, torch.tensor([False, True, False]))["action"].tolist() == [1] * 5
    assert len(program_of(policy).module()(torch.ones((2, 3), dtype=torch.bool), board[:2])["action"]) == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning", "ignore:.*torch.jit.trace:FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_what_traces_or_maps_a_module_without_gradients_sees_all_of_it():
    policy, _ = module_of(Box(-9, 9, (4,), np.float32))
    x, traced_at = torch.randn((2, 6, 4), generator=torch.Generator().manual_seed(0))
    wanted = policy(x)["logits"].detach()
    with torch.no_grad():
        traced: Any = torch.jit.trace(policy, (traced_at,), strict=False)
        torch.testing.assert_close(policy(x)["logits"], wanted)
        torch.testing.assert_close(traced(x)["logits"], wanted)
        mapped = torch.func.vmap(lambda row: policy(row[None])["logits"][0])(x)
    torch.testing.assert_close(mapped, wanted)


def test_a_mask_for_a_module_that_takes_none_is_one_line():
    policy, _ = module_of(Discrete(6))
    line = r"^action_mask: this policy was trained without one and may take any action; leave it out, or train with .*$"
    with pytest.raises(ValueError, match=line):
        policy(torch.arange(6), torch.tensor([False, True, False]))


@pytest.mark.parametrize(
    "space",
    [Discrete(6, start=2), Discrete(1), MultiDiscrete([1, 5]), MultiDiscrete(np.array([[2, 3], [4, 1]]))],
    ids=str,
)
def test_indices_may_begin_anywhere_and_be_few(space, tmp_path):
    pytest.importorskip("onnxruntime")
    policy, layout = module_of(space)
    run = write_onnx(policy, tmp_path / "policy.onnx", {})
    space.seed(0)
    observations = np.stack([space.sample() for _ in range(16)])
    with torch.no_grad():
        wanted = policy(torch.from_numpy(observations))["logits"]
    rows = np.stack([layout.encode(each) for each in observations])
    given = input_arrays(layout, rows, np.zeros((16, 0), np.float32))
    np.testing.assert_array_equal(given["observation"], observations)
    np.testing.assert_allclose(run(given)["logits"], wanted, rtol=1e-4, atol=1e-5)

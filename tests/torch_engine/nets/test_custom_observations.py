"""What a network of a user's own is given."""

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete

from lockstep.core.spaces import observation_layout
from lockstep.torch_engine.nets.custom import observation_tensors

NUMBERS = Box(-1, 1, (2, 3), np.float32)


def given(space: gymnasium.Space, observations, **mask):
    layout = observation_layout(space, **mask)
    rows = np.stack([layout.encode(one, np.ones(4)) for one in observations])
    return observation_tensors(layout, torch.from_numpy(rows))


def test_a_plain_space_is_one_tensor_also_beside_a_mask_that_comes_apart():
    observations = [np.full((2, 3), x, np.float32) for x in (0.5, 0.25)]
    for size in (0, 4):
        seen = given(NUMBERS, observations, mask_size=size)
        assert seen.dtype == torch.float32
        assert seen.tolist() == [x.tolist() for x in observations]


def test_a_dict_is_flat_and_holds_its_own_mask():
    inner = Dict({"colour": Discrete(3, start=7), "camera": Box(0, 255, (4, 5, 3), np.uint8)})
    space = Dict({"legal": Box(0, 1, (4,), np.int8), "view": inner})
    camera = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    observation = {"legal": np.array([1, 0, 1, 0]), "view": {"colour": 9, "camera": camera}}
    seen = given(space, [observation] * 2, mask_key="legal")
    assert {name: part.dtype for name, part in seen.items()} == {
        "legal": torch.float32,
        "view/colour": torch.int64,
        "view/camera": torch.uint8,
    }
    assert seen["view/camera"][1].tolist() == camera.tolist()
    assert seen["view/colour"].tolist() == [2, 2]  # indices count from 0
    assert seen["legal"].tolist() == [[1, 0, 1, 0]] * 2

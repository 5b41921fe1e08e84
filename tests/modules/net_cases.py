"""A table of networks and spaces, each for both engines, and random inputs for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from lockstep.core.spaces import ActionLayout, ObservationLayout, observation_layout
from lockstep.networks import spec as net_shapes
from lockstep.networks.spec import ImageEncoder

VECTOR = Box(-2, 2, (5,), np.float32)
PARTS = Dict(
    {
        "eye": Box(0, 255, (5, 6, 3), np.uint8),
        "legal": MultiBinary(3),
        "dice": MultiDiscrete([3, 2], start=[1, 0]),
        "arm": Tuple((Discrete(4, start=-1), Box(-2, 2, (2, 2), np.float32))),
    }
)


def picture(*shape: int) -> Box:
    return Box(0, 255, shape, np.uint8)


DISCRETE = ActionLayout("discrete", (3,), (0,))
MULTI = ActionLayout("multi_discrete", (3, 1, 4), (0, 0, 0), (3,))
CONTINUOUS = ActionLayout("continuous", shape=(2,), low=(-2.0, 0.0), high=(1.0, 10.0), dtype="float32")
THIN = {"width": 0.125, "depth": 1}


class Case(NamedTuple):
    """A network on a space; ``mask`` is an entry of it, or the size of a mask that comes apart."""

    space: gymnasium.Space = VECTOR
    action: ActionLayout = DISCRETE
    options: dict[str, Any] = {}  # noqa: RUF012
    mask: str | int | None = None

    @property
    def observation(self) -> ObservationLayout:
        if isinstance(self.mask, int):
            return observation_layout(self.space, mask_size=self.mask)
        return observation_layout(self.space, self.mask)

    def net(self, kind: type[net_shapes.PolicyNet], **options: Any) -> Any:
        """An engine's ``PolicyNet`` of it."""
        chosen: dict[str, Any] = {"hidden_sizes": (8,)} | self.options | options
        return kind(self.observation, self.action, **chosen)


CASES = {
    "categorical": Case(),
    "no hidden layer": Case(options={"hidden_sizes": ()}),
    "Gaussian, three layers": Case(action=CONTINUOUS, options={"hidden_sizes": (7, 1, 6), "activation": "elu"}),
    "several categoricals": Case(action=MULTI, options={"activation": "gelu"}),
    "several categoricals, masked": Case(action=MULTI, mask=8),
    "squashed": Case(action=CONTINUOUS, options={"squashed": True}),
    "squashed, std by state": Case(action=CONTINUOUS, options={"squashed": True, "state_dependent_std": True}),
    "std by state": Case(action=CONTINUOUS, options={"state_dependent_std": True, "activation": "relu"}),
    "shared": Case(options={"shared": True, "activation": "silu"}),
    "no critic": Case(options={"critic": False}),
    "indices": Case(space=Discrete(6, start=2)),
    "Dict, masked": Case(PARTS, options={"image": ImageEncoder(width=0.125)}, mask="legal"),
    "Dict, shared": Case(PARTS, CONTINUOUS, {"image": ImageEncoder(**THIN), "shared": True}),
    "nature": Case(picture(36, 40, 2), options={"image": ImageEncoder("nature", **THIN)}),
    "nature, channels first": Case(picture(3, 44, 44), options={"image": ImageEncoder("nature", **THIN)}),
    "impala": Case(picture(9, 12, 3), options={"image": ImageEncoder("impala", width=0.25)}),
    "simple": Case(picture(7, 7), options={"image": ImageEncoder("simple", width=0.25, depth=3)}),
    "residual": Case(picture(5, 6, 3), options={"image": ImageEncoder("residual", width=0.25)}),
    "LSTM": Case(options={"core": "lstm", "core_size": 6}),
    "GRU": Case(action=CONTINUOUS, options={"core": "gru", "core_size": 6}),
    "LSTM, shared, Dict": Case(
        PARTS, options={"core": "lstm", "core_size": 6, "shared": True, "image": ImageEncoder(**THIN)}, mask="legal"
    ),
    "GRU, no critic": Case(options={"core": "gru", "core_size": 6, "critic": False}),
}
RECURRENT = [name for name, case in CASES.items() if case.options.get("core")]


def arrays_of(net: Any, seed: int = 0) -> dict[str, Any]:
    """Parameters (NumPy, as all here) of such a size that no unit is idle or saturated, biases and deviations too."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=shape) / np.sqrt(max(1, np.prod(shape[1:])))).astype(np.float32)
        for name, shape in net.shapes().items()
    }


def masks_of(layout: ObservationLayout, action: ActionLayout, count: int, seed: int) -> Any:
    """Masks ``[count, choices]`` that leave at least the first value of each index."""
    assert layout.mask is not None
    masks = np.random.default_rng(seed).random((count, layout.mask.size)) < 0.6
    masks[:, np.cumsum((0, *action.choices[:-1]))] = True
    return masks


def rows_of(case: Case, count: int, seed: int = 0) -> Any:
    """Sampled observation rows ``[count, width]``."""
    layout = case.observation
    case.space.seed(seed)
    sampled = [case.space.sample() for _ in range(count)]
    if layout.mask is None:
        return np.stack([layout.encode(observation) for observation in sampled])
    masks = masks_of(layout, case.action, count, seed)
    if not layout.mask.apart:
        sampled = [x | {layout.mask.name: mask} for x, mask in zip(sampled, masks, strict=True)]
    return np.stack([layout.encode(x, mask) for x, mask in zip(sampled, masks, strict=True)])


def noise_of(action: ActionLayout, count: int, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    shape = (count, action.outputs)
    return (rng.gumbel(size=shape) if action.discrete else rng.normal(size=shape)).astype(np.float32)

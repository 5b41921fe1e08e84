"""Describes networks for both engines: names and shapes of their parameters, in the order they are stored in.

A network is encoder → recurrent core → hidden layers → head; parts that a config doesn't ask for are left out.
Actor and critic are two networks, or share all but the head. Weights are ``[out, in]``, convolutions
``[out, in, h, w]``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from lockstep.config.run import Config
from lockstep.core.spaces import ActionLayout, Leaf, ObservationLayout

Shapes = dict[str, tuple[int, ...]]

NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel and stride of each layer (Mnih et al. 2015)."""
NATURE_SMALLEST = 36
IMPALA = (16, 32, 32)
"""Channels of each stage (Espeholt et al. 2018, figure 3, right)."""
FEATURES = {"nature": 512, "impala": 256, "simple": 256, "residual": 256}
GRID_CHANNELS = 32
"""Channels of the layers at full resolution (simple, residual)."""
_GATES = {"lstm": 4, "gru": 3}


@dataclass(frozen=True)
class ImageEncoder:
    """The convolutions of images.

    Attributes:
        kind: ``nature`` (from 36 x 36 pixels on), ``impala`` (residual), ``simple`` (3 x 3 at full resolution, for
            small grids), ``residual`` (likewise, in residual blocks: He et al. 2016, "Identity mappings in deep
            residual networks"), or ``auto``: nature if it fits, else simple.
        width: factor of channels and features.
        depth: number of residual blocks (residual; impala: per stage) or layers (simple).
    """

    kind: Literal["auto", "nature", "impala", "simple", "residual"] = "auto"
    width: float = 1.0
    depth: int = 2

    def resolved(self, leaf: Leaf) -> str:
        """Returns the kind for one image."""
        if self.kind != "auto":
            return self.kind
        return "nature" if min(leaf.image_shape[1:]) >= NATURE_SMALLEST else "simple"

    def check(self, layout: ObservationLayout) -> None:
        """Raises a one-line ``ValueError`` if an image is too small for its encoder, or two would share parameters."""
        owners: dict[str, str] = {}
        for leaf in layout.leaves:
            if leaf.kind == "image" and self.resolved(leaf) == "nature" and min(leaf.image_shape[1:]) < NATURE_SMALLEST:
                raise ValueError(
                    f"network.image.kind: nature needs images of {NATURE_SMALLEST} x {NATURE_SMALLEST} pixels or more "
                    f"and {leaf.name or 'the observation'} has {leaf.image_shape[1]} x {leaf.image_shape[2]}; use "
                    "simple, residual or impala"
                )
            for parameter in self.shapes(replace(layout, leaves=(leaf,)), "actor"):
                other = owners.setdefault(parameter, leaf.name)
                if other != leaf.name:
                    raise ValueError(
                        f"observation keys {other!r} and {leaf.name!r}: parameters of their images would have one name "
                        f"({parameter.removeprefix('actor.')}); rename one"
                    )

    def scaled(self, channels: int) -> int:
        """Returns a number of channels or features, scaled by ``width``."""
        return max(1, round(channels * self.width))

    def convolutions(self, leaf: Leaf) -> tuple[Shapes, int]:
        """Returns the shapes of one image's convolutions by name, and the number of their outputs."""
        channels, height, width = leaf.image_shape
        kind, out = self.resolved(leaf), {}
        if kind == "nature":
            for layer, (wanted, kernel, stride) in enumerate(NATURE):
                out[f"{layer}"] = (self.scaled(wanted), channels, kernel, kernel)
                channels = self.scaled(wanted)
                height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        elif kind == "simple":
            for layer in range(self.depth):
                out[f"{layer}"] = (self.scaled(GRID_CHANNELS), channels, 3, 3)
                channels = self.scaled(GRID_CHANNELS)
        elif kind == "residual":
            out["0"] = (self.scaled(GRID_CHANNELS), channels, 3, 3)
            channels = self.scaled(GRID_CHANNELS)
            for block in range(self.depth):
                out[f"0.{block}.0"] = out[f"0.{block}.1"] = (channels, channels, 3, 3)
        else:
            for stage, wanted in enumerate(IMPALA):
                out[f"{stage}"] = (self.scaled(wanted), channels, 3, 3)
                channels = self.scaled(wanted)
                height, width = -(-height // 2), -(-width // 2)
                for block in range(self.depth):
                    out[f"{stage}.{block}.0"] = out[f"{stage}.{block}.1"] = (channels, channels, 3, 3)
        return out, channels * height * width

    def shapes(self, layout: ObservationLayout, trunk: str) -> Shapes:
        """Returns the shapes of all image encoders' parameters of a network."""
        out: Shapes = {}
        for leaf in layout.leaves:
            if leaf.kind != "image":
                continue
            name, (convolutions, flat) = encoder_name(trunk, leaf), self.convolutions(leaf)
            for layer, shape in convolutions.items():
                out[f"{name}.{layer}.weight"], out[f"{name}.{layer}.bias"] = shape, (shape[0],)
            features = self.scaled(FEATURES[self.resolved(leaf)])
            out[f"{name}.out.weight"], out[f"{name}.out.bias"] = (features, flat), (features,)
        return out

    def feature_size(self, layout: ObservationLayout) -> int:
        """Returns the number of features of an observation."""
        images = (self.scaled(FEATURES[self.resolved(x)]) for x in layout.leaves if x.kind == "image")
        return layout.vector_size + sum(sum(leaf.choices) for leaf in layout.leaves) + sum(images)


def encoder_name(trunk: str, leaf: Leaf) -> str:
    """Returns the prefix of an image encoder's parameters."""
    return f"{trunk}.encoder.{leaf.name.replace('/', '.') or 'image'}"


def core_state_size(core: str | None, size: int) -> int:
    """Returns how many numbers are carried from step to step: the hidden state, then the LSTM's cell state."""
    return {None: 0, "gru": size, "lstm": 2 * size}[core]


def core_shapes(core: str, name: str, inputs: int, size: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a core's parameters by name.

    They are ``input.weight`` ``[gates·size, inputs]``, ``hidden.weight`` ``[gates·size, size]``, and the biases.
    """
    rows = _GATES[core] * size
    out: dict[str, tuple[int, ...]] = {f"{name}.core.input.weight": (rows, inputs), f"{name}.core.input.bias": (rows,)}
    out[f"{name}.core.hidden.weight"] = (rows, size)
    if core == "gru":  # the reset gate multiplies the hidden product with its bias, so the two biases differ
        out[f"{name}.core.hidden.bias"] = (rows,)
    return out


DEFAULT_IMAGE_ENCODER = ImageEncoder()


MASKED_LOGIT = -1e8
"""Logit of actions that an observation's mask forbids."""
LOG_STD_LIMITS = (-5.0, 2.0)
"""Limits to which a state-dependent log standard deviation is clamped."""


@dataclass(frozen=True)
class PolicyNet:
    """Describes an actor and, unless ``critic`` is off, a critic.

    Attributes:
        shared: whether actor and critic share all but their heads.
        squashed: whether a tanh squashes continuous actions into their bounds; otherwise they are clipped.
        state_dependent_std: whether the actor outputs a continuous action's log standard deviation; otherwise it is a
            parameter.
        core: recurrent core, or None; ``core_size`` is its number of units.
        custom: a user's own network in place of all of this (the engine's ``CustomNet``), or None.
        bf16: whether matrix products and convolutions are computed in bfloat16, except in the heads (the last layers of
            actor and critic); inputs and outputs are float32.
        traceable: whether engine torch keeps to PyTorch's functions without a graph, too, so that what traces or maps
            a pass sees all of it; otherwise it computes some with NumPy.
    """

    observation: ObservationLayout
    action: ActionLayout
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    critic: bool = True
    shared: bool = False
    squashed: bool = False
    state_dependent_std: bool = False
    image: ImageEncoder = DEFAULT_IMAGE_ENCODER
    core: Literal["lstm", "gru"] | None = None
    core_size: int = 128
    custom: Any = None
    bf16: bool = False
    traceable: bool = False

    @property
    def discrete(self) -> bool:
        """Whether actions are indices."""
        return self.action.discrete

    @property
    def outputs(self) -> int:
        """Number of outputs of the actor's head: logits, means, or means and log standard deviations."""
        return self.action.outputs * (2 if not self.discrete and self.state_dependent_std else 1)

    def squash(self, actions: np.ndarray) -> np.ndarray:
        """Returns what the environment takes ``[…, A]`` for a squashed Gaussian's actions; others are unchanged."""
        if not self.squashed:
            return actions
        low, high = (np.asarray(bound, np.float32) for bound in (self.action.low, self.action.high))
        return (low + (high - low) * np.float32(0.5) * (np.tanh(actions) + np.float32(1.0))).astype(np.float32)

    @property
    def plain(self) -> bool:
        """Whether this is two multilayer perceptrons on numbers with a categorical or diagonal Gaussian head."""
        options = (self.shared, self.squashed, self.state_dependent_std, self.core, self.custom)
        return (
            self.critic
            and not any(options)
            and self.observation.plain
            and self.action.kind in ("discrete", "continuous")
        )

    @property
    def convolutional(self) -> bool:
        """Whether there are images."""
        return bool(self.observation.image_bytes)

    @property
    def trunks(self) -> tuple[str, ...]:
        """Names of the networks up to their heads."""
        if self.shared:
            return ("trunk",)
        return ("actor", "critic") if self.critic else ("actor",)

    @property
    def state_size(self) -> int:
        """How many numbers the recurrent cores of all trunks carry from step to step."""
        return len(self.trunks) * core_state_size(self.core, self.core_size)

    @property
    def feature_size(self) -> int:
        """Number of inputs of the hidden layers."""
        return self.core_size if self.core else self.image.feature_size(self.observation)

    def sizes(self, name: str) -> tuple[int, ...]:
        """Returns the layer sizes of a multilayer perceptron, input and output included."""
        hidden = (self.feature_size, *self.hidden_sizes)
        if name == "trunk":
            return hidden
        head = self.outputs if name == "actor" else 1
        return (hidden[-1], head) if self.shared else (*hidden, head)

    def shapes(self) -> Shapes:
        """Returns the shape of every parameter, in the order they are stored in."""
        if self.custom is not None:
            return self.custom.shapes() | self.log_std_shape
        out: Shapes = {}
        for trunk in self.trunks:
            out |= self.image.shapes(self.observation, trunk)
            if self.core:
                out |= core_shapes(self.core, trunk, self.image.feature_size(self.observation), self.core_size)
            if self.shared:
                out |= layer_shapes(trunk, self.sizes(trunk))
        for name in ("actor", "critic") if self.critic else ("actor",):
            out |= layer_shapes(name, self.sizes(name))
        return out | self.log_std_shape

    def check_custom(self, name: str, shapes: Shapes) -> None:
        """Checks the parameters of a user's own module, called ``name`` in errors.

        Raises:
            ValueError: a parameter has the name of one that we add; one line.
        """
        for taken in self.log_std_shape:
            if taken in shapes:
                begins, instead = "may be set by initial_state", "leave it out or rename it"
                if name.startswith("network.custom"):
                    begins = "begins at network.log_std_init"
                    instead = "leave it out, or give your own out with network.state_dependent_std"
                raise ValueError(
                    f"{name} has a parameter {taken}, which is the name of ours beside the module: the log standard "
                    f"deviation of continuous actions, which {begins}; {instead}"
                )

    @property
    def log_std_shape(self) -> Shapes:
        """The shape of the log standard deviation of continuous actions by name; empty unless it is a parameter."""
        return {} if self.discrete or self.state_dependent_std else {"log_std": (self.action.outputs,)}


def layer_shapes(name: str, sizes: tuple[int, ...]) -> Shapes:
    """Returns the shapes of weights and biases of a multilayer perceptron."""
    out: Shapes = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        out[f"{name}.{layer}.weight"] = (outputs, inputs)
        out[f"{name}.{layer}.bias"] = (outputs,)
    return out


def net_options(config: Config, observation: ObservationLayout, action: ActionLayout) -> dict[str, Any]:
    """Returns the arguments of :class:`PolicyNet` for a config, without ``custom``.

    Raises:
        ValueError: the networks don't fit the spaces; one line.
    """
    network = config.network
    if network.squash and not (action.kind == "continuous" and action.bounded):
        what = "discrete" if action.discrete else f"continuous within {list(action.low)} and {list(action.high)}"
        raise ValueError(
            "network.squash: needs continuous actions with finite bounds, whose span float32 holds, and they are "
            f"{what}"
        )
    encoder = ImageEncoder(network.image.kind, network.image.width, network.image.depth)
    encoder.check(observation)
    return {
        "observation": observation,
        "action": action,
        "hidden_sizes": network.hidden_sizes,
        "activation": network.activation,
        "critic": config.algorithm == "ppo",
        "shared": network.shared and config.algorithm == "ppo",
        "squashed": network.squash,
        "state_dependent_std": network.state_dependent_std and not action.discrete,
        "image": encoder,
        "core": network.recurrent,
        "core_size": network.recurrent_size,
        "bf16": config.precision == "bf16",
    }

"""Networks that a user might bring, good ones and others."""

import random
from typing import ClassVar

import numpy as np
import torch
from torch import nn


class Tiny(nn.Module):
    """One hidden layer, with dropout and a critic if wanted."""

    def __init__(self, observation, outputs, units=8, dropout=0.0, critic=True):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observation.shape[-1], units), nn.Tanh(), nn.Dropout(dropout))
        self.actor, self.critic = nn.Linear(units, outputs), nn.Linear(units, 1) if critic else None

    def forward(self, observation):
        features = self.body(observation)
        output = self.actor(features)
        return output if self.critic is None else (output, self.critic(features))


class WideHead(Tiny):
    """Computes its heads in float32 at any precision, as docs/networks.md has it."""

    def forward(self, observation):
        features = self.body(observation)
        assert self.critic is not None
        with torch.autocast(features.device.type, enabled=False):
            return self.actor(features.float()), self.critic(features.float())


class Taking(Tiny):
    """Takes out of its arguments what it is told."""

    def __init__(self, observation, outputs, options):
        super().__init__(observation, outputs, options.pop("units"))


class Shifted(Tiny):
    """Has buffers: one that is kept with the parameters, and one that isn't."""

    def __init__(self, observation, outputs):
        super().__init__(observation, outputs)
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, observation.shape[-1]))
        self.register_buffer("scale", torch.full((outputs,), 0.5), persistent=False)

    def forward(self, observation):
        output, values = super().forward(observation + self.shift)
        return self.scale * output, values


class Scaling(Tiny):
    """Divides its observations, in place or not."""

    def __init__(self, observation, outputs, in_place=True, **kwargs):
        super().__init__(observation, outputs, **kwargs)
        self.in_place = in_place

    def forward(self, observation):
        numbers = observation.float()  # the same memory
        if self.in_place:
            numbers /= 4.0
        return super().forward(numbers if self.in_place else numbers / 4.0)


class OfParts(nn.Module):
    """Takes the parts of a Dict by name."""

    def __init__(self, observation, outputs):
        super().__init__()
        self.colours = nn.Embedding(3, 4)
        self.pixels = nn.Linear(observation["view/camera"][0].numel(), 6)
        self.head = nn.Linear(4 + 6 + observation["speed"].shape[1], outputs + 1)

    def forward(self, observation):
        pixels = self.pixels(observation["view/camera"].float().flatten(1) / 255)
        colour = self.colours(observation["colour"].reshape(-1))
        out = self.head(torch.cat([pixels, colour, observation["speed"]], -1))
        return out[:, :-1], out[:, -1]


class Statistical(Tiny):
    """Keeps running statistics."""

    def __init__(self, observation, outputs):
        super().__init__(observation, outputs)
        self.body.append(nn.BatchNorm1d(8))


class Narrow(Tiny):
    """Has one output too few."""

    def __init__(self, observation, outputs):
        super().__init__(observation, outputs - 1)


class Broken(nn.Module):
    """Can't be called."""

    def __init__(self, observation, outputs):
        super().__init__()
        self.layer = nn.Linear(3, outputs)

    def forward(self, observation):
        return self.layer(observation)


class Scaled(Tiny):
    """Has a parameter without an axis."""

    def __init__(self, observation, outputs):
        super().__init__(observation, outputs)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, observation):
        output, values = super().forward(observation)
        return self.scale * output, values


class Telling(Tiny):
    """Notes the dtype of its hidden activations, and whether a gradient was being taken."""

    seen: ClassVar[set[tuple[str, bool]]] = set()

    def __init__(self, observation, outputs):
        super().__init__(observation, outputs)
        self.body[0].register_forward_hook(self._tell)

    @classmethod
    def _tell(cls, module, inputs, output):
        cls.seen.add((str(output.dtype), torch.is_grad_enabled()))


class Split(Tiny):
    """Looks at its numbers to decide how to compute."""

    def forward(self, observation):
        return super().forward(-observation if observation.max() > 1e6 else observation)


class Forgetful(Tiny):
    """Has dropout that is no module."""

    def forward(self, observation):
        return super().forward(nn.functional.dropout(observation, 0.5, self.training))


class Renormed(Tiny):
    """Has an operation that PyTorch maps by a loop."""

    def forward(self, observation):
        return super().forward(torch.renorm(observation.detach(), 2, 0, 1.0))


class Convolved(Tiny):
    """Has a convolution over the observation's numbers."""

    def __init__(self, observation, outputs):
        super().__init__(observation, outputs)
        self.along = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, observation):
        return super().forward(self.along(observation.unsqueeze(1)).squeeze(1))


class Smooth(Tiny):
    """Has an activation that rounds a tensor's last elements otherwise than the others."""

    def forward(self, observation):
        return super().forward(nn.functional.silu(observation))


class Varied(nn.Module):
    """Has what people build networks of, but for what must go shard by shard."""

    def __init__(self, observation, outputs):
        super().__init__()
        width = observation.shape[-1]
        first = nn.Linear(width, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 32), nn.LeakyReLU(), nn.RMSNorm(32)
        self.body = nn.Sequential(*first, nn.Linear(32, 32, bias=False), nn.Softsign(), nn.GroupNorm(4, 32))
        self.codes, self.offset = nn.Embedding(2, 32), nn.Parameter(torch.zeros(32))
        self.actor, self.critic = nn.Linear(64, outputs), nn.Linear(64, 1)

    def forward(self, observation):
        x = self.body(observation) + self.offset + self.codes((observation[:, 0] > 0).long())
        x = x * torch.exp(-x.abs()).clamp(0, 5) + torch.softmax(x, -1)
        x = torch.cat([x, torch.where(x > 0, x, x.sin())], -1)
        return self.actor(x), self.critic(x.square() / (1 + x.norm(dim=-1, keepdim=True))).squeeze(-1)


class Halved(Tiny):
    """Computes a part in half precision."""

    def forward(self, observation):
        return super().forward((observation.half() + 1).float())


class Compiled(Tiny):
    """Has a compiled part."""

    def __init__(self, observation, outputs):
        super().__init__(observation, outputs)
        self.body = torch.compile(self.body, backend="eager")


class Crowded(Tiny):
    """Has parameters whose names are those of others, but for their dots, and of what PyTorch's wrappers keep."""

    def __init__(self, observation, outputs):
        super().__init__(observation, outputs)
        self.body_0_weight = nn.Parameter(torch.full((outputs,), 0.5))
        self.net = nn.Parameter(torch.full((outputs,), 0.25))

    def forward(self, observation):
        output, values = super().forward(observation)
        return self.body_0_weight * output + self.net, values


class Frozen(Tiny):
    """Keeps its first layer, or more of it, as it is made; or takes its outputs out of what has a gradient."""

    def __init__(self, observation, outputs, parts=("body",), detached=False):
        super().__init__(observation, outputs)
        self.detached = detached
        for part in parts:
            getattr(self, part).requires_grad_(False)

    def forward(self, observation):
        output, values = super().forward(observation)
        return output.detach() if self.detached else output, values


class AlwaysDropping(Tiny):
    """Has dropout in rollouts, too."""

    def forward(self, observation):
        return super().forward(nn.functional.dropout(observation, 0.5))


class Jittery(Tiny):
    """Draws from a generator of the host, in training only."""

    def __init__(self, observation, outputs, library="numpy"):
        super().__init__(observation, outputs)
        self.draw = np.random.rand if library == "numpy" else random.random

    def forward(self, observation):
        return super().forward(observation + self.draw() if self.training else observation)


class Features(Tiny):
    """Is made with numbers that PyTorch's generator didn't draw: a parameter, a buffer, or an attribute."""

    def __init__(self, observation, outputs, where="buffer", keyed=False):
        super().__init__(observation, outputs)
        size = observation.shape[-1]
        numbers = torch.randn(size) if keyed else torch.as_tensor(np.random.randn(size), dtype=torch.float32)
        if where == "parameter":
            self.basis = nn.Parameter(numbers)
        elif where == "buffer":
            self.register_buffer("basis", numbers)
        else:
            self.basis = numbers

    def forward(self, observation):
        return super().forward(torch.cos(observation + self.basis))


class Spectral(Tiny):
    """Estimates a norm from call to call."""

    def __init__(self, observation, outputs):
        super().__init__(observation, outputs)
        nn.utils.parametrizations.spectral_norm(self.body[0])


class Counting(Tiny):
    """Counts its calls, in a buffer or in none."""

    def __init__(self, observation, outputs, buffer=True):
        super().__init__(observation, outputs)
        self.register_buffer("calls", torch.zeros(()), persistent=False) if buffer else setattr(self, "calls", 0)

    def forward(self, observation):
        self.calls = self.calls + 1
        return super().forward(observation + self.calls)


class Running(Tiny):
    """Keeps a running scale of its observations in a plain attribute, which zeros don't change.

    It changes "always", in "training", or in training alone to be used "outside" of it, as a BatchNorm's does.
    """

    def __init__(self, observation, outputs, changes="training", **kwargs):
        super().__init__(observation, outputs, **kwargs)
        self.scale, self.changes = torch.zeros(()), changes

    def forward(self, observation):
        batch = observation.abs().mean().detach()
        if self.training or self.changes == "always":
            self.scale = 0.9 * self.scale + 0.1 * batch
        return super().forward(
            observation / (1 + (batch if self.changes == "outside" and self.training else self.scale))
        )


class Particular(Tiny):
    """Takes only observations that its environment gives, and keeps what it saw last, without use."""

    def forward(self, observation):
        self.last = observation
        if observation.abs().max() > 1:
            raise ValueError("beyond 1")
        return super().forward(observation)


class Squeezed(Tiny):
    """Drops axes of one, also that of a single observation."""

    def __init__(self, observation, outputs, joined=False):
        super().__init__(observation, outputs)
        self.joined = joined

    def forward(self, observation):
        output, values = super().forward(observation)
        both = torch.cat([output.squeeze(), values.squeeze()[:, None]], 1) if self.joined else None
        return (output.squeeze(), values.squeeze()) if both is None else (both[:, :-1], both[:, -1])


class OfBatch(Tiny):
    """Normalises by the batch's own statistics, and can't be called with a single observation."""

    def __init__(self, observation, outputs):
        super().__init__(observation, outputs)
        self.body.append(nn.BatchNorm1d(8, track_running_stats=False))


class Masking(Tiny):
    """Makes a mask at its first call, and another at the first one of training."""

    def __init__(self, observation, outputs):
        super().__init__(observation, outputs)
        self.register_buffer("mask", None)
        self.register_buffer("in_training", None)

    def forward(self, observation):
        if self.mask is None:
            self.mask = torch.ones(observation.shape[-1])
        if self.training and self.in_training is None:
            self.in_training = torch.ones(observation.shape[-1])
        return super().forward(observation * (self.in_training if self.training else self.mask))


class Untrainable(Tiny):
    """Can't be called in training."""

    def forward(self, observation):
        return super().forward(observation if not self.training else observation.noisy())


class ThroughNumPy(Tiny):
    """Reads a parameter by NumPy, which one that has a gradient doesn't allow."""

    def forward(self, observation):
        output, values = super().forward(observation)
        return output * float(self.actor.weight.numpy().size), values


class Precise(Tiny):
    """Keeps a factor in float64."""

    def __init__(self, observation, outputs):
        super().__init__(observation, outputs)
        self.scale = nn.Parameter(torch.ones(outputs, dtype=torch.float64))

    def forward(self, observation):
        output, values = super().forward(observation)
        return output * self.scale, values


class Forbidding(Tiny):
    """Forbids the last action by a logit of its own, by default -inf."""

    def __init__(self, observation, outputs, logit=float("-inf")):
        super().__init__(observation, outputs)
        self.logit = logit

    def forward(self, observation):
        output, values = super().forward(observation)
        return torch.cat([output[:, :-1], torch.full_like(output[:, -1:], self.logit)], -1), values


class Returning(Tiny):
    """Returns its outputs and values as a list, or something else that the arguments name."""

    def __init__(self, observation, outputs, kind="list"):
        super().__init__(observation, outputs)
        self.kind = kind

    def forward(self, observation):
        output, values = super().forward(observation)
        kinds = {"list": [output, values], "three": (output, values, 1), "no values": (output, None)}
        kinds |= {"dict": {"output": output}, "nothing": None, "one": (output,), "text": (output, "values")}
        return kinds[self.kind]

"""A network of one's own for engine torch, with layers of the kinds that such networks have."""

from __future__ import annotations

import torch
from torch import nn


class Own(nn.Module):
    """One hidden layer; ``dropout``, ``normalizes`` (a LayerNorm) and ``low`` (bfloat16) as the config wants them."""

    def __init__(
        self,
        observation: torch.Tensor,
        outputs: int,
        dropout: float = 0.0,
        normalizes: bool = False,
        low: bool = False,
    ) -> None:
        super().__init__()
        self.low = low
        norm = nn.LayerNorm(16) if normalizes else nn.Identity()
        self.body = nn.Sequential(nn.Linear(observation[0].numel(), 16), norm, nn.GELU(), nn.Dropout(dropout))
        self.actor, self.critic = nn.Linear(16, outputs), nn.Linear(16, 1)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.low):
            features = self.body(observation.flatten(1))
        features = features.float()
        return self.actor(features), self.critic(features)

"""A network of a user's own for images: normalised convolutions, and dropout before the heads."""

import torch
from torch import nn


class Eyes(nn.Module):
    """One module for actor and critic; ``blind`` sees nothing."""

    def __init__(self, observation, outputs, channels=8, dropout=0.1, blind=False):
        super().__init__()
        self.blind, pixels = blind, observation.shape[1] * observation.shape[2]
        self.body = nn.Sequential(
            nn.Conv2d(observation.shape[3], channels, 3, padding=1),
            nn.GroupNorm(2, channels),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(channels * pixels, 32),
            nn.ReLU(),
            nn.Dropout(dropout),
        )
        self.actor, self.critic = nn.Linear(32, outputs), nn.Linear(32, 1)

    def forward(self, observation):
        image = observation.movedim(3, 1).float() / 255
        features = self.body(torch.zeros_like(image) if self.blind else image)
        return self.actor(features), self.critic(features)

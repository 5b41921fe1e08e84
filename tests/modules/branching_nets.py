"""A network of a user's own that Python steers by its numbers, which nothing can trace."""

from torch import nn


class Branching(nn.Module):
    def __init__(self, observation, outputs):
        super().__init__()
        self.actor, self.critic = nn.Linear(observation.shape[1], outputs), nn.Linear(observation.shape[1], 1)

    def forward(self, observation):
        if float(observation.sum()) > 0:
            observation = -observation
        return self.actor(observation), self.critic(observation)

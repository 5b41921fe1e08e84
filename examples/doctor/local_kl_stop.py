"""PPO on CartPole whose ranks stop their epochs each by its own KL divergence: NOT IN SYNC.

Gradients are reduced and parameters stay equal, but ranks pair steps of different rollouts, and in the end one waits.
"""

import gymnasium as gym
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel

NUM_ENVS, NUM_STEPS, ITERATIONS, EPOCHS = 8, 32, 20, 10


class Agent(nn.Module):
    """Gives actions (drawn, unless given) of observations, their log-probabilities, and values."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, obs, actions=None):
        hidden = self.body(obs)
        policy = Categorical(logits=self.actor(hidden))
        actions = policy.sample() if actions is None else actions
        return actions, policy.log_prob(actions), self.critic(hidden).squeeze(-1)


dist.init_process_group("gloo")
torch.manual_seed(0)  # the same parameters on every rank
agent = DistributedDataParallel(Agent())
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
torch.manual_seed(1 + dist.get_rank())  # and other data
envs = gym.make_vec("CartPole-v1", NUM_ENVS, vectorization_mode="sync")
obs = torch.as_tensor(envs.reset(seed=1000 * dist.get_rank())[0])

for _ in range(ITERATIONS):
    rollout = []
    for _ in range(NUM_STEPS):
        with torch.no_grad():
            actions, log_probs, _ = agent.module(obs)
        following, rewards, terminated, truncated, _ = envs.step(actions.numpy())
        ended = torch.as_tensor(terminated | truncated).float()
        rollout.append((obs, actions, log_probs, torch.as_tensor(rewards).float(), ended))
        obs = torch.as_tensor(following)
    all_obs, actions, old_log_probs, rewards, ends = (torch.stack(column) for column in zip(*rollout, strict=True))
    returns = torch.zeros_like(rewards)
    for t in reversed(range(NUM_STEPS)):
        returns[t] = rewards[t] + (0.98 * (1 - ends[t]) * returns[t + 1] if t + 1 < NUM_STEPS else 0)
    for _ in range(EPOCHS):
        _, log_probs, values = agent(all_obs, actions)
        if (old_log_probs - log_probs).mean() > 0.01:  # of this rank's data alone
            break
        ratio, advantages = (log_probs - old_log_probs).exp(), (returns - values).detach()
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        optimizer.zero_grad()
        ((returns - values).pow(2).mean() - gain).backward()
        optimizer.step()
dist.destroy_process_group()

"""CartPole by PPO on several ranks, as it should be: ``lockstep doctor --nproc 2 -- examples/doctor/correct_ddp.py``.

Every gradient goes through DDP's forward, parameters begin equal, and every rank has environments of its own.
"""

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel

NUM_ENVS, NUM_STEPS, ITERATIONS, EPOCHS, MINIBATCHES = 4, 64, 12, 4, 4


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, obs):
        return self.actor(obs), self.critic(obs).squeeze(-1)


def collect(agent, envs, obs):
    """A rollout: observations, actions, their log-probabilities, returns and advantages, flat."""
    rows = []
    for _ in range(NUM_STEPS):
        with torch.no_grad():
            logits, value = agent(torch.as_tensor(obs))
        action = Categorical(logits=logits).sample()
        log_prob = Categorical(logits=logits).log_prob(action)
        next_obs, reward, terminated, truncated, _ = envs.step(action.numpy())
        done = torch.as_tensor(terminated | truncated, dtype=torch.float32)
        rows.append((torch.as_tensor(obs), action, log_prob, value, torch.as_tensor(reward, dtype=torch.float32), done))
        obs = next_obs
    obs_t, actions, log_probs, values, rewards, dones = (torch.stack(column) for column in zip(*rows, strict=True))
    with torch.no_grad():
        last = agent(torch.as_tensor(obs))[1]
    returns = torch.empty_like(rewards)
    for t in reversed(range(NUM_STEPS)):
        last = returns[t] = rewards[t] + 0.98 * last * (1 - dones[t])
    batch = [obs_t.reshape(-1, 4), *(x.reshape(-1) for x in (actions, log_probs, returns, returns - values))]
    return batch, obs


def loss_of(agent, obs, actions, old_log_probs, returns, advantages):
    logits, values = agent(obs)
    ratio = (Categorical(logits=logits).log_prob(actions) - old_log_probs).exp()
    clipped = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -clipped.mean() + 0.5 * (returns - values).pow(2).mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same parameters
    agent = DistributedDataParallel(Agent())
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    torch.manual_seed(1 + rank)  # other actions and minibatches
    envs = gym.make_vec("CartPole-v1", NUM_ENVS, vectorization_mode="sync")
    obs, _ = envs.reset(seed=1000 * rank)
    for _ in range(ITERATIONS):
        batch, obs = collect(agent.module, envs, obs)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(batch[0])).chunk(MINIBATCHES):
                loss = loss_of(agent, *(x[rows] for x in batch))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
    print(f"rank {rank}: mean return {np.mean(batch[3].numpy()):.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

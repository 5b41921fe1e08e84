"""A plain single-process PPO on CartPole in one file, made data-parallel by the lines that are marked ``# attach``.

    python examples/attach_ppo.py
    torchrun --nproc-per-node 2 examples/attach_ppo.py
    lockstep run --nproc 2 examples/attach_ppo.py

Without a launcher the marked lines do nothing. With two ranks each steps half of the environments, and the agent stays
one agent. It takes less than a minute.
"""

import argparse
import time

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import lockstep  # attach

NUM_ENVS, NUM_STEPS, NUM_EPOCHS, NUM_MINIBATCHES = 8, 32, 10, 2
GAMMA, GAE_LAMBDA, CLIP, MAX_GRAD_NORM, TARGET_KL, LEARNING_RATE = 0.98, 0.8, 0.2, 0.5, 0.05, 1e-3


class Agent(nn.Module):
    """Actor and critic with a body each; its losses come by a method that isn't ``forward``."""

    def __init__(self):
        super().__init__()

        def body(outputs):
            return nn.Sequential(
                nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
            )  # fmt: skip

        self.actor, self.critic = body(2), body(1)

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)

    def get_action_and_value(self, obs, action=None):
        distribution = Categorical(logits=self.actor(obs))
        action = distribution.sample() if action is None else action
        return action, distribution.log_prob(action), self.get_value(obs)


def make_envs(count):
    """Environments that begin their next episode in the step that ended the last one."""
    makers = [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1")) for _ in range(count)]
    return gym.vector.SyncVectorEnv(makers, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


def collect(agent, envs, obs, returns):
    """A rollout ``[NUM_STEPS, envs, …]`` with its advantages; episode returns are appended to ``returns``."""
    rows, values = {"obs": [], "action": [], "log_prob": [], "value": []}, []
    rewards, nexts, dones = [], [], []
    for _ in range(NUM_STEPS):
        with torch.no_grad():
            action, log_prob, value = agent.get_action_and_value(obs)
        for name, row in zip(rows, (obs, action, log_prob, value), strict=True):
            rows[name].append(row)
        after, reward, terminated, truncated, info = envs.step(action.numpy())
        last, done = after.copy(), terminated | truncated
        if done.any():
            last[done] = np.stack(list(info["final_obs"][done]))
            returns.extend(info["final_info"]["episode"]["r"][done])
        with torch.no_grad():  # a truncated episode goes on in the critic's eyes, a terminated one doesn't
            nexts.append(agent.get_value(torch.as_tensor(last)) * torch.as_tensor(~terminated))
        rewards.append(torch.as_tensor(reward, dtype=torch.float32))
        dones.append(torch.as_tensor(done))
        obs = torch.as_tensor(after)
    values, advantages, advantage = rows["value"], [], torch.zeros(envs.num_envs)
    for t in reversed(range(NUM_STEPS)):
        delta = rewards[t] + GAMMA * nexts[t] - values[t]
        advantage = delta + GAMMA * GAE_LAMBDA * advantage * ~dones[t]
        advantages.insert(0, advantage)
    batch = {name: torch.cat(row) for name, row in rows.items()} | {"advantage": torch.cat(advantages)}
    return obs, batch | {"return": batch["advantage"] + batch["value"]}


def update(agent, optimizer, batch):
    """Some epochs over a rollout; returns the last Kullback–Leibler divergence."""
    rows, approx_kl = len(batch["action"]), 0.0
    for _ in range(NUM_EPOCHS):
        for part in torch.randperm(rows).chunk(NUM_MINIBATCHES):
            _, log_prob, value = agent.get_action_and_value(batch["obs"][part], batch["action"][part])
            log_ratio = log_prob - batch["log_prob"][part]
            advantage = lockstep.normalize(batch["advantage"][part])  # attach: was (a - a.mean()) / (a.std() + 1e-8)
            ratio = log_ratio.exp()
            policy_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            loss = policy_loss + 0.5 * (value - batch["return"][part]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            with torch.no_grad():
                approx_kl = (ratio - 1 - log_ratio).mean()
        approx_kl = float(lockstep.all_mean(approx_kl))  # attach: every rank decides from the same number
        if approx_kl > TARGET_KL:
            break
    return approx_kl


def main():
    """Train, and say every 50 iterations how far it is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-steps", type=int, default=80_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    _, world_size = lockstep.join()  # attach
    torch.set_num_threads(1)
    seed = lockstep.shard_seed(args.seed)  # attach: was seed = args.seed
    torch.manual_seed(seed)
    envs = make_envs(NUM_ENVS // world_size)  # attach: was NUM_ENVS
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    lockstep.attach(agent, optimizer)  # attach

    obs, returns, started = torch.as_tensor(envs.reset(seed=seed)[0]), [], time.perf_counter()
    iterations = args.total_steps // (NUM_ENVS * NUM_STEPS)
    for iteration in range(iterations):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - iteration / iterations)
        obs, batch = collect(agent, envs, obs, returns)
        approx_kl = update(agent, optimizer, batch)
        if (iteration + 1) % 50 == 0 or iteration + 1 == iterations:
            mean_return = lockstep.all_mean(float(np.mean(returns[-20:])))  # attach: was without all_mean
            if lockstep.is_writer():  # attach
                steps = (iteration + 1) * NUM_ENVS * NUM_STEPS
                fps = steps / (time.perf_counter() - started)
                print(f"step {steps} return {mean_return:.1f} kl {approx_kl:.4f} steps/s {fps:.0f}", flush=True)
    envs.close()


if __name__ == "__main__":
    main()

"""CleanRL's PPO on a benchmark case, written down again: it isn't on a package index.

The code is ours; what decides about its speed is as CleanRL publishes it (Huang et al. 2022; ``ppo.py``,
``ppo_continuous_action.py``, ``ppo_atari.py``, ``ppo_atari_envpool.py``): Gymnasium's ``SyncVectorEnv`` of environments
in the same wrappers, or EnvPool with its late reset; one inference of a ``torch.nn`` agent a step, and a sample from
``torch.distributions``; a rollout in tensors; GAE as a loop over time; minibatches of indices that NumPy shuffles;
advantages normalised in each, clipped values, a clipped gradient norm, Adam with eps 1e-5 and a rate that falls to
nought; TensorBoard's scalars after each iteration and for each episode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cleanrl_parts import Agent, make_envs
from settings import Settings, read_torch_settings
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

GAMMA, LAMBDA, CLIP, VALUE_COEF, MAX_NORM = 0.99, 0.95, 0.2, 0.5, 0.5


class Storage:
    """One rollout, ``[num_steps, num_envs, …]``."""

    def __init__(self, settings: Settings, envs: Any) -> None:
        shape = (settings.num_steps, settings.num_envs)
        self.obs = torch.zeros((*shape, *envs.single_observation_space.shape))
        self.actions = torch.zeros((*shape, *envs.single_action_space.shape))
        self.log_probs, self.rewards, self.dones, self.values = (torch.zeros(shape) for _ in range(4))

    def advantages(self, last_value: Tensor, last_done: Tensor) -> Tensor:
        """GAE, backwards through time."""
        out, carried = torch.zeros_like(self.rewards), torch.zeros_like(last_done)
        for t in reversed(range(len(self.rewards))):
            at_end = t == len(self.rewards) - 1
            going_on = 1.0 - (last_done if at_end else self.dones[t + 1])
            next_value = last_value if at_end else self.values[t + 1]
            delta = self.rewards[t] + GAMMA * next_value * going_on - self.values[t]
            out[t] = carried = delta + GAMMA * LAMBDA * going_on * carried
        return out


class Trainer:
    """Rollouts and updates of one agent."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.envs = settings, make_envs(settings)
        self.agent = Agent(self.envs, settings.images)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=settings.learning_rate, eps=1e-5)
        self.storage, self.writer = Storage(settings, self.envs), SummaryWriter("cleanrl")
        self.obs = torch.Tensor(self.envs.reset()[0])
        self.done = torch.zeros(settings.num_envs)
        self.global_step = 0

    def rollout(self) -> None:
        """One inference and one step of all environments at a time."""
        rollout = self.storage
        for t in range(self.settings.num_steps):
            self.global_step += self.settings.num_envs
            rollout.obs[t], rollout.dones[t] = self.obs, self.done
            with torch.no_grad():
                action, log_prob, _, value = self.agent.act(self.obs)
            rollout.values[t], rollout.actions[t], rollout.log_probs[t] = value.flatten(), action, log_prob
            obs, reward, terminated, truncated, info = self.envs.step(action.numpy())
            rollout.rewards[t] = torch.tensor(reward).view(-1)
            self.obs, self.done = torch.Tensor(obs), torch.Tensor(np.logical_or(terminated, truncated))
            episodes = info.get("final_info", info).get("episode")
            if episodes is not None:
                for i in np.flatnonzero(episodes["_r"]):
                    self.writer.add_scalar("charts/episodic_return", episodes["r"][i], self.global_step)
                    self.writer.add_scalar("charts/episodic_length", episodes["l"][i], self.global_step)

    def update(self) -> dict[str, Tensor | float]:
        """All epochs of the update on the last rollout; the last minibatch's figures."""
        rollout, settings = self.storage, self.settings
        with torch.no_grad():
            advantages = rollout.advantages(self.agent.value(self.obs).flatten(), self.done)
        rows = [x.reshape(-1, *x.shape[2:]) for x in (rollout.obs, rollout.actions, rollout.log_probs)]
        rows += [advantages.reshape(-1), (advantages + rollout.values).reshape(-1), rollout.values.reshape(-1)]
        indices = np.arange(len(rows[0]))
        figures: dict[str, Tensor] = {}
        clipped: list[float] = []
        for _ in range(settings.num_epochs):
            np.random.shuffle(indices)
            for start in range(0, len(indices), settings.batch_size):
                chosen = indices[start : start + settings.batch_size]
                figures = self.step(*(x[chosen] for x in rows), clipped=clipped)
        variance = np.var(rows[4].numpy())
        unexplained = np.var(rows[4].numpy() - rows[5].numpy()) / variance if variance else float("nan")
        return figures | {"clipfrac": float(np.mean(clipped)), "explained_variance": float(1 - unexplained)}

    def step(
        self,
        obs: Tensor,
        actions: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        returns: Tensor,
        old_values: Tensor,
        clipped: list[float],
    ) -> dict[str, Tensor]:
        """One optimiser step on a minibatch; its share of clipped ratios alone is a number at once, as published."""
        _, log_probs, entropy, values = self.agent.act(obs, actions)
        log_ratio = log_probs - old_log_probs
        ratio = log_ratio.exp()
        with torch.no_grad():
            old_kl, kl = (-log_ratio).mean(), ((ratio - 1) - log_ratio).mean()
            clipped.append(((ratio - 1.0).abs() > CLIP).float().mean().item())
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - CLIP, 1 + CLIP)).mean()
        values = values.view(-1)
        near = old_values + torch.clamp(values - old_values, -CLIP, CLIP)
        value_loss = 0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2).mean()
        entropy_loss = entropy.mean()
        loss = policy_loss - self.settings.entropy_coef * entropy_loss + VALUE_COEF * value_loss
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.agent.parameters(), MAX_NORM)
        self.optimizer.step()
        found = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy_loss}
        return found | {"old_approx_kl": old_kl, "approx_kl": kl}

    def log(self, figures: dict[str, Tensor | float]) -> None:
        """What is written after every iteration."""
        self.writer.add_scalar("charts/learning_rate", self.optimizer.param_groups[0]["lr"], self.global_step)
        for name, value in figures.items():
            number = value.item() if isinstance(value, Tensor) else value
            self.writer.add_scalar(f"losses/{name}", number, self.global_step)


def main() -> None:
    settings = read_torch_settings()
    torch.manual_seed(1)
    np.random.seed(1)
    trainer = Trainer(settings)
    for iteration in range(settings.iterations):
        trainer.optimizer.param_groups[0]["lr"] = settings.learning_rate * (1 - iteration / settings.iterations)
        trainer.rollout()
        trainer.log(trainer.update())
        settings.iteration_done()


if __name__ == "__main__":
    main()

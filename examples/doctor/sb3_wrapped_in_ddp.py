"""Stable-Baselines3's PPO with its policy wrapped in DDP, which never reduces a gradient: NOT IN SYNC.

SB3 computes its loss by ``policy.evaluate_actions``; DDP only sees ``policy.forward``.
"""

import torch.distributed as dist
from stable_baselines3 import PPO
from torch.nn.parallel import DistributedDataParallel


class WrappedPolicy(DistributedDataParallel):
    """DDP around a policy whose other attributes are still found."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


dist.init_process_group("gloo")
model = PPO("MlpPolicy", "CartPole-v1", n_steps=256, batch_size=64, n_epochs=4, seed=dist.get_rank(), device="cpu")
model.policy = WrappedPolicy(model.policy)  # pyright: ignore[reportAttributeAccessIssue]
model.learn(2048)
dist.destroy_process_group()

"""A task that takes steps apart on two devices and averages now and then, with checkpoints, in pmap style."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import corridors

from lockstep.jax import DistributedPPOConfig, DistributedPPOTask


class CorridorTask(DistributedPPOTask):
    def get_environment(self):
        return corridors.Corridor()

    def get_rewards(self):
        return {"arrival": (2.0, lambda t: t.terminated), "haste": lambda t: -0.1}


def config(**changes):
    """Two devices, three updates of four optimiser steps."""
    settings: dict[str, Any] = dict(
        num_envs=8, num_batches=2, num_devices=2, grad_sync_period=2, num_passes=2, rollout_length_steps=8,
        total_timesteps=3 * 8 * 8, hidden_sizes=(8,), log_devices_every=2,
    )  # fmt: skip
    return DistributedPPOConfig(**(settings | changes))


def main(folder: Path):
    """Train twice as long in two runs as in one."""
    CorridorTask(
        config(checkpoint_dir=folder, checkpoint_interval=64, total_timesteps=2 * 64)
    ).run_distributed_training()
    task = CorridorTask(config(checkpoint_dir=folder, checkpoint_interval=64, resume=True))
    return task, *task.run_distributed_training()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(Path(sys.argv[1]))

"""A training script as users of functional trainers write it; nothing but the import is Lockstep's."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from lockstep.jax import (
    PPO,
    AutoResetWrapper,
    PPOConfig,
    PPOMetricsHistory,
    PPOTrainState,
    RunnerConfig,
    load_checkpoint,
    load_metadata,
    make,
    save_checkpoint,
    train_ppo_multigpu,
)


def main(folder: Path) -> tuple[PPOTrainState, PPOMetricsHistory]:
    """Train on two devices, save, load, and try the policy."""
    env, env_params = make("CartPole-v1")
    env = AutoResetWrapper(env)
    env_params = env.default_params()
    ppo_config = PPOConfig(
        n_steps=8, n_minibatches=2, n_epochs=2, hidden_sizes=(8, 8), lr=1e-3, clip_eps=0.2, shared_backbone=True
    )
    runner_config = RunnerConfig(total_timesteps=128, seed=0, num_devices=2, num_envs=2)
    train_state, history = train_ppo_multigpu(env, env_params, ppo_config=ppo_config, runner_config=runner_config)

    n_updates = 128 // (2 * 2 * 8)
    assert isinstance(history, PPOMetricsHistory)
    assert isinstance(train_state, PPOTrainState)
    assert history.total_loss.shape == (n_updates,)
    assert int(train_state.agent_state.step) == n_updates
    assert train_state.env_obs.shape == (2, 2, 4)
    for leaf in jax.tree.leaves(train_state):
        assert jnp.all(jnp.isfinite(leaf))

    save_checkpoint(folder, train_state.agent_state, step=128, metadata={"env": "CartPole-v1", "algorithm": "ppo"})
    template = PPO.init(jax.random.PRNGKey(99), obs_shape=(4,), n_actions=2, config=ppo_config)
    loaded = load_checkpoint(folder, like=template, step=128)
    assert loaded.step.shape == ()
    assert load_metadata(folder, step=128) == {"env": "CartPole-v1", "algorithm": "ppo"}
    logits, _ = PPO.apply(loaded, train_state.env_obs)
    print(f"final loss {float(history.total_loss[-1]):.4f}, logits {logits.shape}")
    return train_state, history


if __name__ == "__main__":
    main(Path(sys.argv[1]))

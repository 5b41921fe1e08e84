"""Stable-Baselines3's tutorial on CartPole, on as many ranks as it is given: only the import of PPO has changed.

``python examples/sb3_cartpole.py`` is Stable-Baselines3; ``lockstep run --nproc 2 examples/sb3_cartpole.py`` and
``torchrun --nproc-per-node 2 examples/sb3_cartpole.py`` train one agent in twice as many environments.
Arguments, both optional: the folder to write to and the device.
"""

import sys
from pathlib import Path

from stable_baselines3.common.callbacks import CheckpointCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from lockstep.integrations.sb3 import PPO  # was: from stable_baselines3 import PPO

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "sb3_cartpole")
device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
vec_env = make_vec_env("CartPole-v1", n_envs=4, monitor_dir=str(folder / "monitor"))
eval_env = make_vec_env("CartPole-v1", n_envs=4)
callbacks = [
    CheckpointCallback(save_freq=1_250, save_path=str(folder / "checkpoints")),
    EvalCallback(eval_env, eval_freq=1_250, n_eval_episodes=4, best_model_save_path=str(folder / "best")),
]

model = PPO(
    "MlpPolicy",
    vec_env,
    learning_rate=lambda remaining: 1e-3 * remaining,
    n_steps=32,
    batch_size=32,
    gamma=0.98,
    gae_lambda=0.8,
    tensorboard_log=str(folder / "tensorboard"),
    seed=1,
    device=device,
    verbose=1,
)
model.learn(total_timesteps=30_000, callback=callbacks)
model.save(folder / "ppo_cartpole")

model = PPO.load(folder / "ppo_cartpole", env=vec_env, device=device)
mean, deviation = evaluate_policy(model, eval_env, n_eval_episodes=20)
print(f"mean return over 20 episodes: {mean:.1f} +/- {deviation:.1f}")

"""Words of other libraries, with the setting that each stands for, or advice if it means something else here.

They come from Stable-Baselines3 and its RL Zoo, CleanRL, rsl_rl, PureJaxRL and common training scripts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lockstep.config.algorithms import CLIPPED

ALIASES = {
    "env": "env.id",
    "env_id": "env.id",
    "env_name": "env.id",
    "gym_id": "env.id",
    "task": "env.id",
    "env_kwargs": "env.kwargs",
    "num_workers": "env.workers",
    "frame_stack": "env.frame_stack",
    "algo": "algorithm",
    "total_timesteps": "total_steps",
    "n_timesteps": "total_steps",
    "timesteps": "total_steps",
    "total_iters": "total_iterations",
    "max_iterations": "total_iterations",
    "num_updates": "total_iterations",
    "num_iterations": "total_iterations",
    "num_learning_iterations": "total_iterations",
    "n_envs": "num_envs",
    "local_num_envs": "num_envs_per_rank",
    "n_steps": "num_steps",
    "rollout_steps": "num_steps",
    "num_steps_per_env": "num_steps",
    "num_threads": "threads",
    "learning_rate": "ppo.learning_rate",
    "lr": "ppo.learning_rate",
    "gamma": "ppo.gamma",
    "gae_lambda": "ppo.gae_lambda",
    "lam": "ppo.gae_lambda",
    "num_epochs": "ppo.num_epochs",
    "n_epochs": "ppo.num_epochs",
    "update_epochs": "ppo.num_epochs",
    "epochs": "ppo.num_epochs",
    "num_learning_epochs": "ppo.num_epochs",
    "batch_size": "ppo.batch_size",
    "minibatch_size": "ppo.batch_size",
    "num_minibatches": "ppo.num_minibatches",
    "minibatches": "ppo.num_minibatches",
    "n_minibatches": "ppo.num_minibatches",
    "num_mini_batches": "ppo.num_minibatches",
    "clip_range": "ppo.clip_range",
    "clip_coef": "ppo.clip_range",
    "clip_eps": "ppo.clip_range",
    "clip_param": "ppo.clip_range",
    "clip_range_vf": "ppo.value_clip_range",  # the range; SB3's loss is of the clipped value, not the larger of both
    "ent_coef": "ppo.entropy_coef",
    "target_kl": "ppo.target_kl",
    "desired_kl": "ppo.desired_kl",
    "max_grad_norm": "ppo.max_grad_norm",
    "hidden_sizes": "network.hidden_sizes",
    "activation": "network.activation",
    "log_std_init": "network.log_std_init",
    "norm_obs": "normalize.observations",
    "empirical_normalization": "normalize.observations",
    "norm_reward": "normalize.returns",
    "clip_obs": "normalize.clip_observations",
    "n_eval_episodes": "eval.episodes",
    "eval_episodes": "eval.episodes",
    "log_jsonl": "log.jsonl",
    "wandb_project_name": "log.project",
    "wandb_project": "log.project",
    "wandb_entity": "log.entity",
    "wandb_tags": "log.tags",
    "world_size": "nproc",
    "nproc_per_node": "nproc",
    "run_name": "name",
    "exp_name": "name",
    "experiment_name": "name",
}
"""Words that mean exactly what a setting means."""

MEMORY = "network.recurrent"
WITH_MEMORY = {"lstm_hidden_size": "network.recurrent_size"}
"""Words that are aliases only if ``network.recurrent`` is given too; otherwise ``ADVICE`` answers them."""

CONFIG_FILE = ("config", "config_file", "conf_file", "cfg")
"""Options that precede a config file in other libraries; here a file needs none."""


class StandsFor(NamedTuple):
    """The setting that a switch stands for: its path, and its values if the switch is on and if it is off.

    A value is None if no setting does that; then ``ADVICE`` says what to write.
    """

    path: str
    on: str | None
    off: str | None


SWITCHES = {
    "amp": StandsFor("precision", "bf16", "fp32"),
    "track": StandsFor("log.wandb", "true", "false"),
    "anneal_lr": StandsFor("ppo.schedule", "linear", "constant"),
    "norm_adv": StandsFor("ppo.advantage_normalization", "global", "off"),
    "normalize_advantage": StandsFor("ppo.advantage_normalization", "global", "off"),
    "clip_vloss": StandsFor("ppo.value_clip_range", CLIPPED, "none"),
    "use_clipped_value_loss": StandsFor("ppo.value_clip_range", CLIPPED, "none"),
    "gae": StandsFor("algorithm", "ppo", None),
    "cuda": StandsFor("device", "cuda", "cpu"),
    "max_utilization": StandsFor("num_envs_per_rank", "max", None),
    "capture_video": StandsFor("eval.record_video", None, "false"),
    "record_video": StandsFor("eval.record_video", None, "false"),
}
"""On/off options, with the setting that each stands for."""

ALREADY = {
    "torch_deterministic": True,
    "use_sde": False,
    "headless": True,
    "render": False,
    "save_model": True,
    "upload_model": False,
}
"""Switches for what every run does anyway if they have this value; ``ADVICE`` answers the other value."""

VALUES = {
    "precision": {"amp": "bf16", "bfloat16": "bf16", "bf16-mixed": "bf16", "float32": "fp32", "32": "fp32"},
    "algorithm": {"PPO": "ppo", "GRPO": "grpo"},
    "device": {"gpu": "cuda"},
}
"""Other words for the values of a setting."""


def _times(text: str, factor: float) -> str:
    try:
        return f"{float(text) * factor:g}"
    except ValueError:
        return f"{factor:g}X"


def _logarithm(text: str) -> str:
    try:
        return f"{math.log(float(text)):g}, the logarithm of {text}"
    except ValueError:  # also of what has no logarithm
        return "X, the logarithm of the standard deviation: 0 for 1"


def _sizes(text: str) -> str:
    return " ".join(text.strip("[]()").replace(",", " ").split()) or "64 64"


SHORT = {"-f": "--runs-dir", "-n": "--total-steps", "-i": "--resume", "-tb": "--log.tensorboard"}
"""RL Zoo's options with one dash."""

_WORKERS = "--env.workers 4 steps environments in four worker processes a rank"
_EXPLORATION = "there is no state-dependent exploration; --network.state-dependent-std learns the spread by state"
_OWN_NETWORK = "a network of your own is --network.custom module:Class, in place of all layers"
_OWN_LOSS = "a loss of your own is --ppo.loss module:function, a term that is added or a whole one (docs/losses.md); "
_OWN_LOSS += "to keep your loop instead, lockstep.attach(model, optimizer) makes it one agent on many ranks"
_CURIOSITY = "there is no intrinsic reward; an environment may add one to its own rewards"
_MODULE = "'my_module:MyEnv-v0' in the id's place imports my_module first"
_WRAPPERS = "a class or function that makes the wrapped environment is an environment: my_module:make_env"
_RESUME = "--resume RUN goes on with a run; lockstep eval RUN and lockstep play RUN load a policy"

_RANKS = "--nproc 4 starts four ranks, --nproc 1 is the default; under torchrun, Slurm or MPI nothing is needed, and "
_RANKS += "engine jax takes all GPUs unless --devices 1 says otherwise"
_UPLOAD = "nothing is uploaded to a hub; lockstep export RUN writes a policy for other programs"
_OFF_POLICY = "there are no off-policy algorithms (DQN, SAC, TD3, DDPG); algorithms are ppo and grpo"


_ONE_LAYER = "there is one layer, of --network.recurrent-size units; leave it out"


def _of_both(sizes: str) -> str:
    return f"write --network.hidden-sizes {_sizes(sizes)}; actor and critic have the same sizes"


def _units(count: str) -> str:
    return f"write --network.recurrent-size {count or 256} beside --network.recurrent"


def _count(text: str) -> str:
    return text if text.isdigit() and text != "0" else "2"


def _every(setting: str) -> Callable[[str], str]:
    """Returns advice on an option that counts steps elsewhere and iterations here."""
    return lambda v: f"write --{setting}, in iterations: {v or 'steps'} / (num_envs x num_steps)"


ADVICE: dict[str, str | Callable[[str], str]] = {
    "vf_coef": lambda v: (
        f"libraries count the value loss with a factor 0.5 or without: CleanRL's and PureJaxRL's is "
        f"--ppo.value-coef {v or 'X'}, SB3's --ppo.value-coef {_times(v, 2)}"
    ),
    "value_loss_coef": lambda v: f"rsl_rl's loss has no factor 0.5: write --ppo.value-coef {_times(v, 2)}",
    "eval_freq": _every("eval.interval"),
    "eval_interval_steps": _every("eval.interval"),
    "save_freq": _every("checkpoint.interval"),
    "save_interval": "write --checkpoint.interval, in iterations",
    "log_interval": "every iteration is logged; leave it out",
    "capture_video": "evaluations are filmed: --eval.interval 10 --eval.record-video",
    "record_video": "evaluations are filmed: --eval.interval 10 --eval.record-video",
    "max_utilization": "--num-envs or --num-envs-per-rank says how many environments; leave it out",
    "distributed": _RANKS,
    "multi_gpu": _RANKS,
    "num_gpus": lambda v: f"--nproc {_count(v)} --device cuda takes a GPU a rank; CUDA_VISIBLE_DEVICES says which",
    "device_ids": "--nproc 2 --device cuda takes a GPU a rank; CUDA_VISIBLE_DEVICES says which",
    "gpu_id": lambda v: f"CUDA_VISIBLE_DEVICES={v or 0} before the command chooses the GPU, --device cuda uses it",
    "torch_deterministic": "runs are always deterministic; leave it out",
    "verbose": "--quiet shows less, --log.console full more",
    "progress": "progress is shown on a terminal by itself; leave it out",
    "progress_bar": "progress is shown on a terminal by itself; leave it out",
    "tensorboard_log": "TensorBoard's files lie in the run directory; --runs-dir DIR says where those are made",
    "log_folder": "--runs-dir DIR says where run directories are made",
    "log_dir": "--runs-dir DIR says where run directories are made",
    "save_dir": "--runs-dir DIR says where run directories are made",
    "output_dir": "--runs-dir DIR says where run directories are made",
    "load_run": _RESUME,
    "checkpoint_path": _RESUME,
    "trained_agent": _RESUME,
    "save_model": "every run keeps checkpoints and its best policy; leave it out",
    "upload_model": _UPLOAD,
    "hf_entity": _UPLOAD,
    "gae": "PPO's advantages are always GAE's; --ppo.gae-lambda 1 makes them returns minus values",
    "buffer_size": _OFF_POLICY,
    "learning_starts": _OFF_POLICY,
    "train_frequency": _OFF_POLICY,
    "target_network_frequency": _OFF_POLICY,
    "exploration_fraction": _OFF_POLICY,
    "tau": _OFF_POLICY,
    "q_lambda": "there is no PQN; algorithms are ppo and grpo",
    "rpo_alpha": "there is no RPO; algorithms are ppo and grpo",
    "rnd": _CURIOSITY,
    "rnd_cfg": _CURIOSITY,
    "int_coef": _CURIOSITY,
    "intrinsic_reward": _CURIOSITY,
    "loss_fn": _OWN_LOSS,
    "loss_function": _OWN_LOSS,
    "agent": _OWN_NETWORK,
    "model": _OWN_NETWORK,
    "actor_critic": _OWN_NETWORK,
    "policy": "networks follow from the observation; --network.hidden-sizes, --network.recurrent, "
    "--network.log-std-init and others shape them",
    "policy_kwargs": "networks are shaped by --network.hidden-sizes, --network.activation, --network.log-std-init",
    "net_arch": lambda v: f"write --network.hidden-sizes {_sizes(v)}",
    "actor_hidden_dims": _of_both,
    "critic_hidden_dims": _of_both,
    "init_noise_std": lambda v: f"write --network.log-std-init {_logarithm(v)}",
    "activation_fn": lambda v: f"write --network.activation {v.rpartition('.')[2].lower() or 'tanh'}",
    "ortho_init": "weights are always drawn as orthogonal matrices; leave it out",
    "features_extractor_class": _OWN_NETWORK,
    "features_extractor_kwargs": _OWN_NETWORK,
    "lstm_hidden_size": lambda v: f"write --network.recurrent lstm --network.recurrent-size {v or 256}",
    "n_lstm_layers": _ONE_LAYER,
    "rnn_type": lambda v: f"write --network.recurrent {'gru' if v.lower() == 'gru' else 'lstm'}",
    "rnn_hidden_dim": _units,
    "rnn_hidden_size": _units,
    "rnn_num_layers": _ONE_LAYER,
    "use_sde": _EXPLORATION,
    "sde_sample_freq": _EXPLORATION,
    "vec_env": _WORKERS,
    "vec_env_cls": _WORKERS,
    "vec_env_class": _WORKERS,
    "vec_env_kwargs": _WORKERS,
    "env_wrapper": _WRAPPERS,
    "wrapper_class": _WRAPPERS,
    "gym_packages": _MODULE,
    "env_package": _MODULE,
    "callback": "lockstep.train takes callbacks=[…], objects with some of lockstep.BaseCallback's methods",
    "reset_num_timesteps": "a run that is resumed counts on, a new one begins at 0; leave it out",
    "tb_log_name": "write --name, of the run directory in which TensorBoard's files lie",
    "stats_window_size": "returns are of the last 100 episodes; leave it out",
    "monitor_dir": "episodes are counted by themselves; leave it out",
    "monitor_kwargs": "episodes are counted by themselves; leave it out",
    "normalize": "write --normalize.observations, --normalize.returns or both; in a file {observations: true}",
    "hyperparams": "write each as key=value after the environment, or as an option: num_envs=8",
    "hyperparameters": "write each as key=value after the environment, or as an option: num_envs=8",
    "logger": lambda v: f"write --log.{v}" if v in ("wandb", "mlflow", "trackio", "tensorboard") else "see --log.wandb",
    "headless": "nothing is drawn while training; leave it out",
    "render": "nothing is drawn while training; lockstep play RUN shows a policy",
    "render_mode": "nothing is drawn while training; lockstep play RUN shows a policy",
    "optimizer": "the optimiser is Adam; --ppo.learning-rate, --ppo.adam-eps and --ppo.adam-betas are its settings",
}
"""Words that mean something else here, or nothing, with what to write instead."""


def algorithms(other: str) -> str:
    """Says in one line which algorithm to use in place of another one."""
    name = other.lower()
    if name == "a2c":
        return "algorithms are ppo and grpo; lockstep.integrations.sb3 has Stable-Baselines3's A2C on many ranks"
    if name in ("dqn", "qrdqn", "c51", "sac", "td3", "ddpg", "tqc", "crossq", "her", "pqn"):
        return "an off-policy algorithm, of which there are none; algorithms are ppo and grpo"
    if name in ("recurrentppo", "recurrent_ppo", "ppo_lstm"):
        return "write ppo, and network.recurrent: lstm"
    if name in ("maskableppo", "maskable_ppo", "ppo_mask"):
        return "write ppo, which takes masks as they are"
    return "algorithms are ppo and grpo"


def plain(flag: str) -> str:
    """Normalises the name of an option or key: ``--clip-coef`` and ``CLIP_COEF`` both give ``clip_coef``."""
    name = flag.lstrip("-+").replace("-", "_")
    return name.lower() if name.isupper() else name


def spelled_out(argv: Sequence[str]) -> list[str]:
    """Replaces the words of :data:`WITH_MEMORY` by their settings if the command line gives ``network.recurrent``."""
    if all(plain(word.partition("=")[0]) != MEMORY for word in argv):
        return list(argv)
    out = []
    for word in argv:
        flag, equals, value = word.partition("=")
        setting = WITH_MEMORY.get(plain(flag)) if equals or flag.startswith("--") else None
        out.append(word if setting is None else f"--{setting}{equals}{value}")
    return out


def advice(flag: str, value: str) -> str | None:
    """Says in one line what to write instead of another library's option; None if the option is unknown."""
    found = ADVICE.get(plain(flag))
    if found is None:
        return None
    return f"{flag}{f' {value}' if value else ''}: {found(value) if callable(found) else found}"

"""Small trainings, one for each feature in Stable-Baselines3's documentation of PPO, with whichever class is given.

``FEATURES`` holds by name a function of a PPO class and a folder that returns the trained model.
"""

import hashlib
import json
from typing import Any

import gymnasium
import numpy as np
import stable_baselines3
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    EveryNTimesteps,
    LogEveryNTimesteps,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnNoModelImprovement,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecCheckNan,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)

TWO, THREE = spaces.Discrete(2), spaces.Box(-1, 1, (3,), np.float32)
PICTURE = spaces.Box(0, 255, (36, 36, 1), np.uint8)
SMALL = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "seed": 3, "device": "cpu"}
STEPS = 128
FEATURES = {}


def feature(function):
    FEATURES[function.__name__] = function
    return function


def digest(model):
    """Of parameters, the optimiser's moments and counters."""
    found = hashlib.sha256()
    for tensor in model.policy.state_dict().values():
        found.update(tensor.numpy().tobytes())
    for moments in model.policy.optimizer.state_dict()["state"].values():
        for value in moments.values():
            found.update(torch.as_tensor(value).numpy().tobytes())
    found.update(json.dumps([model.num_timesteps, model._n_updates, model._current_progress_remaining]).encode())
    return found.hexdigest()[:16]


def cartpoles(count=2, **options: Any) -> Any:
    return make_vec_env("CartPole-v1", count, **options)


def trained(cls, env: Any = "CartPole-v1", policy: Any = "MlpPolicy", learn: Any = None, **changes: Any) -> Any:
    return cls(policy, env, **{**SMALL, **changes}).learn(STEPS, **(learn or {}))


class Choices(gymnasium.Env):
    """Any spaces; an episode of seven steps, cut off after that."""

    def __init__(self, action_space: Any = TWO, observation_space: Any = THREE):
        self.action_space, self.observation_space = action_space, observation_space

    def _observe(self):
        self.observation_space.seed(int(self.np_random.integers(1 << 30)))
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._left = 7
        return self._observe(), {}

    def step(self, action):
        self._left -= 1
        return self._observe(), float(np.sum(action)), False, self._left == 0, {"is_success": self._left % 2 == 0}


class Normed(BaseFeaturesExtractor):
    """A features extractor of a user's, with a batch normalisation, whose statistics are buffers."""

    def __init__(self, observation_space, features_dim=8):
        super().__init__(observation_space, features_dim)
        self.linear = torch.nn.Linear(4, features_dim)
        self.norm = torch.nn.BatchNorm1d(features_dim)

    def forward(self, observations):
        return torch.relu(self.norm(self.linear(observations)))


class Halves(torch.nn.Module):
    """Networks of a user's for actor and critic."""

    latent_dim_pi = latent_dim_vf = 8

    def __init__(self, features_dim):
        super().__init__()
        self.actor = torch.nn.Sequential(torch.nn.Linear(features_dim, 8), torch.nn.ReLU())
        self.critic = torch.nn.Sequential(torch.nn.Linear(features_dim, 8), torch.nn.ReLU())

    def forward(self, features):
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features):
        return self.actor(features)

    def forward_critic(self, features):
        return self.critic(features)


class HalvesPolicy(ActorCriticPolicy):
    def _build_mlp_extractor(self):
        self.mlp_extractor = Halves(self.features_dim)


class Doubled(RolloutBuffer):
    """A rollout buffer of a user's."""

    def __init__(self, *args, factor=1.0, **options):
        super().__init__(*args, **options)
        self.factor = factor

    def compute_returns_and_advantage(self, last_values, dones):
        super().compute_returns_and_advantage(last_values, dones)
        self.advantages *= self.factor


class Seen(BaseCallback):
    """Notes which of its methods were called, and the steps it saw."""

    def __init__(self):
        super().__init__()
        self.calls, self.steps = [], []

    def _on_training_start(self):
        self.calls.append("training start")

    def _on_rollout_start(self):
        self.calls.append("rollout start")

    def _on_step(self):
        self.steps.append(self.num_timesteps)
        self.logger.record("seen/steps", len(self.steps))
        return True

    def _on_rollout_end(self):
        self.calls.append("rollout end")

    def _on_training_end(self):
        self.calls.append("training end")


# --- policies and spaces ----------------------------------------------------------------------------------------


@feature
def a_name_of_an_environment(cls, folder):
    return trained(cls)


@feature
def several_environments(cls, folder):
    return trained(cls, cartpoles(seed=7))


@feature
def unseeded_environments_with_seeds_of_their_own(cls, folder):
    torch.manual_seed(0)
    np.random.seed(0)
    return trained(cls, cartpoles(seed=7), seed=None)


@feature
def continuous_actions(cls, folder):
    return trained(cls, "Pendulum-v1")


@feature
def state_dependent_exploration(cls, folder):
    return trained(cls, "Pendulum-v1", use_sde=True, sde_sample_freq=4)


@feature
def multi_discrete_actions(cls, folder):
    return trained(cls, Choices(spaces.MultiDiscrete([2, 3])))


@feature
def multi_binary_actions_and_cut_off_episodes(cls, folder):
    return trained(cls, Choices(spaces.MultiBinary(3)))


@feature
def dict_observations(cls, folder):
    return trained(
        cls, Choices(observation_space=spaces.Dict({"picture": PICTURE, "vector": THREE})), "MultiInputPolicy"
    )


@feature
def images(cls, folder):
    env = Choices(observation_space=PICTURE)
    return trained(cls, env, "CnnPolicy", policy_kwargs={"features_extractor_kwargs": {"features_dim": 16}})


@feature
def own_network_sizes_and_optimizer(cls, folder):
    return trained(
        cls,
        policy_kwargs={
            "net_arch": {"pi": [8], "vf": [12, 8]},
            "activation_fn": torch.nn.ReLU,
            "ortho_init": False,
            "optimizer_class": RMSpropTFLike,
            "optimizer_kwargs": {"alpha": 0.9},
        },
    )


@feature
def own_features_extractor(cls, folder):
    return trained(cls, policy_kwargs={"features_extractor_class": Normed, "features_extractor_kwargs": {}})


@feature
def own_policy(cls, folder):
    return trained(cls, policy=HalvesPolicy)


@feature
def own_rollout_buffer(cls, folder):
    return trained(cls, rollout_buffer_class=Doubled, rollout_buffer_kwargs={"factor": 2.0}, normalize_advantage=False)


# --- the algorithm ----------------------------------------------------------------------------------------------


@feature
def schedules(cls, folder):
    return trained(cls, learning_rate=lambda left: 1e-3 * left, clip_range=lambda left: 0.1 + 0.1 * left)


@feature
def value_clipping_and_entropy(cls, folder):
    return trained(cls, clip_range_vf=0.2, ent_coef=0.01, vf_coef=1.0, max_grad_norm=0.1)


@feature
def a_limit_of_the_divergence(cls, folder):
    return trained(cls, cartpoles(), target_kl=1e-3, learning_rate=1e-2, n_epochs=4)


@feature
def a_minibatch_that_is_cut_off(cls, folder):
    return trained(cls, batch_size=12)


@feature
def learning_goes_on(cls, folder):
    model = trained(cls, cartpoles())
    return model.learn(64, reset_num_timesteps=False)


@feature
def learning_begins_anew(cls, folder):
    return trained(cls, cartpoles()).learn(64)


# --- vector environments ----------------------------------------------------------------------------------------


@feature
def normalized_environments(cls, folder):
    env: Any = VecNormalize(cartpoles(), clip_obs=5.0)
    model = trained(cls, env)
    env.save(str(folder / "normalize.pkl"))
    again: Any = VecNormalize.load(str(folder / "normalize.pkl"), cartpoles())
    assert np.array_equal(again.obs_rms.mean, env.obs_rms.mean)
    return model


@feature
def normalized_dict_observations(cls, folder):
    env = make_vec_env(lambda: Choices(observation_space=spaces.Dict({"one": TWO, "vector": THREE})), 2)
    return trained(cls, VecNormalize(env, norm_obs_keys=["vector"]), "MultiInputPolicy")


@feature
def stacked_and_monitored_environments(cls, folder):
    env = VecMonitor(DummyVecEnv([Choices, Choices]), str(folder / "whole"))
    return trained(cls, VecCheckNan(VecFrameStack(env, 3)))


@feature
def environments_in_processes(cls, folder):
    fork = {"start_method": "fork"}
    env = make_vec_env(Choices, 2, vec_env_cls=SubprocVecEnv, vec_env_kwargs=fork, monitor_dir=f"{folder}/processes")
    model = trained(cls, env)
    env.close()
    return model


@feature
def monitored_environments(cls, folder):
    return trained(cls, make_vec_env(Choices, 2, monitor_dir=str(folder / "monitor")))


@feature
def other_environments(cls, folder):
    model = trained(cls, cartpoles())
    model.set_env(cartpoles(seed=11))
    return model.learn(64, reset_num_timesteps=False)


# --- callbacks and logs -----------------------------------------------------------------------------------------


@feature
def callbacks(cls, folder):
    seen = Seen()
    best = StopTrainingOnNoModelImprovement(max_no_improvement_evals=100)
    evaluation = EvalCallback(
        VecNormalize(cartpoles(1), training=False, norm_reward=False),
        callback_after_eval=best,
        n_eval_episodes=2,
        eval_freq=20,
        log_path=str(folder / "evaluation"),
        best_model_save_path=str(folder / "evaluation"),
        verbose=0,
    )
    checkpoints = EveryNTimesteps(64, CheckpointCallback(1, str(folder / "checkpoints"), save_vecnormalize=True))
    several = CallbackList([seen, evaluation, LogEveryNTimesteps(32)])
    model = trained(cls, VecNormalize(cartpoles()), learn={"callback": [several, checkpoints]})
    assert seen.calls[:2] == ["training start", "rollout start"]
    assert seen.calls[-2:] == ["rollout end", "training end"]
    assert len(seen.steps) == STEPS / np.diff(seen.steps)[0]
    assert np.isfinite(evaluation.best_mean_reward)
    return model


@feature
def a_function_as_callback(cls, folder):
    return trained(cls, cartpoles(), learn={"callback": lambda variables, _: variables["self"].num_timesteps < 70})


@feature
def a_limit_of_episodes(cls, folder):
    return trained(cls, cartpoles(), learn={"callback": StopTrainingOnMaxEpisodes(1)})


@feature
def a_progress_bar(cls, folder):
    return trained(cls, learn={"progress_bar": True})


@feature
def a_logger(cls, folder):
    model = cls("MlpPolicy", cartpoles(), **SMALL)
    model.set_logger(configure(str(folder / "logger"), ["csv", "json", "log", "tensorboard"]))
    return model.learn(STEPS)


@feature
def tensorboard(cls, folder):
    model = trained(cls, tensorboard_log=str(folder / "tensorboard"), learn={"tb_log_name": "first"})
    return model.learn(64, tb_log_name="first", reset_num_timesteps=False)


# --- models -----------------------------------------------------------------------------------------------------


@feature
def saved_and_loaded(cls, folder):
    model = trained(cls, cartpoles(), learning_rate=lambda left: 1e-3 * left)
    model.save(folder / "saved")
    again = cls.load(folder / "saved", env=cartpoles(seed=5), device="cpu")
    assert digest(again) == digest(model)
    assert again.n_steps == 16
    return again.learn(64, reset_num_timesteps=False)


@feature
def loaded_from_the_library_itself(cls, folder):
    cls("MlpPolicy", cartpoles(), **SMALL).save(folder / "ours")  # so that only one rank writes the next
    model = stable_baselines3.PPO("MlpPolicy", cartpoles(), **SMALL)
    file = folder / f"theirs-{id(model)}"
    model.save(file)
    return cls.load(file, env=cartpoles(seed=5), device="cpu").learn(64)


@feature
def parameters_taken_and_given(cls, folder):
    model = trained(cls, cartpoles())
    other = cls("MlpPolicy", cartpoles(), **{**SMALL, "seed": 4})
    other.set_parameters(model.get_parameters())
    assert all(
        torch.equal(a, b)
        for a, b in zip(other.policy.state_dict().values(), model.policy.state_dict().values(), strict=True)
    )
    return other.learn(64)


@feature
def actions_and_evaluation(cls, folder):
    model = trained(cls, cartpoles())
    observations = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)
    actions, state = model.predict(observations, deterministic=True)
    assert actions.shape == (5,)
    assert state is None
    mean, _ = evaluate_policy(model, model.get_env(), n_eval_episodes=2)
    assert np.mean(mean) > 1
    return model.learn(64, reset_num_timesteps=False)

"""A rank that trains with ``lockstep.integrations.sb3``: ``python -m sb3_ranks FOLDER`` under ``lockstep run``.

It writes what it saw of each feature and each case into ``FOLDER/rank_<rank>.json``; the tests read that.
"""

import io
import json
import sys
import time
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium
import numpy as np
import sb3_features
import stable_baselines3
import torch
from sb3_features import FEATURES, SMALL, Choices, cartpoles, digest, trained
from stable_baselines3.common import evaluation as evaluation_of_policies
from stable_baselines3.common.callbacks import (
    BaseCallback,
    EvalCallback,
    ProgressBarCallback,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

from lockstep.integrations.attach.process_group import communicator, place
from lockstep.integrations.sb3 import A2C, PPO, OneRankCallback, agreement, normalize, synchronized, update

CASES = {}
RANK, WORLD = place()


def case(function):
    CASES[function.__name__] = function
    return function


def gathered(array):
    """An array of every rank, ``[world, …]``."""
    return communicator().gather_ranks(torch.as_tensor(np.ascontiguousarray(array))).numpy()


def failure(function):
    """The error that a function raises, as text, or None."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Watch(BaseCallback):
    """Keeps copies of what a rollout sees."""

    def __init__(self):
        super().__init__()
        self.observations, self.actions, self.buffers = [], [], []

    def _raw(self):
        env = self.training_env
        return env.get_original_obs() if isinstance(env, VecNormalize) else self.model._last_obs

    def _on_training_start(self):
        self.parameters = {name: value.clone() for name, value in self.model.policy.state_dict().items()}
        self.first = np.array(self._raw())
        self.observations.append(self.first)

    def _on_step(self):
        self.observations.append(np.array(self._raw()))
        self.actions.append(np.array(self.locals["actions"]))
        return True

    def _on_rollout_end(self):
        buffer = self.locals["rollout_buffer"]
        names = ("observations", "actions", "rewards", "values", "log_probs", "advantages", "returns")
        self.buffers.append({name: getattr(buffer, name).copy() for name in names})


# --- updates ----------------------------------------------------------------------------------------------------


def whole_update(watch, **settings):
    """The library's own PPO, one update with all ranks' samples: its parameters and its log."""
    model = stable_baselines3.PPO("MlpPolicy", cartpoles(2 * WORLD), **settings)
    model.policy.load_state_dict(watch.parameters)
    for name, mine in watch.buffers[0].items():
        setattr(model.rollout_buffer, name, np.concatenate(list(gathered(mine)), 1))
    model.rollout_buffer.full = True
    model.set_logger(Logger(None, []))
    model.train()
    return model.policy.state_dict(), dict(model.logger.name_to_value)


@case
def one_update(folder):
    """An update of the ranks' halves against one of the whole; then the same with advantages normalised by halves."""
    sgd = {"policy_kwargs": {"optimizer_class": torch.optim.SGD}, "learning_rate": 0.1}
    settings = {**SMALL, **sgd, "n_epochs": 1}
    facts = {}
    for name, locally in (("globally", False), ("locally", True)):
        watch = Watch()
        size = 16 * 2
        model = PPO("MlpPolicy", cartpoles(), normalize_advantage_locally=locally, **{**settings, "batch_size": size})
        model.learn(size * WORLD, callback=watch)
        theirs, log = whole_update(watch, **{**settings, "batch_size": size * WORLD})
        mine = model.policy.state_dict()
        facts[name] = max(float((mine[key] - theirs[key]).abs().max()) for key in mine)
        facts[f"moved {name}"] = max(float((mine[key] - watch.parameters[key]).abs().max()) for key in mine)
        for metric in ("loss", "value_loss", "entropy_loss", "explained_variance"):
            said = model.logger.name_to_value[f"train/{metric}"]
            facts[f"{metric} {name}"] = abs(said - log[f"train/{metric}"])
    returns, values = (watch.buffers[0][name] for name in ("returns", "values"))
    alone = 1 - np.var(returns - values) / np.var(returns)
    facts["explained_variance alone"] = abs(float(alone) - log["train/explained_variance"])
    return facts


@case
def divergence(folder):
    """Optimiser steps under a limit of the KL divergence, and what each rank would have decided for itself."""
    seen, compare = [], update.AgreedLimit.__lt__

    def spy(limit, kl):
        seen.append([float(kl) > limit.limit, compare(limit, kl)])
        return seen[-1][1]

    with patch.object(update.AgreedLimit, "__lt__", spy):
        model = PPO("MlpPolicy", cartpoles(), **{**SMALL, "n_epochs": 8, "target_kl": 4e-3, "learning_rate": 5e-3})
        model.learn(64 * 6)
    return {"alone": [mine for mine, _ in seen], "agreed": [ours for _, ours in seen], "limit": model.target_kl}


@case
def a2c(folder):
    model = A2C("MlpPolicy", cartpoles(), seed=3, device="cpu", normalize_advantage=True).learn(80)
    locally = A2C("MlpPolicy", cartpoles(), 7e-4, seed=3, device="cpu", normalize_advantage_locally=True)
    return {"digest": digest(model), "steps": model.num_timesteps, "locally": digest(locally.learn(80))}


@case
def repeated(folder):
    """The same run twice at one world size."""
    return {"digests": [digest(FEATURES["several_environments"](PPO, folder)) for _ in range(2)]}


class OwnUpdate(PPO):
    """One optimiser step of its own, as a tutorial's subclass takes it; at first it calls what ``before`` says."""

    before: Any = staticmethod(lambda: None)

    def train(self):
        self.before()
        values = self.policy.predict_values(torch.as_tensor(self.rollout_buffer.observations.reshape(-1, 4)))
        self.policy.optimizer.zero_grad()
        values.square().mean().backward()
        self.policy.optimizer.step()


class CallsOurs(OwnUpdate):
    def before(self):
        PPO.train(self)


@case
def own_updates(folder):
    """A ``train`` that doesn't call ours: the error, and whether a parameter has moved; then one that does."""
    alone, calling = (cls("MlpPolicy", cartpoles(), **SMALL) for cls in (OwnUpdate, CallsOurs))
    before = digest(calling)
    error = failure(lambda: alone.learn(128))
    facts = {"error": error, "steps": alone.num_timesteps, "moved": len(alone.policy.optimizer.state) > 0}
    calling.learn(128)
    facts |= {"other": [digest(calling) != before, calling.num_timesteps], "digest": digest(calling)}
    return {**facts, "unwatched": failure(alone.policy.optimizer.step)}  # outside of ``learn`` it does as it likes


# --- environments and statistics --------------------------------------------------------------------------------


@contextmanager
def unseparated():
    """Every rank with the same seeds, as they would be without us."""
    library = synchronized.OnPolicyAlgorithm.set_random_seed
    with (
        patch.object(synchronized.Synchronized, "set_random_seed", library),
        patch.object(agreement, "_separate_generators", lambda *args: None),
        patch.object(agreement, "tell_apart", lambda *args: None),
    ):
        yield


@case
def seeds(folder):
    """First observations against those of one process with all environments; actions of the ranks."""
    facts = {}
    for name, of_model, of_envs in (("of the model", 5, None), ("of the environments", None, 7)):
        torch.manual_seed(0)  # as many scripts do, on every rank
        watch = Watch()
        env = cartpoles(seed=of_envs)
        model = PPO("MlpPolicy", env, **{**SMALL, "seed": of_model}).learn(64, callback=watch)
        whole = cartpoles(2 * WORLD, seed=of_envs)
        if of_model is not None:
            whole.seed(of_model)
        facts[name] = bool(np.array_equal(np.concatenate(list(gathered(watch.first))), whole.reset()))
        actions = gathered(np.stack(watch.actions))
        facts[f"actions {name}"] = bool(np.array_equal(actions[0], actions[1]))
        facts[f"parameters {name}"] = digest(model)
    with unseparated():
        watch = Watch()
        PPO("MlpPolicy", cartpoles(), **SMALL).learn(64, callback=watch)
        actions = gathered(np.stack(watch.actions))
        facts["actions unseparated"] = bool(np.array_equal(actions[0], actions[1]))
    return facts


def reset_first():
    env = cartpoles(seed=7)
    env.reset()
    return env


def evaluated_first():
    """Each rank's policy acts otherwise, so that the environments have begun different numbers of episodes."""
    env = cartpoles(seed=7)
    torch.manual_seed(RANK)
    evaluate_policy(PPO("MlpPolicy", env, device="cpu"), env, n_eval_episodes=2 + RANK, deterministic=False)
    return env


def used_on_one_rank():
    env = cartpoles(seed=7)
    if not RANK:
        env.reset()
    return env


def seeded(seed):
    """As Stable-Baselines3's page on vector environments does it."""

    def make():
        env = gymnasium.make("CartPole-v1")
        env.reset(seed=seed)
        return env

    return make


def seeded_before_they_are_wrapped():
    return DummyVecEnv([seeded(7), seeded(7)])


def seeded_in_processes():
    return SubprocVecEnv([seeded(7), seeded(8)])


def seeded_by_rank():
    return DummyVecEnv([seeded(7 + 2 * RANK), seeded(8 + 2 * RANK)])


USED = (
    *(reset_first, evaluated_first, used_on_one_rank, seeded_before_they_are_wrapped, seeded_in_processes),
    seeded_by_rank,
)


@case
def used_environments(folder):
    """First observations in environments that have used the seeds that the script gave them; then as without us."""
    facts = {}
    for make in USED:
        for name, separated in ((make.__name__, nullcontext()), (f"{make.__name__}, unseparated", unseparated())):
            with separated:
                watch, env = Watch(), make()
                PPO("MlpPolicy", env, **{**SMALL, "seed": None}).learn(64, callback=watch)
                env.close()
            facts[name] = watch.first.tolist()
    facts["of global ids"] = cartpoles(seed=7 + 2 * RANK).reset().tolist()
    return facts


class Level(gymnasium.Env):
    """The same level in each episode, which is longer than any training here."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32), gymnasium.spaces.Discrete(2)
    begun = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=42)
        self.begun += 1
        return self.np_random.uniform(-1, 1, 4).astype(np.float32), {}

    def step(self, action):
        return self.np_random.uniform(-1, 1, 4).astype(np.float32), float(action), False, False, {}


class OwnGenerator(Level):
    def __init__(self):
        self.np_random = np.random.default_rng(7)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        self.begun += 1
        return self.np_random.uniform(-1, 1, 4).astype(np.float32), {}


def used_levels():
    env = DummyVecEnv([Level, Level])
    env.reset()
    return env


SEEDING_THEMSELVES = {
    "levels": lambda: DummyVecEnv([Level, Level]),
    "levels, monitored": lambda: DummyVecEnv([lambda: Monitor(Level(), allow_early_resets=False)] * 2),
    "generators": lambda: DummyVecEnv([OwnGenerator, OwnGenerator]),
    "generators in processes": lambda: SubprocVecEnv([OwnGenerator, OwnGenerator]),
    "used levels": used_levels,
}


@case
def environments_that_seed_themselves(folder):
    """How many episodes each has begun after each of three calls of ``learn``, and after one that begins anew."""
    facts = {}
    for name, make in SEEDING_THEMSELVES.items():
        said, env = io.StringIO(), make()
        model = PPO("MlpPolicy", env, **{**SMALL, "seed": None})
        facts[name] = []
        with redirect_stderr(said):
            for anew in (True, False, False, True):
                if anew and facts[name] and "monitored" in name:
                    env.set_attr("needs_reset", True)  # as if the episode had just ended
                model.learn(64, reset_num_timesteps=anew)
                facts[name].append(max(env.get_attr("begun")))
        env.close()
        facts[f"{name}, lines"] = said.getvalue().count("a lower rank's random numbers")
    return facts


@case
def environments_that_are_set_later(folder):
    facts, said, model = {}, io.StringIO(), None
    with redirect_stderr(said):
        for name in ("first", "later"):
            env, watch = reset_first(), Watch()
            if model is None:
                model = PPO("MlpPolicy", env, **{**SMALL, "seed": None})
            else:
                model.set_env(env)
            model.learn(64, callback=watch, reset_num_timesteps=False)
            model.learn(64, reset_num_timesteps=False)
            facts[name] = watch.first.tolist()
    facts["lines"] = said.getvalue().count("a lower rank's random numbers")
    facts["of global ids"] = cartpoles(seed=7 + 2 * RANK).reset().tolist()
    return facts


def vec_normalize() -> Any:
    return VecNormalize(cartpoles())


def normalized(rollouts=2):
    """Largest distance of statistics from those of all ranks' samples, and from the first rank's."""
    watch, env = Watch(), vec_normalize()
    PPO("MlpPolicy", env, **SMALL).learn(32 * WORLD * rollouts, callback=watch)
    whole = RunningMeanStd(shape=(4,))
    whole.update(np.concatenate(list(gathered(np.concatenate(watch.observations)))))
    mine = np.concatenate([env.obs_rms.mean, env.obs_rms.var, [env.obs_rms.count, env.ret_rms.mean, env.ret_rms.count]])
    return {
        "from the whole": float(np.abs(mine[:9] - [*whole.mean, *whole.var, whole.count]).max()),
        "between ranks": float(np.abs(np.ptp(gathered(mine), 0)).max()),
        "returns": env.ret_rms.count,
    }


@case
def normalizers(folder):
    facts = {"merged": normalized()}
    with patch.object(normalize.MergedStatistics, "merge", lambda self: None):
        facts["unmerged"] = normalized()
    return facts


@case
def normalizers_go_on(folder):
    """A second ``learn``, after this rank alone has moved its environments; nothing counts twice."""
    env = vec_normalize()
    model = PPO("MlpPolicy", env, **SMALL).learn(64)
    counts = [float(env.obs_rms.count)]
    if RANK:
        env.reset()
    model.learn(64, reset_num_timesteps=False)
    return {"counts": [*counts, float(env.obs_rms.count)], "mean": env.obs_rms.mean.tolist()}


@case
def episodes(folder):
    """Episodes of seven steps in two environments of each rank: those of the log, and this rank's own."""
    mine = []

    def note(variables, _):
        mine.extend(info["episode"]["r"] for info in variables["infos"] if "episode" in info)
        return True

    model = PPO("MlpPolicy", make_vec_env(Choices, 2), **SMALL).learn(16 * 2 * WORLD, callback=note)
    return {"returns": [episode["r"] for episode in model.ep_info_buffer], "mine": mine}


# --- callbacks --------------------------------------------------------------------------------------------------


class StopsAlone(BaseCallback):
    """Says stop on the second rank, in the middle of its second rollout."""

    def _on_step(self):
        return not (RANK == 1 and self.n_calls == 20)


@case
def one_rank_stops(folder):
    seen = sb3_features.Seen()
    model = PPO("MlpPolicy", cartpoles(), **SMALL).learn(64 * 5, callback=[seen, StopsAlone()])
    return {"steps": model.num_timesteps, "updates": model._n_updates, "digest": digest(model), "ended": seen.calls[-1]}


@case
def evaluation(folder):
    """An evaluation by one rank, whose child stops the training; and what all ranks know of it."""
    enough = StopTrainingOnRewardThreshold(reward_threshold=-1.0)
    evaluation = EvalCallback(
        *(cartpoles(1), enough), eval_freq=20, best_model_save_path=str(folder), log_path=str(folder), verbose=0
    )
    evaluated = []
    real = evaluation_of_policies.evaluate_policy
    with patch(
        "stable_baselines3.common.callbacks.evaluate_policy", lambda *a, **k: evaluated.append(1) or real(*a, **k)
    ):
        model = PPO("MlpPolicy", cartpoles(), **SMALL).learn(64 * 5, callback=evaluation)
    return {"steps": model.num_timesteps, "best": evaluation.best_mean_reward, "evaluated": len(evaluated)}


@case
def own_callbacks_on_one_rank(folder):
    calls = []
    only = OneRankCallback([sb3_features.Seen(), sb3_features.Seen()])
    only.callbacks[0]._on_step = lambda: calls.append(1) is None
    model = PPO("MlpPolicy", cartpoles(), **SMALL).learn(64, callback=[only])
    return {"calls": len(calls), "steps": model.num_timesteps, "seen": only.n_calls}


@case
def progress_bar(folder):
    bars = []
    start = ProgressBarCallback._on_training_start

    def spy(self):
        start(self)
        bars.append(self.pbar)

    with patch.object(ProgressBarCallback, "_on_training_start", spy):
        PPO("MlpPolicy", cartpoles(), **SMALL).learn(128, progress_bar=True)
    return {"bars": [[bar.n, bar.total] for bar in bars]}


@case
def progress(folder):
    """Schedules and counts go by the steps of all ranks."""
    left, steps = [], []
    model = PPO("MlpPolicy", cartpoles(), **{**SMALL, "learning_rate": lambda x: left.append(x) or 1e-3 * x})
    model.learn(64 * 4, callback=lambda variables, _: steps.append(variables["self"].num_timesteps) is None)
    return {"left": sorted(set(left), reverse=True), "steps": steps, "log": model.logger.get_dir()}


# --- models and files -------------------------------------------------------------------------------------------


@case
def saving(folder):
    """The first rank saves late; the others return when it is there. Memory is everybody's."""
    model, memory = trained(PPO, cartpoles()), io.BytesIO()
    model.save(memory)
    late = stable_baselines3.PPO.save

    def slow(*args):
        time.sleep(0.3)
        late(*args)

    with patch.object(stable_baselines3.PPO, "save", slow):
        model.save(folder / "late")
    there = (folder / "late.zip").exists()
    if not RANK:
        model.save(folder / "alone")
    again = PPO.load(folder / "late", device="cpu")
    memory.seek(0)
    actions = stable_baselines3.PPO.load(memory, device="cpu").predict(np.ones((3, 4)), deterministic=True)[0]
    return {"there": there, "same": digest(again) == digest(model), "actions": actions.tolist()}


@case
def saving_on_one_rank_before(folder):
    """The first rank saves alone; after more learning all save, the first late, and load what they trained."""
    model, late = trained(PPO, cartpoles()), stable_baselines3.PPO.save
    if not RANK:
        for _ in range(3):
            model.save(folder / "model")
    model.learn(64, reset_num_timesteps=False)

    def slow(*args):
        time.sleep(0.3)
        late(*args)

    with patch.object(stable_baselines3.PPO, "save", slow):
        model.save(folder / "model")
    return {"trained": model.num_timesteps, "loaded": PPO.load(folder / "model", device="cpu").num_timesteps}


@case
def saving_on_one_rank_while_learning(folder):
    """Callbacks that save differently on every rank keep nobody waiting."""

    def save(variables, _):
        if RANK == 1:
            variables["self"].save(folder / "by the second rank")
        return True

    trained(PPO, cartpoles(), learn={"callback": save})
    return {"files": sorted(file.name for file in folder.iterdir())}


@case
def parameters_on_one_rank(folder):
    """Parameters that only the first rank was given are everybody's; with the optimiser's state, an error."""
    model = trained(PPO, cartpoles())
    if not RANK:
        weights = model.policy.state_dict()
        model.set_parameters({"policy": {k: v + 0.5 for k, v in weights.items()}}, exact_match=False)
    before = digest(model)
    moved = digest(model.learn(64, reset_num_timesteps=False))
    if not RANK:
        model.set_parameters(PPO("MlpPolicy", cartpoles(), **SMALL).get_parameters())
    return {"before": before, "moved": moved, "error": failure(lambda: model.learn(64))}


@case
def other_settings(folder):
    model = PPO("MlpPolicy", cartpoles(), **{**SMALL, "n_steps": 16 + 16 * RANK})
    return {"n_steps": failure(lambda: model.learn(64)), "steps": failure(lambda: trained(PPO).learn(64 + RANK))}


# --- failures; the last ones ------------------------------------------------------------------------------------


class Breaks(gymnasium.Wrapper):
    def step(self, action):
        self.left = getattr(self, "left", 10) - 1
        if RANK == 1 and not self.left:
            raise OSError("the simulator is gone")
        return super().step(action)


@case
def an_environment_fails(folder):
    env = DummyVecEnv([lambda: Breaks(gymnasium.make("CartPole-v1"))])
    return {"error": failure(lambda: trained(PPO, env)), "after": digest(trained(PPO, cartpoles()))}


@case
def a_divergence_judged_alone(folder):
    """What happens without an agreement: ranks take different numbers of steps, and notice."""
    with patch.object(update.AgreedLimit, "__lt__", lambda limit, kl: RANK == 1):
        model = PPO("MlpPolicy", cartpoles(), **SMALL, target_kl=1.0)
        return {"error": failure(lambda: model.learn(64))}


def main(folder):
    torch.set_num_threads(1)
    facts = {}
    for name, run in FEATURES.items():
        place = folder / "features" / name
        place.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        try:
            model = run(PPO, place)
            facts[name] = {"digest": digest(model), "steps": model.num_timesteps}
        except Exception as error:
            facts[name] = {"error": f"{type(error).__name__}: {error}"}
        facts[name]["seconds"] = time.perf_counter() - started
    for name, run in CASES.items():
        place = folder / "cases" / name
        place.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        try:
            facts[name] = run(place)
        except Exception as error:
            facts[name] = {"error of the case": f"{type(error).__name__}: {error}"}
        facts[name]["seconds"] = time.perf_counter() - started
    (folder / f"rank_{RANK}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]))

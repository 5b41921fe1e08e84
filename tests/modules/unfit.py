"""Environments that a run can't use as they are, each by one mistake; ``Hooked`` and ``Fit`` have none."""

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv


class Fit(CartPoleEnv):
    pass


class OldStep(CartPoleEnv):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info


class OldReset(CartPoleEnv):
    def reset(self, **kwargs):
        return super().reset(**kwargs)[0]


class ShapedReward(CartPoleEnv):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, np.array([reward]), *rest


class Wide(CartPoleEnv):
    def step(self, action):
        observation, *rest = super().step(action)
        return observation.astype(np.float64), *rest


class Outside(CartPoleEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.observation_space = spaces.Box(-0.01, 0.01, (4,), np.float32)


class Endless(CartPoleEnv):
    steps = 0

    def step(self, action):
        observation, reward, *rest = super().step(action)
        self.steps += 1
        return observation, float("-inf") if self.steps == 60 else reward, *rest


class Unseen(CartPoleEnv):
    """A NaN far inside of a Dict."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        space: Any = spaces.Dict({"arm": spaces.Dict({"pole": self.observation_space})})
        self.observation_space = space
        self.steps = 0

    def _as_dict(self, observation):
        self.steps += 1
        if self.steps == 60:
            observation = np.where(np.arange(4) == 2, np.nan, observation).astype(np.float32)
        return {"arm": {"pole": observation}}

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return self._as_dict(observation), info

    def step(self, action):
        observation, *rest = super().step(action)
        return self._as_dict(observation), *rest


class Clocked(CartPoleEnv):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, time.perf_counter(), *rest


class Kept(CartPoleEnv):
    """What it returns depends on how often the class was stepped: a new process begins anew."""

    steps = 0

    def step(self, action):
        observation, _, *rest = super().step(action)
        Kept.steps += 1
        return observation, float(Kept.steps), *rest


class Hooked(CartPoleEnv):
    def get_env_state(self):
        return {"state": np.array(self.state, np.float64)}

    def set_env_state(self, arrays):
        self.state = tuple(arrays["state"])  # pyright: ignore[reportAttributeAccessIssue]


class Harder(CartPoleEnv):
    """From the sixth step of an episode on it pays less for every episode that there was before."""

    before = taken = 0

    def reset(self, **kwargs):
        self.before, self.taken = self.before + (self.taken > 0), 0
        return super().reset(**kwargs)

    def step(self, action):
        observation, reward, *rest = super().step(action)
        self.taken += 1
        return observation, float(reward) / (1 + self.before * (self.taken > 5)), *rest


class HarderButKept(Harder):
    def get_env_state(self):
        return {"state": np.array(self.state, np.float64), "counts": np.array([self.before, self.taken])}

    def set_env_state(self, arrays):
        self.state = tuple(arrays["state"])  # pyright: ignore[reportAttributeAccessIssue]
        self.before, self.taken = (int(n) for n in arrays["counts"])


class HarderWithoutEnd(Harder):
    """Nothing but a time limit ends its episodes."""

    def step(self, action):
        observation, reward, *_ = super().step(action)
        self.steps_beyond_terminated = None
        return observation, reward, False, False, {}


class HarderForSome(HarderWithoutEnd):
    """Most of its episodes end soon, where the cart begins far enough to the right, and others don't."""

    def step(self, action):
        observation, reward, *_ = super().step(action)
        return observation, reward, self.taken == 8 and self.right, False, {}

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        self.right = bool(observation[0] > -0.03)
        return observation, info


class HookedAndDrawing(Hooked):
    """Its hooks leave out the generator that its steps draw from."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, float(reward) + self.np_random.normal(), *rest


class Unhooked(gymnasium.Wrapper):
    """Has hooks of neither kind itself."""


def unhooked():
    return Unhooked(HookedAndDrawing())


class HookedAndHarder(Harder):
    """Its hooks leave out how many episodes there were."""

    def get_env_state(self):
        return {"state": np.array(self.state, np.float64), "taken": np.array(self.taken)}

    def set_env_state(self, arrays):
        self.state = tuple(arrays["state"])  # pyright: ignore[reportAttributeAccessIssue]
        self.taken = int(arrays["taken"])


class Crowded(HarderWithoutEnd):
    """All of a process count their steps together, since the last reset of any."""

    count = 0

    def reset(self, **kwargs):
        Crowded.count = 0
        return super().reset(**kwargs)

    def step(self, action):
        observation, _, *rest = super().step(action)
        Crowded.count += 1
        return observation, float(Crowded.count), *rest


class Worded(CartPoleEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        space: Any = spaces.Dict({"pole": self.observation_space, "name": spaces.Text(4)})
        self.observation_space = space


class Named(Worded):
    """Gives what its space says."""

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        return {"pole": observation, "name": "Pole"}, info

    def step(self, action):
        observation, *rest = super().step(action)
        return {"pole": observation, "name": "Pole"}, *rest


class Listed(CartPoleEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        space: Any = spaces.Dict({"pole": self.observation_space, "names": spaces.Sequence(spaces.Discrete(4))})
        self.observation_space = space


class Unseeded(CartPoleEnv):
    def reset(self):
        return super().reset()


class Unpaid(CartPoleEnv):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, None, *rest


class Spaceless(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        return 0, {}


class Picky(gymnasium.Env):
    """It takes one of a thousand actions, and says by a method which."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(1000)

    def action_masks(self):
        return np.arange(1000) == 7

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        assert action == 7, "forbidden"
        return 1, 1.0, False, False, {}


class Late(CartPoleEnv):
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 40:
            raise OSError("out of order")
        return super().step(action)


class OfNumpy(CartPoleEnv):
    """Says in NumPy's bools whether an episode ended."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, np.bool_(terminated), np.bool_(truncated), info


class Unmeasured(CartPoleEnv):
    """What its first step says beside the reward is no number yet."""

    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, {"speed": np.nan}


class SeededByItself(CartPoleEnv):
    def reset(self, *, seed=None, options=None):
        self._own = np.random.default_rng(seed)
        self.state = self._own.uniform(-0.05, 0.05, 4)  # pyright: ignore[reportAttributeAccessIssue]
        self.steps_beyond_terminated = None
        return np.array(self.state, np.float32), {}


def narrowed(**kwargs):
    """What its wrapper gives is of the dtype that the space says, and what is inside isn't."""
    env = Wide(**kwargs)
    return gymnasium.wrappers.TransformObservation(env, lambda seen: seen.astype(np.float32), env.observation_space)


def normalized(**kwargs):
    return gymnasium.wrappers.NormalizeObservation(CartPoleEnv(**kwargs))


for kind in (
    Fit,
    Unseeded,
    Unpaid,
    Spaceless,
    Picky,
    OfNumpy,
    Unmeasured,
    SeededByItself,
    Late,
    OldStep,
    OldReset,
    ShapedReward,
    Wide,
    Outside,
    Endless,
    Unseen,
    Clocked,
    Kept,
    Hooked,
    Harder,
    HarderButKept,
    HookedAndDrawing,
    HookedAndHarder,
    Worded,
    Named,
    Listed,
):
    gymnasium.register(f"{kind.__name__}-v0", f"unfit:{kind.__name__}", max_episode_steps=500)

gymnasium.register("Normalized-v0", "unfit:normalized", max_episode_steps=500)

"""Environments of a user's own for the JAX engine: a corridor to walk along, and what may be wrong with one."""

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

LENGTH = 4


class Corridor:
    """Step right (1) or left (0); the end is ``length`` steps away. Derived from nothing of ours."""

    def __init__(self, length=LENGTH):
        self.length = length

    def reset(self, key, params):
        return jnp.zeros(2), jnp.zeros((), jnp.int32)

    def step(self, key, state, action, params):
        place = jnp.maximum(state + 2 * action - 1, 0)
        done = place >= self.length
        info = {"success": done, "reward_terms": {"arrival": done * 1.0, "haste": -0.1}}
        return self.seen(place), place, done - 0.1, done, info

    def seen(self, place):
        return jnp.stack([place, place + 1.0]).astype(jnp.float32)

    def observation_space(self, params):
        return spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def action_space(self, params):
        return spaces.Discrete(2)


def taking(options):
    """Takes out of its arguments what it is told."""
    return Corridor(options.pop("length"))


class Slotted:
    """Has no place for further attributes."""

    __slots__ = ()
    length = LENGTH
    reset, step, seen = Corridor.reset, Corridor.step, Corridor.seen
    observation_space, action_space = Corridor.observation_space, Corridor.action_space


class SixValues(Corridor):
    """Truncates itself one step before the end."""

    def step(self, key, state, action, params):
        obs, state, reward, done, info = super().step(key, state, action, params)
        return obs, state, reward, done, state == self.length - 1, info


class SelfResetting(Corridor):
    """Resets by itself, and says so; by default it keeps what it saw last."""

    autoreset = True

    def __init__(self, final: str | None = "final_obs"):
        super().__init__()
        self.final = final

    def step(self, key, state, action, params):
        obs, state, reward, done, info = super().step(key, state, action, params)
        first, fresh = self.reset(key, params)
        info = info | ({self.final: obs} if self.final else {})
        return jnp.where(done, first, obs), jnp.where(done, fresh, state), reward, done, info


class Keyed(Corridor):
    """A typed key in the state: rewards are drawn from it."""

    def reset(self, key, params):
        return jnp.zeros(2), {"place": 0, "key": jax.random.wrap_key_data(key)}

    def step(self, key, state, action, params):
        following, drawn = jax.random.split(state["key"])
        obs, place, _, done, info = super().step(key, state["place"], action, params)
        return obs, {"place": place, "key": following}, jax.random.uniform(drawn), done, info


class Noisy(Corridor):
    """Rewards are drawn from the key of each step; an episode begins somewhere on the way."""

    def reset(self, key, params):
        place = jax.random.randint(key, (), 0, self.length)
        return self.seen(place), place

    def step(self, key, state, action, params):
        obs, place, _, done, info = super().step(key, state, action, params)
        return obs, place, jax.random.uniform(key), done, info


class Odd(Noisy):
    """A state of dtypes that NumPy lacks, of two leaves whose paths read alike, and of a leaf that is named as ours.

    Rewards depend on all of them.
    """

    def __init__(self, more=None):
        super().__init__()
        self.more = more

    def reset(self, key, params):
        obs, place = super().reset(key, params)
        drawn = jax.random.uniform(key, (3,))
        state = {
            "place": place,
            "half": drawn.astype(jnp.bfloat16),
            "eighth": drawn.astype(jnp.float8_e5m2),
            "nibble": place.astype(jnp.int4),
            "a.b": drawn[0],
            "a": {"b": drawn[1]},
            "elapsed": drawn[2],
            "none": jnp.zeros((0, 4)),
        }
        return obs, state | ({} if self.more is None else {"more": jnp.zeros((), self.more)})

    def step(self, key, state, action, params):
        obs, place, reward, done, info = super().step(key, state["place"], action, params)
        half = state["half"] * jnp.bfloat16(0.5) + reward.astype(jnp.bfloat16)
        eighth, nibble = half.astype(jnp.float8_e5m2), place.astype(jnp.int4)
        reward += half.sum() + state["a.b"] + 2 * state["a"]["b"] + 3 * state["elapsed"]
        reward += state["eighth"].astype(jnp.float32).sum() + state["nibble"].astype(jnp.float32)
        return obs, state | {"place": place, "half": half, "eighth": eighth, "nibble": nibble}, reward, done, info


class Painted(Corridor):
    """Draws itself: a column as bright as the place is far."""

    render_fps = 12

    def render(self, state, params):
        return np.full((4, 6, 3), 10 * int(state), np.uint8)


class Wrong(Corridor):
    """One thing of it is wrong."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def reset(self, key, params):
        obs, state = super().reset(key, params)
        if self.what == "reset":
            return obs
        return obs[:1] if self.what == "shape" else obs, state

    def step(self, key, state, action, params):
        if self.what == "branch" and state > 3:
            return None
        obs, state, reward, done, info = super().step(key, state, action, params)
        if self.what == "dtype":
            obs = obs.astype(jnp.int32)
        if self.what == "state":
            state = state * 1.0
        if self.what == "structure":
            state = (state,)
        if self.what == "done":
            done = done * 1.0
        if self.what == "reward":
            reward = reward[None]
        if self.what in ("no reward", "complex"):
            reward = None if self.what == "no reward" else reward + 0j
        if self.what == "no done":
            done = None
        if self.what == "info" or isinstance(self.what, dict):
            info = None if self.what == "info" else self.what
        return (obs, state, reward, done) if self.what == "values" else (obs, state, reward, done, info)

    def observation_space(self, params):
        return "two numbers" if self.what == "space" else super().observation_space(params)

    def action_space(self, params):
        return spaces.Text(3) if self.what == "actions" else super().action_space(params)


def with_params(limit):
    """An environment and its parameters."""
    from lockstep.jax_engine.envs.functional import EnvParams

    return Corridor(), EnvParams(max_steps_in_episode=limit)


class Incomplete:
    def reset(self, key, params):
        return 0, 0

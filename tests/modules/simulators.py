"""Simulators on tensors, shaped like Isaac Lab's and ManiSkill's: their resets draw from PyTorch's global generator."""

from typing import Any

import torch
from gymnasium import make_vec
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import NumpyToTorch


class Point:
    """A point that each action moves; an episode terminates near the middle and is truncated after seven steps.

    Args:
        num_envs: environments.
        device: where they live.
        style: ``isaac`` (a dict of observation groups, no final observation, buffers used again), ``maniskill``
            (tensors, final observations, success, state hooks) or ``sparing`` (the like, of steps that end an episode).
    """

    def __init__(self, num_envs, device, style):
        self.num_envs, self.device, self.style = num_envs, device, style
        box = Box(-9.0, 9.0, (3,))
        self.single_observation_space = Dict({"policy": box}) if style == "isaac" else box
        self.single_action_space = Box(-1.0, 1.0, (2,))
        self.place, self.steps = torch.zeros((num_envs, 2), device=device), torch.zeros(num_envs, device=device)
        self.metadata: dict[str, Any] = {}
        self.seen = torch.zeros((num_envs, 3), device=device)
        if style == "maniskill":
            self.get_env_state = lambda: {"place": self.place, "steps": self.steps}

    def set_env_state(self, state: dict[str, Any]):
        self.place, self.steps = (state[name].clone() for name in ("place", "steps"))

    def _observe(self):
        self.seen[:] = torch.cat([self.place, self.steps.unsqueeze(1)], 1)
        return {"policy": self.seen} if self.style == "isaac" else self.seen

    def reset(self, *, seed=None):
        if seed is not None:
            torch.manual_seed(seed)
        self.place = torch.rand((self.num_envs, 2), device=self.device) * 2 - 1
        self.steps = torch.zeros(self.num_envs, device=self.device)
        return self._observe(), {}

    def step(self, actions):
        assert actions.shape == (self.num_envs, 2)
        assert actions.abs().max() <= 1.0
        self.place = self.place + 0.2 * actions
        self.steps = self.steps + 1
        distance = self.place.norm(dim=1)
        terminated, truncated = distance < 0.1, self.steps >= 7
        info, done = {}, terminated | truncated
        if self.style == "maniskill":
            last = self._observe()
            assert isinstance(last, torch.Tensor)
            info = {"final_observation": last.clone(), "success": terminated.clone()}
        if self.style == "sparing" and done.any():
            info = {"final_info": {"success": terminated.clone()}}
        fresh = torch.rand((self.num_envs, 2), device=self.device) * 2 - 1
        self.place = torch.where(done.unsqueeze(1), fresh, self.place)
        self.steps = torch.where(done, 0.0, self.steps)
        return self._observe(), -distance, terminated, truncated, info


class Levelled(Point):
    """Each step raises a level that resets leave as it is, and its hooks don't."""

    def __init__(self, num_envs, device):
        super().__init__(num_envs, device, "maniskill")
        self.level = torch.zeros(num_envs, device=device)
        self.get_env_state = lambda: {"place": self.place, "steps": self.steps, "level": self.level}

    def set_env_state(self, state):
        super().set_env_state(state)
        self.level = state["level"].clone()

    def step(self, actions):
        self.level = self.level + 1
        observation, rewards, *rest = super().step(actions)
        return observation, rewards - self.level, *rest


def levelled(num_envs, device, seed):
    return Levelled(num_envs, device)


class Forgetful(Point):
    """Its state hooks leave out the steps of its episodes."""

    def __init__(self, num_envs, device):
        super().__init__(num_envs, device, "maniskill")
        self.get_env_state = lambda: {"place": self.place}

    def set_env_state(self, state):
        self.place = state["place"].clone()


def forgetful(num_envs, device, seed):
    return Forgetful(num_envs, device)


class Broken(Point):
    """Its state can be had, and not be set."""

    def __init__(self, num_envs, device):
        super().__init__(num_envs, device, "maniskill")

    def set_env_state(self, state):
        raise KeyError("velocity")


class HalfHooked(Broken):
    """Its state can be had, and there is nothing that sets it."""

    set_env_state = property()  # pyright: ignore[reportAssignmentType]


def broken(num_envs, device, seed):
    return Broken(num_envs, device)


def half_hooked(num_envs, device, seed):
    return HalfHooked(num_envs, device)


def of_arrays(num_envs, device, seed):
    """Its state is NumPy's."""
    made = Point(num_envs, device, "maniskill")
    made.get_env_state = lambda: {"place": made.place.numpy(), "steps": made.steps.numpy()}
    return made


def of_nothing(num_envs, device, seed):
    """It says by its hook that there is nothing to save."""
    made: Any = Point(num_envs, device, "isaac")
    made.get_env_state = lambda: None
    return made


KERNELS: list[tuple[bool, bool]] = []
"""What :func:`noting` found each time: whether kernels must repeat their bits, and whether others only warn."""


def noting(num_envs, device, seed):
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    KERNELS.append((torch.are_deterministic_algorithms_enabled(), warns))
    return Point(num_envs, device, "isaac")


def elsewhere(num_envs, device, seed):
    """One by itself lives on the CPU; several don't."""
    if num_envs > 1:
        raise RuntimeError(f"no\nroom on {device}")
    return Point(num_envs, device, "isaac")


MADE: list[int] = []


def once(num_envs, device, seed):
    """Can be made once, but for single ones, which are looked at."""
    if num_envs > 1 and MADE:
        raise RuntimeError("one app\na process")
    MADE.extend([num_envs] * (num_envs > 1))
    return Point(num_envs, device, "isaac")


def huge(num_envs, device, seed, kind="OutOfMemoryError"):
    """Several have no room."""
    if num_envs > 1:
        raise MemoryError if kind == "MemoryError" else torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    return Point(num_envs, device, "isaac")


def taking(num_envs, device, seed, options):
    """Takes out of its arguments what it is told."""
    assert options.pop("size") == 9
    return Point(num_envs, device, "isaac")


def isaac(num_envs, device, seed):
    return Point(num_envs, device, "isaac")


def maniskill(num_envs, device, seed):
    return Point(num_envs, device, "maniskill")


def sparing(num_envs, device, seed):
    return Point(num_envs, device, "sparing")


def single(num_envs, device, seed):
    return Point(num_envs, device, "isaac")


single.per_shard = False


class Alone(Point):
    """A process can hold one of these."""

    there = False

    def __init__(self, num_envs, device):
        if Alone.there:
            raise RuntimeError("one is there already")
        Alone.there = True
        super().__init__(num_envs, device, "maniskill")

    def close(self):
        Alone.there = False


def alone(num_envs, device, seed):
    return Alone(num_envs, device)


alone.per_shard = False


def resetting(num_envs, device, seed, mode="SAME_STEP"):
    """What says when its episodes begin, as Gymnasium's vector environments do."""
    made = Point(num_envs, device, "isaac")
    made.metadata = {"autoreset_mode": AutoresetMode[mode]}
    return made


class OfGymnasium:
    """Gymnasium's own environments, which reset in the same step, and all tensors but what ended episodes saw last."""

    def __init__(self, num_envs):
        mode = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.env = make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="sync", vector_kwargs=mode)
        self.num_envs = num_envs
        self.single_observation_space = self.env.single_observation_space
        self.single_action_space = self.env.single_action_space

    def reset(self, *, seed=None):
        observation, info = self.env.reset(seed=seed)
        return torch.from_numpy(observation), info

    def step(self, actions):
        *values, info = self.env.step(actions.numpy())
        return *map(torch.from_numpy, values), info


def of_gymnasium(num_envs, device, seed):
    return OfGymnasium(num_envs)


def late(num_envs, device, seed):
    return NumpyToTorch(make_vec("CartPole-v1", num_envs=num_envs))


def late_unseen(num_envs, device, seed):
    return late(num_envs, device, seed)


late_unseen.spaces = lambda: (Box(-9.0, 9.0, (4,)), Discrete(2))


class Vmas:
    """One agent of VMAS (Bettini et al. 2022), whose environments are reset one by one and share a generator.

    Each episode starts from a seed keyed by environment and count: so it doesn't matter who else is in the simulator.
    """

    def __init__(self, num_envs, device, seed, scenario, max_steps):
        import vmas

        self.env: Any = vmas.make_env(
            scenario, num_envs=num_envs, device=device, seed=seed, max_steps=max_steps, terminated_truncated=True
        )
        (observation,), (action,) = self.env.observation_space, self.env.action_space
        self.num_envs, self.seed = num_envs, seed
        self.single_observation_space = Box(-float("inf"), float("inf"), observation.shape)
        self.single_action_space = Box(action.low, action.high)
        self.begun = [0] * num_envs

    def _begin(self, index):
        self.env.seed((self.seed + 7919 * index + 104729 * self.begun[index]) % 2**31)
        self.begun[index] += 1
        return self.env.reset_at(index)[0]

    def reset(self, *, seed=None):
        self.seed, self.begun = self.seed if seed is None else seed, [0] * self.num_envs
        for index in range(self.num_envs):
            observation = self._begin(index)
        return observation, {}

    def step(self, actions):
        (observation,), (reward,), terminated, truncated, _ = self.env.step([actions])
        final = observation.clone()
        for index in torch.nonzero(terminated | truncated).flatten().tolist():
            observation = self._begin(index)
        return observation, reward, terminated, truncated, {"final_observation": final}


def vmas(num_envs, device, seed, scenario="simple", max_steps=25):
    return Vmas(num_envs, device, seed, scenario, max_steps)

"""Environments as tensors: the same physics, autoreset without the host, groups that know nothing of each other."""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from lockstep.config.checks import resolve
from lockstep.config.run import Config, EnvConfig
from lockstep.core.errors import EnvironmentFailureError, RunError
from lockstep.core.life import life
from lockstep.core.spaces import action_layout, observation_layout
from lockstep.envs.arrays import CartPole, GridWorldPixels
from lockstep.envs.batched import array_envs
from lockstep.envs.describe import describe
from lockstep.envs.registry import make_envs
from lockstep.envs.tensor import check_tensor_options, named_object
from lockstep.policies.evaluation import run_episodes
from lockstep.torch_engine.envs.simulators import GlobalGenerators, NativeActions, Simulator, Step, encode, joined
from lockstep.torch_engine.envs.tensor_arrays import TensorArrays, of_steps, uniform
from lockstep.torch_engine.envs.tensor_envs import TensorEnvs
from lockstep.training.session import EvalEnvs

CPU = torch.device("cpu")
SPACE = spaces.Dict(
    {
        "arm": spaces.Box(-1, 1, (3,)),
        "key": spaces.Discrete(4, start=2),
        "door": spaces.MultiBinary(2),
        "eye": spaces.Box(0, 255, (5, 7, 3), np.uint8),
    }
)


def made(env: dict[str, Any], env_ids=range(8), shard_size=2, purpose="reset", seed=0) -> TensorEnvs:
    config = EnvConfig.model_validate({"backend": "tensor", **env})
    envs = make_envs(config, describe(config), seed, env_ids, pytest.fail, purpose, shard_size=shard_size)
    assert isinstance(envs, TensorEnvs)
    envs.reset()
    return envs


def played(envs: TensorEnvs, actions: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    out = []
    for rows in actions:
        step = envs.advance(rows)
        kept = (envs.observations, step.reward, step.terminated, step.truncated, step.final)
        out.append(tuple(x.clone() for x in kept))
    return out


def test_draws_are_uniform_and_a_function_of_key_counter_and_column():
    keys, counters = torch.arange(500) * 77, torch.zeros(500, dtype=torch.int64)
    drawn = uniform(keys, counters, 8)
    assert drawn.dtype == torch.float32
    assert 0.0 <= float(drawn.min()) < 0.01
    assert 0.99 < float(drawn.max()) < 1.0
    assert abs(float(drawn.mean()) - 0.5) < 0.02
    assert abs(float(drawn.var()) - 1 / 12) < 0.005
    assert len(torch.unique(drawn)) > 3990
    assert torch.equal(uniform(keys[3:5], counters[3:5], 8), drawn[3:5])
    assert not torch.equal(uniform(keys, counters + 1, 8), drawn)


def test_they_are_splitmix64():
    """Outputs for seed 1234567, from the generator's reference implementation (Vigna 2015)."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    drawn = uniform(torch.tensor([1234567]), torch.zeros(1, dtype=torch.int64), 4)[0]
    assert drawn.tolist() == [(x >> 40) * 2.0**-24 for x in expected]


@pytest.mark.parametrize("draws", [1, 2, 64])
def test_no_iteration_of_groups_draws_what_another_has_drawn_for_steps(draws):
    """An episode's number is a multiple of 2 ** 20 there, and a counter has 64 bits; the same numbers by NumPy."""
    iterations = torch.tensor([0, 1, 2, 63, 64, 2048, 4096, 4097, 8192, 1 << 30])
    episodes = torch.cat([iterations << 20, torch.tensor([1, 2])])
    number, keys, steps = len(episodes), torch.full_like(episodes, -77), torch.arange(50)
    drawn = torch.stack([uniform(*of_steps(keys, episodes, steps[t].expand(number)), draws) for t in range(50)], 1)
    assert len(torch.unique(drawn[:, :, 0])) > 0.999 * number * 50
    assert len(torch.unique(drawn.flatten(1), dim=0)) == number
    assert torch.equal(drawn[0, :, 0], uniform(keys[:1].expand(50), steps, draws)[:, 0])  # the key as it is
    by_numpy = array_envs.uniform(keys.numpy().astype(np.uint64), episodes.numpy(), np.full(number, 7), draws)
    np.testing.assert_array_equal(drawn[:, 7].numpy(), by_numpy)


def test_the_physics_is_that_of_the_array_environment():
    envs = made({"id": "lockstep/CartPole-v1"})
    group: Any = envs._groups[1]
    state = {k: v.numpy().copy() for k, v in group.state.items()}
    actions = torch.tensor([0, 1] * 4)
    step = envs.advance(actions)
    expected = CartPole().step(np, state, actions[2:4].numpy(), np.zeros((2, 0)))
    np.testing.assert_allclose(envs.observations[2:4].numpy(), expected[1], atol=1e-6)
    assert step.reward.tolist() == [1.0] * 8


@pytest.mark.parametrize("size", [4, 5])  # of 48 and of 75 bytes, which are filled up to 76
def test_an_image_is_the_row_that_numpy_makes_of_it(size):
    envs = made({"id": "lockstep/GridWorldPixels-v0", "kwargs": {"size": size}, "max_episode_steps": 3})
    layout, world = envs.description.observation, GridWorldPixels(size)
    assert (envs.observations.dtype, envs.observations.shape) == (torch.uint8, (8, layout.width))
    for _ in range(5):
        group: Any = envs._groups[1]
        state = {k: v.numpy().copy() for k, v in group.state.items()}
        actions = torch.tensor([0, 1, 2, 3] * 2)
        step = envs.advance(actions)
        _, images, rewards, terminated = world.step(np, state, actions[2:4].numpy(), np.zeros((2, 0)))
        np.testing.assert_array_equal(step.final[2:4].numpy(), [layout.encode(image) for image in images])
        np.testing.assert_array_equal(step.reward[2:4].numpy(), rewards)
        ended = terminated | step.truncated[2:4].numpy()
        now = world._observe(np, {k: v.numpy() for k, v in group.state.items()})
        np.testing.assert_array_equal(envs.observations[2:4].numpy(), [layout.encode(image) for image in now])
        assert np.array_equal((now == images).all((1, 2, 3)), ~ended)


def test_an_ended_episode_is_followed_by_the_next_one_of_its_key():
    envs = made({"id": "lockstep/CartPole-v1", "max_episode_steps": 12})
    first = envs.observations.clone()
    steps = played(envs, torch.ones((40, 8), dtype=torch.int64))
    count = torch.zeros(8, dtype=torch.int64)
    truncations = 0
    for observation, _, terminated, truncated, final in steps:
        done = terminated | truncated
        truncations += int(truncated.sum())
        fallen = (final[:, 0].abs() > 2.4) | (final[:, 2].abs() > np.radians(12))
        assert torch.equal(fallen, terminated)
        assert (observation[done].abs() <= 0.05).all()
        assert torch.equal(observation[~done], final[~done])
        count += done
    envs.buffers.episodes[:] = 0
    envs.reset()
    assert torch.equal(envs.observations, first)
    assert count.min() >= 3
    envs.buffers.episodes[:] = 1
    envs.reset()
    second = envs.observations
    begun = torch.stack([o[:, :] for o, *_ in steps])
    ended = torch.stack([te | tr for _, _, te, tr, _ in steps])
    for env in range(8):
        assert torch.equal(begun[int(ended[:, env].nonzero()[0]), env], second[env])


@pytest.mark.parametrize(
    "env_id", ["lockstep/CartPole-v1", "lockstep/GridWorldPixels-v0", "simulators:isaac", "simulators:maniskill"]
)
def test_a_shards_bits_do_not_depend_on_the_others(env_id):
    draws = torch.Generator().manual_seed(0)
    discrete = env_id.startswith("lockstep")
    actions = torch.randint(2, (30, 8), generator=draws) if discrete else torch.randn((30, 8, 2), generator=draws)
    everyone = played(made({"id": env_id}), actions)
    for part in (slice(0, 2), slice(4, 8)):
        some = played(made({"id": env_id}, range(part.start, part.stop)), actions[:, part])
        for together, alone in zip(everyone, some, strict=True):
            assert all(torch.equal(a[part], b) for a, b in zip(together, alone, strict=True))
    other = played(made({"id": env_id}, seed=1), actions)
    assert not torch.equal(other[-1][0], everyone[-1][0])


def test_groups_of_grpo_start_alike_and_others_do_not():
    config = EnvConfig.model_validate({"backend": "tensor", "id": "lockstep/Pendulum-v1"})
    envs = make_envs(config, describe(config), 0, range(8), pytest.fail, group_size=4, shard_size=4)
    envs.reset()
    rows = envs.buffers.observations
    assert (rows[:4] == rows[0]).all()
    assert (rows[4:] == rows[4]).all()
    assert (rows[0] != rows[4]).any()


# --- Simulators -------------------------------------------------------------------------------------------------------


def test_tensors_are_encoded_as_arrays_are():
    layout, sampled = observation_layout(SPACE), [SPACE.sample() for _ in range(6)]
    rows = np.stack([layout.encode(x) for x in sampled])
    batch = {k: torch.from_numpy(np.stack([x[k] for x in sampled])) for k in SPACE}
    assert np.array_equal(encode(layout, batch, 6).numpy(), rows)
    with pytest.raises(ValueError, match=r"part 'arm' of shape \(6, 4\), its space says \(6, 3\)"):
        encode(layout, {**batch, "arm": torch.zeros(6, 4)}, 6)


@pytest.mark.parametrize(
    ("part", "given", "said"),
    [
        ("eye", torch.zeros(6, 3, 5, 7, dtype=torch.uint8), r"shape \(6, 3, 5, 7\), its space says \(6, 5, 7, 3\)"),
        ("eye", torch.zeros(6, 5, 7, 3), "dtype float32, its space says uint8"),
        ("eye", torch.ones(6, 5, 7, 3, dtype=torch.bool), "dtype bool, its space says uint8"),
        ("arm", torch.zeros(3, 6), r"shape \(3, 6\), its space says \(6, 3\)"),
        ("key", torch.full((1, 6), 2), r"shape \(1, 6\), its space says \(6,\)"),
    ],
)
def test_what_lies_otherwise_than_its_space_says_is_refused(part, given, said):
    """As many numbers as the space says would be taken for other environments', or other pixels."""
    sampled = [SPACE.sample() for _ in range(6)]
    batch = {k: torch.from_numpy(np.stack([x[k] for x in sampled])) for k in SPACE}
    with pytest.raises(ValueError, match=f"^observation part '{part}' of {said}$"):
        encode(observation_layout(SPACE), batch | {part: given}, 6)


@pytest.mark.parametrize(("part", "said"), [("arm", "ndarray"), ("eye", "list")])
def test_a_simulator_that_gives_no_tensors_is_told_what_it_must_give(part, said):
    sampled = [SPACE.sample() for _ in range(6)]
    batch = {k: torch.from_numpy(np.stack([x[k] for x in sampled])) for k in SPACE}
    given = batch[part].numpy() if said == "ndarray" else batch[part].tolist()
    with pytest.raises(ValueError, match=f"^observation part '{part}' must be a tensor, and is {said}; wrap the simul"):
        encode(observation_layout(SPACE), batch | {part: given}, 6)


def test_numbers_of_an_environment_may_come_in_another_shape_and_pixels_in_wider_integers():
    layout, sampled = observation_layout(SPACE), [SPACE.sample() for _ in range(6)]
    batch = {k: torch.from_numpy(np.stack([x[k] for x in sampled])) for k in SPACE}
    other = batch | {"arm": batch["arm"][:, None], "key": batch["key"][:, None], "eye": batch["eye"].int()}
    assert torch.equal(encode(layout, other, 6), encode(layout, batch, 6))
    flat = observation_layout(spaces.Box(0, 255, (5, 7, 1), np.uint8))
    image = torch.arange(70, dtype=torch.uint8).reshape(2, 5, 7)
    assert torch.equal(encode(flat, image, 2), encode(flat, image[..., None], 2))
    with pytest.raises(ValueError, match=r"^observation of shape \(2, 7, 5\), its space says \(2, 5, 7, 1\)$"):
        encode(flat, image.transpose(1, 2), 2)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=5),
        spaces.MultiDiscrete([3, 4], start=[1, 0]),
        spaces.MultiBinary(3),
        spaces.Box(np.array([[-1.0, 0.0]], np.float32), np.array([[1.0, 2.0]], np.float32)),
    ],
)
def test_native_actions_are_those_of_the_host(space):
    layout, draws = action_layout(space), np.random.default_rng(0)
    rows: Any = draws.integers(0, 2, (5, *layout.row_shape)) if layout.discrete else 3 * draws.standard_normal((5, 2))
    rows = rows.astype(layout.row_dtype)
    np.testing.assert_array_equal(NativeActions(layout, CPU)(torch.from_numpy(rows)), layout.natives(rows))


def test_generators_of_simulators_are_apart_and_come_back():
    def draw() -> list[float]:
        import random

        return [float(torch.rand(())), float(np.random.rand()), random.random(), random.gauss(0, 1)]

    torch.manual_seed(5)
    np.random.seed(5)
    outside = draw()[:2]
    torch.manual_seed(5)
    np.random.seed(5)
    one, two = GlobalGenerators(1, CPU), GlobalGenerators(2, CPU)
    with one():
        first = draw()
    with two():
        draw()
    assert draw()[:2] == outside
    saved = one.save()
    with one():
        second = draw()
    assert first != second
    again = GlobalGenerators(9, CPU)
    again.load(saved)
    with again():
        assert draw() == second


def simulator(name: str) -> Simulator:
    config = EnvConfig.model_validate({"id": f"simulators:{name}", "backend": "tensor"})
    out = Simulator(config, describe(config).observation, 3, CPU, seed=4)
    out.reset(7)
    return out


def test_a_simulator_without_final_observations_bootstraps_from_the_one_before():
    ours = simulator("isaac")
    before = ours.step(torch.zeros(3, 2)).observation
    kept = before.clone()
    step = ours.step(torch.zeros(3, 2))
    assert torch.equal(step.final, kept)  # although the simulator used its buffer again
    assert step.final_missing is not None
    assert step.final_missing.tolist() == [1, 1, 1]
    assert step.success is None


def test_final_observations_and_success_are_taken_where_they_are_given():
    ours = simulator("maniskill")
    for _ in range(6):
        ours.step(torch.zeros(3, 2))
    step = ours.step(torch.zeros(3, 2))
    assert step.truncated.all()
    assert step.final[:, 2].tolist() == [7.0] * 3
    assert step.final_missing is None
    assert step.observation[:, 2].tolist() == [0.0] * 3
    assert step.success is not None
    assert torch.equal(step.success, step.terminated)


def test_groups_that_say_nothing_of_success_are_joined_with_those_that_do():
    """As those of simulators do in whose steps no episode ended."""
    zeros, nobody = torch.zeros(2), torch.zeros(2, dtype=torch.bool)
    silent = Step(torch.zeros(2, 3), zeros, nobody, nobody, torch.zeros(2, 3), None)
    told = silent._replace(reward=zeros + 1, success=torch.tensor([True, False]))
    rows = torch.ones(4, 3)
    step = joined([silent, told], rows)
    assert step.observation is rows
    assert step.reward.tolist() == [0, 0, 1, 1]
    assert step.successes is not None
    assert step.successes.tolist() == [0, 0, 1, -1]
    first = joined([told, silent], rows).successes
    assert first is not None
    assert first.tolist() == [1, -1, 0, 0]
    marked = joined([told, silent._replace(final_missing=torch.ones(2, dtype=torch.int8))], rows).final_missing
    assert marked is not None
    assert marked.tolist() == [0, 0, 1, 1]
    assert joined([silent, silent], rows)[5:] == (None, None)
    assert joined([told], rows).success is told.success


def test_evaluations_give_simulators_back_what_their_hooks_hold():
    """As those of Gymnasium's environments: else a resumed run couldn't repeat them."""

    def evaluated(evaluations):
        envs = evaluations.begin()
        envs.buffers.episodes[:] = 0
        envs.reset()
        rewards = []
        for _ in range(5):
            envs.buffers.actions[:] = 0.5
            envs.step()
            rewards.append(envs.buffers.rewards.copy())
        return np.stack(rewards)

    levelled, hookless = (
        EvalEnvs(lambda name=name: made({"id": f"simulators:{name}"}, purpose="eval")) for name in ("levelled", "isaac")
    )
    first = evaluated(levelled)
    assert first.mean() < -2
    assert np.array_equal(evaluated(levelled), first)
    assert np.array_equal(evaluated(levelled), first)
    assert evaluated(hookless).shape == first.shape


def test_on_the_host_they_are_what_they_are_on_the_device():
    envs = made({"id": "simulators:maniskill"}, purpose="eval")
    envs.buffers.actions[:] = 0.5
    ended = np.zeros(8, np.int64)
    for _ in range(9):
        envs.step()
        done = envs.buffers.terminated | envs.buffers.truncated
        ended += done
        assert np.array_equal(envs.buffers.observations, envs.observations.numpy())
        assert (envs.buffers.successes == np.where(envs.buffers.terminated, 1, -1)).all()
    assert (envs.buffers.episodes == ended).all()
    assert ended.all()


@pytest.mark.parametrize(
    "env_id",
    [
        "lockstep/CartPole-v1",
        "lockstep/GridWorldPixels-v0",
        "simulators:maniskill",
        "simulators:isaac",
        "simulators:of_nothing",
    ],
)
def test_saved_environments_go_on_as_they_would_have_or_are_named(env_id):
    def acted(envs: TensorEnvs) -> torch.Tensor:
        shape = (20, *envs.buffers.actions.shape)
        ones = torch.ones(shape, dtype=torch.int64 if len(shape) == 2 else torch.float32)
        return torch.stack([step[0] for step in played(envs, ones)])

    envs = made({"id": env_id})
    acted(envs)
    states, buffers = envs.save_states(), envs.buffers
    again = made({"id": env_id})
    again.buffers.episodes[:], again.buffers.observations[:] = buffers.episodes, buffers.observations
    nothing = np.zeros(0)
    restored = [again.restore(env, nothing, nothing, state or {}) for env, state in enumerate(states)]
    if env_id in ("simulators:isaac", "simulators:of_nothing"):  # no state hooks, or no state
        assert states == [None] * 8
        assert not any(restored)
        assert (again.buffers.episodes == buffers.episodes + 1).all()
        assert np.array_equal(again.buffers.observations, again.observations.numpy())
        return
    assert all(restored)
    assert torch.equal(again.observations, envs.observations)
    assert torch.equal(acted(again), acted(envs))


def test_one_simulator_comes_back_as_several_with_generators_of_their_own():
    envs = made({"id": "simulators:maniskill"}, shard_size=8)
    states, nothing = envs.save_states(), np.zeros(0)
    assert sum("generators.numpy.rest" in (state or {}) for state in states) == 1
    again = made({"id": "simulators:maniskill"}, shard_size=4)
    again.buffers.episodes[:], again.buffers.observations[:] = envs.buffers.episodes, envs.buffers.observations
    assert all(again.restore(env, nothing, nothing, state or {}) for env, state in enumerate(states))
    assert torch.equal(again.observations, envs.observations)


def test_a_simulator_that_raises_is_named(monkeypatch):
    simulators = importlib.import_module("simulators")

    envs = made({"id": "simulators:isaac"})

    def broken(self, actions):
        raise RuntimeError("the solver diverged")

    monkeypatch.setattr(simulators.Point, "step", broken)
    with pytest.raises(EnvironmentFailureError, match=r"simulators:isaac\) raised in step: RuntimeError: the solver"):
        envs.step()


def test_one_that_cannot_be_made_for_an_evaluation_has_failed(monkeypatch):
    """It was made for training, by the same call."""
    monkeypatch.setattr(importlib.import_module("simulators"), "MADE", [])
    monkeypatch.setattr(life, "trains", False)
    made({"id": "simulators:once"}, shard_size=8)
    with pytest.raises(ValueError, match=r"^env\.id: simulators:once can't be made, 8 on cpu: RuntimeError: one app a"):
        made({"id": "simulators:once"}, shard_size=8, purpose="eval")
    monkeypatch.setattr(life, "trains", True)
    said = r"^environments \(simulators:once\) raised in make, 8 on cpu: RuntimeError: one app a process \(simulators"
    with pytest.raises(EnvironmentFailureError, match=said):
        made({"id": "simulators:once"}, shard_size=8, purpose="eval")


def test_one_of_another_size_or_whose_reset_refuses_has_failed_too_once_training_has_begun(monkeypatch):
    simulators, envs = importlib.import_module("simulators"), made({"id": "simulators:isaac"})

    def unsound(self, seed=None):
        raise ValueError("no such\nlevel")

    monkeypatch.setattr(simulators, "isaac", lambda num_envs, device, seed: simulators.Point(8, device, "isaac"))
    said = r"^env\.id: simulators:isaac made 8 environments where 4 were asked for$"
    for trains, kind in ((False, ValueError), (True, EnvironmentFailureError)):
        monkeypatch.setattr(life, "trains", trains)
        with pytest.raises(kind, match=said):
            made({"id": "simulators:isaac"}, shard_size=4)
    monkeypatch.setattr(simulators.Point, "reset", unsound)
    with pytest.raises(EnvironmentFailureError, match=r"simulators:isaac\) raised in reset: ValueError: no such level"):
        envs.begin()


@pytest.mark.parametrize("kind", ["OutOfMemoryError", "MemoryError"])
@pytest.mark.parametrize("trains", [False, True])
def test_one_for_which_memory_is_too_small_says_what_takes_less(monkeypatch, kind, trains):
    monkeypatch.setattr(life, "trains", trains)
    said = (
        r"^env\.id: simulators:huge can't be made, 2 on cpu: device cpu: too little memory: .* each of more ranks takes"
    )
    with pytest.raises(RunError, match=said):
        made({"id": "simulators:huge", "kwargs": {"kind": kind}})


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"id": "CartPole-v1"}, "as module:function"),
        ({"id": "simulators:nothing"}, "module simulators has no nothing"),
        ({"id": "no_such_module:make"}, "No module named"),
        ({"id": "simulators:Vmas"}, "can't be made: TypeError"),
        ({"id": "simulators:late"}, "simulators:late resets one step late .*autoreset_mode NextStep.*same step"),
        (
            {"id": "simulators:late"},
            "train the id that Gymnasium knows itself, or give one that does, with info's final_obs as",
        ),
        ({"id": "simulators:resetting", "kwargs": {"mode": "NEXT_STEP"}}, "resets one step late .*NextStep"),
        ({"id": "simulators:resetting", "kwargs": {"mode": "DISABLED"}}, "does not reset ended episodes .*Disabled"),
        ({"id": "simulators:isaac", "workers": 2}, "env.workers"),
        ({"id": "simulators:isaac", "frame_stack": 2}, "env.frame_stack: .* let the simulator do it"),
        ({"id": "simulators:isaac", "max_episode_steps": 5}, "env.max_episode_steps"),
        ({"id": "simulators:isaac", "action_mask": "info"}, "env.action_mask"),
        ({"id": "lockstep/CartPole-v1", "frame_skip": 2}, "env.frame_skip: .* --env.backend gymnasium"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(env, says):
    with pytest.raises(ValueError, match=says) as caught:
        describe(EnvConfig.model_validate({"backend": "tensor", **env}))
    assert "\n" not in str(caught.value)


def test_one_that_resets_late_is_refused_when_it_is_made_too():
    with pytest.raises(ValueError, match=r"^env.id: simulators:late_unseen resets one step late"):
        made({"id": "simulators:late_unseen"})


def test_policies_that_were_trained_where_one_resets_late_are_evaluated():
    """An evaluation counts the first episode of each environment, which ends before a reset comes late."""
    config = EnvConfig.model_validate({"id": "simulators:late", "backend": "tensor"})
    description = describe(config, trains=False)
    envs = make_envs(config, description, 0, range(4), pytest.fail, "eval")
    assert isinstance(envs, TensorEnvs)
    there = gymnasium.make_vec("CartPole-v1", num_envs=4)
    there.reset(seed=envs._wanted.episode_seed(0, 0, "/simulator"))
    lengths = np.zeros(4)
    for step in range(1, 101):
        _, _, terminated, _, _ = there.step(np.ones(4, np.int64))
        lengths = np.where((lengths == 0) & terminated, step, lengths)
    assert lengths.all()
    table = run_episodes(envs, lambda rows: np.ones(len(rows), np.int64), 100)
    np.testing.assert_array_equal(table[:, :2], np.stack([lengths, lengths], 1))


def test_one_that_says_that_it_resets_in_the_same_step_is_played_as_one_that_says_nothing():
    silent, saying = (made({"id": f"simulators:{name}"}) for name in ("isaac", "resetting"))
    actions = torch.linspace(-1, 1, 10 * 8 * 2).reshape(10, 8, 2)
    for one, other in zip(played(silent, actions), played(saying, actions), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def checked(env_id: str, **settings: Any) -> None:
    values = {"env": {"id": env_id, "backend": "tensor"}, "num_envs": 8, **settings}
    check_tensor_options(resolve(Config.model_validate(values)))


def test_a_simulator_that_cannot_be_one_of_several_leaves_exact():
    with pytest.raises(ValueError, match=r"reduction: exact with 8 shards .*; use --reduction fast or --num-shards 1$"):
        checked("simulators:single")
    checked("simulators:single", reduction="fast")
    checked("simulators:single", num_shards=1)
    checked("simulators:isaac")
    with pytest.raises(ValueError, match=r"^eval.interval"):
        checked("simulators:single", num_shards=1, eval={"interval": 1})
    with pytest.raises(ValueError, match="grpo needs groups"):
        checked("simulators:isaac", algorithm="grpo", grpo={"group_size": 2}, num_envs=16)
    checked("lockstep/CartPole-v1", algorithm="grpo", grpo={"group_size": 2}, num_envs=16)


def test_all_of_a_ranks_environments_are_one_group_then():
    assert len(made({"id": "simulators:single"})._groups) == 1
    assert len(made({"id": "simulators:isaac"})._groups) == 4


def test_an_array_environment_group_has_keys_of_its_own():
    one, two = (TensorArrays(CartPole(), 0, keys, 500, CPU) for keys in ([0, 1], [1, 2]))
    zeros = torch.zeros(2, dtype=torch.int64)
    assert torch.equal(one.reset(zeros)[1], two.reset(zeros)[0])
    assert not torch.equal(one.reset(zeros)[0], two.reset(zeros)[0])


def test_a_module_that_fails_when_it_is_imported_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "fails_at_import.py").write_text("raise RuntimeError('two\\nlines')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=r"^env.id: fails_at_import:make: importing .* failed: RuntimeError: two lines$"
    ):
        named_object("fails_at_import:make")
    with pytest.raises(
        ValueError, match=r"^env.id: is_not_there_at_all:make: No module named .*; modules are looked for"
    ):
        named_object("is_not_there_at_all:make")
    with pytest.raises(ValueError, match="module json has no nothing_of_it"):
        named_object("json:nothing_of_it")

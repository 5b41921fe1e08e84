"""PushCube: its arm, its contacts, its rewards and its pictures."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.envs.arrays import PushCube

CUBE = ("cube_x", "cube_y", "cube_cos", "cube_sin")


def joints_for(env: PushCube, x: float, y: float) -> tuple[float, float]:
    """Angles that hold the peg at a point: two equal links make an isosceles triangle."""
    dx, dy = x - env.base[0], y - env.base[1]
    elbow = 2 * np.arccos(np.hypot(dx, dy) / (2 * env.link_length))
    return np.arctan2(dy, dx) - elbow / 2, elbow


def scene(
    env: PushCube, peg: tuple, cube: tuple = (0.0, 0.0), yaw: float = 0.0, goal: tuple = (0.3, 0.3)
) -> dict[str, np.ndarray]:
    """One environment at rest."""
    shoulder, elbow = joints_for(env, *peg)
    values = {"shoulder": shoulder, "elbow": elbow, "shoulder_speed": 0.0, "elbow_speed": 0.0}
    values |= {"cube_x": cube[0], "cube_y": cube[1], "cube_cos": np.cos(yaw), "cube_sin": np.sin(yaw)}
    values |= {"goal_x": goal[0], "goal_y": goal[1]}
    return {name: np.array([value], np.float32) for name, value in values.items()}


def towards(env: PushCube, state: dict[str, np.ndarray], direction: tuple, speed: float = 0.1) -> np.ndarray:
    """The action that has the peg move in a direction at `speed` m/s once the motors follow."""
    first, second = float(state["shoulder"][0]), float(state["shoulder"][0] + state["elbow"][0])
    outer = env.link_length * np.array([-np.sin(second), np.cos(second)])
    inner = env.link_length * np.array([-np.sin(first), np.cos(first)])
    velocity = speed * np.asarray(direction) / np.hypot(*direction)
    return np.linalg.solve(np.stack([inner + outer, outer], 1), velocity)[None].astype(np.float32)


def pushed(env: PushCube, state: dict[str, np.ndarray], direction: tuple, steps: int) -> list[dict[str, np.ndarray]]:
    """The states while the peg moves straight."""
    out = [state]
    for _ in range(steps):
        out.append(env.step(np, out[-1], towards(env, out[-1], direction), None)[0])
    return out


def yaw_of(state: dict[str, np.ndarray]) -> float:
    return float(np.arctan2(state["cube_sin"][0], state["cube_cos"][0]))


def gap(env: PushCube, state: dict[str, np.ndarray]) -> float:
    """Distance of the peg's rim from the cube, negative where it penetrates."""
    x, y = env._peg(np, state["shoulder"][0], state["elbow"][0])
    rx, ry = float(x - state["cube_x"][0]), float(y - state["cube_y"][0])
    cos, sin = float(state["cube_cos"][0]), float(state["cube_sin"][0])
    qx, qy = abs(cos * rx + sin * ry) - env.cube_half_size, abs(cos * ry - sin * rx) - env.cube_half_size
    return np.hypot(max(qx, 0), max(qy, 0)) + min(max(qx, qy), 0) - env.peg_radius


# --- Physics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [(0, -1), (1, 0), (0, 1), (-1, 0)])
def test_a_push_through_the_centre_moves_the_cube_straight_ahead(side):
    env, start = PushCube(), 0.08
    states = pushed(env, scene(env, (start * side[0], start * side[1])), (-side[0], -side[1]), 20)
    moved = np.array([states[-1]["cube_x"][0], states[-1]["cube_y"][0]])
    assert yaw_of(states[-1]) == pytest.approx(0.0, abs=2e-2)  # the motors lag behind the line
    along, across = -moved @ side, abs(moved @ (side[1], -side[0]))
    peg = env._peg(np, states[-1]["shoulder"][0], states[-1]["elbow"][0])
    assert along == pytest.approx(-np.dot(peg, side) + env.cube_half_size + env.peg_radius, abs=1e-3)
    assert along > 0.05
    assert across < 2e-3


@pytest.mark.parametrize(("offset", "sign"), [(0.03, 1), (-0.03, -1)])
def test_a_push_beside_the_centre_turns_the_cube(offset, sign):
    # From below, right of the centre: p = (0.03, -0.05), n = (0, 1), p x n = 0.03 > 0, so it turns to the left.
    env = PushCube()
    states = pushed(env, scene(env, (offset, -0.08)), (0, 1), 12)
    assert sign * yaw_of(states[-1]) > 0.2
    assert states[-1]["cube_y"][0] > 0.01


def test_the_first_contact_by_hand():
    # The peg, in the middle of a substep, 1 mm deep below the cube at x = 0.03; it slides in no direction.
    # p = (0.03, -0.05), n = (0, 1), t = (1, 0), c = 0.0383: p x n = 0.03, p x t = 0.05.
    # M = [[1 + 0.03²/c², 0.03 · 0.05/c²], [.., 1 + 0.05²/c²]] = [[1.6135, 1.0226], [1.0226, 2.7043]].
    # Sticking: M f = (0.001, 0), f = (2.7043, -1.0226) · 0.001 / 3.3178 = (0.00081508, -0.00030821): |f_t| > 0.3 f_n.
    # Sliding: f = k (1, -0.3), k = 0.001 / (1.6135 - 0.3 · 1.0226) = 0.00076526, so it moves by
    # (-0.00022958, 0.00076526) and turns by (p x f)/c² = (0.03 · 0.00076526 - 0.05 · 0.00022958) / c² = 0.0078257 rad.
    env = PushCube()
    one = np.ones(1)
    cube = env._push(np, (0 * one, 0 * one, one, 0 * one), 0.03 * one, -0.074 * one, 0 * one, 0.001 * one)
    np.testing.assert_allclose(np.concatenate(cube[:2]), [-0.00022958, 0.00076526], atol=2e-8)
    np.testing.assert_allclose(np.arctan2(cube[3], cube[2]), 0.0078257, atol=2e-6)


def test_with_much_friction_the_peg_sticks():
    # As above, with f = (0.00081508, -0.00030821): the point of contact moves by (0, 0.001), as the peg does.
    env, one = PushCube(), np.ones(1)
    env.contact_friction = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    x, y, cos, sin = env._push(np, (0 * one, 0 * one, one, 0 * one), 0.03 * one, -0.074 * one, 0 * one, 0.001 * one)
    np.testing.assert_allclose([x[0], y[0]], [-0.00030821, 0.00081508], atol=2e-8)
    contact = [x + cos * 0.03 + sin * 0.05 - 0.03, y + sin * 0.03 - cos * 0.05 + 0.05]
    np.testing.assert_allclose(np.concatenate(contact), [0.0, 0.001], atol=3e-6)  # a turn is no straight line


def test_nothing_moves_the_cube_but_the_peg():
    env = PushCube()
    state = scene(env, (0.1, -0.25), yaw=0.3)
    for later in pushed(env, state, (1, 0.2), 15):
        assert all(later[name] == state[name] for name in CUBE)
    assert later["shoulder"] != state["shoulder"]


@given(st.integers(0, 2**32 - 1))
def test_the_peg_never_stays_in_the_cube_and_a_yaw_stays_a_unit_vector(seed):
    env, rng = PushCube(), np.random.default_rng(seed)
    angle = rng.uniform(-np.pi, np.pi)
    state = scene(env, (0.1 * np.cos(angle), 0.1 * np.sin(angle)), yaw=rng.uniform(-np.pi, np.pi))
    for _ in range(30):
        x, y = env._peg(np, state["shoulder"][0], state["elbow"][0])
        aim = (float(state["cube_x"][0] - x) + rng.normal(0, 0.03), float(state["cube_y"][0] - y))
        action = towards(env, state, aim, rng.uniform(0.1, 0.5))
        state = env.step(np, state, action, None)[0]
        assert gap(env, state) > -0.006  # what one linear correction leaves of a substep's 6 mm
        assert np.hypot(state["cube_cos"], state["cube_sin"]) == pytest.approx(1.0, abs=1e-6)


def test_joints_stop_at_their_limits_and_speeds_follow_with_a_lag():
    env = PushCube()
    state = scene(env, (0.0, -0.2))
    speeds = []
    for _ in range(100):
        state = env.step(np, state, np.array([[3.0, -3.0]]), None)[0]  # clipped to 1
        speeds.append(state["shoulder_speed"][0])
    np.testing.assert_allclose(speeds[:3], [0.5, 0.75, 0.875])
    assert state["shoulder"] == np.float32(env.shoulder_limits[1])
    assert state["elbow"] == np.float32(env.elbow_limits[0])
    assert state["shoulder_speed"] == state["elbow_speed"] == 0.0


def test_the_peg_moves_less_than_its_radius_between_contacts():
    env = PushCube()
    fastest = env.time_step * env.max_joint_speed * (2 * env.link_length * np.cos(env.elbow_limits[0] / 2) + 0.65)
    assert fastest / env.substeps < env.peg_radius


# --- Task -------------------------------------------------------------------------------------------------------------


def test_a_start_is_on_the_table_apart_from_the_goal_and_touches_nothing():
    env = PushCube()
    random = np.random.default_rng(0).random((5000, env.reset_draws), np.float32)
    random[0], random[1] = 0.0, np.nextafter(np.float32(1), np.float32(0))
    state, observation = env.reset(np, random)
    assert not env.success(np, state).any()
    distance = np.hypot(state["goal_x"] - state["cube_x"], state["goal_y"] - state["cube_y"])
    assert 0.0799 < distance.min() < 0.1
    assert 0.27 < distance.max() < 0.2801
    assert max(np.abs(state[name]).max() for name in ("goal_x", "goal_y")) < env.table_half_size - env.tolerance
    rows = [{name: values[i : i + 1] for name, values in state.items()} for i in range(1000)]
    assert min(gap(env, row) for row in rows) > 0.0
    assert env.observation_space.contains(observation[0])


@pytest.mark.parametrize("action", [(-1, -1), (-1, 1), (1, -1), (1, 1)])
def test_what_is_seen_lies_within_the_space_wherever_the_arm_goes(action):
    env, rows = PushCube(), 200
    state, observation = env.reset(np, np.random.default_rng(0).random((rows, env.reset_draws), np.float32))
    seen, going = [observation], np.ones(rows, bool)
    for _ in range(env.max_episode_steps):
        state, observation, _, terminated = env.step(np, state, np.tile(np.float32(action), (rows, 1)), None)
        seen.append(observation[going])  # an episode's last one too
        going &= ~terminated
    assert (np.abs(np.concatenate(seen)).max(0) <= env.observation_space.high).all()


def test_success_and_falling_terminate_and_only_success_is_one():
    env = PushCube()
    still = np.zeros((1, 2), np.float32)
    for cube, goal, success, over in [
        ((0.0, 0.0), (0.0499, 0.0), True, True),
        ((0.0, 0.0), (0.0501, 0.0), False, False),
        ((0.401, 0.0), (0.3, 0.0), False, True),
        ((0.0, -0.399), (0.3, 0.0), False, False),
    ]:
        moved, _, _, terminated = env.step(np, scene(env, (-0.1, -0.2), cube, 0.0, goal), still, None)
        assert (bool(env.success(np, moved)[0]), bool(terminated[0])) == (success, over)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_rewards_add_up_to_what_was_won(kind):
    # The peg pushes the cube up until it reaches the goal.
    env = PushCube(kind)
    state = scene(env, (0.0, -0.12), goal=(0.0, 0.15))
    total, rewards, over = 0.0, [], False
    behind = -env.cube_half_size - env.peg_radius
    start = 10 * 0.15 + 2 * (behind + 0.12)  # cube to goal; peg to where it pushes towards the goal
    while not over:
        state, _, reward, terminated = env.step(np, state, towards(env, state, (0, 1)), None)
        rewards.append(float(reward[0]))
        total, over = total + rewards[-1], bool(terminated[0])
    assert env.success(np, state)[0]
    left = 10 * np.hypot(state["goal_x"][0] - state["cube_x"][0], state["goal_y"][0] - state["cube_y"][0])
    expected = 5 + start - left if kind == "dense" else 1.0
    assert total == pytest.approx(expected, abs=2e-3)
    assert (np.array(rewards[:-1]) != 0).any() == (kind == "dense")


def test_an_unknown_reward_is_refused():
    with pytest.raises(ValueError, match=r"reward: 'shaped' isn't offered; use 'dense' or 'sparse'"):
        PushCube("shaped")


def test_the_observation_by_hand():
    env = PushCube()
    state = scene(env, (0.1, -0.2), (0.05, 0.1), np.pi / 12, (-0.1, 0.2))
    _, observation, _, _ = env.step(np, state, np.zeros((1, 2), np.float32), None)
    q1, q2 = joints_for(env, 0.1, -0.2)
    expected = [np.cos(q1), np.sin(q1), np.cos(q2), np.sin(q2), 0, 0, 0.1, -0.2, 0.05, 0.1]
    expected += [0.5, np.sqrt(3) / 2, -0.1, 0.2, -0.05, 0.3, -0.15, 0.1]  # four times 15 degrees are 60
    np.testing.assert_allclose(observation[0], expected, atol=1e-6)


@pytest.mark.parametrize("backend", ["numpy", "array_api_compat.torch"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_an_episode_has_the_same_bits_in_any_company(backend, rows):
    env, xp, rng = PushCube(), pytest.importorskip(backend), np.random.default_rng(1)
    draws = rng.random((64, env.reset_draws), np.float32)
    actions = np.clip(np.cumsum(rng.normal(0, 0.3, (60, 64, 2)), 0), -1, 1).astype(np.float32)

    def episode(part: slice) -> list[np.ndarray]:
        state, observation = env.reset(xp, xp.asarray(draws[part]))
        out = [observation]
        for action in actions:
            state, observation, reward, _ = env.step(xp, state, xp.asarray(action[part]), None)
            out += [observation, reward]
        return [np.asarray(array) for array in out]

    together = episode(slice(64))
    assert (together[-2][:, 8:10] != together[0][:, 8:10]).any(1).sum() >= 5  # cubes that were moved
    for first in (0, 17, 64 - rows):
        part = slice(first, first + rows)
        for ours, theirs in zip(episode(part), together, strict=True):
            np.testing.assert_array_equal(ours, theirs[part])


# --- Gymnasium, pictures ----------------------------------------------------------------------------------------------


def test_gymnasium_is_told_of_success():
    env = gymnasium.make("lockstep/PushCube-v0", reward="sparse")
    env.reset(seed=0)
    state = scene(PushCube(), (-0.1, -0.2), (0.0, 0.0), 0.0, (0.2, 0.0))
    env.unwrapped._state = state  # pyright: ignore[reportAttributeAccessIssue]
    assert env.step(np.zeros(2, np.float32))[1:] == (0.0, False, False, {"is_success": False})
    state["goal_x"][:] = 0.01
    env.unwrapped._state = state  # pyright: ignore[reportAttributeAccessIssue]
    assert env.step(np.zeros(2, np.float32))[1:] == (1.0, True, False, {"is_success": True})


def test_the_picture_shows_table_goal_cube_and_arm_where_they_are():
    env = PushCube()
    state = scene(env, (0.1, -0.2), (-0.1, 0.1), 0.4, (0.2, 0.2))
    picture = env.render(state)
    assert (picture.shape, picture.dtype) == ((480, 480, 3), np.uint8)

    def colour(x: float, y: float) -> list[int]:
        return picture[int((0.58 - y) * 480 / 1.44), int((x + 0.72) * 480 / 1.44)].tolist()

    table, floor, cube, goal, peg = (
        colour(*at) for at in [(0, 0.3), (-0.6, 0.3), (-0.12, 0.1), (0.22, 0.2), (0.125, -0.2)]
    )
    assert table[0] > floor[0] > 200
    assert cube[0] > 200 > cube[2] + 50
    assert goal[1] > goal[0]
    assert max(peg) < 130
    state["cube_x"][:] = 0.3
    assert (env.render(state) != picture).any()
    state["goal_x"][:], state["goal_y"][:] = 0.3, 0.1
    assert not np.array_equal(env.render(state)[170:200], picture[170:200])


def test_the_text_shows_goal_cube_and_peg():
    env = gymnasium.make("lockstep/PushCube-v0", render_mode="ansi")
    env.reset(seed=0)
    env.unwrapped._state = scene(PushCube(), (0.1, -0.2), (-0.2, 0.0), 0.0, (0.2, 0.2))  # pyright: ignore[reportAttributeAccessIssue]
    text = env.render()
    assert isinstance(text, str)
    lines = text.splitlines()
    assert {len(line) for line in lines[:-1]} == {43}
    assert lines[-1] == "cube to goal: 0.447 m"
    assert [line.index("#") for line in lines if "#" in line] == [9, 9, 9]
    assert min(line.index("o") for line in lines[:-1] if "o" in line) > 25
    (peg,) = [line for line in lines if "*" in line]
    assert peg.index("*") == 26
    with pytest.raises(ValueError, match="render_mode: 'ansi' isn't offered; use 'rgb_array', 'human' or None"):
        gymnasium.make("lockstep/CartPole-v1", render_mode="ansi")

"""GridWorld: its worlds, its rules, what is seen of it by numbers and by sight, and its pictures."""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
import numpy as np
import pytest

from lockstep.envs.arrays import GridWorld, GridWorldPixels

LEFT, DOWN, RIGHT, UP = range(4)
FREE, WALL, HOLE = ".", "#", "o"


def begun(env: GridWorld, n: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    return env.reset(np, np.random.default_rng(seed).random((n, env.reset_draws), np.float32))


def world(env: GridWorld, agent: tuple, goal: tuple, **cells: str) -> dict[str, np.ndarray]:
    """One environment of open cells but for those named, as ``r1c3="#"``."""
    state, _ = env.reset(np, np.full((1, env.reset_draws), 0.99, np.float32))
    for place, what in cells.items():
        row, column = map(int, place[1:].split("c"))
        state["walls" if what == WALL else "holes"][0, number(env, row, column)] = True
    state["agent"][0], state["goal"][0] = number(env, *agent), number(env, *goal)
    return state


def number(env: GridWorld, row: int, column: int) -> int:
    return (row + 1) * env.width + column + 1


def place(env: GridWorld, state: dict[str, np.ndarray], name: str = "agent") -> tuple[int, int]:
    row, column = divmod(int(state[name][0]), env.width)
    return row - 1, column - 1


def moved(env: GridWorld, state: dict[str, np.ndarray], action: int) -> tuple[dict[str, np.ndarray], float, bool]:
    after, _, reward, terminated = env.step(np, state, np.array([action]), None)
    return after, float(reward[0]), bool(terminated[0])


def reachable(env: GridWorld, state: dict[str, np.ndarray]) -> set[int]:
    """Cells to which there is a way past walls and holes from the agent of environment 0."""
    blocked = state["walls"][0] | state["holes"][0]
    found, queue = {int(state["agent"][0])}, deque([int(state["agent"][0])])
    while queue:
        cell = queue.popleft()
        for step in (-1, 1, -env.width, env.width):
            if cell + step not in found and not blocked[cell + step]:
                found.add(cell + step)
                queue.append(cell + step)
    return found


# --- Worlds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 5, 8])
def test_there_is_a_way_from_every_start_to_its_goal(size):
    env = GridWorld(size)
    state, _ = begun(env, 500)
    for i in range(500):
        one = {name: values[i : i + 1] for name, values in state.items()}
        free = ~(one["walls"][0] | one["holes"][0])
        assert free[one["agent"][0]]
        assert one["agent"][0] != one["goal"][0]
        assert reachable(env, one) == set(np.flatnonzero(free))


def test_the_search_for_a_way_sees_a_closed_world():
    env = GridWorld(4)
    state = world(env, (0, 0), (3, 3), r0c1=WALL, r1c0=HOLE)
    assert reachable(env, state) == {number(env, 0, 0)}


@pytest.mark.parametrize("size", [5, 8])
def test_every_open_cell_is_start_and_goal_as_often_and_obstacles_have_their_shares(size):
    env, n = GridWorld(size), 20_000
    random = np.random.default_rng(1).random((n, env.reset_draws), np.float32)
    random[0], random[1] = 0.0, np.nextafter(np.float32(1), np.float32(0))
    state, _ = env.reset(np, random)
    count = size * size - (size // 2) ** 2
    for name in ("agent", "goal"):
        cells, times = np.unique(state[name], return_counts=True)
        assert len(cells) == count
        assert abs(times / n * count - 1).max() < 0.3
    assert not (state["walls"] & state["holes"]).any()
    shares = [state[name].reshape(n, env.width, env.width)[:, 1:-1, 1:-1].mean(0) for name in ("walls", "holes")]
    for share in shares:
        assert abs(share[1::2, 1::2] - 0.3).max() < 0.02
        share[1::2, 1::2] = 0
        assert not share.any()
    border = state["walls"].reshape(n, env.width, env.width)
    assert all(edge.all() for edge in (border[:, 0], border[:, -1], border[:, :, 0], border[:, :, -1]))


@pytest.mark.parametrize("kind", [GridWorld, GridWorldPixels])
def test_nothing_blind_gets_there_often(kind):
    """The best of many fixed courses, each tried in the same 500 worlds."""
    env, rng = kind(), np.random.default_rng(2)
    successes = []
    for _ in range(15):
        state, _ = begun(env, 500)
        over, arrived = np.zeros(500, bool), np.zeros(500, bool)
        for action in rng.integers(0, 4, env.max_episode_steps):
            state, _, _, terminated = env.step(np, state, np.full(500, action), None)
            arrived |= env.success(np, state) & ~over
            over |= terminated
        successes.append(arrived.mean())
    assert max(successes) < 0.5


# --- Rules ------------------------------------------------------------------------------------------------------------


def test_actions_are_left_down_right_up():
    env = GridWorld()
    state = world(env, (2, 4), (7, 7))
    places = [place(env, moved(env, state, action)[0]) for action in (LEFT, DOWN, RIGHT, UP)]
    assert places == [(2, 3), (3, 4), (2, 5), (1, 4)]


def test_walls_and_the_border_stop_a_step():
    env = GridWorld()
    inside = world(env, (2, 4), (7, 7), r2c3=WALL, r3c4=WALL, r2c5=WALL, r1c4=WALL)
    assert [moved(env, inside, action)[1:] for action in range(4)] == [(pytest.approx(-0.01), False)] * 4
    assert {place(env, moved(env, inside, action)[0]) for action in range(4)} == {(2, 4)}
    for corner, stopped in (((0, 0), (LEFT, UP)), ((7, 7), (RIGHT, DOWN))):
        state = world(env, corner, (3, 4))
        assert [place(env, moved(env, state, action)[0]) == corner for action in range(4)] == [
            action in stopped for action in range(4)
        ]


def test_goal_and_hole_terminate_and_only_the_goal_is_a_success():
    env = GridWorld()
    state = world(env, (2, 4), (2, 5), r3c4=HOLE)
    after, reward, terminated = moved(env, state, RIGHT)
    assert (reward, terminated, bool(env.success(np, after)[0])) == (pytest.approx(0.99), True, True)
    after, reward, terminated = moved(env, state, DOWN)
    assert (reward, terminated, bool(env.success(np, after)[0])) == (pytest.approx(-1.01), True, False)
    after, reward, terminated = moved(env, state, UP)
    assert (reward, terminated, bool(env.success(np, after)[0])) == (pytest.approx(-0.01), False, False)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GridWorld(3), "size: 3 isn't offered; use 4 to 32"),
        (lambda: GridWorldPixels(33), "size: 33 isn't offered"),
        (lambda: GridWorldPixels(8, 0), "pixels: 0 isn't offered; use 1 or more"),
    ],
)
def test_what_cannot_be_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


# --- What is seen -----------------------------------------------------------------------------------------------------


def test_the_numbers_by_hand():
    env = GridWorld()
    state = world(env, (2, 4), (7, 1), r2c3=WALL, r2c5=HOLE, r1c4=WALL)
    _, observation, _, _ = env.step(np, state, np.array([LEFT]), None)
    walls, holes = [1, 0, 0, 1], [0, 0, 1, 0]
    np.testing.assert_allclose(observation[0], [2 / 7, 4 / 7, 5 / 7, -3 / 7, *walls, *holes], atol=1e-6)
    for seed in range(3):
        assert all(env.observation_space.contains(row) for row in begun(env, 50, seed)[1])


@pytest.mark.parametrize(("size", "pixels"), [(8, 1), (5, 1), (6, 4)])
def test_the_image_by_hand(size, pixels):
    env = GridWorldPixels(size, pixels)
    state = world(env, (2, 3), (4, 1), r1c1=WALL, r3c3=HOLE)
    _, image, _, _ = env.step(np, state, np.array([RIGHT]), None)
    assert (image.dtype, image.shape) == (np.uint8, (1, size * pixels, size * pixels, 3))
    expected = np.zeros((size, size, 3), np.uint8)
    expected[2, 4 if size > 4 else 3] = 255, 0, 0
    expected[4, 1] = 0, 255, 0
    expected[3, 3] = 0, 0, 255
    expected[1, 1] = 128
    np.testing.assert_array_equal(image[0], expected.repeat(pixels, 0).repeat(pixels, 1))
    fallen = env.step(np, world(env, (2, 3), (4, 1), r3c3=HOLE), np.array([DOWN]), None)[1]
    assert fallen[0, 3 * pixels, 3 * pixels].tolist() == [255, 0, 255]


def test_both_see_the_same_worlds():
    numbers, pixels = GridWorld(), GridWorldPixels(8)
    (first, _), (second, image) = begun(numbers, 5), begun(pixels, 5)
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name])
    red = image[..., 0] == 255
    np.testing.assert_array_equal(np.argwhere(red)[:, 1:].T, np.divmod(first["agent"], numbers.width) - np.array([[1]]))


# --- Gymnasium, pictures ----------------------------------------------------------------------------------------------


def test_the_text_shows_the_world():
    env: Any = gymnasium.make("lockstep/GridWorld-v0", size=4, render_mode="ansi")
    env.reset(seed=0)
    inner = env.unwrapped.array_environment
    lines = {}
    for agent in ((0, 1), (2, 3), (3, 3)):
        env.unwrapped._state = world(inner, agent, (2, 3), r1c1=WALL, r3c3=HOLE)
        lines[agent] = env.render().splitlines()
    assert lines[0, 1] == ["+-------+", "|. A . .|", "|. # . .|", "|. . . G|", "|. . . o|", "+-------+"]
    assert lines[2, 3][3:5] == ["|. . . *|", "|. . . o|"]
    assert lines[3, 3][3:5] == ["|. . . G|", "|. . . x|"]


def test_the_picture_shows_agent_goal_walls_and_holes_where_they_are():
    env = GridWorld(8)
    state = world(env, (0, 0), (4, 7), r1c1=WALL, r3c3=HOLE)
    picture = env.render(state)
    assert (picture.shape, picture.dtype) == ((480, 480, 3), np.uint8)

    def colour(row: int, column: int) -> list[int]:
        return picture[8 + 58 * row + 29, 8 + 58 * column + 29].tolist()

    agent, goal, wall, hole, free = (colour(*at) for at in [(0, 0), (4, 7), (1, 1), (3, 3), (5, 5)])
    assert agent[0] > 200 > agent[2] + 50
    assert goal[1] == max(goal)
    assert goal[0] < 220
    assert 100 < wall[0] < 160
    assert max(hole) < 80
    assert min(free) > 240
    there = env.render(world(env, (4, 7), (4, 7), r1c1=WALL, r3c3=HOLE))
    assert (there != picture).any()
    assert env.render(state).tobytes() == picture.tobytes()
    assert GridWorld(7).render(world(GridWorld(7), (0, 0), (4, 6))).shape == (480, 480, 3)


def test_gymnasium_is_told_of_success():
    env: Any = gymnasium.make("lockstep/GridWorldPixels-v0")
    env.reset(seed=0)
    env.unwrapped._state = world(env.unwrapped.array_environment, (2, 2), (2, 3))
    assert env.step(UP)[2:] == (False, False, {"is_success": False})
    env.unwrapped._state = world(env.unwrapped.array_environment, (2, 2), (2, 3))
    observation, reward, *rest = env.step(RIGHT)
    assert (observation.dtype, reward, rest) == (np.uint8, pytest.approx(0.99), [True, False, {"is_success": True}])

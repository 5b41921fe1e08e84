"""Snake: held to a plain Snake with a deque step by step; its rules, rewards, what is seen of it, and its pictures."""

from __future__ import annotations

import itertools
import os
from collections import deque
from typing import Any

import gymnasium
import numpy as np
import pytest
from array_cases import array_namespace, on_every_backend, reset_function, snake_states, step_function
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.envs.arrays import Snake
from lockstep.envs.arrays.base import host_array
from lockstep.envs.arrays.frame_stack import FrameStack

LEFT, DOWN, RIGHT, UP = range(4)
MOVES = {LEFT: (0, -1), DOWN: (1, 0), RIGHT: (0, 1), UP: (-1, 0)}


class PlainSnake:
    """The game for one snake, as anybody would write it: cells of the body in a deque, head first."""

    def __init__(self, env: Snake, draw: float) -> None:
        self.env, self.size = env, env.size
        middle = env.size // 2
        self.body = deque([(middle, middle), (middle, middle - 1), (middle, middle - 2)])
        self.eaten = self.hunger = 0
        self.food = self.place(draw)

    def place(self, draw: float) -> tuple[int, int] | None:
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        free = [cell for cell in cells if cell not in self.body]
        return free[min(int(np.float32(draw) * np.float32(len(free))), len(free) - 1)] if free else None

    def away(self) -> float:
        if self.food is None:
            return 0.0
        (row, column), (food_row, food_column) = self.body[0], self.food
        return (abs(row - food_row) + abs(column - food_column)) / (2 * (self.size - 1))

    def step(self, action: int, draw: float) -> tuple[float, bool, bool]:
        """Reward, terminated, truncated."""
        weights, before = self.env.rewards, self.away()
        row, column = self.body[0][0] + MOVES[action][0], self.body[0][1] + MOVES[action][1]
        eats = (row, column) == self.food
        in_the_way = list(self.body) if eats else list(self.body)[:-1]
        if not (0 <= row < self.size and 0 <= column < self.size) or (row, column) in in_the_way:
            return weights["death"] + weights["step"] + weights["shaping"] * before, True, False
        self.body.appendleft((row, column))
        self.hunger += 1
        reward = weights["step"]
        if eats:
            reward += weights["food"]
            self.eaten, self.hunger = self.eaten + 1, 0
            self.food = self.place(draw)
        else:
            self.body.pop()
        won = self.food is None
        reward += weights["win"] * won + weights["shaping"] * (before - self.env.gamma * (not won) * self.away())
        return reward, won, self.hunger > self.env.patience

    def image(self) -> np.ndarray:
        out, length = np.zeros((self.size, self.size, 3), np.uint8), len(self.body)
        for place, cell in enumerate(self.body):
            out[(*cell, 1)] = (55 + 200 * (length - place) // length if self.env.ages else 255) if place else 0
        out[(*self.body[0], 0)] = 255
        if self.food is not None:
            out[(*self.food, 2)] = 255
        return out


def follow(env: Snake, backend: str, steps: int, n: int = 32, seed: int = 0, careful: float = 0.8) -> dict[str, int]:
    """Play ``n`` games at once, each step held to the plain ones; returns how often what happened.

    Actions are those of a chase that looks a step ahead as often as it is ``careful``, else random ones.
    """
    xp, rng = array_namespace(backend), np.random.default_rng(seed)
    reset, step = reset_function(env, backend), step_function(env, backend)
    draws = rng.random((n, 1), np.float32)
    state, seen = reset(xp.asarray(draws))
    games = [PlainSnake(env, float(draw)) for draw in draws[:, 0]]
    found = {"ate": 0, "died": 0, "won": 0, "starved": 0, "into the tail's cell": 0}
    for _ in range(steps):
        for game, image in zip(games, host_array(seen), strict=True):
            np.testing.assert_array_equal(image, game.image())
        actions = np.array([chosen(game, rng, careful) for game in games])
        draws = rng.random((n, 1), np.float32)
        tails = [game.body[-1] for game in games]
        eaten = sum(game.eaten for game in games)
        expected = [game.step(int(a), float(d)) for game, a, d in zip(games, actions, draws[:, 0], strict=True)]
        state, seen, reward, terminated = step(state, xp.asarray(actions), xp.asarray(draws))
        truncated = host_array(env.truncated(xp, state))
        np.testing.assert_allclose(host_array(reward), [each[0] for each in expected], 1e-5, 1e-6)
        assert host_array(terminated).tolist() == [each[1] for each in expected]
        assert truncated.tolist() == [each[2] for each in expected]
        assert host_array(env.score(xp, state)).tolist() == [game.eaten for game in games]
        won = [game.food is None for game in games]
        assert host_array(env.success(xp, state)).tolist() == won
        over = [terminated or truncated for _, terminated, truncated in expected]
        found["ate"] += sum(game.eaten for game in games) - eaten
        found["won"] += sum(won)
        found["died"] += sum(each[1] for each in expected) - sum(won)
        found["starved"] += sum(each[2] for each in expected)
        pairs = zip(games, tails, over, strict=True)
        found["into the tail's cell"] += sum(game.body[0] == tail and not ended for game, tail, ended in pairs)
        if any(over):
            draws = rng.random((n, 1), np.float32)
            fresh, first = (
                {k: host_array(v) for k, v in x.items()} if isinstance(x, dict) else host_array(x)
                for x in reset(xp.asarray(draws))
            )
            old = {k: host_array(v).copy() for k, v in state.items()}
            seen = host_array(seen).copy()
            for row in np.flatnonzero(over):
                games[row] = PlainSnake(env, float(draws[row, 0]))
                seen[row] = first[row]
                for name in old:
                    old[name][row] = fresh[name][row]
            state = {name: xp.asarray(values) for name, values in old.items()}
    return found


def chosen(game: PlainSnake, rng: np.random.Generator, careful: float) -> int:
    if rng.random() > careful or game.food is None:
        return int(rng.integers(0, 4))
    (row, column), occupied = game.body[0], list(game.body)[:-1]
    ranked = []
    for action, (down, right) in MOVES.items():
        cell = row + down, column + right
        if 0 <= cell[0] < game.size and 0 <= cell[1] < game.size and cell not in occupied:
            ranked.append((abs(cell[0] - game.food[0]) + abs(cell[1] - game.food[1]), rng.random(), action))
    return min(ranked)[2] if ranked else LEFT


# --- The plain game --------------------------------------------------------------------------------------------------


@on_every_backend
@pytest.mark.parametrize("kwargs", [{}, {"size": 4, "starvation": 0.25, "ages": False, "shaping": 0.5, "step": -0.01}])
def test_games_follow_the_plain_snake(backend: str, kwargs: dict[str, Any]) -> None:
    found = follow(Snake(**kwargs), backend, steps=250, careful=0.97)
    assert found["ate"] > 100
    assert found["died"] > 10
    assert found["into the tail's cell"] > (5 if kwargs else -1)
    assert found["starved"] > (2 if kwargs else -1)


def test_a_game_may_be_won() -> None:
    found = follow(Snake(4, win=5.0), "numpy", steps=1000, n=32, careful=1.0)
    assert found["won"] > 0
    assert found["into the tail's cell"] > 20


@pytest.mark.parametrize("wrong", ["tail", "food", "hunger"])
def test_a_game_by_other_rules_does_not_follow(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = Snake(4, starvation=0.25)
    if wrong == "tail":  # the tail's cell is freed too late

        def late(self: PlainSnake, action: int, draw: float, step=PlainSnake.step) -> tuple[float, bool, bool]:
            ahead = self.body[0][0] + MOVES[action][0], self.body[0][1] + MOVES[action][1]
            return (-1.0, True, False) if ahead == self.body[-1] else step(self, action, draw)

        monkeypatch.setattr(PlainSnake, "step", late)
    elif wrong == "food":  # placed among all cells but the last free one
        place = PlainSnake.place
        monkeypatch.setattr(PlainSnake, "place", lambda self, draw: place(self, draw * 0.9))
    else:
        monkeypatch.setattr(Snake, "truncated", lambda self, xp, state: state["hunger"] >= self.patience)
    with pytest.raises(AssertionError):
        follow(env, "numpy", steps=250, careful=0.97)


# --- Invariants ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(size=st.integers(4, 12), seed=st.integers(0, 2**32 - 1), steps=st.integers(0, 120))
def test_a_snake_is_one_path_of_its_length_and_its_food_lies_beside_it(size: int, seed: int, steps: int) -> None:
    env, n = Snake(size), 8
    state = snake_states(env, n, np.random.default_rng(seed), steps)
    for row in range(n):
        ages, length = state["ages"][row], int(state["length"][row])
        assert sorted(ages[ages > 0].tolist()) == list(range(1, length + 1))
        cells = [int(np.flatnonzero(ages == age)[0]) for age in range(length, 0, -1)]
        assert cells[0] == state["head"][row]
        for one, other in itertools.pairwise(cells):
            assert abs(one // size - other // size) + abs(one % size - other % size) == 1
        if length < env.cells:
            assert ages[state["food"][row]] == 0
        assert 0 <= state["hunger"][row] <= env.patience + steps


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shaping=st.floats(0.1, 3.0), gamma=st.floats(0.5, 1.0))
def test_shaping_adds_up_to_nothing_but_the_start(seed: int, shaping: float, gamma: float) -> None:
    """The discounted sum of shaping terms over an episode is minus the potential of its start (Ng et al. 1999)."""
    kwargs: dict[str, Any] = {"food": 0.0, "death": 0.0, "win": 0.0, "gamma": gamma, "shaping": shaping}
    env, rng = Snake(5, **kwargs), np.random.default_rng(seed)
    state, _ = env.reset(np, rng.random((1, 1), np.float32))
    start, total, discount, over = -shaping * float(env._distance(np, state)[0]), 0.0, 1.0, False
    while not over:
        state, _, reward, terminated = env.step(np, state, rng.integers(0, 4, 1), rng.random((1, 1), np.float32))
        total, discount, over = total + discount * float(reward[0]), discount * gamma, bool(terminated[0])
    assert total == pytest.approx(-start, abs=1e-4)


@on_every_backend
def test_food_lies_in_every_free_cell_as_often(backend: str) -> None:
    env, xp, n = Snake(5), array_namespace(backend), 44_000
    random = np.random.default_rng(1).random((n, 1), np.float32)
    random[0], random[1] = 0.0, np.nextafter(np.float32(1), np.float32(0))
    state, _ = reset_function(env, backend)(xp.asarray(random))
    cells, times = np.unique(host_array(state["food"]), return_counts=True)
    assert sorted({*range(25)} - {*cells.tolist()}) == [10, 11, 12]  # the snake
    assert abs(times / (n / 22) - 1).max() < 0.1


# --- Rules by hand ---------------------------------------------------------------------------------------------------


def board(env: Snake, text: str, food: tuple[int, int] | None) -> dict[str, np.ndarray]:
    """One snake by its cells from head to tail, ``abc…``."""
    rows = text.split()
    length = sum(letter != "." for row in rows for letter in row)
    ages = np.array([[0 if x == "." else length - (ord(x) - ord("a")) for x in row] for row in rows], np.int32)
    head = int(ages.argmax())
    place = env.cells if food is None else food[0] * env.size + food[1]
    numbers = {"head": head, "food": place, "length": length, "hunger": 0}
    return {"ages": ages.reshape(1, -1), **{k: np.array([v], np.int32) for k, v in numbers.items()}}


def moved(env: Snake, state: dict[str, np.ndarray], action: int) -> tuple[dict[str, np.ndarray], float, bool]:
    after, _, reward, terminated = env.step(np, state, np.array([action]), np.zeros((1, 1), np.float32))
    return after, float(reward[0]), bool(terminated[0])


def test_actions_are_left_down_right_up_and_backwards_is_into_oneself() -> None:
    env = Snake(5)
    state = board(env, "..... ..... .cba. ..... .....", (4, 4))
    heads = [divmod(int(moved(env, state, action)[0]["head"][0]), 5) for action in (DOWN, RIGHT, UP)]
    assert heads == [(3, 3), (2, 4), (1, 3)]
    after, reward, terminated = moved(env, state, LEFT)
    assert (reward, terminated) == (-1.0, True)
    assert all(np.array_equal(after[name], state[name]) for name in state)


def test_the_tail_makes_way_unless_the_snake_is_longer() -> None:
    env = Snake(4)
    ring = board(env, "ab.. dc.. .... ....", (3, 3))
    assert moved(env, ring, DOWN)[1:] == (0.0, False)
    longer = board(env, "abc. fed. .... ....", (3, 3))
    assert moved(env, longer, DOWN)[1:] == (0.0, False)
    inside = board(env, "abc. fed. gh.. ....", (3, 3))
    assert moved(env, inside, DOWN)[1:] == (-1.0, True)


def test_eating_grows_and_places_food_in_a_free_cell() -> None:
    env = Snake(4)
    after, reward, terminated = moved(env, board(env, "cba. .... .... ....", (0, 3)), RIGHT)
    assert (reward, terminated, int(env.score(np, after)[0])) == (1.0, False, 1)
    assert after["ages"].reshape(4, 4)[0].tolist() == [1, 2, 3, 4]
    assert int(after["food"][0]) == 4  # the first free cell, by a draw of 0


def test_a_full_board_is_a_win() -> None:
    env = Snake(4, win=3.0)
    state = board(env, ".abc gfed hijk onml", (0, 0))
    after, reward, terminated = moved(env, state, LEFT)
    assert (reward, terminated, bool(env.success(np, after)[0])) == (4.0, True, True)
    assert int(after["food"][0]) == env.cells
    assert not env.success(np, state)[0]
    assert (env._observe(np, after)[..., 2] == 0).all()


def test_hunger_truncates_and_does_not_terminate() -> None:
    env = Snake(4, starvation=0.5)
    state, ended = board(env, "ab.. dc.. .... ....", (3, 3)), []
    for step in range(10):
        state, _, terminated = moved(env, state, (DOWN, RIGHT, UP, LEFT)[step % 4])
        ended.append((terminated, bool(env.truncated(np, state)[0])))
    assert ended == [(False, False)] * 8 + [(False, True)] * 2


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"size": 3}, "size: 3 isn't offered; use 4 to 32"),
        ({"size": 33}, "size: 33 isn't offered"),
        ({"size": 10.5}, "size: 10.5 is no whole number; use 4 to 32"),
        ({"starvation": 0}, "starvation: 0 boards of steps without food; use a number above 0"),
        ({"gamma": 1.5}, "gamma: 1.5 is no discount; use 0 to 1"),
        ({"death": float("nan")}, "death: nan is no finite number; use one"),
    ],
)
def test_what_cannot_be_is_refused(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Snake(**kwargs)


# --- What is seen ----------------------------------------------------------------------------------------------------


def test_the_image_by_hand() -> None:
    state = board(Snake(4), "cba. d... .... ....", (3, 1))
    faded, plain = Snake(4)._observe(np, state)[0], Snake(4, ages=False)._observe(np, state)[0]
    assert (faded.dtype, faded.shape) == (np.uint8, (4, 4, 3))
    for image in (faded, plain):
        assert np.argwhere(image[..., 0]).tolist() == [[0, 2]]
        assert np.argwhere(image[..., 2]).tolist() == [[3, 1]]
        assert image[0, 2].tolist() == [255, 0, 0]
    assert faded[0, :3, 1].tolist() == [155, 205, 0]
    assert faded[1, 0, 1] == 105
    assert plain[0, :2, 1].tolist() == [255, 255]


@on_every_backend
def test_a_frame_stack_keeps_the_newest_images_oldest_first(backend: str) -> None:
    env, xp, rng = Snake(4, starvation=0.75), array_namespace(backend), np.random.default_rng(3)
    stacked, draws = FrameStack(env, 3), rng.random((6, 1), np.float32)
    assert stacked.observation_space.shape == (4, 4, 9)
    reset, step = reset_function(stacked, backend), step_function(stacked, backend)
    state, seen = reset(xp.asarray(draws))
    plain, first = env.reset(np, draws)
    history = [first] * 3
    np.testing.assert_array_equal(host_array(seen), np.concatenate(history, -1))
    for _ in range(14):
        action, draws = rng.integers(0, 4, 6), rng.random((6, 1), np.float32)
        state, seen, reward, over = step(state, xp.asarray(action), xp.asarray(draws))
        plain, newest, *expected = env.step(np, plain, action, draws)
        history.append(newest)
        np.testing.assert_array_equal(host_array(seen), np.concatenate(history[-3:], -1))
        for ours, theirs in zip((reward, over), expected, strict=True):
            np.testing.assert_array_equal(host_array(ours), theirs)
        for fact in ("success", "truncated", "score"):
            ours, theirs = getattr(stacked, fact)(xp, state), getattr(env, fact)(np, plain)
            np.testing.assert_array_equal(host_array(ours), theirs)
    assert stacked.text(state) == env.text(plain)
    assert np.array_equal(stacked.render(state), env.render(plain))


# --- Gymnasium, pictures ---------------------------------------------------------------------------------------------


def test_the_text_shows_the_board() -> None:
    env = Snake(4)
    state = board(env, "cba. d... .... ....", (3, 1))
    border = "+-------+"
    assert env.text(state).splitlines() == [
        border,
        "|o o @ .|",
        "|o . . .|",
        "|. . . .|",
        "|. * . .|",
        border,
        "score 1",
    ]
    won = board(env, "abcd hgfe ijkl ponm", None)
    assert "*" not in env.text(won)


def test_the_picture_shows_head_body_and_food_where_they_are() -> None:
    env = Snake(8)
    rows = " ".join(["........", ".abcd...", "....e...", "....f...", *["........"] * 4])
    state = board(env, rows, (6, 2))
    picture = env.render(state)
    assert (picture.shape, picture.dtype) == ((480, 480, 3), np.uint8)

    def colour(row: int, column: int) -> list[int]:
        return picture[8 + 58 * row + 29, 8 + 58 * column + 29].tolist()

    head, neck, tail, food, free = (colour(*at) for at in [(1, 1), (1, 2), (3, 4), (6, 2), (4, 1)])
    assert max(head) < 100
    assert neck[1] == max(neck) > 120
    assert tail[1] > neck[1]
    assert food[0] == max(food) > 150 > food[1]
    assert min(free) > 235
    assert env.render(state).tobytes() == picture.tobytes()
    assert (env.render(board(env, rows, (6, 3))) != picture).any()


def test_gymnasium_is_told_of_score_starvation_and_success() -> None:
    env: Any = gymnasium.make("lockstep/Snake-v0", size=4, starvation=0.5, render_mode="ansi")
    env.reset(seed=0)
    inner = env.unwrapped.array_environment
    env.unwrapped._state = board(inner, "cba. .... .... ....", (0, 3))
    _, reward, terminated, truncated, info = env.step(RIGHT)
    assert (reward, terminated, truncated, info) == (1.0, False, False, {"is_success": False, "score": 1})
    assert env.render().splitlines()[-1] == "score 1"
    env.unwrapped._state = {**board(inner, "ab.. dc.. .... ....", (3, 3)), "hunger": np.array([8], np.int32)}
    assert env.step(DOWN)[2:4] == (False, True)
    env.unwrapped._state = board(inner, ".abc gfed hijk onml", (0, 0))
    assert env.step(LEFT)[4] == {"is_success": True, "score": 13}


def test_a_window_shows_the_game(monkeypatch: pytest.MonkeyPatch) -> None:
    pygame = pytest.importorskip("pygame")
    for name in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
        monkeypatch.setitem(os.environ, name, "dummy")
    env: Any = gymnasium.make("lockstep/Snake-v0", render_mode="human")
    env.unwrapped.metadata["render_fps"] = 1000
    env.reset(seed=0)
    shown = pygame.surfarray.array3d(pygame.display.get_surface()).swapaxes(0, 1)
    assert np.array_equal(shown, env.unwrapped.array_environment.render(env.unwrapped._state))
    env.step(UP)
    assert not np.array_equal(pygame.surfarray.array3d(pygame.display.get_surface()).swapaxes(0, 1), shown)
    env.close()
    assert not pygame.display.get_init()

"""Snake-v0 on arrays: eat, grow, and run into neither a wall nor yourself."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from array_api_compat import device
from gymnasium.spaces import Box, Discrete

from lockstep.envs.arrays.arguments import finite_number, switch, whole_number
from lockstep.envs.arrays.base import Array, ArrayEnvironment, State, host_array
from lockstep.envs.arrays.pictures.snake import draw, write

SMALLEST, LARGEST = 4, 32
START_LENGTH = 3
LONGEST_HUNGER = 2**31 - 1
"""Greatest ``hunger`` that a state can hold."""


class Snake(ArrayEnvironment):
    """Task: steer a snake left (0), down (1), right (2) or up (3) through a square of cells to its food.

    An episode begins with a snake of three cells, head in the middle and body to its left. Each step moves the head by
    a cell and frees the cell of the tail, into which the head may move in the same step. On the food the snake grows
    instead: the tail stays, and the next food lies in a free cell, each with the same probability. Running into the
    border or into its own body, backwards too, **terminates** the episode. So does a board without a free cell, which
    is a success. More than ``starvation * size²`` steps since the last food **truncate** it.

    Rewards: ``food`` for each food, ``death`` for running into something, ``win`` for a full board, ``step`` for every
    step. ``shaping`` adds ``gamma * p(after) - p(before)`` with the potential ``p = -shaping * distance``, where
    ``distance`` is the number of rows and columns between head and food, divided by the greatest possible. ``p`` is 0
    once an episode has terminated. Shaping leaves the best policy as it is (Ng, Harada and Russell 1999, "Policy
    invariance under reward transformations").

    State, int32: ``ages`` ``[n, size²]``, the number of steps until a cell of the snake becomes free, 0 for a free one;
    ``head`` and ``food``, cells counted row by row, ``length`` and ``hunger``, steps since the last food, ``[n]`` each.
    On a full board ``food`` is ``size²``, a cell that doesn't exist. A snake that ran into something stays where it
    was.

    The observation is an image, uint8 ``[size, size, 3]``, whose channels are head, body and food, 255 where they are.
    With ``ages=True`` the body shows its direction: it fades towards the tail: ``55 + 200 * age // length``, with
    age 1 at the tail and ``length - 1`` at the neck.

    The board has 4 to 32 rows and columns; ``gamma``, the discount of the shaping, should be the learner's.

    Raises:
        ValueError: an argument has another type than its default; ``size``, ``starvation`` or ``gamma`` is out of
            range, or a reward isn't finite.
    """

    gymnasium_id = None
    max_episode_steps = 10_000
    reset_draws = 1
    step_draws = 1
    render_fps = 12

    _tail_shade: ClassVar[int] = 55

    def __init__(
        self,
        size: int = 10,
        food: float = 1.0,
        death: float = -1.0,
        win: float = 1.0,
        step: float = 0.0,
        shaping: float = 0.0,
        gamma: float = 0.99,
        starvation: float = 2.0,
        ages: bool = True,
    ) -> None:
        self.size = whole_number("size", size, SMALLEST, LARGEST)
        self.cells = self.size**2
        patience = finite_number("starvation", starvation) * self.cells
        if patience <= 0:
            raise ValueError(f"starvation: {starvation} boards of steps without food; use a number above 0")
        self.patience = int(min(patience, LONGEST_HUNGER))
        self.gamma = finite_number("gamma", gamma)
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma: {gamma} is no discount; use 0 to 1")
        rewards = {"food": food, "death": death, "win": win, "step": step, "shaping": shaping}
        self.rewards = {name: finite_number(name, value) for name, value in rewards.items()}
        self.ages = switch("ages", ages)
        self.observation_space: Box = Box(0, 255, (self.size, self.size, 3), np.uint8)
        self.action_space = Discrete(4)

    def reset(self, xp: Any, random: Array) -> tuple[State, Array]:
        """Starts every episode in the middle of the board."""
        numbers = self._numbers(xp, random)
        head = (self.size // 2) * self.size + self.size // 2
        none = xp.astype(0 * random[:, 0], xp.int32)
        body = (numbers > head - START_LENGTH) & (numbers <= head)
        ages = none[:, None] + xp.where(body, numbers - (head - START_LENGTH), 0 * numbers)
        state = {
            "ages": ages,
            "head": none + head,
            "food": self._place(xp, ages, random[:, 0]),
            "length": none + START_LENGTH,
            "hunger": none,
        }
        return state, self._observe(xp, state)

    def step(self, xp: Any, state: State, action: Array, random: Array) -> tuple[State, Array, Array, Array]:
        """Moves every snake by one step; ``random`` places the food of those that ate."""
        numbers, length = self._numbers(xp, state["head"]), state["length"]
        head, hit_wall = self._ahead(xp, state["head"], action)
        ate = head == state["food"]
        kept = xp.where(ate[:, None], state["ages"], xp.clip(state["ages"] - 1, 0, self.cells))
        at_head = numbers == head[:, None]
        dead = hit_wall | xp.any(at_head & (kept > 0), axis=1)
        ate = ate & ~dead
        length = length + xp.astype(ate, xp.int32)
        ages = xp.where(dead[:, None], state["ages"], xp.where(at_head, length[:, None], kept))
        moved = {
            "ages": ages,
            "head": xp.where(dead, state["head"], head),
            "food": xp.where(ate, self._place(xp, ages, random[:, 0]), state["food"]),
            "length": length,
            "hunger": xp.where(dead, state["hunger"], xp.where(ate, 0 * length, state["hunger"] + 1)),
        }
        won = self.success(xp, moved)
        over = dead | won
        return moved, self._observe(xp, moved), self._reward(xp, state, moved, ate, dead, won), over

    def success(self, xp: Any, state: State) -> Array:
        """Returns whether the snake fills the board, bool ``[n]``."""
        return state["length"] == self.cells

    def truncated(self, xp: Any, state: State) -> Array:
        """Returns whether the snake has starved, bool ``[n]``."""
        return state["hunger"] > self.patience

    def score(self, xp: Any, state: State) -> Array:
        """Returns the number of foods eaten, int32 ``[n]``."""
        return state["length"] - START_LENGTH

    def _numbers(self, xp: Any, like: Array) -> Array:
        """Returns the number of each cell, int32 ``[1, size²]``."""
        return xp.arange(self.cells, dtype=xp.int32, device=device(like))[None, :]

    def _ahead(self, xp: Any, head: Array, action: Array) -> tuple[Array, Array]:
        """Returns the cell that a head moves to, int32 ``[n]``, and whether it lies off the board, bool ``[n]``."""
        action = xp.astype(action, xp.int32)
        down = xp.astype(action == 1, xp.int32) - xp.astype(action == 3, xp.int32)
        right = xp.astype(action == 2, xp.int32) - xp.astype(action == 0, xp.int32)
        row, column = head // self.size + down, head % self.size + right
        outside = (row < 0) | (row >= self.size) | (column < 0) | (column >= self.size)
        return row * self.size + column, outside

    def _place(self, xp: Any, ages: Array, random: Array) -> Array:
        """Chooses a free cell, int32 ``[n]``, by a number in [0, 1); ``size²`` if there is none.

        The k-th free cell, from 0, comes after as many cells as have at most k free ones up to and including
        themselves.
        """
        counts = xp.cumulative_sum(xp.astype(ages == 0, xp.int32), axis=1, dtype=xp.int32)
        free = counts[:, -1]
        which = xp.astype(xp.floor(random * xp.astype(free, xp.float32)), xp.int32)  # may round up to ``free``
        which = xp.where(which >= free, free - 1, which)
        found = xp.sum(xp.astype(counts <= which[:, None], xp.int32), axis=1, dtype=xp.int32)
        return xp.where(free > 0, found, 0 * found + self.cells)

    def _distance(self, xp: Any, state: State) -> Array:
        """Returns rows plus columns from head to food, divided by the greatest possible, float32 ``[n]`` in [0, 1]."""
        head, food = state["head"], state["food"]
        rows = xp.abs(head // self.size - food // self.size)
        columns = xp.abs(head % self.size - food % self.size)
        return xp.astype(rows + columns, xp.float32) * (1 / (2 * (self.size - 1)))

    def _reward(self, xp: Any, before: State, after: State, ate: Array, dead: Array, won: Array) -> Array:
        weights = self.rewards
        reward = sum(
            weights[name] * xp.astype(happened, xp.float32)
            for name, happened in (("food", ate), ("death", dead), ("win", won))
        )
        reward = reward + weights["step"]
        if weights["shaping"]:
            goes_on = xp.astype(~(dead | won), xp.float32)
            nearer = self._distance(xp, before) - self.gamma * goes_on * self._distance(xp, after)
            reward = reward + weights["shaping"] * nearer
        return reward

    def _observe(self, xp: Any, state: State) -> Array:
        numbers, ages = self._numbers(xp, state["head"]), state["ages"]
        head, food = (numbers == state[name][:, None] for name in ("head", "food"))
        body = (ages > 0) & ~head
        shade = 255 + 0 * ages
        if self.ages:
            shade = self._tail_shade + (255 - self._tail_shade) * ages // state["length"][:, None]
        planes = (255 * xp.astype(head, xp.int32), xp.where(body, shade, 0 * ages), 255 * xp.astype(food, xp.int32))
        return xp.reshape(xp.astype(xp.stack(planes, axis=-1), xp.uint8), (-1, self.size, self.size, 3))

    def render(self, state: State, index: int = 0) -> np.ndarray:
        """Draws one environment; see :meth:`ArrayEnvironment.render`. Needs nothing else installed."""
        return draw(*self._board(state, index))

    def text(self, state: State, index: int = 0) -> str:
        """Returns one environment as text."""
        return write(*self._board(state, index))

    def _board(self, state: State, index: int) -> tuple[np.ndarray, int]:
        """Returns the steps until each cell becomes free, ``[size, size]``, -1 for food, and the foods eaten."""
        board = host_array(state["ages"][index]).copy()
        food = int(state["food"][index])
        if food < self.cells:
            board[food] = -1
        return board.reshape(self.size, self.size), int(state["length"][index]) - START_LENGTH

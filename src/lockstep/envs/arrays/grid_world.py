"""GridWorld-v0 and GridWorldPixels-v0 on arrays: find a way past walls and holes, by numbers or by sight."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from array_api_compat import device
from gymnasium.spaces import Box, Discrete

from lockstep.envs.arrays.arguments import whole_number
from lockstep.envs.arrays.base import Array, ArrayEnvironment, State, host_array
from lockstep.envs.arrays.pictures.grid_world import draw, write

SMALLEST, LARGEST = 4, 32


class GridWorld(ArrayEnvironment):
    """Task: step left (0), down (1), right (2) or up (3) through a square of cells to the goal.

    Walls and holes are drawn anew for every episode, among the cells whose row and column are both odd (counted from
    0), so that all other cells stay connected. Start and goal are drawn from the other cells and differ. A wall stops a
    step. Reaching the goal is a success, pays 1 and terminates the episode. Falling into a hole costs 1 and terminates
    it too. Every step costs 0.01.

    State: ``agent`` and ``goal``, int32 ``[n]``, and ``walls`` and ``holes``, bool ``[n, (size + 2)²]``. Cells are
    numbered row by row from the upper left one, including a border of walls around the square.

    The observation: row and column of the agent, rows and columns from it to the goal, all in units of ``size - 1``;
    whether there is a wall to the left, below, to the right, above; whether there is a hole: 12 numbers.

    Args:
        size: rows and columns, 4 to 32.

    Raises:
        ValueError: ``size`` is no whole number, or out of range.
    """

    gymnasium_id = None
    max_episode_steps = 64
    render_fps = 8

    step_cost: ClassVar[float] = 0.01
    wall_share: ClassVar[float] = 0.3
    """Probability that a cell with odd row and column is a wall."""
    hole_share: ClassVar[float] = 0.3
    """Probability that it is a hole."""

    def __init__(self, size: int = 8) -> None:
        self.size = whole_number("size", size, SMALLEST, LARGEST)
        self.reset_draws = 2 + (self.size // 2) ** 2
        high = np.ones(12, np.float32)
        self.observation_space: Box = Box(np.array([0, 0, -1, -1, *[0] * 8], np.float32), high, dtype=np.float32)
        self.action_space = Discrete(4)

    @property
    def width(self) -> int:
        """Number of cells in a row, with the border."""
        return self.size + 2

    @cached_property
    def _moves(self) -> np.ndarray:
        """How much greater the number of the cell to the left, below, to the right and above is: int32 ``[4]``."""
        return np.array([-1, self.width, 1, -self.width], np.int32)

    @cached_property
    def _open(self) -> np.ndarray:
        """The cells that are never a wall or a hole, int32 ``[count]``."""
        rows, columns = np.indices((self.size, self.size))
        cells = (rows + 1) * self.width + columns + 1
        return cells[(rows % 2 == 0) | (columns % 2 == 0)].astype(np.int32)

    @cached_property
    def _lots(self) -> np.ndarray:
        """Column of the draw that decides what each cell is, int32 ``[(size + 2)²]``; the last two: open, wall."""
        half = self.size // 2
        lots = np.full((self.width, self.width), half * half + 1, np.int32)
        lots[1:-1, 1:-1] = half * half
        lots[2 : 2 * half + 1 : 2, 2 : 2 * half + 1 : 2] = np.arange(half * half).reshape(half, half)
        return lots.reshape(-1)

    def reset(self, xp: Any, random: Array) -> tuple[State, Array]:
        """Starts every episode in a new world."""
        count, cells = len(self._open), self.constant(xp, "_open", random)
        start = _choice(xp, random[:, 0], count)
        goal = (start + 1 + _choice(xp, random[:, 1], count - 1)) % count
        one = xp.ones_like(random[:, :1])  # a draw that leaves a cell open; 0 makes a wall
        lots = xp.concat((random[:, 2:], one, 0 * one), axis=1)
        draws = xp.take(lots, self.constant(xp, "_lots", random), axis=1)
        state = {
            "agent": xp.take(cells, start, axis=0),
            "goal": xp.take(cells, goal, axis=0),
            "walls": draws < self.wall_share,
            "holes": (draws >= self.wall_share) & (draws < self.wall_share + self.hole_share),
        }
        return state, self._observe(xp, state)

    def step(self, xp: Any, state: State, action: Array, random: Array) -> tuple[State, Array, Array, Array]:
        """Moves to a neighbouring cell, unless it is a wall."""
        agent = state["agent"]
        ahead = agent + xp.take(self.constant(xp, "_moves", agent), action, axis=0)
        moved = {
            "agent": xp.where(self._among(xp, ahead[:, None], state["walls"])[:, 0], agent, ahead),
            "goal": state["goal"] + 0,
            **{name: state[name] | False for name in ("walls", "holes")},
        }
        success = self.success(xp, moved)
        fallen = self._among(xp, moved["agent"][:, None], moved["holes"])[:, 0]
        reward = xp.astype(success, xp.float32) - xp.astype(fallen, xp.float32) - self.step_cost
        return moved, self._observe(xp, moved), reward, success | fallen

    def success(self, xp: Any, state: State) -> Array:
        """Returns whether the agent is at the goal, bool ``[n]``."""
        return state["agent"] == state["goal"]

    def _cells(self, xp: Any, like: Array) -> Array:
        """Returns the number of each cell, int32 ``[(size + 2)²]``."""
        return xp.arange(self.width**2, dtype=xp.int32, device=device(like))

    def _among(self, xp: Any, cells: Array, marked: Array) -> Array:
        """Returns whether cells, int32 ``[n, k]``, are among those ``marked``, bool ``[n, (size + 2)²]``.

        It compares with every cell, because a gather needs another type of index in each of NumPy, PyTorch and JAX.
        """
        return xp.any(marked[:, None, :] & (self._cells(xp, cells) == cells[:, :, None]), axis=-1)

    def _observe(self, xp: Any, state: State) -> Array:
        agent, goal, unit = state["agent"], state["goal"], 1 / (self.size - 1)
        row, column = agent // self.width - 1, agent % self.width - 1
        down, right = goal // self.width - 1 - row, goal % self.width - 1 - column
        places = xp.astype(xp.stack((row, column, down, right), axis=-1), xp.float32) * unit
        beside = agent[:, None] + self.constant(xp, "_moves", agent)
        seen = [xp.astype(self._among(xp, beside, state[name]), xp.float32) for name in ("walls", "holes")]
        return xp.concat((places, *seen), axis=-1)

    def render(self, state: State, index: int = 0) -> np.ndarray:
        """Draws one environment; see :meth:`ArrayEnvironment.render`. Needs nothing else installed."""
        return draw(self._map(state, index))

    def text(self, state: State, index: int = 0) -> str:
        """Returns one environment as text."""
        return write(self._map(state, index))

    def _map(self, state: State, index: int) -> np.ndarray:
        """Returns what stands in each cell as a letter, ``[size, size]``, for :mod:`.pictures.grid_world`."""
        row = {name: host_array(values[index]) for name, values in state.items()}
        out = np.where(row["walls"], "#", np.where(row["holes"], "o", "."))
        out[row["goal"]] = "G"
        out[row["agent"]] = {"G": "*", "o": "x"}.get(str(out[row["agent"]]), "A")
        return out.reshape(self.width, self.width)[1:-1, 1:-1]


class GridWorldPixels(GridWorld):
    """:class:`GridWorld` seen from above: the observation is an image, uint8 ``[size · pixels, size · pixels, 3]``.

    The agent is red, the goal green, holes blue, walls grey and the rest black; an agent at the goal or in a hole has
    both colours.

    Args:
        size: rows and columns, 4 to 32.
        pixels: height and width of a cell.

    Raises:
        ValueError: ``size`` or ``pixels`` is no whole number, or out of range.
    """

    wall_colour: ClassVar[int] = 128

    def __init__(self, size: int = 6, pixels: int = 1) -> None:
        super().__init__(size)
        self.pixels = whole_number("pixels", pixels, 1)
        side = self.size * self.pixels
        self.observation_space = Box(0, 255, (side, side, 3), np.uint8)

    def _observe(self, xp: Any, state: State) -> Array:
        cells = self._cells(xp, state["agent"])
        marked = (cells == state["agent"][:, None], cells == state["goal"][:, None], state["holes"])
        colours = 255 * xp.astype(xp.stack(marked, axis=-1), xp.uint8)
        colours = colours + self.wall_colour * xp.astype(state["walls"], xp.uint8)[:, :, None]
        image = xp.reshape(colours, (-1, self.width, self.width, 3))[:, 1:-1, 1:-1, :]
        return xp.repeat(xp.repeat(image, self.pixels, axis=1), self.pixels, axis=2)


def _choice(xp: Any, random: Array, count: int) -> Array:
    """Maps numbers in [0, 1) to ``0 … count - 1``, int32 ``[n]``; clips, as a product may round up to ``count``."""
    return xp.astype(xp.clip(xp.floor(random * count), 0, count - 1), xp.int32)

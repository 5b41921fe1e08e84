"""Shows how far a run is while it trains: as a live bar on a terminal, as a line now and then in a pipe.

``update`` draws the display; there is no background thread, because a thread could hold a lock while an environment
process is forked, and the child would wait for that lock forever. What is shown doesn't wait for its reader, because
other ranks would wait for the one that shows it.
"""

from __future__ import annotations

import math
import select
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from lockstep.core.episodes import WINDOW
from lockstep.core.process import say
from lockstep.runs.shown.numerals import format_number, format_share

UNKNOWN = "–"
NO_ETA = "no_eta"  # key of a record whose speed says nothing about the time left
MEASURED = "measured"  # key of a record whose speed is measured by the wall clock already
LINE_INTERVAL = 2.0  # seconds between two plain lines
DRAW_INTERVAL = 0.1  # seconds between two drawings of the live bar
PACE_WINDOW = 60.0  # seconds that the speed shown is a mean of
MOST_WAITING = 1000  # lines kept while the output takes none
LEAST_BAR = 6  # columns that are worth a bar
COUNTS = TextColumn("{task.completed:,.0f}/{task.total:,.0f}")
STATE = TextColumn("{task.fields[state]}")


class Progress:
    """The interface of the progress displays; this one shows nothing, for ``--quiet`` and for every rank except 0."""

    def update(self, record: Mapping[str, Any]) -> None:
        """Shows the state after an iteration, of which ``record`` is the metrics record."""

    def message(self, text: str) -> None:
        """Prints a separate line, above the bar if there is one."""

    def close(self) -> None:
        """Shows the last state and restores the terminal; a second call does nothing."""


def make_progress(total_steps: int, quiet: bool, stream: TextIO | None = None, states: bool = True) -> Progress:
    """Returns the display for ``stream`` (default: stdout): live on a terminal, plain lines elsewhere, none if quiet.

    Without ``states``, plain lines show messages only: the caller sends one for every iteration.
    """
    if quiet:
        return Progress()
    output = sys.stdout if stream is None else stream
    if output.isatty():
        console = Console(file=output)
        if console.is_terminal and not console.is_dumb_terminal:
            return TerminalProgress(total_steps, console)
    return PlainProgress(total_steps if states else None, output)


class Pace:
    """Measures the speed by the wall clock over the last minute, so that evaluations and checkpoints count too.

    The iteration before the first update doesn't count: programs are compiled in it. Records of several iterations may
    come together; the clock then shows less than they took, and their own times count.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._points: deque[tuple[float, int, float]] = deque()  # moment, step, sum of the records' own seconds

    def measured(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a record with the speed measured; at the first update with its own speed and without a time left.

        A group of seeds in processes measures its own, in which the start-up of later seeds counts.
        """
        if record.get(MEASURED):
            return dict(record)
        points, now, step = self._points, self._clock(), record["global_step"]
        if not points or step > points[-1][1]:
            points.append((now, step, (points[-1][2] if points else 0.0) + (_number(record, "time/t_iter") or 0.0)))
        while len(points) > 2 and points[1][0] <= now - PACE_WINDOW:
            points.popleft()
        (begun, first, before), (ended, last, after) = points[0], points[-1]
        if last > first and (taken := max(ended - begun, after - before)) > 0:
            return {**record, "time/global_fps": (last - first) / taken}
        return {**record, NO_ETA: True}


def takes_more(stream: Any) -> bool:
    """Tells whether a line can be written without waiting: not if Ctrl-S has stopped a terminal, or a pipe is full."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return bool(poll.poll(0))
    except (OSError, ValueError, AttributeError):  # it has no descriptor, or is closed
        return True


class Lines:
    """Writes lines to a stream by ``write``; those that it doesn't take yet wait, the newest :data:`MOST_WAITING`."""

    def __init__(self, stream: Any, write: Callable[[str], None]) -> None:
        self._stream, self._write = stream, write
        self._waiting: deque[str] = deque(maxlen=MOST_WAITING)

    def add(self, text: str) -> None:
        """Writes a line, or keeps it."""
        self._waiting.append(text)
        self.are_written()

    def are_written(self) -> bool:
        """Writes what waits; returns whether nothing is left, and the stream takes more."""
        while (takes := takes_more(self._stream)) and self._waiting:
            self._write(self._waiting.popleft())
        return takes

    def finish(self) -> None:
        """Writes what waits, however long the stream takes it."""
        while self._waiting:
            self._write(self._waiting.popleft())


class PlainProgress(Progress):
    """Prints a line at the first update, then at most one every two seconds, and the last state on closing.

    Training goes on even if the reader of the pipe is gone (``| head``).
    """

    def __init__(self, total_steps: int | None, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_steps = total_steps
        self._stream = stream
        self._clock = clock
        self._pace = Pace(clock)
        self._next_line = -math.inf
        self._unprinted: Mapping[str, Any] | None = None
        self._lines = Lines(stream, lambda text: say(text, stream))

    def update(self, record: Mapping[str, Any]) -> None:
        """Prints the state if two seconds have passed since the last line, unless the stream takes none."""
        self._unprinted = self._pace.measured(record)
        if self._clock() >= self._next_line and self._lines.are_written():
            self._print_state()
            self._next_line = self._clock() + LINE_INTERVAL

    def message(self, text: str) -> None:
        """Prints ``text``, when the stream takes it."""
        self._lines.add(text)

    def close(self) -> None:
        """Prints what waits, and the last state unless it is printed already."""
        self._lines.finish()
        self._print_state()

    def _print_state(self) -> None:
        if self._unprinted is not None and self._total_steps is not None:
            say(plain_line(self._unprinted, self._total_steps), self._stream)
            self._unprinted = None


class TerminalProgress(Progress):
    """Draws a bar of the run's global steps in place, with return, speed, time left and time elapsed.

    Everything else that is printed meanwhile appears above the bar. Training goes on even if the terminal is gone; then
    nothing more is drawn.
    """

    def __init__(self, total_steps: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_steps = total_steps
        self._clock = clock
        self._pace = Pace(clock)
        self._next_drawing = -math.inf
        is_stdout = console.file is sys.stdout
        self._room = 0  # columns that the longest state so far takes
        self._bar = RichProgress(
            console=console,
            auto_refresh=False,
            redirect_stdout=is_stdout,
            redirect_stderr=is_stdout and sys.stderr.isatty(),  # a stderr that goes to a file stays there
            get_time=clock,
            expand=True,
        )
        self._lines = Lines(console.file, self._print)
        self._task = self._bar.add_task("", total=total_steps, state="")
        self._is_gone = False
        self._newest: Mapping[str, Any] = {"global_step": 0}
        self._lay_out()
        self._show(self._bar.start)

    def update(self, record: Mapping[str, Any]) -> None:
        """Redraws the bar, at most ten times a second, unless the terminal is stopped."""
        self._newest = self._pace.measured(record)
        if self._clock() >= self._next_drawing and self._lines.are_written():
            self._lay_out()
            self._show(self._bar.refresh)
            self._next_drawing = self._clock() + DRAW_INTERVAL

    def _lay_out(self) -> None:
        """Sets what is drawn: the share that is done, and of the rest what the terminal has room for.

        What is left out first is the time elapsed, then the steps and their bar, then the speed, the time left and the
        return. The longest state so far counts, so that the line doesn't jump.
        """
        record = self._newest
        told, left = f"return {_return_of(record)}", f"eta {format_eta(record, self._total_steps)}"
        state = f"{told}  {format_speed(record)} steps/s  {left}"
        self._room = max(self._room, cell_len(state))
        spare = self._bar.console.width - self._room - len("100% ")
        columns: list[ProgressColumn] = [TaskProgressColumn(table_column=Column(min_width=4, no_wrap=True)), STATE]
        if (bar := spare - len(f" {self._total_steps:,}/{self._total_steps:,} ")) >= LEAST_BAR:
            elapsed = len(f" {timedelta(seconds=int(self._bar.tasks[0].elapsed or 0))}")
            columns = [columns[0], COUNTS, STATE]
            if bar - elapsed >= LEAST_BAR:
                bar -= elapsed
                columns.append(TimeElapsedColumn())
            columns.insert(0, BarColumn(bar_width=bar))
        self._bar.columns = tuple(columns)
        shorter = (text for text in (f"{told}  {left}", told) if cell_len(text) <= spare + self._room)
        shown = state if spare >= 0 else next(shorter, "")
        self._bar.update(self._task, completed=record["global_step"], state=shown)

    def message(self, text: str) -> None:
        """Prints ``text`` above the bar, when the terminal takes it."""
        self._lines.add(text)

    def _print(self, text: str) -> None:
        """Prints ``text`` above the bar; wraps long lines between words and indents what follows."""
        console = self._bar.console
        whole = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
        parts = [textwrap.wrap(x, console.width, **whole) if len(x) > console.width else [x] for x in text.split("\n")]
        lines = "\n".join(line for part in parts for line in part)
        self._show(lambda: console.print(lines, markup=False, highlight=False, soft_wrap=True))

    def close(self) -> None:
        """Prints what waits, draws the last state and restores the terminal."""
        self._lines.finish()
        self._lay_out()
        self._show(self._bar.stop)

    def _show(self, draw: Callable[[], None]) -> None:
        """Draws, unless the terminal is gone; when that is found, standard output and error are given back."""
        if self._is_gone:
            return
        try:
            draw()
        except (OSError, ValueError):
            self._is_gone = True
            with suppress(OSError, ValueError, IndexError):  # it may not have been started as a whole
                self._bar.stop()


def plain_line(record: Mapping[str, Any], total_steps: int) -> str:
    """Returns a line such as ``step 40,960/200,000  20%  return 187.3  41,200 steps/s  eta 0:00:04``."""
    step = record["global_step"]
    percent = min(100, 100 * step // max(1, total_steps))
    return (
        f"step {step:,}/{total_steps:,}  {percent}%  return {_return_of(record)}  "
        f"{format_speed(record)} steps/s  eta {format_eta(record, total_steps)}"
    )


def evaluation_line(record: Mapping[str, Any]) -> str | None:
    """Returns a line with an evaluation's return, spread, episodes and success rate; None if the record has none."""
    if "eval/episodes" not in record:
        return None
    mean, std = (_number(record, f"eval/return_{name}") for name in ("mean", "std"))
    line = f"evaluation at step {record['global_step']:,}: return {UNKNOWN if mean is None else format_number(mean)}"
    if record["eval/episodes"] == 1:  # no spread is known
        line += " in 1 episode"
    else:
        line += f" ± {UNKNOWN if std is None else format_number(std)} over {record['eval/episodes']:,} episodes"
    success = _number(record, "eval/success_rate")
    return line if success is None else f"{line}, success rate {format_share(success)}"


def full_lines(record: Mapping[str, Any]) -> str:
    """Returns up to three lines about an iteration: its state, the times of its parts, the metrics of its update."""
    parts = {"time": [], "train": []}
    for name, value in record.items():
        group, _, short = name.partition("/")
        if group in parts and value is not None and name not in ("time/global_fps", "time/world_size"):
            unit = " s" if short.startswith("t_") else ""
            parts[group].append(f"{short.removeprefix('t_')} {value:.4g}{unit}")
    length = _number(record, "rollout/episode_length_mean")
    lines = [
        f"iteration {record['iteration']:,}  step {record['global_step']:,}  return {format_return(record)}  "
        f"length {UNKNOWN if length is None else format_number(length)}  {format_speed(record)} steps/s",
        *(f"  {group}: {'  '.join(said)}" for group, said in parts.items() if said),
    ]
    return "\n".join(lines)


def format_return(record: Mapping[str, Any]) -> str:
    """Formats the mean return by :func:`format_number`; a dash until an episode has ended."""
    value = _number(record, "rollout/episode_return_mean")
    return UNKNOWN if value is None else format_number(value)


def _return_of(record: Mapping[str, Any]) -> str:
    """Formats the mean return, followed, for several seeds, by which of them it covers: ``187.3 (2 ended)``."""
    return format_return(record) + (f" ({record['return_of']})" if "return_of" in record else "")


def format_speed(record: Mapping[str, Any]) -> str:
    """Formats the global environment steps per second; a dash if unknown."""
    fps = _number(record, "time/global_fps")
    return UNKNOWN if fps is None else f"{fps:,.0f}"


def format_eta(record: Mapping[str, Any], total_steps: int) -> str:
    """Formats the time left at the present speed, as ``h:mm:ss``, in whole seconds rounded up.

    Returns a dash if the speed is unknown or the time overflows: ``total_steps`` may be a huge number, for a run that
    goes on until it is stopped.
    """
    fps = _number(record, "time/global_fps")
    if not fps or fps < 0 or record.get(NO_ETA):
        return UNKNOWN
    try:
        return str(timedelta(seconds=math.ceil(max(0, total_steps - record["global_step"]) / fps)))
    except OverflowError:
        return UNKNOWN


def last_episodes(count: int | None) -> str:
    """Says which episodes a mean return covers if ``count`` have ended in all: the last hundred, or fewer."""
    if count is None or count >= WINDOW:
        return f"the last {WINDOW} episodes"
    return "the only episode" if count == 1 else f"all {count} episodes"


def _number(record: Mapping[str, Any], key: str) -> float | None:
    value = record.get(key)
    return None if value is None or not math.isfinite(value) else value

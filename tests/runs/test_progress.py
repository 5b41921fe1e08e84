import math
import os
import pty
import re
import select
import sys
import termios
from contextlib import suppress
from io import StringIO

import pytest
from rich.console import Console

from lockstep.runs.groups import together_in_turn
from lockstep.runs.progress import (
    MOST_WAITING,
    Lines,
    PlainProgress,
    Progress,
    TerminalProgress,
    evaluation_line,
    full_lines,
    make_progress,
    plain_line,
    takes_more,
)
from lockstep.runs.shown.numerals import format_share

TOTAL = 200_000


def make_record(step, episode_return: float | None = 187.3, fps: float | None = 41_200.0):
    return {"global_step": step, "rollout/episode_return_mean": episode_return, "time/global_fps": fps}


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Terminal(StringIO):
    def isatty(self):
        return True


class ClosedPipe(StringIO):
    def write(self, text):
        raise BrokenPipeError


@pytest.fixture
def clock():
    return Clock()


def without_escapes(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


# ---- the line


@pytest.mark.parametrize("total", [10**18, 10**400], ids=["18 digits", "400 digits"])
def test_a_run_that_is_to_go_on_until_it_is_stopped_has_no_time_left_to_tell(total):
    line = plain_line(make_record(40_960, fps=1000.0), total)
    assert line.endswith("  0%  return 187.3  1,000 steps/s  eta –")
    assert plain_line(make_record(40_960, fps=1e-320), TOTAL).endswith("eta –")
    assert plain_line(make_record(0, fps=1e6), 10**10).endswith("eta 2:46:40")


def test_plain_line():
    expected = "step 40,960/200,000  20%  return 187.3  41,200 steps/s  eta 0:00:04"
    assert plain_line(make_record(40_960), TOTAL) == expected


@pytest.mark.parametrize("missing", [None, math.nan])
def test_plain_line_shows_dashes_for_what_is_not_known(missing):
    line = plain_line(make_record(2048, missing, missing), TOTAL)
    assert line == "step 2,048/200,000  1%  return –  – steps/s  eta –"
    assert plain_line({"global_step": 2048}, TOTAL) == line


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-1234.56, "-1,234.6"),
        (100.0, "100.0"),
        (99.996, "100.00"),
        (0.953, "0.953"),
        (-0.00421, "-0.00421"),
        (0.0, "0.00"),
    ],
)
def test_returns_have_digits_that_suit_their_size(value, shown):
    assert f"return {shown} " in plain_line(make_record(0, value), TOTAL)


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.0, "0%"),
        (1e-6, "<0.01%"),
        (0.0004, "0.04%"),
        (0.004, "0.4%"),
        (0.006, "1%"),
        (0.5, "50%"),
        (0.994, "99%"),
        (0.995, "99.5%"),
        (0.9999, "99.99%"),
        (0.99996, ">99.99%"),
        (1.0, "100%"),
    ],
)
def test_a_share_that_is_not_everything_is_not_said_to_be(share, shown):
    assert format_share(share) == shown


@pytest.mark.parametrize(
    ("step", "fps", "end"),
    [
        (0, 10.0, "0%  return 187.3  10 steps/s  eta 5:33:20"),
        (0, 0.0, "0%  return 187.3  0 steps/s  eta –"),
        (199_999, 41_200.0, "99%  return 187.3  41,200 steps/s  eta 0:00:01"),  # 100% is kept for the end
        (200_000, 41_200.0, "100%  return 187.3  41,200 steps/s  eta 0:00:00"),
        (204_800, 41_200.0, "100%  return 187.3  41,200 steps/s  eta 0:00:00"),  # whole iterations overshoot
    ],
)
def test_percent_and_time_left(step, fps, end):
    assert plain_line(make_record(step, fps=fps), TOTAL).endswith(end)


# ---- plain lines in a pipe


def printed_steps(stream):
    return [int(step.replace(",", "")) for step in re.findall(r"step ([\d,]+)/", stream.getvalue())]


def test_plain_prints_the_first_then_one_every_two_seconds_then_the_last(clock):
    stream = StringIO()
    progress = PlainProgress(TOTAL, stream, clock)
    for step in range(1, 12):
        progress.update(make_record(step))
        clock.now += 0.5
    assert printed_steps(stream) == [1, 5, 9]
    progress.close()
    progress.close()
    assert printed_steps(stream) == [1, 5, 9, 11]
    assert stream.getvalue().count("\n") == 4


def test_plain_does_not_repeat_a_last_line_that_is_there(clock):
    stream = StringIO()
    progress = PlainProgress(TOTAL, stream, clock)
    progress.update(make_record(1))
    progress.close()
    assert printed_steps(stream) == [1]


def test_plain_prints_nothing_on_closing_a_run_without_iterations(clock):
    stream = StringIO()
    PlainProgress(TOTAL, stream, clock).close()
    assert stream.getvalue() == ""


def test_plain_messages_are_printed_at_once_and_in_order(clock):
    stream = StringIO()
    progress = PlainProgress(TOTAL, stream, clock)
    progress.update(make_record(1))
    progress.message("checkpoint [step_1] written")
    lines = stream.getvalue().splitlines()
    assert [line.partition("  ")[0] for line in lines] == ["step 1/200,000", "checkpoint [step_1] written"]


def test_speed_and_time_left_are_of_the_last_minute_without_the_first_iteration(clock):
    stream = StringIO()
    progress = PlainProgress(TOTAL, stream, clock)
    progress.update(make_record(1_000, fps=10.0))  # 100 s, most of them for a compiler
    for step in range(2_000, 11_000, 1_000):
        clock.now += 10
        progress.update(make_record(step, fps=1e6))  # an evaluation takes most of each interval
    clock.now += 100
    progress.update(make_record(11_000, fps=1e6))
    ends = [line.partition("return 187.3  ")[2] for line in stream.getvalue().splitlines()]
    assert ends[:3] == ["10 steps/s  eta –", "100 steps/s  eta 0:33:00", "100 steps/s  eta 0:32:50"]
    assert ends[-1] == "10 steps/s  eta 5:15:00"


def test_speed_of_records_that_come_together_is_of_their_own_times(clock):
    stream = StringIO()
    progress = PlainProgress(4_000, stream, clock)
    for step, seconds in ((1_000, 5.0), (2_000, 0.5), (3_000, 0.25), (4_000, 0.25)):  # engine jax: a program for all
        progress.update({**make_record(step, fps=1_000 / seconds), "time/t_iter": seconds})
        clock.now += 1e-6
    progress.close()
    assert stream.getvalue().endswith("100%  return 187.3  3,000 steps/s  eta 0:00:00\n")


def test_a_speed_that_a_group_has_measured_is_left_as_it_is(clock):
    stream = StringIO()
    progress = PlainProgress(TOTAL, stream, clock)
    for step in (1_000, 2_000):
        progress.update(together_in_turn([make_record(step)], [], [], 50.0))
        clock.now += 1_000
    assert [line.rpartition("  ")[0][-10:] for line in stream.getvalue().splitlines()] == ["50 steps/s"] * 2
    assert stream.getvalue().endswith("eta 1:06:00\n")


def test_updates_without_a_step_do_not_move_the_speed(clock):
    stream = StringIO()
    progress = PlainProgress(TOTAL, stream, clock)
    for step in (100, 100, 200, 200):
        progress.update(make_record(step))
        clock.now += 10
    speeds = re.findall(r"([\d,]+) steps/s", stream.getvalue())
    assert speeds == ["41,200", "41,200", "5", "5"]


def test_a_speed_is_shown_however_long_ago_the_last_step_was(clock):
    """As while the run is evaluated for minutes."""
    stream = StringIO()
    progress = PlainProgress(TOTAL, stream, clock)
    for step in (1000, 2000):
        progress.update(make_record(step))
        clock.now += 10.0
    clock.now += 300.0
    progress.update(make_record(2000))
    assert "100 steps/s" in stream.getvalue().splitlines()[-1]


def test_plain_falls_silent_when_nobody_reads(clock):
    progress = PlainProgress(TOTAL, ClosedPipe(), clock)
    for step in range(3):
        progress.update(make_record(step))
        clock.now += 5
    progress.message("still here")
    progress.close()


# ---- the live bar on a terminal


@pytest.fixture(autouse=True)
def moving_terminal(monkeypatch):
    """Whatever the tests' own terminal is, or none."""
    monkeypatch.setenv("TERM", "xterm")


def make_terminal(clock, width=120, total=TOTAL):
    stream = StringIO()
    console = Console(force_terminal=True, file=stream, width=width, color_system=None)
    return stream, TerminalProgress(total, console, clock)


def last_line(stream):
    return without_escapes(stream.getvalue()).rstrip().replace("\r", "\n").splitlines()[-1]


def drawn_steps(stream):
    return {int(step.replace(",", "")) for step in re.findall(r"([\d,]+)/200,000", stream.getvalue())}


def test_terminal_shows_steps_return_speed_and_times(clock):
    stream, progress = make_terminal(clock)
    progress.update(make_record(36_840))
    clock.now += 65
    progress.update(make_record(40_960, fps=41_200.0))
    progress.close()
    last = without_escapes(stream.getvalue()).rstrip().splitlines()[-1]
    assert re.search(r"20% +40,960/200,000 return 187\.3  63 steps/s  eta 0:41:50 0:01:05", last)


@pytest.mark.parametrize("width", [50, 55, 60])
def test_a_narrow_terminal_shows_what_changes_in_one_whole_line(clock, width):
    stream, progress = make_terminal(clock, width)
    progress.update(make_record(36_840))
    clock.now += 65
    progress.update(make_record(40_960, fps=41_200.0))
    progress.close()
    last = last_line(stream)
    assert len(last) <= width
    assert last.split() == ["20%", "return", "187.3", "63", "steps/s", "eta", "0:41:50"]


@pytest.mark.parametrize("width", [6, 15, 20, 28, 30, 36, 38, 46, 47, 60, 76, 80, 90, 120])
@pytest.mark.parametrize("total", [200_000, 10**7, 10**8, 10**11])
def test_a_terminal_of_any_width_shows_whole_numbers_and_the_share_first_of_all(clock, width, total):
    stream, progress = make_terminal(clock, width, total)
    clock.now += 65
    progress.update(make_record(total // 2, -1218.8, 141_200.0) | {"measured": True})
    progress.close()
    last = last_line(stream)
    assert len(last) <= width
    assert "50%" in last
    assert "…" not in last
    assert ("return -1,218.8" in last) == ("return" in last) == (width >= 20)
    whole = re.search(r"eta (\d+ days?, )?\d+:\d\d:\d\d\b", last)
    assert bool(whole) == ("eta" in last)
    assert whole or width < (36 if total < 10**11 else 60)
    if width >= 80 and total <= 10**7:
        assert f"{total // 2:,}/{total:,}" in last
    if width == 120:
        assert last.endswith("0:01:05")


def test_a_terminal_that_becomes_narrow_meanwhile_gets_a_line_that_fits(clock):
    stream, progress = make_terminal(clock, 120)
    progress.update(make_record(1000))
    clock.now += 65
    progress._bar.console.width = 60
    progress.update(make_record(40_960) | {"measured": True})
    progress.close()
    assert last_line(stream).split() == ["20%", "return", "187.3", "41,200", "steps/s", "eta", "0:00:04"]


def test_terminal_shows_a_dash_until_there_is_a_return(clock):
    stream, progress = make_terminal(clock)
    progress.update(make_record(2048, None))
    progress.close()
    assert "return –  41,200 steps/s" in without_escapes(stream.getvalue())


def test_terminal_draws_at_most_ten_times_a_second_and_always_the_last_state(clock):
    stream, progress = make_terminal(clock)
    for step in range(1000, 1050):
        progress.update(make_record(step))
        clock.now += 1 / 64
    assert drawn_steps(stream) == {0, *range(1000, 1050, 7)}
    progress.close()
    assert drawn_steps(stream) == {0, *range(1000, 1050, 7), 1049}


def test_terminal_prints_messages_above_the_bar_as_they_are(clock):
    stream, progress = make_terminal(clock, width=80)
    path = "a/long/path" * 8
    progress.message(f"checkpoint [step_1] written to {path}")
    progress.close()
    lines = without_escapes(stream.getvalue()).replace("\r", "\n").splitlines()
    assert lines[lines.index(f"  {path}") - 1] == "checkpoint [step_1] written to"  # a path stays whole
    assert "0/200,000" in "".join(lines[lines.index(f"  {path}") + 1 :])


def test_terminal_gives_the_cursor_back_once(clock):
    stream, progress = make_terminal(clock)
    progress.close()
    progress.close()
    assert stream.getvalue().count("\x1b[?25l") == 1
    assert stream.getvalue().count("\x1b[?25h") == 1


def test_a_bar_elsewhere_leaves_stdout_and_stderr_alone(clock):
    stdout, stderr = sys.stdout, sys.stderr
    _, progress = make_terminal(clock)
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    progress.close()


def test_the_bar_falls_silent_when_its_terminal_is_closed(monkeypatch):
    ours, theirs = pty.openpty()
    stream = open(theirs, "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", stream)
    progress = make_progress(TOTAL, quiet=False)
    assert sys.stdout is not stream  # what is printed goes above the bar
    progress.message("hello")
    os.close(ours)
    with pytest.raises(OSError, match="Input/output"):
        os.write(theirs, b"x")
    progress.message("still here")
    assert sys.stdout is stream
    progress.update(make_record(1))
    progress.message("still here")
    progress.close()
    later = make_progress(TOTAL, quiet=False)
    later.update(make_record(1))
    later.close()
    assert sys.stdout is stream
    with suppress(OSError):
        stream.close()


# ---- an output that takes nothing for a while


@pytest.fixture
def stopped_terminal():
    """A terminal on which Ctrl-S was pressed: its stream, what to call to go on, and what it has shown so far."""
    ours, theirs = pty.openpty()
    stream = open(theirs, "w")  # noqa: SIM115
    termios.tcflow(theirs, termios.TCOOFF)

    def shown():
        text = ""
        while select.select([ours], [], [], 0)[0]:
            text += os.read(ours, 65536).decode()
        return without_escapes(text).replace("\r", "")

    yield stream, lambda: termios.tcflow(theirs, termios.TCOON), shown
    termios.tcflow(theirs, termios.TCOON)
    stream.close()
    os.close(ours)


@pytest.fixture
def full_pipe():
    """A pipe that is full, in the same terms."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    stream = open(writing, "w")  # noqa: SIM115

    def shown():
        text = ""
        while select.select([reading], [], [], 0)[0]:
            text += os.read(reading, 65536).decode()
        return text.lstrip("x")

    yield stream, shown, shown
    stream.close()
    os.close(reading)


@pytest.mark.parametrize("output", ["stopped_terminal", "full_pipe"])
def test_plain_lines_do_not_wait_for_their_reader(output, clock, request):
    stream, go_on, shown = request.getfixturevalue(output)
    progress = PlainProgress(TOTAL, stream, clock)
    for step in (1, 2):
        clock.now += 5
        progress.message(f"message {step}")
        progress.update(make_record(step))
    assert not takes_more(stream)
    go_on()
    assert takes_more(stream)
    progress.update(make_record(3))  # states that nobody saw aren't shown, messages are
    assert re.findall("message .|step .", shown()) == ["message 1", "message 2", "step 3"]
    progress.close()


def test_nor_does_the_bar(stopped_terminal, clock, moving_terminal):
    stream, go_on, shown = stopped_terminal
    go_on()
    progress = TerminalProgress(TOTAL, Console(file=stream, width=120), clock)
    termios.tcflow(stream.fileno(), termios.TCOOFF)
    shown()
    for step in (1000, 2000):
        clock.now += 1
        progress.message(f"message {step}")
        progress.update(make_record(step))
    assert shown() == ""
    go_on()
    clock.now += 1
    progress.update(make_record(3000))
    text = shown()
    assert re.findall("message .", text) == ["message 1", "message 2"]
    assert "3,000/200,000" in text
    progress.close()


@pytest.mark.parametrize("output", ["stopped_terminal", "full_pipe"])
def test_what_waits_is_shown_at_the_end_and_the_oldest_of_very_many_is_lost(output, request):
    stream, go_on, shown = request.getfixturevalue(output)
    lines = Lines(stream, lambda text: print(text, file=stream, flush=True))
    for number in range(MOST_WAITING + 1):
        lines.add(f"<{number}>")
    go_on()
    lines.finish()
    assert re.findall("<[0-9]+>", shown()) == [f"<{number}>" for number in range(1, MOST_WAITING + 1)]


# ---- the choice between them


def test_make_progress_prints_plain_lines_into_a_pipe(capsys):
    progress = make_progress(TOTAL, quiet=False)
    progress.update(make_record(40_960))
    progress.close()
    expected = "step 40,960/200,000  20%  return 187.3  41,200 steps/s  eta –\n"
    assert capsys.readouterr().out == expected


def test_make_progress_is_live_on_a_terminal():
    stream = Terminal()
    progress = make_progress(TOTAL, quiet=False, stream=stream)
    assert isinstance(progress, TerminalProgress)
    progress.close()
    assert "\x1b[" in stream.getvalue()


def test_make_progress_is_plain_on_a_terminal_that_cannot_redraw(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(TOTAL, quiet=False, stream=Terminal()), PlainProgress)


def test_quiet_prints_nothing():
    stream = Terminal()
    progress = make_progress(TOTAL, quiet=True, stream=stream)
    assert type(progress) is Progress
    progress.update(make_record(1))
    progress.message("hello")
    progress.close()
    assert stream.getvalue() == ""


# ---- evaluations, and whole records


def test_an_evaluation_is_a_line_of_its_own():
    record = {"global_step": 2048, "eval/episodes": 16, "eval/return_mean": 78.3125, "eval/return_std": 32.3}
    assert evaluation_line(record) == "evaluation at step 2,048: return 78.31 ± 32.30 over 16 episodes"
    line = evaluation_line(record | {"eval/success_rate": 0.5})
    assert line is not None
    assert line.endswith("episodes, success rate 50%")
    one = evaluation_line(record | {"eval/episodes": 1, "eval/return_std": 0.0})
    assert one == "evaluation at step 2,048: return 78.31 in 1 episode"  # one has no spread
    assert evaluation_line({"global_step": 2048}) is None


def test_a_whole_record_says_times_and_losses():
    record = {"iteration": 3, "global_step": 768, "rollout/episode_return_mean": 19.24, "time/t_rollout": 0.0101}
    record |= {
        "time/global_fps": 1516.0,
        "time/world_size": 2,
        "train/policy_loss": -0.5,
        "train/explained_variance": None,
    }
    assert full_lines(record | {"rollout/episode_length_mean": 19.5}).splitlines() == [
        "iteration 3  step 768  return 19.24  length 19.50  1,516 steps/s",
        "  time: rollout 0.0101 s",
        "  train: policy_loss -0.5",
    ]
    assert full_lines({"iteration": 3, "global_step": 768}) == "iteration 3  step 768  return –  length –  – steps/s"


def test_where_each_iteration_is_shown_the_state_is_not_repeated():
    stream = StringIO()
    progress = make_progress(TOTAL, quiet=False, stream=stream, states=False)
    progress.update(make_record(2048))
    progress.message("all of it")
    progress.close()
    assert stream.getvalue() == "all of it\n"


def test_long_messages_are_broken_between_words():
    stream = StringIO()
    progress = TerminalProgress(TOTAL, Console(file=stream, force_terminal=True, width=30), Clock())
    progress.message("CartPole-v1 · torch · 2 ranks × 4 shards × 1 environment\n  kept   as it is")
    progress.close()
    lines = without_escapes(stream.getvalue()).replace("\r", "\n").splitlines()
    start = next(number for number, line in enumerate(lines) if "CartPole" in line)
    assert lines[start : start + 3] == [
        "CartPole-v1 · torch · 2 ranks",
        "  × 4 shards × 1 environment",
        "  kept   as it is",
    ]

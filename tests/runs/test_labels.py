"""Pictures of many runs, of runs with long names and of odd numbers: everything in them can be read."""

import warnings
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from lockstep.policies.comparison import comparison
from lockstep.policies.comparison import draw as draw_comparison
from lockstep.policies.evaluated import Evaluated
from lockstep.policies.results import draw_histogram
from lockstep.runs.plot import Line, draw
from lockstep.runs.shown.labels import in_a_picture, shortened, write_out

LONG = [f"a_rather_long_name_that_somebody_made_of_all_settings_{'x' * 150}_{n}" for n in range(3)]


def drawn(figure):
    """Lays a figure out, as it is when it is written; a warning says that something had no room."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.draw_without_rendering()
    return figure


def table_of(returns):
    returns = np.asarray(returns, np.float64)
    count = len(returns)
    return np.stack([returns, np.full(count, 200.0), np.zeros(count), np.full(count, np.nan)], 1)


def compared(*samples, names=None):
    facts = {"environment": "CartPole-v1"}
    names = names or [f"policy{n}" for n in range(len(samples))]
    them = [Evaluated(name, facts, table_of(values)) for name, values in zip(names, samples, strict=True)]
    return drawn(draw_comparison(them, comparison(them)))


@pytest.mark.parametrize("names", [[f"seed_{n}" for n in range(30)], [f"seed_{n}" for n in range(120)], LONG])
def test_lines_of_many_or_of_long_names_keep_their_room(names):
    figure = drawn(draw([Line(name, [0.0, 1.0], [n, n + 1.0]) for n, name in enumerate(names)], "steps", "my/metric"))
    axis, (legend,) = figure.axes[0], figure.legends
    box, below = axis.get_window_extent(), legend.get_window_extent()
    assert box.height > 3 * figure.dpi
    assert box.width > 6 * figure.dpi
    assert below.y1 <= box.y0
    assert below.y0 >= 0
    assert below.x1 <= figure.bbox.width
    assert [text.get_text() for text in legend.get_texts()] == [in_a_picture(name) for name in names]
    looks = {(line.get_color(), line.get_linestyle()) for line in axis.lines}
    assert len(looks) == min(len(names), 40)


def test_a_few_short_names_stand_over_the_curves():
    figure = drawn(draw([Line(f"run{n}", [0.0, 1.0], [0.0, 1.0]) for n in range(5)], "steps", "my/metric"))
    assert figure.legends == []
    assert figure.axes[0].get_legend() is not None


@pytest.mark.parametrize("middle", [-1000.5, 1e6, 1e20, 1e-7, 0.0])
def test_a_comparison_writes_numbers_out(middle):
    spread = np.linspace(0.0, 0.3, 20) * (1.0 if abs(middle) < 1e9 else 1e19)
    for axis in compared(middle + spread, middle + 2 * spread).axes:
        assert axis.xaxis.get_offset_text().get_text() == ""
        boxes = [label.get_window_extent() for label in axis.get_xticklabels() if label.get_text()]
        inside = [box for box in boxes if axis.bbox.x0 - 1 <= (box.x0 + box.x1) / 2 <= axis.bbox.x1 + 1]
        assert all(one.x1 < other.x0 for one, other in pairwise(inside))
        assert inside


@pytest.mark.parametrize(("first", "spread"), [(1e12, 1.0), (1e15, 3.0), (-123456789013.0, 0.5), (0.0, 1.0)])
def test_no_two_numbers_along_an_axis_are_written_alike(first, spread):
    figure = Figure()
    axis = figure.subplots()
    axis.set_xlim(first, first + spread)
    write_out(axis.xaxis)
    drawn(figure)
    labels = [label.get_text() for label in axis.get_xticklabels()]
    assert len(set(labels)) == len(labels) > 1


def test_many_policies_have_bars_and_rows_of_their_own():
    figure = compared(*(np.arange(20.0) + n for n in range(14)))
    labels = [label.get_window_extent() for label in figure.axes[2].get_yticklabels()]
    assert all(one.y0 > other.y1 - 2 for one, other in pairwise(labels))
    bars = {(patch.get_facecolor(), patch.get_hatch()) for patch in figure.axes[0].patches}
    assert len(bars) == 14


def test_a_comparison_of_long_names_keeps_its_room():
    figure = compared(*(np.arange(20.0) + n for n in range(3)), names=LONG)
    assert all(axis.get_window_extent().width > 1.5 * figure.dpi for axis in figure.axes)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [in_a_picture(name) for name in LONG]


def test_a_long_title_and_a_small_mean_are_shown_whole():
    figure = drawn(draw_histogram(f"{LONG[0]}: CartPole-v1, 20 episodes", table_of(np.linspace(0, 1e-5, 20))))
    assert figure._suptitle.get_window_extent().width <= figure.bbox.width
    (text,) = figure.axes[0].get_legend().get_texts()
    assert text.get_text() == "mean 5.00e-06"


def test_names_are_text_and_keep_what_tells_them_apart():
    assert in_a_picture("_a$b$") == r" _a\$b\$"
    assert len({shortened(name) for name in LONG}) == 3
    assert shortened("short") == "short"

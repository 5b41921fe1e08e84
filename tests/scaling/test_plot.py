"""The picture shows what the tables say."""

import dataclasses

import pytest
from test_summarize import PLAN, SPEEDS, rows_of

from lockstep.scaling.plot import COLORS, MEANING, draw, write_plots
from lockstep.scaling.summarize import PARTS, summary_rows


@pytest.fixture
def tables():
    rows = rows_of(SPEEDS)
    summary = summary_rows(rows, PLAN)
    for row in summary:  # times that tell the parts apart
        row |= {part: row["t_iter"] * share for part, share in zip(PARTS, (0.4, 0.3, 0.15, 0.1, 0.05), strict=True)}
    return rows, summary


def lines(axis):
    return {line.get_label(): [float(y) for y in line.get_ydata()] for line in axis.get_lines()}


def test_speed_is_measured_ceiling_and_ideal(tables):
    speed = lines(draw("title", *tables).axes[0])
    assert speed["measured"] == pytest.approx([75.0, 100.0])
    assert speed["ceiling: independent runs at once"] == pytest.approx([75.0, 130.0])
    assert speed["ideal: linear"] == pytest.approx([75.0, 150.0])
    assert sorted(y for ys in speed.values() for y in ys if y in (120.0, 80.0)) == [80.0, 120.0]  # each repeat


def test_efficiency_has_two_measures_with_their_intervals(tables):
    axis = draw("title", *tables).axes[1]
    two = tables[1][1]
    assert lines(axis)["of ideal"] == pytest.approx([1.0, two["efficiency"]])
    assert lines(axis)["of the ceiling"] == pytest.approx([1.0, two["ceiling_efficiency"]])
    bars = [ys for label, ys in lines(axis).items() if label.startswith("_") and len(ys) == 2 and ys[0] != ys[1]]
    assert [two["efficiency_low"], two["efficiency_high"]] == pytest.approx(bars[0])


def test_an_efficiency_without_an_interval_lies_inside_of_its_axis(tables):
    rows, summary = tables
    for row in summary:
        row |= {"efficiency": 1.3, "efficiency_low": None, "efficiency_high": None}
    assert draw("title", rows, summary).axes[1].get_ylim()[1] > 1.3


def test_an_iteration_of_one_program_is_one_bar(tables):
    rows, summary = tables
    untold = [row | dict.fromkeys(PARTS) for row in summary]
    axis = draw("title", rows, untold).axes[2]
    assert axis.get_legend_handles_labels()[1] == ["not told apart"]
    assert [bar.get_height() for bar in axis.patches] == pytest.approx([1000 * row["t_iter"] for row in summary])


def test_the_bars_stack_up_to_the_iteration(tables):
    axis = draw("title", *tables).axes[2]
    tops = [max(p.get_y() + p.get_height() for p in axis.patches if abs(p.get_x() + 0.275 - i) < 0.01) for i in (0, 1)]
    assert tops == pytest.approx([1000 * row["t_iter"] for row in tables[1]])
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [MEANING[part] for part in reversed(PARTS)]
    assert len(set(COLORS.values())) == len(PARTS)


def test_a_world_size_without_a_run_is_left_out():
    rows = rows_of(SPEEDS, failed=[("run", 2, 1), ("run", 2, 2)])
    figure = draw("title", rows, summary_rows(rows, PLAN))
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["1"]


@pytest.mark.parametrize("ceiling", [True, False])
def test_without_a_run_of_the_base_nothing_is_said_to_be_ideal(ceiling, recwarn):
    """The tables have no speed-up and no efficiency then."""
    rows = rows_of(SPEEDS, failed=[("run", 1, 1), ("run", 1, 2)])
    summary = summary_rows(rows, dataclasses.replace(PLAN, ceiling=ceiling))
    assert [row["efficiency"] for row in summary] == [None, None]
    speed = lines(draw("title", rows, summary).axes[0])
    assert speed["measured"] == pytest.approx([100.0])
    assert "ideal: linear" not in speed
    assert not recwarn


def test_nothing_to_draw_leaves_no_old_picture(tmp_path, tables):
    path = tmp_path / "plots.png"
    assert write_plots(path, "title", *tables)
    assert path.read_bytes().startswith(b"\x89PNG")
    rows = rows_of(SPEEDS, failed=SPEEDS)
    assert not write_plots(path, "title", rows, summary_rows(rows, PLAN))
    assert not path.exists()


def test_the_picture_needs_no_latex(tmp_path, tables, monkeypatch):
    """A user's ``matplotlibrc`` may ask for it where it isn't installed."""
    monkeypatch.setenv("PATH", "")
    with pytest.importorskip("matplotlib").rc_context({"text.usetex": True}):
        assert write_plots(tmp_path / "plots.png", "title", *tables)
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")

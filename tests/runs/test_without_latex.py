"""Pictures are drawn without LaTeX, even where a user's ``matplotlibrc`` asks for it and it isn't installed."""

import io

import numpy as np
import pytest
from made_runs import add_evaluation, make_group, make_run

from lockstep.cli import main
from lockstep.planning.hardware import CASES
from lockstep.planning.plot import write_plot
from lockstep.planning.prediction import PARTS, Outlook, Prediction
from lockstep.policies.comparison import comparison, draw
from lockstep.policies.evaluated import Evaluated
from lockstep.policies.results import draw_histogram, save_figure
from lockstep.runs.curves import draw_curves, write_curves

PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def asked_for_latex(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setenv("PATH", "")
    with matplotlib.rc_context({"text.usetex": True}):
        yield


def test_matplotlib_would_fail():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.suptitle("a title")
    with pytest.raises(RuntimeError, match="latex"):
        figure.savefig(io.BytesIO())


def test_a_groups_curves(tmp_path):
    group = make_group(tmp_path / "many")
    seeds = {seed: group / f"seed_{seed}" for seed in range(3)}
    draw_curves(group, "a_title", write_curves(group, seeds), "seed_0")
    assert (group / "curves.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_plot_of_a_run(tmp_path, suffix):
    run = make_run(tmp_path / "a_run")
    assert main(["plot", str(run), "--out", str(tmp_path / f"plot.{suffix}")]) == 0


def test_the_page_of_a_run(tmp_path):
    pytest.importorskip("jinja2")
    run = make_run(tmp_path / "a_run")
    add_evaluation(run, [1.0, 2.0, 4.0])
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().count("<svg") > 2


def test_evaluations(tmp_path):
    table = np.full((4, 4), np.nan)
    table[:, :3] = [[1, 7, 0], [2, 8, 0], [3, 9, 0], [5, 7, 0]]
    both = [Evaluated(name, {"environment": "Game_v0"}, table) for name in ("a_b", "c_d")]
    for name, figure in (("one", draw_histogram("a_b", table)), ("two", draw(both, comparison(both)))):
        save_figure(figure, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)


def test_a_plan(tmp_path):
    parts: dict[str, float] = {part: 1.0 for part in PARTS}
    one = Prediction(1, 8, 1024, dict.fromkeys(CASES, 8.0), parts, {}, {}, (), {"parameters": 1.0})
    write_plot(tmp_path / "plan.png", "a_title", [Outlook("a_target", "cpu", "torch", "counted", 1, 0.0, (one,))])
    assert (tmp_path / "plan.png").read_bytes().startswith(PNG)

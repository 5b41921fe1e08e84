"""``lockstep plot``: which lines it draws, and what it refuses."""

import importlib.util
import io
import json

import pytest

from lockstep.cli import main
from lockstep.runs.plot import OF_SEEDS, Line, draw, line_of, lines_of

METRIC = "rollout/episode_return_mean"


def make(path, values, times=None):
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"env": {}}')
    rows = [{"iteration": n, "global_step": 10 * n, METRIC: value} for n, value in enumerate(values, 1)]
    for row in rows:
        row["time/t_iter"] = 0.5
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refused(capsys, *words):
    assert main(["plot", *map(str, words)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(("x", "places"), [("steps", [20, 30]), ("iterations", [2, 3]), ("time", [1.0, 1.5])])
def test_a_line_is_the_metric_where_it_is_known(x, places, tmp_path):
    run = make(tmp_path / "a", [None, 4.0, 8.0])
    assert line_of(run, "a", x, METRIC) == Line("a", places, [4.0, 8.0])
    assert line_of(run, "a", x, "global_step").y == [10, 20, 30]


def test_a_long_line_keeps_its_peak(tmp_path):
    line = line_of(make(tmp_path / "a", [1.0] * 1501 + [9.0] + [1.0] * 1498), "a", "iterations", METRIC)
    assert len(line.x) <= 500
    assert (1502, 9.0) in zip(line.x, line.y, strict=True)


@pytest.mark.parametrize(("band", "said"), [(([1.0], [3.0]), OF_SEEDS), (None, "")])
def test_a_band_is_explained(band, said):
    pytest.importorskip("matplotlib")
    figure = draw([Line("a", [1.0], [2.0], band)], "steps", METRIC)
    assert figure.axes[0].get_legend().get_title().get_text() == said


def test_a_policy_that_was_cloned_takes_no_steps_and_is_drawn_over_its_epochs(tmp_path):
    clone, run = make(tmp_path / "clone", []), make(tmp_path / "run", [1.0, 2.0])
    rows = [{"iteration": n, "global_step": 0, METRIC: 1.0 / n} for n in (1, 2)]
    (clone / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines, x = lines_of({clone: "clone"}, "steps", METRIC)
    assert ([line.x for line in lines], x) == ([[1, 2]], "iterations")
    assert draw(lines, x, METRIC).axes[0].get_xlabel() == "iterations"
    for paths, asked in (({clone: "clone", run: "run"}, "steps"), ({clone: "clone"}, "time"), ({run: "run"}, "steps")):
        assert lines_of(paths, asked, METRIC)[1] == asked


def test_several_seeds_are_a_mean_with_a_band(tmp_path):
    for seed, values in ((2, [1.0, 2.0]), (3, [3.0, 8.0])):
        make(tmp_path / "many" / f"seed_{seed}", values)
    (tmp_path / "many" / "config.json").write_text('{"env": {}}')
    line = line_of(tmp_path / "many", "many", "steps", METRIC)
    assert (line.label, line.x, line.y) == ("many (2 seeds)", [10, 20], [2.0, 5.0])
    assert line.band == ([1.0, 2.0], [3.0, 8.0])


def test_seeds_that_have_not_begun_are_left_out_and_counted(tmp_path):
    group = tmp_path / "many"
    for seed, values in ((2, [1.0, 2.0]), (3, [None, None]), (5, [3.0, 8.0])):
        make(group / f"seed_{seed}", values)
    make(group / "seed_4", [])
    (make(group / "seed_6", []) / "metrics.jsonl").unlink()
    (group / "config.json").write_text('{"env": {}}')
    line = line_of(group, "many", "steps", METRIC)
    assert (line.label, line.x, line.y) == ("many (2 of 5 seeds)", [10, 20], [2.0, 5.0])
    with pytest.raises(ValueError, match="many has no nothing"):
        line_of(group, "many", "steps", "nothing")


def test_a_seed_that_failed_does_not_shorten_the_line_of_the_others(tmp_path):
    group = tmp_path / "many"
    for seed, values in ((2, [1.0, 2.0]), (3, [9.0]), (5, [3.0, 8.0])):
        make(group / f"seed_{seed}", values)
    (group / "config.json").write_text('{"env": {}}')
    assert line_of(group, "many", "steps", METRIC).x == [10]
    rows = [{"seed": seed, "directory": f"seed_{seed}"} for seed in (2, 5)]
    for seeds in (rows, [*rows, None, {"seed": 3}, {"directory": "gone"}]):
        (group / "summary.json").write_text(json.dumps({"status": "2 of 3 seeds finished", "seeds": seeds}))
        line = line_of(group, "many", "steps", METRIC)
        assert (line.label, line.x, line.y) == ("many (2 of 3 seeds)", [10, 20], [2.0, 5.0])
    for damaged in ('{"seeds": 5}', '{"seeds": []}', "[]"):
        (group / "summary.json").write_text(damaged)
        assert line_of(group, "many", "steps", METRIC).label == "many (3 seeds)"


def test_a_torn_last_line_is_left_out_and_another_is_refused(tmp_path):
    run = make(tmp_path / "a", [1.0, 2.0])
    file = run / "metrics.jsonl"
    file.write_text(file.read_text() + '{"iteration": 3, "glo')
    assert line_of(run, "a", "steps", METRIC).x == [10, 20]
    file.write_text("no record\n" + file.read_text())
    with pytest.raises(ValueError, match="line 1 is no metrics record"):
        line_of(run, "a", "steps", METRIC)


def test_runs_are_drawn_by_their_names(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    make(tmp_path / "runs" / "a", [1.0, 2.0])
    make(tmp_path / "other" / "a", [1.0, 4.0])
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "a", "other/a", "runs/a", "--y", METRIC, "--out", "out/two.svg"]) == 0
    assert capsys.readouterr().out == "runs/a, other/a → out/two.svg\n"
    assert "<svg" in (tmp_path / "out" / "two.svg").read_text()
    assert main(["plot", "a"]) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_the_lines():
    pytest.importorskip("matplotlib")
    lines = [Line("a $1$_{", [1, 2], [3, 4]), Line("b", [1, 2], [5, 6], ([4, 5], [6, 7]))]
    figure = draw(lines, "time", "train/loss")
    (axis,) = figure.axes
    assert [line.get_ydata().tolist() for line in axis.lines] == [[3, 4], [5, 6]]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("seconds of training", "train/loss")
    assert len(axis.collections) == 1
    figure.canvas.draw()


@pytest.mark.parametrize("name", ["_rec", r"a$\frac$c", "$", "_$x_$"])
def test_a_name_is_in_the_legend_as_it_is(name, recwarn):
    pytest.importorskip("matplotlib")
    figure = draw([Line(name, [1, 2], [3, 4])], "steps", METRIC)
    figure.savefig(io.BytesIO())
    (text,) = figure.axes[0].get_legend().get_texts()
    assert text.get_text().replace(r"\$", "$").strip() == name
    assert not [str(warning.message) for warning in recwarn]


def test_what_cannot_be_drawn_is_one_line(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs" / "a", [None])
    assert "a has no rollout/episode_return_mean yet" in refused(capsys, "a")
    assert "did you mean time/t_iter?" in refused(capsys, "a", "--y", "t_iter")
    assert "there are iteration, global_step" in refused(capsys, "a", "--y", "zzzz")
    assert "must end in .png or .svg or .pdf" in refused(capsys, "a", "--out", "a.txt")
    assert "neither b nor runs/b is a run directory" in refused(capsys, "b")
    (tmp_path / "runs" / "a" / "metrics.jsonl").unlink()
    assert "has no metrics.jsonl" in refused(capsys, "a")
    assert not (tmp_path / "curves.png").exists()


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs" / "a", [1.0])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refused(capsys, "a") == "lockstep: error: plot: needs matplotlib; pip install 'lockstep-rl[plot]'"


def test_a_name_with_letters_that_the_font_lacks_is_drawn_without_a_warning(tmp_path, monkeypatch, recwarn):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs" / "名", [1.0, 2.0])
    assert main(["plot", "名"]) == 0
    assert (tmp_path / "curves.png").is_file()
    assert not [str(warning.message) for warning in recwarn if "Glyph" in str(warning.message)]

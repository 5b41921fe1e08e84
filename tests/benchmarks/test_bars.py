"""The picture of the side-by-side benchmark shows what its file holds."""

import json

import pytest

from benchmarks import bars
from benchmarks.bars import RESULTS, draw, figure_of, panels
from benchmarks.cases import ARRAY_CARTPOLE, T1
from benchmarks.learning import digest, texts_of
from benchmarks.report import Results

TEXT = (RESULTS / "peers.json").read_text()
KEPT = json.loads(TEXT)


def test_the_kept_picture_is_of_the_kept_figures():
    said = texts_of((RESULTS / "peers.png").read_bytes())
    assert said["Figures"] == digest(TEXT)


def test_bars_are_the_medians_of_the_file():
    pytest.importorskip("matplotlib")
    drawn = {}
    for axes in (axes for axes in figure_of(KEPT).axes if axes.patches):  # the last places may stay empty
        names = [label.get_text() for label in axes.get_yticklabels()]
        case = axes.get_title(loc="left").partition(":")[0]
        drawn |= {(case, name): bar.get_width() for name, bar in zip(names, axes.patches, strict=True)}
    medians = [row["median"] for row in KEPT["rows"] if row["scaling"] is None and row["median"] is not None]
    of_one_thread = {key for key in drawn if key[1].endswith((" (T2)", " (T3)", " (A1)"))}
    assert sorted(drawn[key] for key in drawn.keys() - of_one_thread) == sorted(medians)
    assert {drawn[key] for key in of_one_thread} <= set(medians)
    fastest = next(row for row in KEPT["rows"] if (row["case"], row["label"]) == ("T1", "Stable-Baselines3"))
    assert drawn["T1", "Stable-Baselines3"] == fastest["median"]


def found(*rows) -> dict:
    return json.loads(json.dumps(Results({"date": "today"}, [T1], rows=list(rows)).as_json()))


def test_a_row_that_failed_has_no_bar(row):
    mine, slow = row(30.0, 31.0, 50.0, ours=True), row(10.0, 10.0, 10.0, label="slow")
    broken = row(20.0, label="broken", failures=["killed"])
    alone = row(99.0, ours=True, scaling="two ranks")
    (panel,) = panels(found(mine, broken, slow, alone))
    assert panel.title == T1.title
    assert [(bar.label, bar.median) for bar in panel.bars] == [("slow", 10.0), ("Lockstep, exact (Gymnasium)", 31.0)]
    assert (panel.bars[1].least, panel.bars[1].most, panel.bars[1].ours) == (30.0, 50.0, True)


def test_on_both_cores_a_faster_peer_with_one_thread_is_drawn(row):
    rows = [row(50.0, case="T2", label="alone"), row(40.0, case="T2x2", label="together")]
    mine = row(99.0, case="T2x2", ours=True)
    assert [bar.label for bar in panels(found(*rows, mine))[1].bars[:-1]] == ["together", "alone (T2)"]
    rows[1].rates = [51.0]
    assert [bar.label for bar in panels(found(*rows, mine))[1].bars[:-1]] == ["together"]


def test_ours_are_told_apart_by_who_steps_the_environments(row):
    rows = [row(1.0, ours=True), row(2.0, ours=True, env=ARRAY_CARTPOLE)]
    rows.append(row(3.0, ours=True, env="CartPole-v1 of EnvPool", label="Lockstep, exact, 2 ranks, EnvPool"))
    (panel,) = panels(found(*rows))
    names = ["Lockstep, exact (Gymnasium)", "Lockstep, exact (arrays)", "Lockstep, exact, 2 ranks, EnvPool"]
    assert [bar.label for bar in panel.bars] == names


def test_other_figures_make_another_picture(tmp_path, row):
    pytest.importorskip("matplotlib")
    text = json.dumps(found(row(1.0)))
    (tmp_path / "peers.json").write_text(text)
    bars.main([str(tmp_path)])
    assert texts_of((tmp_path / "peers.png").read_bytes())["Figures"] == digest(text) != digest(TEXT)
    draw(json.dumps(found()), tmp_path / "none.png")

"""The picture of the side-by-side benchmark shows what its file holds, and pages say it."""

import json
from pathlib import Path

import pytest

from benchmarks import bars
from benchmarks.bars import RESULTS, draw, figure_of, panels
from benchmarks.cases import A1, A1_BOTH, ARRAY_CARTPOLE, T1, T2, T2_BOTH, T3, T3_BOTH, Case
from benchmarks.comparison import Row, ratio
from benchmarks.learning import digest, texts_of
from benchmarks.programs import STRONG, WEAK
from benchmarks.report import Results

ROOT = Path(__file__).parents[2]
TEXT = (RESULTS / "peers.json").read_text()
KEPT = json.loads(TEXT)
ROWS = [Row(**{name: value for name, value in row.items() if name != "median"}) for row in KEPT["rows"]]


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


def gain(one: Case, env: str, two: Case, scaling: str | None = None) -> float:
    """How many times as fast two ranks are as one: the median of the repetitions' ratios."""

    def row(case: Case, label: str, scaling: str | None) -> Row:
        wanted = (case.name, label, env, scaling)
        return next(row for row in ROWS if (row.case, row.label, row.env, row.scaling) == wanted)

    label = "Lockstep, exact" if scaling else "Lockstep, exact, 2 ranks"
    return ratio(row(two, label, scaling), row(one, "Lockstep, exact", None)) or 0.0


def test_pages_say_how_much_faster_two_ranks_were():
    arrays, arrays_each = (gain(T2, ARRAY_CARTPOLE, T2, scaling) for scaling in (STRONG, WEAK))
    objects, objects_each = gain(T2, T2.env, T2_BOTH), gain(T2, T2.env, T2, WEAK)
    page = (ROOT / "docs" / "tutorials" / "several-devices.md").read_text()
    kept = f"([kept figures](../../benchmarks/results/peers.md)) | {arrays:.2f} | {objects:.2f} |\n"
    assert f"| 64 environments {kept}| 64 environments for each rank | {arrays_each:.2f} | {objects_each:.2f} |" in page
    cartpole = f"{min(arrays, objects):.1f} to {max(arrays, objects):.1f} times as fast as one on CartPole"
    others = [gain(T3, T3.env, T3_BOTH), gain(A1, A1.env, A1_BOTH)]
    said = "two ranks were {} with 64 environments, {:.1f} times on HalfCheetah and {:.1f} times on Breakout frames"
    assert said.format(cartpole, *others) in (ROOT / "README.md").read_text()


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

"""The table of docs/results.md and the picture of README.md are those of the figures that are kept."""

import json

import pytest

from benchmarks import learning
from benchmarks.learning import (
    FIGURES,
    PAGE,
    PICTURE,
    ROOT,
    block,
    digest,
    draw,
    every_figure,
    in_short,
    kept,
    number,
    texts_of,
    with_block,
)

TEXT = FIGURES.read_text()
FOUND = json.loads(TEXT)


def test_the_page_has_the_kept_figures():
    page = PAGE.read_text()
    assert page.count(learning.BEGIN) == page.count(learning.END) == 1
    every, changed = every_figure(), every_figure()
    assert every[0] == FOUND
    assert block(every) in page
    changed[-1]["runs"][-1]["final_return"] += 100
    assert block(changed) not in page
    assert with_block(page, block(every)) == page != with_block(page, block(changed))


def test_the_picture_was_drawn_from_the_kept_figures():
    said = texts_of(PICTURE.read_bytes())
    assert said["Figures"] == digest(TEXT), "python -m benchmarks.learning draw"
    assert said["Description"] == in_short(FOUND["facts"])
    assert said["Figures"] != digest(TEXT.replace("500.0", "499.0"))
    assert f"docs/{PICTURE.name}" in (ROOT / "README.md").read_text()


def test_the_figures_name_commit_and_versions():
    assert len(FOUND["facts"]["commit"]) == 40
    assert {"date", "torch", "gymnasium", "mujoco", "numpy", "python", "cpu"} <= FOUND["facts"].keys()


def test_one_seed_is_one_agent_on_any_number_of_ranks():
    runs = [run for run in FOUND["runs"] if (run["environment"], run["seed"]) == learning.RANKS]
    assert {run["world_size"] for run in runs} == {1, 2, 4}
    assert len({run["params_sha256"] for run in runs}) == 1
    assert all(run["returns"] == runs[0]["returns"] for run in runs)


def test_what_is_drawn_names_what_it_was_drawn_from(tmp_path):
    pytest.importorskip("matplotlib")
    other = TEXT.replace(FOUND["facts"]["commit"], "f" * 40)
    draw(other, tmp_path / "a.png")
    said = texts_of((tmp_path / "a.png").read_bytes())
    assert said["Figures"] == digest(other) != digest(TEXT)
    assert "commit fffffff" in said["Description"]


def run_directory(path, **changes):
    path.mkdir()
    summary = {"status": "finished", "environment": "Game-v0", "seed": 1, "world_size": 2, "global_step": 3000}
    summary |= {"final_return": 7.0, "params_sha256": "ab" * 32, "torch": "2.13.0", "mujoco": "not loaded"} | changes
    (path / "summary.json").write_text(json.dumps(summary))
    rows = [{"global_step": n, "rollout/episode_return_mean": None if n < 10 else n / 3} for n in range(1, 301)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_runs_are_kept_with_thinned_curves(tmp_path):
    found = kept([run_directory(tmp_path / "a")], "c" * 40)
    assert found["facts"]["torch"] == "2.13.0"
    assert "mujoco" not in found["facts"]
    (run,) = found["runs"]
    assert (run["steps"][0], run["steps"][-1], run["returns"][-1]) == (10, 300, 100.0)
    assert len(run["steps"]) <= learning.POINTS + 1
    assert json.loads(learning.written(found)) == found
    assert "| Game-v0 | 3,000 | 1 | 7 | 7 | abababab |" in block([found])


def test_an_evaluation_of_the_last_step_is_kept_too(tmp_path):
    run = run_directory(tmp_path / "a", final_return=0.957)
    evaluation = {"global_step": 3000, "episodes": 100, "return_mean": 0.961, "return_std": 0.02}
    (run / learning.EVALUATION).write_text(json.dumps(evaluation))
    found = kept([run, run_directory(tmp_path / "b", environment="Other-v0")], "c" * 40)
    assert "| Game-v0 | 3,000 | 1 | 0.96 | 0.96 | 0.96 ± 0.02 (100 episodes) | abababab |" in block([found])
    assert "| Other-v0 | 3,000 | 1 | 7 | 7 | – | abababab |" in block([found])
    (run / learning.EVALUATION).write_text(json.dumps(evaluation | {"global_step": 2000}))
    with pytest.raises(ValueError, match=r"evaluation\.json is of step 2000, the run's end 3000"):
        kept([run], "c" * 40)


def test_returns_have_the_digits_that_matter():
    assert [number(value) for value in (1550.4, -205.2, 7.0, 0.964, -0.5)] == ["1,550", "-205", "7", "0.96", "-0.50"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"status": "interrupted"}, "only finished runs"), ({"torch": "2.12.0"}, "torch 2.12.0, and")],
)
def test_runs_that_make_no_table_together_are_refused(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        kept([run_directory(tmp_path / "a"), run_directory(tmp_path / "b", **changes)], "c" * 40)

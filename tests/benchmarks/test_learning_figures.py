"""The table of docs/results.md and the picture of README.md are those of the figures that are kept."""

import json

import pytest

from benchmarks import learning
from benchmarks.learning import (
    FIGURES,
    PAGE,
    PICTURE,
    PONG,
    PONG_PICTURE,
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


@pytest.mark.parametrize(
    ("picture", "file", "page"), [(PICTURE, FIGURES, "README.md"), (PONG_PICTURE, PONG, "docs/environments.md")]
)
def test_a_picture_was_drawn_from_the_kept_figures(picture, file, page):
    said, text = texts_of(picture.read_bytes()), file.read_text()
    assert said["Figures"] == digest(text), "python -m benchmarks.learning draw"
    assert said["Description"] == in_short(json.loads(text)["facts"])
    assert said["Figures"] != digest(text.replace("returns", "other"))
    assert picture.name in (ROOT / page).read_text()


@pytest.mark.parametrize(
    ("environment", "said"),
    [("HalfCheetah-v5", "1,443 ± 46"), ("Hopper-v5", "2,383 ± 272"), ("Walker2d-v5", "2,288 ± 572")],
)
def test_cleanrls_figures_are_rounded_and_have_their_spread(environment, said):
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {environment} |")]
    assert rows
    assert all(f"(CleanRL, -v4: {said})" in row for row in rows)


def test_the_page_of_atari_says_what_was_reached():
    (run,) = json.loads(PONG.read_text())["runs"]
    page = (ROOT / "docs/environments.md").read_text()
    found, ranks = run["evaluation"], run["world_size"]
    assert run["minutes"] < 60
    for said in (
        f"in {run['minutes']:.0f} minutes on {ranks} cores",
        f"mean return {run['final_return']:.1f}",
        f"{found['return_mean']:.1f} ± {found['return_std']:.1f} over {found['episodes']} evaluation episodes",
        run["config"],
    ):
        assert said in page, said


def test_learning_is_what_it_was_before_images_and_recurrent_policies_got_faster():
    """HalfCheetah has the same bits; the others, whose bits have changed, learn as well."""
    before, after = (
        {(run["environment"], run.get("config"), run["seed"]): run for run in json.loads(file.read_text())["runs"]}
        for file in (FIGURES.with_name(f"learning-{when}.json") for when in ("before", "after"))
    )
    assert before.keys() == after.keys()
    assert {name for name, *_ in before} == {"HalfCheetah-v5", "tasks:Recall-v0", "BreakoutNoFrameskip-v4"}
    for (name, *_), run in before.items():
        same = run["params_sha256"] == after[run["environment"], run.get("config"), run["seed"]]["params_sha256"]
        assert same == (name == "HalfCheetah-v5")
    for task in {(name, config) for name, config, _ in before}:
        old, new = ([run["final_return"] for key, run in found.items() if key[:2] == task] for found in (before, after))
        assert sum(new) / len(new) > min(old) - 0.05


def test_another_processor_has_agents_of_its_own_which_are_the_same_by_old_and_new_code():
    before, after, first = (
        json.loads(FIGURES.with_name(f"learning-{when}.json").read_text())
        for when in ("family25-before", "family25-after", "after")
    )
    assert before["facts"]["commit"] != after["facts"]["commit"]
    assert before["facts"]["cpu"] == after["facts"]["cpu"] != first["facts"]["cpu"]

    def agents(found: dict) -> dict[int, str]:
        return {run["seed"]: run["params_sha256"] for run in found["runs"] if run["environment"] == "HalfCheetah-v5"}

    assert agents(before) == agents(after)
    assert agents(after).keys() == agents(first).keys() == {1, 2, 3}
    assert not set(agents(after).values()) & set(agents(first).values())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2026-11-23", "family25-avx2"),  # a third processor, by the kernels for AVX2
        (None, "family25-after"),  # the same processor days before, by those for AVX-512
    ],
)
def test_a_cheetahs_agents_are_the_same_by_other_code_and_the_same_kernels(one, other):
    kept = [FIGURES if which is None else FIGURES.with_name(f"learning-{which}.json") for which in (one, other)]
    first, second = (json.loads(file.read_text()) for file in kept)
    assert first["facts"]["commit"] != second["facts"]["commit"]
    agents, others = (
        {run["seed"]: run["params_sha256"] for run in found["runs"] if run["environment"] == "HalfCheetah-v5"}
        for found in (first, second)
    )
    assert agents == others
    assert len(set(agents.values())) == 3


def test_two_processors_have_the_same_agents_by_the_same_kernels():
    second, first = (
        json.loads(FIGURES.with_name(f"learning-{which}.json").read_text()) for which in ("family25-after", "kernels")
    )
    assert second["facts"]["cpu"] != first["facts"]["cpu"]
    assert second["facts"]["commit"] != first["facts"]["commit"]

    def agents(found: dict) -> dict[tuple, str]:
        runs = [run for run in found["runs"] if run["environment"] != "BreakoutNoFrameskip-v4"]
        return {(run["environment"], run.get("config"), run["seed"]): run["params_sha256"] for run in runs}

    assert agents(second) == agents(first)
    assert len(agents(first)) == len(first["runs"]) == 9


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
    [
        ({"status": "interrupted"}, "only finished runs"),
        ({"torch": "2.12.0"}, "torch 2.12.0, and"),
        ({"commit": "d" * 40}, "b: its summary says commit d{40}, not c{40}$"),
        ({"commit": "c" * 40 + "-dirty"}, "b: its summary says commit c{40}-dirty, not c{40}$"),
    ],
)
def test_runs_that_make_no_table_together_are_refused(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        kept([run_directory(tmp_path / "a"), run_directory(tmp_path / "b", **changes)], "c" * 40)


def test_a_run_by_a_config_file_is_held_to_it(trained):
    file = ROOT / "benchmarks/configs/recall-gru.yaml"
    path = trained(file, "--seed", 3, "--log.no-tensorboard").path
    commit = json.loads((path / "summary.json").read_text())["commit"] or "c" * 40
    found = kept([(file, path)], commit, times=True)
    (run,) = found["runs"]
    assert (run["config"], run["seed"]) == ("benchmarks/configs/recall-gru.yaml", 3)
    assert 0 <= run["minutes"] < 60
    with pytest.raises(ValueError, match=r"total_steps is 512, and 16384 by .*recall-gru\.yaml"):
        kept([(file, trained(file, "--total-steps", 512).path)], commit)


def test_a_row_names_its_config_file_ranks_and_minutes():
    run = {"environment": "Game-v0", "seed": 1, "world_size": 2, "global_step": 3000, "final_return": 7.0}
    run |= {"params_sha256": "ab" * 32, "steps": [1], "returns": [7.0], "config": "examples/game.yaml", "minutes": 3.4}
    facts = FOUND["facts"]
    row = "| Game-v0 by [game.yaml](../examples/game.yaml) | 3,000 | 3 on 2 ranks | 1 | 7 | 7 | abababab |"
    assert row in block([{"facts": facts, "runs": [run]}])
    assert "3 on 2 ranks" not in block([{"facts": facts, "runs": [{k: v for k, v in run.items() if k != "minutes"}]}])

"""The page about runs: what its numbers are, that they are the files', and that it says what isn't there."""

import errno
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from made_runs import (
    PARAMS,
    ROWS,
    STATE,
    add_evaluation,
    add_timing,
    add_verification,
    add_video,
    make_group,
    make_run,
    summary_of,
)
from mirror_places import add_step

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from lockstep.core.fingerprint import sha256_of
from lockstep.report import reading
from lockstep.report.charts import EVALUATION, charts_of, extent_of
from lockstep.report.page import json_in_html, page_of, write_report
from lockstep.report.reading import read_run
from lockstep.report.settings import configs_of, differing
from lockstep.report.videos import ROOM
from lockstep.runs.curves import METRIC, interquartile_mean
from lockstep.runs.plot import line_of

OF_THREE = "20 … 100 (with 3 seeds it covers about 75 %)"
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Read(HTMLParser):
    """The text of a page outside of scripts and styles, the tags, and what stands in tables, rows by cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if {"script", "style"} & set(self.open):
            return
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def cells(self, first: str) -> list[str]:
        rows = [[" ".join(cell.split()) for cell in row] for row in self.rows]
        return next(row for row in rows if row and row[0] == first)


def page(*paths):
    return page_of([read_run(path, path.name) for path in paths])


def data_of(text):
    found = re.search(r'<script type="application/json" id="chart-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return {chart["key"]: chart for chart in json.loads(found[1])}


def test_a_run_of_one_shard_is_verified_by_training_it_twice(tmp_path):
    run = make_run(tmp_path / "demo", num_envs=1, num_shards=1)
    assert f"lockstep verify {run} --world-sizes 1,1" in Read(page(run)).text


def test_the_numbers_are_those_of_the_files(tmp_path):
    run = make_run(tmp_path / "demo")
    add_timing(run)
    text = page(run)
    read = Read(text)
    for words in (
        "environment CartPole-v1 seed 0",
        "final return 40.50 mean of the last 100 episodes",
        "best evaluation 80 at step 10,240",
        "environment steps 10,240",
        "wall time 62 min 05 s 2.75 steps/s",  # over both sessions; 1,234.5 is of the last
        f"params_sha256 {PARAMS}",
        f"state_sha256 {STATE}",
        "git commit 0123456789abcdef-dirty",
        "lockstep train CartPole-v1 --nproc 2",
        f"lockstep train {run}/config.json",
        "cpu Some Processor (family 1)",
        "torch 2.13.0+cpu",
        "started 2026-01-31 12:00 UTC",
        "world size 1 (iterations 1 to 10), then 2 (iterations 11 to 40)",
        "40 iterations took 40.0 s, the first one 1.0 s of it",
        "Nobody has compared world sizes for this run.",
        f"lockstep verify {run} --world-sizes 1,2,4",
        "No row of metrics.jsonl is missing.",
        "Its settings are those of the preset of CartPole-v1.",
    ):
        assert words in read.text, words
    assert read.cells("rollout") == ["rollout", "8.0 s", "20 %"]
    assert read.cells("inside collectives") == ["inside collectives", "4.0 s", "10 %"]
    assert read.cells("1")[2:] == ["3.6 s", "900 ms", "1.5 s", "1.2 s", "6.0 kB", "209.7 MB"]


def test_a_run_of_one_iteration_has_one(tmp_path):
    run = make_run(tmp_path / "demo")
    first = (run / "metrics.jsonl").read_text().splitlines()[0]
    (run / "metrics.jsonl").write_text(first + "\n")
    assert "1 iteration took 1.0 s." in Read(page(run)).text


def test_the_rank_that_the_others_waited_for_is_named_also_if_it_is_always_the_same(tmp_path):
    run = make_run(tmp_path / "demo")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for slow, said in (
        (lambda n: 3, "Others waited for rank 3 in 100 % of the iterations."),
        (lambda n: n % 4 // 3, "Others waited for rank 0 in 75 %, rank 1 in 25 % of the iterations."),
    ):
        told = [row | {"time/waited_for": slow(n)} for n, row in enumerate(rows)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
        assert said in Read(page(run)).text
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "Others waited" not in Read(page(run)).text


def test_waiting_is_counted_among_the_iterations_that_know_of_it(tmp_path):
    """On one rank nobody waits."""
    run = make_run(tmp_path / "demo")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [row | ({"time/waited_for": 1} if n >= 36 else {}) for n, row in enumerate(rows)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    assert "Others waited for rank 1 in 10 % of the iterations." in Read(page(run)).text


def test_a_part_in_which_the_first_rank_spent_no_time_is_shown_and_what_was_not_measured_is_blank(tmp_path):
    run = make_run(tmp_path / "demo")
    rows = [{"iteration": 1, "t_rollout": [1.0, 0.6], "t_wait": [0.0, 0.4], "t_iter": [1.0, 1.0]}]
    (run / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = Read(page(run))
    assert [" ".join(cell.split()) for cell in next(row for row in read.rows if row[0] == "rank")][3:5] == [
        "rollout",
        "waiting",
    ]
    assert read.cells("0")[2:] == ["1.0 s", "1.0 s", "0 ms", "–", "–"]
    assert read.cells("1")[2:] == ["1.0 s", "600 ms", "400 ms", "–", "–"]


def test_the_times_of_a_group_are_those_of_the_seed_that_is_named(tmp_path):
    group = make_group(tmp_path / "many")
    (group / "seed_0" / "metrics.jsonl").write_text("")
    add_timing(group / "seed_1")
    for name in ("checkpoints", "summary.json"):
        path = group / "seed_0" / name
        path.unlink() if path.is_file() else None
    read = Read(page(group))
    assert "(rows of seed_1)" in read.text
    assert "Each rank, by timing.jsonl" in read.text
    assert f"lockstep eval {group}/seed_1 --episodes 100 --json {group}/seed_1/evaluation.json" in read.text
    assert f"lockstep eval {group}/seed_0" not in read.text


def test_curves_are_the_rows(tmp_path):
    charts = data_of(page(make_run(tmp_path / "demo")))
    (line,) = charts[METRIC]["series"]
    assert line["y"] == [float(n) for n in range(1, ROWS + 1)]
    assert line["x"]["steps"] == [256.0 * n for n in range(1, ROWS + 1)]
    assert line["x"]["time"] == [float(n) for n in range(1, ROWS + 1)]
    (line,) = charts[EVALUATION]["series"]
    assert (line["x"]["iterations"], line["y"]) == ([10, 20, 30, 40], [20, 40, 60, 80])
    assert line["band"] == [[18.5, 38.5, 58.5, 78.5], [21.5, 41.5, 61.5, 81.5]]
    assert charts["my/metric"]["series"][0]["y"][:2] == [2.0, 4.0]
    assert "train/approx_kl" not in charts


def test_every_chart_is_a_picture_with_words_too(tmp_path):
    text = page(make_run(tmp_path / "demo"))
    pictures = [attrs for tag, attrs in Read(text).tags if tag == "svg"]
    assert len(pictures) == len(data_of(text))
    words = pictures[0]["aria-label"]
    assert words == (
        "Mean return of the last 100 episodes. demo: 1 at step 256, highest 40 at step 10,240, last 40 at step 10,240."
    )
    ids = [attrs["id"] for _, attrs in Read(text).tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def with_peak(run):
    """Makes a run's record long, with one high and one low row that are at no even distance."""
    rows = [{"iteration": n, "global_step": 256 * n, METRIC: 100.0, "train/approx_kl": 0.01} for n in range(1, 3001)]
    rows[1501] |= {METRIC: 480.0, "train/approx_kl": 9.5}
    rows[740] |= {METRIC: -3.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_peaks_of_a_long_run_are_drawn_and_told(tmp_path):
    run, group = make_run(tmp_path / "demo"), make_group(tmp_path / "many")
    for path in (run, *sorted(group.glob("seed_*"))):
        with_peak(path)
    for path, most in ((run, {METRIC: 500, "train/approx_kl": 200}), (group, {METRIC: 500, "train/approx_kl": 200})):
        text = page(path)
        for key, points in most.items():
            line = data_of(text)[key]["series"][0]
            assert len(line["y"]) <= points
            assert max(line["y"]) == (480.0 if key == METRIC else 9.5)
            assert 1502 in line["x"]["iterations"]
        assert min(data_of(text)[METRIC]["series"][0]["y"]) == -3.0
        assert "100 at step 256, highest 480 at step 384,512, last 100 at step 768,000." in text
        assert "0.01 at step 256, highest 9.5 at step 384,512, last 0.01 at step 768,000." in text


def test_a_policy_that_was_cloned_has_its_curves_over_its_epochs(tmp_path):
    clone, run = (make_run(tmp_path / name) for name in ("clone", "run"))
    rows = [{"iteration": n, "global_step": 0, "clone/loss": 8.0 / n} for n in (1, 2, 4)]
    (clone / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page(clone, run)
    chart, other = (data_of(text)[key] for key in ("clone/loss", METRIC))
    assert (chart["over"], chart["series"][0]["x"]["iterations"]) == ("iterations", [1, 2, 4])
    assert other["over"] == "steps"
    charts = charts_of([read_run(path, path.name) for path in (clone, run)])
    assert (extent_of(charts), extent_of(charts, "iterations")) == ((256, 10240), (1, 4))
    words = "clone/loss. clone: 8 at iteration 1, highest 8 at iteration 1, last 2 at iteration 4."
    assert words in Read(text).text
    assert f'aria-label="{words}"' in text
    assert ">iterations</text>" in text


def test_several_seeds_are_a_mean_with_an_interval_and_each_has_its_proof(tmp_path):
    text = page(make_group(tmp_path / "many"))
    (line,) = data_of(text)[METRIC]["series"]
    assert line["label"] == "many (3 seeds)"
    assert line["seeds"] == [[scale * n for n in range(1, ROWS + 1)] for scale in (1.0, 2.0, 3.0)]
    assert line["y"][-1] == interquartile_mean(np.array([40.0, 80.0, 120.0]))
    low, high = line["band"]
    assert low[-1] < line["y"][-1] < high[-1]
    read = Read(text)
    assert f"final return 60 interquartile mean over 3 seeds, 95 % interval {OF_THREE}" in read.text
    assert [read.cells(f"seed_{seed}")[1:] for seed in range(3)] == [[f"{seed}f" * 32, STATE] for seed in range(3)]
    assert read.text.count("Nobody has compared world sizes") == read.text.count("shards 8") == 1
    assert f"lockstep train {tmp_path}/many/config.json --seeds 0-2" in read.text


def test_seeds_whose_proofs_differ_are_told_apart(tmp_path):
    group = make_group(tmp_path / "many")
    add_verification(group / "seed_1")
    read = Read(page(group))
    assert "seed_0, seed_2 Nobody has compared world sizes for these runs." in read.text
    assert "seed_1 Verified on" in read.text
    assert "1 of 3 verified" in read.text


def test_seeds_that_are_not_equally_far_are_not_said_to_be(tmp_path):
    group = make_group(tmp_path / "many")
    assert "environment steps 10,240 of each of 3 seeds" in Read(page(group)).text
    (group / "seed_1" / "summary.json").write_text(json.dumps(summary_of(global_step=512)))
    assert "environment steps 512 … 10,240 of 3 seeds" in Read(page(group)).text


def test_a_seed_that_failed_is_neither_in_the_result_nor_in_the_curves(tmp_path):
    """The group's summary is of the seeds that have ended."""
    group = make_group(tmp_path / "many", seeds=4)
    (group / "seed_2" / "summary.json").unlink()
    rows = (group / "seed_2" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (group / "seed_2" / "metrics.jsonl").write_text("".join(rows[:3]))
    listed = [{"seed": seed, "directory": f"seed_{seed}"} for seed in (0, 1, 3)]
    summary = json.loads((group / "summary.json").read_text()) | {"num_seeds": 3, "seeds": listed}
    (group / "summary.json").write_text(json.dumps(summary))
    text = page(group)
    (line,) = data_of(text)[METRIC]["series"]
    assert (line["label"], len(line["y"])) == ("many (3 of 4 seeds)", ROWS)
    assert line["seeds"] == [[scale * n for n in range(1, ROWS + 1)] for scale in (1.0, 2.0, 4.0)]
    assert f"interquartile mean over 3 of 4 seeds, 95 % interval {OF_THREE}" in Read(text).text
    assert "environment steps 768 … 10,240 of 4 seeds" in Read(text).text
    both = Read(page(group, make_run(tmp_path / "one")))
    assert both.cells("many")[5] == f"60interquartile mean over 3 of 4 seeds95 %: {OF_THREE}"
    for seed in (1, 3):
        (group / f"seed_{seed}" / "summary.json").unlink()
    (group / "summary.json").write_text(json.dumps(summary | {"final_return_interval": None, "seeds": listed[:1]}))
    assert "final return 60 of seed_0 (1 of 4 seeds)" in Read(page(group)).text
    assert data_of(page(group))[METRIC]["series"][0]["label"] == "many (1 of 4 seeds)"


def listed(group, *seeds):
    """Has a group's summary list these seeds, as they are now."""
    summary = json.loads((group / "summary.json").read_text())
    ends = {seed: json.loads((group / f"seed_{seed}" / "summary.json").read_text()) for seed in seeds}
    rows = [
        {"seed": seed, "directory": f"seed_{seed}"} | {key: own[key] for key in ("global_step", "state_sha256")}
        for seed, own in ends.items()
    ]
    (group / "summary.json").write_text(json.dumps(summary | {"seeds": rows}))


def trained_further(group, seed, **more):
    own = json.loads((group / f"seed_{seed}" / "summary.json").read_text())
    (group / f"seed_{seed}" / "summary.json").write_text(json.dumps(own | {"state_sha256": "c3" * 32} | more))


def test_the_result_of_a_group_is_not_that_of_before_a_seed_was_trained_further(tmp_path):
    group = make_group(tmp_path / "many")
    summary = json.loads((group / "summary.json").read_text())
    (group / "summary.json").write_text(json.dumps(summary | {"status": "stopped by signal 15", "global_step": 512}))
    listed(group, 0, 1, 2)
    before = Read(page(group)).text
    assert f"final return 60 interquartile mean over 3 seeds, 95 % interval {OF_THREE}" in before
    assert "stopped by signal 15" in before
    for seed in (0, 1, 2):
        trained_further(group, seed, final_return=10.0 * seed)
    read = Read(page(group))
    assert "final return 10 interquartile mean over 3 seeds best evaluation" in read.text
    assert "environment steps 10,240 of each of 3 seeds" in read.text
    assert "wall time – – steps/s" in read.text  # the group's is without what they were trained since
    assert "lockstep train CartPole-v1 --nproc 2" in read.text
    assert "stopped by signal 15" not in read.text


def test_a_seed_that_failed_is_in_the_curves_once_it_was_finished_by_itself(tmp_path):
    group = make_group(tmp_path / "many")
    listed(group, 0, 2)
    own = json.loads((group / "seed_1" / "summary.json").read_text())
    for step, label in ((512, "many (2 of 3 seeds)"), (own["global_step"], "many (3 seeds)")):
        (group / "seed_1" / "summary.json").write_text(json.dumps(own | {"global_step": step}))
        assert data_of(page(group))[METRIC]["series"][0]["label"] == label
        assert line_of(group, "many", "steps", METRIC).label == label


def test_few_episodes_are_not_said_to_be_a_hundred(tmp_path):
    assert "mean of all 3 episodes" in Read(page(make_run(tmp_path / "demo", summary_of(episodes=3)))).text


def test_metrics_of_an_environment_have_charts_and_own_rows_have_none(tmp_path):
    run = make_run(tmp_path / "demo")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    more = {"rollout/metrics/distance": 0.5, "rollout/episodes": 3, "eval/return_max": 90.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | more) + "\n" for row in rows))
    charts = data_of(page(run))
    assert charts["rollout/metrics/distance"]["series"][0]["y"] == [0.5] * ROWS
    assert not {"rollout/episodes", "eval/return_max"} & set(charts)


def test_users_metrics_have_charts_whatever_their_names_begin_with(tmp_path):
    run = make_run(tmp_path / "demo")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    mine = ["iteration_cost", "global_step_size", "train/mine", "eval/mine", "mine"]
    more = dict.fromkeys(mine, 1.0) | {"train/stopped_by_kl": 4, "time/fps": 9.0, "eval/length_mean": 3.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | more) + "\n" for row in rows))
    charts = data_of(page(run))
    assert [key for key in charts if key in more] == mine
    assert not {"iteration", "global_step"} & set(charts)


def test_a_run_with_an_object_as_environment_is_told_what_works(tmp_path):
    run = make_run(tmp_path / "demo", env={"id": "python:Reach2D"})
    text = Read(page(run)).text
    assert f"lockstep.train(Reach2D, config='{run}/config.json')" in text
    assert (
        f"json.dump(lockstep.load_run('{run}', env=Reach2D).evaluate(100), open('{run}/evaluation.json', 'w'))" in text
    )
    assert f"lockstep eval {run}" not in text
    assert f"lockstep verify {run}" not in text
    assert f"lockstep train {run}" not in text


def test_charts_are_over_the_same_steps(tmp_path):
    charts = charts_of([read_run(make_run(tmp_path / "demo"), "demo")])
    evaluations = next(chart for chart in charts if chart.key == EVALUATION)
    assert evaluations.series[0].x["steps"][0] == 2560
    assert extent_of(charts) == (256, 10240)
    assert extent_of([evaluations]) == (2560, 10240)


def test_evaluations_and_interruptions_of_several_seeds_are_each_ones_own(tmp_path):
    group = make_group(tmp_path / "many")
    add_evaluation(group / "seed_1", [1.0, 2.0, 3.0, 4.0, 10.0])
    restart = {"time": "2026-01-31T13:00:00+00:00", "why": "rank 1 was killed", "ranks_before": 2, "ranks_after": 1}
    facts = summary_of(seed=2, restarts=[restart | {"from": "disk", "iteration": 4, "iterations_again": 1}])
    (group / "seed_2" / "summary.json").write_text(json.dumps(facts | {"missing_rows": [[4, 6]]}))
    read = Read(page(group))
    for seed, mean in enumerate((80, 160, 240)):
        assert f"seed_{seed}: last and best of training, step 10,240 episodes 8 mean return {mean}" in read.text
    assert "seed_1: evaluation.json, step 512, sampled actions episodes 5 mean return 4" in read.text
    assert "For the distribution over episodes" not in read.text
    incident = ["seed_2", "2026-01-31 13:00 UTC", "rank 1 was killed", "2 → 1", "disk", "4", "1"]
    assert incident in [[" ".join(cell.split()) for cell in row] for row in read.rows]
    assert "seed_2: iterations without a row in metrics.jsonl" in read.text
    assert "No rank had to be started again" not in read.text
    assert "No row of metrics.jsonl is missing" not in read.text


def test_settings_that_are_not_the_presets_are_told(tmp_path):
    preset = json.loads((make_run(tmp_path / "plain") / "config.json").read_text())
    read = Read(page(make_run(tmp_path / "demo", seed=7, num_steps=64, env={"id": "CartPole-v1"})))
    assert read.cells("seed") == ["seed", "7", "0"]
    assert read.cells("num_steps") == ["num_steps", "64", str(preset["num_steps"])]
    assert "What differs from the preset of CartPole-v1" in read.text
    assert not any(row and row[0] == "total_steps" for row in read.rows)


def test_what_is_secret_in_a_config_is_not_on_the_page(tmp_path):
    """A page is passed on; the config stays with the run, which goes on by it."""
    runs = [
        make_run(
            tmp_path / name,
            env={"id": "tasks:Mine-v0", "kwargs": {"api_key": f"geheim-{name}", "size": size}},
            checkpoint={"mirror": f"ftp://me:geheim-{name}@host/runs"},
        )
        for name, size in (("a", 3), ("b", 4))
    ]
    add_verification(runs[0], config=json.loads((runs[1] / "config.json").read_text()))
    assert "geheim-a" in (runs[0] / "config.json").read_text()
    for text in (page(runs[0]), page(*runs)):
        assert "geheim" not in text
        assert "ftp://***@host/runs" in text
    hidden = '{"api_key": "***", "size": %d}'
    assert Read(page(*runs)).cells("env.kwargs") == ["env.kwargs", hidden % 3, hidden % 4]


def test_an_evaluation_beside_the_run_is_a_distribution(tmp_path):
    run = make_run(tmp_path / "demo")
    assert "For the distribution over episodes: lockstep eval" in Read(page(run)).text
    add_evaluation(run, [1.0, 2.0, 3.0, 4.0, 10.0])
    (run / "other.json").write_text('{"no": "evaluation"}')
    read = Read(page(run))
    assert "evaluation.json, step 512, sampled actions episodes 5 mean return 4" in read.text
    assert "mean return 4 lower quartile 2 median 3 upper quartile 4 mean length 7" in read.text
    assert "For the distribution over episodes" not in read.text
    assert "other.json" not in read.text
    labels = [attrs.get("aria-label") or "" for tag, attrs in read.tags if tag == "svg"]
    assert labels[-1].startswith("Returns of the episodes of evaluation.json: episodes 5, mean return 4")


def test_an_evaluation_of_another_policy_is_not_shown_as_the_runs_own(tmp_path):
    run = make_run(tmp_path / "demo")
    for name, policy in (("a", "random"), ("b", "runs/other"), ("c", "somewhere/demo/checkpoints/step_512")):
        add_evaluation(run, [1.0, 2.0, 3.0])
        facts = json.loads((run / "evaluation.json").read_text()) | {"policy": policy, "environment": "CartPole-v1"}
        facts |= {"global_step": 0, "stochastic": None} if policy == "random" else {}
        (run / f"{name}.json").write_text(json.dumps(facts))
    (run / "evaluation.json").write_text(json.dumps(facts | {"environment": "MountainCar-v0"}))
    read = Read(page(run))
    assert "MountainCar" not in read.text
    assert "evaluation.json, step" not in read.text
    own, random, other = (
        read.text.index(words)
        for words in (
            "c.json, step 512, sampled actions episodes 3",
            "a.json: policy random episodes 3",
            "b.json: policy runs/other, step 512, sampled actions episodes 3",
        )
    )
    assert own < random < other
    assert "For the distribution over episodes" not in read.text
    (run / "c.json").unlink()
    assert "For the distribution over episodes" in Read(page(run)).text


def test_an_evaluation_is_the_runs_own_by_its_parameters_whatever_the_names_are(tmp_path):
    run = make_run(tmp_path / "seed_0")
    add_evaluation(run, [1.0, 2.0, 3.0])
    facts = json.loads((run / "evaluation.json").read_text()) | {"environment": "CartPole-v1"}
    (run / "evaluation.json").unlink()
    last, kept = facts | {"global_step": 256 * ROWS}, sha256_of({"policy/w": np.full(3, 512, np.float32)})
    add_step(run, 512)
    for name, more in {
        "a": last | {"policy": "before", "params_sha256": PARAMS},
        "b": last | {"policy": "runs/other/seed_0", "params_sha256": STATE},
        "c": facts | {"policy": "before/checkpoints/step_512", "params_sha256": kept},
        "d": facts | {"policy": "other/seed_0/checkpoints/step_512", "params_sha256": STATE},
    }.items():
        (run / f"{name}.json").write_text(json.dumps(more))
    read = Read(page(run))
    for words in (
        "a.json, step 10,240",
        "b.json: policy runs/other/seed_0, step 10,240",
        "c.json, step 512",
        "d.json: policy other/seed_0/checkpoints/step_512, step 512",
    ):
        assert words in read.text
    shutil.rmtree(run / "checkpoints")  # whose step it was can't be told any more
    read = Read(page(run))
    assert "c.json: policy before/checkpoints/step_512, step 512" in read.text
    assert "d.json, step 512" in read.text


@pytest.mark.parametrize("value", [10**400, 1.7e308, -1.7e308, 1e299], ids=["int", "max", "min", "drawn"])
def test_numbers_that_can_not_be_drawn_are_left_out(value, tmp_path):
    run = make_run(tmp_path / "demo")
    add_evaluation(run, [1.0, 2.0])
    facts = json.loads((run / "evaluation.json").read_text())
    facts["per_episode"]["return"][0] = value
    (run / "evaluation.json").write_text(json.dumps(facts))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[3] |= {METRIC: value, "my/metric": -value, "train/entropy": value}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page(run)
    assert len(data_of(text)[METRIC]["series"][0]["y"]) == ROWS - (value != 1e299)
    assert "evaluation.json" not in re.sub("--json [^<]*", "", Read(text).text)


def test_the_newest_video_is_in_the_page_as_far_as_there_is_room(tmp_path):
    run = make_run(tmp_path / "demo")
    add_video(run, 256)
    add_video(run, 1024, size=ROOM)
    (run / "videos" / "step_2048.mp4").symlink_to("/etc/hostname")
    (run / "videos" / "step_4096.mp4").write_bytes(b"something else")
    read = Read(page(run))
    assert "An episode at step 1,024" in read.text
    assert "too large for this page" in read.text
    assert not [tag for tag, _ in read.tags if tag == "video"]
    (run / "videos" / "step_1024.mp4").unlink()
    (video,) = [attrs for tag, attrs in Read(page(run)).tags if tag == "video"]
    assert (video["src"] or "").startswith("data:video/mp4;base64,AAAAIGZ0eXBpc29t")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "Verified on 2026-02-01 08:00 UTC: the first 5 iterations"),
        ({"iterations": 1}, "UTC: the first iteration of this config was trained on each world size"),
        ({"equal": False, "iterations": 1}, "UTC: of 1 iteration on each world size"),
        ({"equal": False}, "Not verified on 2026-02-01"),
        ({"world_sizes": [{"label": "1", "equal": True}]}, "Not verified on"),
        ({"config": {"seed": 9}}, "is of another config than this run's"),
        ({"config": None}, "is of another config than this run's"),
        ({"machine": {"torch": "9"}}, "or its packages differed when it was verified: torch 9 there, 2.13.0+cpu here"),
    ],
)
def test_what_verify_said_is_told(tmp_path, more, said):
    run = make_run(tmp_path / "demo")
    add_verification(run, **more)
    assert said in Read(page(run)).text


def test_metrics_that_were_not_compared_are_named(tmp_path):
    run, other = make_run(tmp_path / "all"), make_run(tmp_path / "some")
    add_verification(run)
    kept = json.loads((run / "verify.json").read_text())["world_sizes"]
    add_verification(other, world_sizes=[row | {"not_compared": ["eval/return_mean", "own"]} for row in kept])
    assert "every tensor and metric had the same bytes" in (text := Read(page(run)).text)
    assert "Not compared" not in text
    assert "every tensor and every metric that was compared had the same bytes" in (text := Read(page(other)).text)
    assert "both have them: eval/return_mean, own." in text


def without_new_settings(run):
    """Takes settings out of a config, as a version that didn't have them yet would have written it."""
    config = json.loads((run / "config.json").read_text())
    del config["collective_timeout"], config["ppo"]["clip_schedule"], config["log"]["console"]
    (run / "config.json").write_text(json.dumps(config))
    return run


def test_a_verification_by_a_version_with_more_settings_is_of_the_same_config(tmp_path):
    run = make_run(tmp_path / "demo")
    add_verification(run)
    without_new_settings(run)
    text = Read(page(run)).text
    assert "Verified on 2026-02-01 08:00 UTC: the first 5 iterations" in text
    assert "of another config" not in text


def test_settings_that_an_older_version_did_not_have_do_not_differ(tmp_path):
    old = read_run(without_new_settings(make_run(tmp_path / "old")), "old")
    new = read_run(make_run(tmp_path / "new", seed=7), "new")
    group = read_run(make_group(tmp_path / "group"), "group")
    assert differing(configs_of([old, new, group])) == [("seed", [old.config["seed"], 7, "0–2"])]
    other = make_run(tmp_path / "other")
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(json.dumps(json.loads(text) | {"setting_of_tomorrow": 1}))
    assert differing([{"env": {"kwargs": {"hard": 1}}}, {"env": {"kwargs": {"hard": True}}}])
    rows = differing(configs_of([read_run(other, "other"), new]))
    assert ("setting_of_tomorrow", [1, "–"]) in rows
    (other / "config.json").write_text("")
    assert ("seed", ["–", 7]) in differing(configs_of([read_run(other, "other"), new]))


def test_what_has_left_the_promise_is_told(tmp_path):
    read = Read(page(make_run(tmp_path / "demo", reduction="fast", sync_period=4)))
    assert "Outside of the promise: reduction fast" in read.text
    assert "Outside of the promise: sync_period 4" in read.text
    assert "Outside of the promise" not in Read(page(make_run(tmp_path / "exact"))).text


def test_a_run_whose_schedules_were_stretched_is_not_said_to_come_again(tmp_path):
    run = make_run(tmp_path / "demo", summary_of(lengths=[{"global_step": 256, "was": 1024, "is": 2048}]))
    add_verification(run)
    read = Read(page(run))
    assert "Outside of the promise: total_steps was 1024 until step 256 and is 2048 since" in read.text
    assert "Of this config, but not the same again" in read.text
    assert "is of another config than this run's" in read.text
    whole = Read(page(make_run(tmp_path / "whole"))).text
    assert "The same agent again" in whole
    assert "Of this config, but" not in whole


def test_one_seed_is_no_mean_and_has_no_interval(tmp_path):
    group = make_group(tmp_path / "many")
    for seed in ("seed_1", "seed_2"):
        shutil.rmtree(group / seed)
    assert json.loads((group / "summary.json").read_text())["final_return_interval"] == [20.0, 100.0]
    text = page(group)
    assert data_of(text)[METRIC]["series"][0]["label"] == "many (1 seed)"
    read = Read(text)
    assert "final return 60 of one seed" in read.text
    assert not any(words in read.text for words in ("interquartile", "95 % interval", "1 seeds"))
    assert Read(page(group, make_run(tmp_path / "one"))).cells("many")[5] == "60"


def test_interruptions_are_told(tmp_path):
    restart = {"time": "2026-01-31T13:00:00+00:00", "why": "rank 1 was killed", "ranks_before": 2, "ranks_after": 1}
    restart |= {"from": "memory", "iteration": 17, "iterations_again": 3}
    summary = summary_of(restarts=[restart], restarted_environments=[3, 5], missing_rows=[[4, 6]])
    read = Read(page(make_run(tmp_path / "demo", summary)))
    wanted = ["2026-01-31 13:00 UTC", "rank 1 was killed", "2 → 1", "memory", "17", "3"]
    assert read.cells(wanted[0]) == wanted
    assert "couldn't be restored exactly: [3, 5]" in read.text
    assert "first and last of each stretch: [[4, 6]]" in read.text


def test_runs_are_compared_on_one_page(tmp_path):
    runs = [make_run(tmp_path / "one"), make_run(tmp_path / "two", summary_of(final_return=7.0), scale=2.0, seed=5)]
    text = page(*runs, make_group(tmp_path / "many"))
    read = Read(text)
    assert [line["label"] for line in data_of(text)[METRIC]["series"]] == ["one", "two", "many (3 seeds)"]
    assert read.cells("two")[1:6] == ["CartPole-v1", "5", "finished", "not verified", "7"]
    assert read.cells("many")[5] == f"60interquartile mean95 %: {OF_THREE}"
    assert read.cells("seed") == ["seed", "0", "5", "0–2"]
    assert not any(row and row[0] == "num_envs" for row in read.rows[:12])
    assert len([1 for tag, attrs in read.tags if tag == "details" and attrs.get("class") == "run"]) == 3


def test_a_run_that_goes_on_or_has_nothing_yet_has_a_page(tmp_path):
    run = make_run(tmp_path / "demo")
    (run / "summary.json").unlink()
    read = Read(page(run))
    assert "ended without a summary" in read.text
    assert "params_sha256 not known before the run ends" in read.text
    assert "environment steps 10,240" in read.text
    (run / "metrics.jsonl").unlink()
    read = Read(page(run))
    assert "No iteration has been recorded yet." in read.text
    assert "No iteration has been timed." in read.text
    (run / "config.json").write_text("{ torn")
    read = Read(page(run))
    assert "config.json is damaged" in read.text


def test_a_run_of_an_older_version_has_a_page(tmp_path):
    old = {"status": "finished", "global_step": 10240, "final_return": 3.25, "params_sha256": PARAMS, "world_size": 1}
    run = make_run(tmp_path / "old", old)
    rows = [{"iteration": 1, "global_step": 256, METRIC: None}, {"iteration": 2, "global_step": 512, METRIC: 5.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn')
    text = page(run)
    assert data_of(text)[METRIC]["series"][0]["y"] == [5.0]
    assert "final return 3.25" in Read(text).text


NASTY = "<script>alert(1)</script>"


def test_what_files_say_is_text(tmp_path):
    summary = summary_of(
        status=NASTY, command=["lockstep", NASTY], commit=NASTY, params_sha256=NASTY, torch=NASTY, cpu='"><img src=x>'
    )
    summary |= {"restarts": [{"why": NASTY, "from": [NASTY]}], "missing_rows": [NASTY], "best_evaluation": NASTY}
    run = make_run(tmp_path / '"><script>', summary, env={"id": NASTY, "kwargs": {NASTY: "</script><b>"}})
    row = {"iteration": 41, "global_step": 1, NASTY: 5, "</script>": 6, METRIC: 10**400, "time/world_size": NASTY}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    add_verification(run, verified=NASTY, iterations=NASTY, world_sizes=[{"label": NASTY, "difference": NASTY}])
    (run / "config.json").write_text((run / "config.json").read_text().replace("CartPole", "\\ud800"))
    text = write_report([(run, run.name), (make_group(tmp_path / "many"), NASTY)], tmp_path / "page.html").read_text()
    read = Read(text)
    scripts = [attrs for tag, attrs in read.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "chart-data"}, {}, {}]
    assert not [tag for tag, _ in read.tags if tag in ("img", "b")]
    assert NASTY in read.text
    assert all("on" not in {name[:2] for name in attrs} for _, attrs in read.tags)
    assert data_of(text)[NASTY]["series"][0]["y"] == [5.0]


def test_a_page_that_is_put_together_without_care_is_found():
    assert json.loads(json_in_html([NASTY, "<!--", "a & b"])) == [NASTY, "<!--", "a & b"]
    assert not set("<>&") & set(json_in_html([NASTY, "<!--", "a & b"]))
    careless = f'<p>{NASTY}</p><script id="chart-data">{json.dumps([NASTY])}</script>'
    assert careless.count("<script>") == 2


def test_nothing_that_the_page_names_is_fetched(tmp_path):
    read = Read(page(make_run(tmp_path / "demo")))
    named = [attrs[key] for tag, attrs in read.tags for key in ("src", "href", "xlink:href") if attrs.get(key)]
    outside = [name for name in named if not str(name).startswith(("#", "data:"))]
    assert outside == ["https://github.com/leeoniya/uPlot"]
    assert [tag for tag, attrs in read.tags if outside[0] in attrs.values()] == ["a"]
    (policy,) = [a["content"] for tag, a in read.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert (policy or "").startswith("default-src 'none'; script-src 'sha256-")


FILES = ("summary.json", "metrics.jsonl", "timing.jsonl", "verify.json", "videos/step_512.mp4")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_can_not_be_read_is_one_problem_on_the_page_of_the_rest(tmp_path, monkeypatch, name):
    run = make_run(tmp_path / "demo")
    add_timing(run)
    add_verification(run)
    for step in (256, 512):
        add_video(run, step)

    def refusing(method):
        def wrapped(path, *given, **named):
            if path == run / name:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return method(path, *given, **named)

        return wrapped

    for method in ("open", "read_bytes", "read_text"):
        monkeypatch.setattr(Path, method, refusing(getattr(Path, method)))
    text = write_report([(run, "demo")], tmp_path / "page.html").read_text()
    assert re.findall(r'<p class="problem">(.*)</p>', text) == [f"{run / name} can&#39;t be read: Permission denied"]
    assert ("An episode at step 256" in text) == (name == FILES[-1])


def test_a_directory_that_can_not_be_read_is_not_taken_for_the_page(tmp_path, monkeypatch):
    run = make_run(tmp_path / "demo")

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(reading, "seeds_in", refuse)
    with pytest.raises(ValueError, match=f"^report: {run} can't be read: Permission denied$"):
        write_report([(run, "demo")], tmp_path / "page.html")


def test_a_file_that_can_not_be_written_is_one_line(tmp_path):
    run = make_run(tmp_path / "demo")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"report: .*page.html can't be written: File exists"):
        write_report([(run, "demo")], tmp_path / "file" / "page.html")


def test_a_config_that_was_edited_by_hand_is_a_problem_and_not_verified(tmp_path):
    run = make_run(tmp_path / "demo", seed=5)
    add_verification(run)
    assert "Verified on 2026-02-01" in Read(page(run)).text
    checkpoint = run / "checkpoints" / "step_512"
    checkpoint.mkdir(parents=True)
    config = json.loads((run / "config.json").read_text())
    manifest = {"format": 1, "files": {}, "step": 512, "config": config | {"total_steps": 999}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert "Verified on 2026-02-01" in Read(page(run)).text
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"config": config | {"seed": 0}}))
    text = Read(page(run)).text
    said = f"seed: {run / 'config.json'} says 5, but it was 0 when step_512 was written"
    assert text.count(said) == 2
    assert f"is of another config than this run's: {said}" in text
    assert "Verified on" not in text

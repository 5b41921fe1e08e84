"""``lockstep bench`` as a user meets it: what it leaves, what it goes on with, what it refuses."""

import csv
import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from command_line import (
    NEEDS_PROC,
    SMALL,
    assert_no_orphans,
    ending,
    error_line,
    lockstep,
    running,
    wait_until,
)

from lockstep.cli import main
from lockstep.commands import bench

SHORT = ("--world-sizes", "1,2", "--repeats", 1, "--warmup-iters", 1, "--iters", 3)
SWEEP = ("bench", "CartPole-v1", *SMALL, *SHORT)
JOBS = ("ranks_1_repeat_1", "copies_2_repeat_1", "ranks_2_repeat_1")
PARTS = ("t_rollout", "t_learn", "t_comm", "t_wait", "t_other")


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A folder with a finished sweep, and how the command ended."""
    folder = tmp_path_factory.mktemp("swept")
    ended = lockstep(*SWEEP, "--name", "sweep", cwd=folder)
    assert ended.code == 0, ended.stderr
    return folder, ended


@pytest.fixture
def copy(swept, tmp_path):
    shutil.copytree(swept[0] / "runs", tmp_path / "runs")
    return tmp_path


def table(path, name):
    return json.loads((path / "runs" / "sweep" / f"{name}.json").read_text())


def logs(path):
    return {log.stem: log.read_bytes() for log in (path / "runs" / "sweep" / "logs").iterdir()}


def test_a_sweep_leaves_what_it_promises(swept):
    folder, ended = swept
    there = {path.name for path in (folder / "runs" / "sweep").iterdir()}
    tables = {f"{name}.{kind}" for name in ("per_run", "summary") for kind in ("csv", "json")}
    assert there == {"bench.json", "logs", "plots.png"} | tables
    assert set(logs(folder)) == set(JOBS)
    assert ended.stderr == ""
    assert_no_orphans(ended)


def test_it_says_what_it_does_and_ends_with_a_table(swept):
    lines = swept[1].stdout.splitlines()
    assert lines[0].startswith("CartPole-v1 · weak scaling on 1, 2 ranks · once, 1 + 3 iterations each · runs/sweep")
    done = [line for line in lines if re.match(r"\[\d/3\] .+: [\d,]+ steps/s, [\d.,]+ ms an iteration$", line)]
    whats = ("[1/3] 1 rank,", "[2/3] 2 independent runs,", "[3/3] 2 ranks,")
    assert [line.startswith(what) for line, what in zip(done, whats, strict=True)] == [True] * 3
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    summary = table(swept[0], "summary")
    assert [(c[0], c[1], c[2]) for c in cells] == [
        (str(r["world_size"]), f"{r['steps_per_second']:,.0f}", f"{r['speedup']:.2f}") for r in summary
    ]
    assert lines[-1] == "bench: runs/sweep"


def test_every_iteration_is_in_the_logs_and_the_warm_up_is_marked(swept):
    for name, content in logs(swept[0]).items():
        records = [json.loads(line) for line in content.splitlines()]
        if name.startswith("ranks"):
            assert [(r["iteration"], r["measured"]) for r in records] == [(1, False), (2, True), (3, True), (4, True)]
        for copy in {r["copy"] for r in records}:
            own = [r for r in records if r["copy"] == copy]
            assert [r["iteration"] for r in own] == list(range(1, len(own) + 1))
            assert not own[0]["measured"]
            assert sum(r["measured"] for r in own) >= 3


def test_the_runs_of_a_ceiling_were_measured_side_by_side(swept):
    records = [json.loads(line) for line in logs(swept[0])["copies_2_repeat_1"].splitlines()]
    spans = []
    for copy in (0, 1):
        own = [r for r in records if r["copy"] == copy]
        counted = [r for r in own if r["measured"]]
        spans.append((own[0]["ended"], counted[0]["ended"] - max(counted[0]["t_iter"]), own[-1]["ended"]))
        assert all(len(r["t_iter"]) == 1 for r in own)
    for (_, begins, _), (warm, _, ends) in (spans, spans[::-1]):
        assert warm <= begins <= ends  # what is counted of one lies in the warmed-up time of the other


def test_the_tables_agree_with_the_logs(swept):
    rows = {row["run"]: row for row in table(swept[0], "per_run")}
    assert list(rows) == list(JOBS)
    for name in ("ranks_1_repeat_1", "ranks_2_repeat_1"):
        measured = [r for line in logs(swept[0])[name].splitlines() if (r := json.loads(line))["measured"]]
        seconds = sum(sum(r["t_iter"]) / len(r["t_iter"]) for r in measured)
        assert rows[name]["steps_per_second"] == pytest.approx(sum(r["steps"] for r in measured) / seconds)
        assert rows[name]["status"] == "ok"
    one, two = table(swept[0], "summary")
    assert two["steps_per_second"] == pytest.approx(rows["ranks_2_repeat_1"]["steps_per_second"])
    assert two["speedup"] == pytest.approx(two["steps_per_second"] / one["steps_per_second"])
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2)
    ceiling = rows["copies_2_repeat_1"]["steps_per_second"]
    assert two["ceiling_efficiency"] == pytest.approx(two["steps_per_second"] / ceiling)


def test_the_summary_says_where_the_time_went_and_what_was_sent(swept):
    one, two = table(swept[0], "summary")
    assert [(r["num_envs"], r["num_shards"], r["steps_per_iteration"]) for r in (one, two)] == [
        (8, 8, 128),
        (16, 16, 256),
    ]
    for row in (one, two):
        assert sum(row[part] for part in PARTS) == pytest.approx(row["t_iter"], rel=0.05)
        assert row["peak_memory_mb"] > 50
    assert (one["collectives"], one["bytes"], one["t_comm"], one["t_wait"]) == (0, 0, 0, 0)
    assert two["collectives"] == pytest.approx(10)  # 4 epochs x 2 minibatches, statistics, metrics
    assert two["bytes"] > 8 * 4 * 9000  # eight gradients of the two networks
    assert two["t_comm"] > 0


def test_csv_and_json_hold_the_same(swept):
    for name in ("per_run", "summary"):
        with (swept[0] / "runs" / "sweep" / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        for text, row in zip(rows, table(swept[0], name), strict=True):
            assert list(text) == list(row)
            for key, value in row.items():
                shown = ";".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
                assert text[key] == shown


def test_the_same_command_measures_nothing_twice(copy):
    before = logs(copy)
    ended = lockstep(*SWEEP, "--name", "sweep", cwd=copy)
    assert ended.code == 0, ended.stderr
    assert "3 of 3 runs are there already" in ended.stdout
    assert not re.search(r"^\[\d/3\]", ended.stdout, re.MULTILINE)
    assert logs(copy) == before


def test_a_run_whose_log_was_changed_is_measured_again_and_only_that(copy):
    before = logs(copy)
    log = copy / "runs" / "sweep" / "logs" / "ranks_1_repeat_1.jsonl"
    log.write_text(re.sub(r'"steps": \d+', '"steps": 10000000', log.read_text()))
    ended = lockstep(*SWEEP, "--name", "sweep", cwd=copy)
    assert "2 of 3 runs are there already" in ended.stdout
    after = logs(copy)
    assert {name for name in JOBS if after[name] != before[name]} == {"ranks_1_repeat_1"}
    assert all(row["steps_per_second"] < 1e6 for row in table(copy, "per_run"))


def test_another_measurement_does_not_go_into_a_name(copy, capsys, monkeypatch):
    monkeypatch.chdir(copy)
    before = logs(copy)
    assert main([*map(str, SWEEP), "--iters", "4", "--name", "sweep"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "lockstep: error: name: bench runs/sweep was measured with iters 3 and this is 4; choose another --name"
    )
    assert logs(copy) == before


def interrupt(folder, number):
    """Start the sweep, or go on with it, and stop it by a signal while it measures the ceiling."""
    with running(*SWEEP, cwd=folder) as (process, mark):
        wait_until(lambda: list(folder.glob("runs/*/work/copy_1.stderr")), "the second job has started")
        process.send_signal(number)
        ended = ending(process, mark)
        assert_no_orphans(ended)
    return ended


@pytest.mark.long
@NEEDS_PROC
def test_an_interrupted_sweep_goes_on_by_the_same_command(tmp_path):
    ended = interrupt(tmp_path, signal.SIGINT)
    assert ended.code == 130
    assert error_line(ended) == "lockstep: error: interrupted; the same command continues it"
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"bench-CartPole-v1-weak-\d{8}-\d{6}", folder.name)
    first = (folder / "logs" / "ranks_1_repeat_1.jsonl").read_bytes()
    assert not (folder / "work").exists()

    assert interrupt(tmp_path, signal.SIGKILL).code == -signal.SIGKILL
    ended = lockstep(*SWEEP, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert "1 of 3 runs are there already" in ended.stdout
    assert list((tmp_path / "runs").iterdir()) == [folder]
    assert (folder / "logs" / "ranks_1_repeat_1.jsonl").read_bytes() == first
    assert {log.stem for log in (folder / "logs").iterdir()} == set(JOBS)
    assert {path.name for path in folder.iterdir()} >= {"summary.csv", "plots.png"}
    assert not (folder / "work").exists()


@pytest.mark.long
def test_a_failed_run_is_a_row_and_the_rest_is_measured(tmp_path):
    words = ("--env.kwargs", '{"fault": "construction in a rank"}', "--name", "sweep", "--no-ceiling")
    ended = lockstep("bench", "faulty:FaultyCartPole-v0", *SMALL, *SHORT, *words, cwd=tmp_path)
    assert ended.code == 1
    line = error_line(ended)
    assert line.startswith("lockstep: error: ranks_2_repeat_1 failed: rank ")
    assert line.endswith("the pole is missing; the same command tries again")
    one, two = table(tmp_path, "per_run")
    assert (one["status"], one["error"], two["status"]) == ("ok", None, "failed")
    assert "the pole is missing" in two["error"]
    one, two = table(tmp_path, "summary")
    assert (one["runs"], one["failed"], two["runs"], two["failed"]) == (1, 0, 0, 1)
    assert one["steps_per_second"] > 0
    assert two["steps_per_second"] is two["efficiency"] is None
    assert "FAILED: rank" in ended.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--world-sizes", "1,9", "--mode", "strong"), "num_envs: 8 environments make 8 shards by default and 9 ranks"),
        (("--world-sizes", "1,9", "--mode", "strong", "--num-shards", "8"), "nproc: 9 ranks can't share 8 shards"),
        (("--world-sizes", "1,x"), "world-sizes: '1,x' is not a list of different numbers of ranks such as 1,2,4"),
        (("--iters", "0"), "iters: 0 is below 1"),
        (("--iters", "many"), "argument --iters: 'many' is no whole number (lockstep bench --help)"),
        (("--repeats", "0"), "repeats: 0 is below 1"),
        (("--warmup-iters", "-1"), "warmup-iters: -1 is below 0"),
        (("--mode", "wide"), "mode: 'wide' is none of weak, strong"),
        (("--nproc", "2"), "nproc: bench starts its own runs; give only what describes the run"),
        (("--name", "a/b"), "command line: name: 'a/b' is not a plain directory name"),
        (("--num-minibatch", "2"), "--num-minibatch: unknown option"),
        (("--device", "cuda", "--backend", "gloo"), "device: cuda, but PyTorch"),
        (
            ("--env.backend", "envpool", "--algorithm", "grpo"),
            "algorithm: grpo needs groups of environments that start",
        ),
        (("other.yaml",), "'other.yaml': one config file or environment id is enough"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_made(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lockstep.scaling.ledger.measure", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["bench", "CartPole-v1", *words]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"lockstep: error: {said}")
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_it_says_so_and_goes_on(copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    (copy / "runs" / "sweep" / "plots.png").unlink()
    for module in ("lockstep.commands.bench", "lockstep.scaling.ledger"):
        monkeypatch.setattr(f"{module}.can_plot", lambda: False)
    assert main([*map(str, SWEEP), "--name", "sweep"]) == 0
    assert "note: plots.png needs matplotlib; pip install 'lockstep-rl[plot]'" in capsys.readouterr().out
    assert not (copy / "runs" / "sweep" / "plots.png").exists()
    assert table(copy, "summary")[1]["runs"] == 1


def test_a_reference_policy_may_be_named_by_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(Path(__file__).parents[1] / "golden" / "runs" / "torch_cartpole", tmp_path / "kept" / "first")
    words = ["--algorithm", "grpo", "--grpo.reference", "first", "--grpo.kl-coef", "0.1", "--num-envs", "32"]
    words += ["--network.hidden-sizes", "[16,16]", "--runs-dir", "kept"]
    plan, _ = bench._read_plan(["CartPole-v1", *words])
    named = [plan.sized(world_size).grpo.reference for world_size in (1, 4)]
    assert named == [str(tmp_path / "kept" / "first" / "checkpoints" / "step_256")] * 2

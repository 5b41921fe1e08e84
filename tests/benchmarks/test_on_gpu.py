import json
import shlex
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import wait_until

from benchmarks import gpu_judges, on_gpu
from benchmarks.gpu_checks import CHECKS, Check, verdict
from benchmarks.gpu_judges import Outcome, Verdict, speeds
from benchmarks.on_gpu import Seen
from lockstep.config.command_line import read_request

BY_NAME = {check.name: check for check in CHECKS}
TWO = {"torch": Seen(["Some GPU"] * 2), "jax": Seen(["Some GPU"] * 2)}
NONE = {"torch": Seen(), "jax": Seen()}
ROWS = [{"global_step": 10 * n, "time/t_iter": 9.0 if n == 1 else 0.5} for n in range(1, 9)]


def ended(output="", code=0, metrics=ROWS, timing=(), **summary):
    return Outcome(code, output, {"steps_per_second": 100.0} | summary, metrics, timing)


def returns(first, final, **rest):
    rows = [row | {"rollout/episode_return_mean": first if n else None} for n, row in enumerate(ROWS)]
    return ended(metrics=rows, final_return=final, **rest)


def equal(*flags):
    rows = [
        {"world_size": n + 1, "equal": flag, "difference": "" if flag else "log_std"} for n, flag in enumerate(flags)
    ]
    return ended(f"Warning\n{json.dumps(rows)}\n")


def peak(mib):
    return ended(timing=[{"peak_gpu_memory_mb": [mib / 2]}, {"peak_gpu_memory_mb": [mib]}])


def sweep(t_comm):
    rows = [{"world_size": n, "t_comm": t_comm, "peak_gpu_memory_mb": 9.0, "steps_per_second": 10.0} for n in (1, 2)]
    return ended(world_sizes=rows)


def shared(*digests, sizes=gpu_judges.SHARING, said="cuda:0"):
    """Runs of some kinds, by so many ranks each, with a letter for the state of each."""
    named = [(size, letter * 64) for letters in digests for size, letter in zip(sizes, letters, strict=True)]
    return [ended(said, world_size=n, state_sha256=state, shards_on_a_rank="batched") for n, state in named]


def branched(*states, forks=2):
    """Runs of some kinds with branches and without, with a letter for the state of each."""
    said = [f"forks {forks}", "forks 0"]
    pairs = [zip(letters, said, strict=True) for letters in states]
    return [ended(line, state_sha256=letter * 64, shards_on_a_rank="loop") for pair in pairs for letter, line in pair]


TIMELESS = ended(metrics=[{"global_step": row["global_step"]} for row in ROWS])
STATE_A, STATE_B = ended(global_step=8, state_sha256="a" * 64), ended(global_step=8, state_sha256="b" * 64)
STOPPED = ended(global_step=4)
REFUSED = "lockstep: error: nproc: 2 ranks need 2 GPUs and 1 are visible (CUDA_VISIBLE_DEVICES); use 1\n"
GRADIENT = "backend nccl difference {}\n"

JUDGED = {
    "trains": [
        ([ended("… · cuda:0 · …", final_return=480.0)], True),
        ([ended("… · cuda:0 · …", final_return=60.0)], False),
        ([ended("… · cpu · …", final_return=480.0)], False),
    ],
    "update-without-waits": [
        ([ended("updates 20")], True),
        ([ended("updates 0")], False),
    ],
    "graphs": [
        ([replace(STATE_A, output="graphs 2 replays 160"), STATE_A], True),
        ([replace(STATE_A, output="graphs 2 replays 160"), STATE_B], False),
        ([replace(STATE_A, output="graphs 0 replays 0"), STATE_A], False),
        ([replace(STATE_A, output="graphs 1 replays 160"), STATE_A], False),
        ([replace(STATE_A, output="graphs 2 replays 7"), STATE_A], False),
        ([STATE_A, STATE_A], False),
    ],
    "branches": [
        (branched("aa", "bb"), True),
        (branched("aa", "bc"), False),
        (branched("aa", forks=0), False),
        ([], False),
    ],
    "graphs-of-environments": [
        ([replace(STATE_A, output="graphs 2 replays 160"), STATE_A], True),
        ([replace(STATE_A, output="graphs 2 replays 160"), STATE_B], False),
        ([replace(STATE_A, output="graphs 0 replays 0"), STATE_A], False),
        ([replace(STATE_A, output="graphs 1 replays 160"), STATE_A], False),
        ([replace(STATE_A, output="graphs 2 replays 7"), STATE_A], False),
        ([STATE_A, STATE_A], False),
    ],
    "too-few-gpus": [
        ([Outcome(2, REFUSED)], True),
        ([Outcome(1, REFUSED)], False),
        ([Outcome(2, REFUSED * 2)], False),
        ([Outcome(2, REFUSED, metrics=[{}])], False),
        ([Outcome(0, REFUSED)], False),
    ],
    "verify": [
        ([equal(True, True), ended(collectives="nccl")], True),
        ([equal(True, True), ended(collectives="gloo")], False),
        ([equal(True, False), ended(collectives="nccl")], False),
        ([equal(True), ended(collectives="nccl")], False),
    ],
    "resume": [
        ([STOPPED, STATE_A, STATE_A], True),
        ([STOPPED, STATE_A, STATE_B], False),
        ([STATE_A, STATE_A, STATE_A], False),
    ],
    "ranks-of-one-gpu": [
        (shared("aaaa", "bbbb", "cccc"), True),
        (shared("aaaa", "bbbb", "ccca"), False),
        (shared("aaaa", sizes=(1, 1, 1, 1)), False),
        (shared("aaaa", said="cpu"), False),
        (shared("aaaa")[:2], False),
    ],
    "tensor-environments": [
        ([ended("copies 300")], True),
        ([ended("copies 5120")], False),
        ([ended("copies 0")], False),
    ],
    "bf16": [
        ([ended(params_sha256="a"), ended(params_sha256="b")], True),
        ([ended(params_sha256="a"), ended(params_sha256="a")], False),
    ],
    "images": [([ended(), ended()], True), ([ended(), ended(code=1)], False), ([ended(), TIMELESS], False)],
    "fsdp": [([peak(50), peak(100)], True), ([peak(100), peak(100)], False), ([peak(0), peak(100)], False)],
    "envs-per-rank": [
        ([ended("num_envs_per_rank auto: 48 on a GPU of 150 GB (from 80 GB on); …")], True),
        ([ended("num_envs_per_rank auto: 16 for each of 2 cores; …")], False),
    ],
    "bench": [([sweep(0.1)], True), ([sweep(0.0)], False)],
    "attach": [
        ([ended(GRADIENT.format("1e-07") * 2)], True),
        ([ended((GRADIENT.format("1e-07") * 2).replace("07\n", "07", 1))], True),
        ([ended(GRADIENT.format("0.5") * 2)], False),
        ([ended(GRADIENT.format("nan") * 2)], False),
        ([ended(GRADIENT.format("1e-07"))], False),
        ([ended((GRADIENT.format("1e-07") * 2).replace("nccl", "gloo"))], False),
    ],
    "sb3": [
        ([ended("mean return over 20 episodes: 500.0 +/- 0.0\n")], True),
        ([ended("mean return over 20 episodes: 50.0 +/- 0.0\n")], False),
        ([ended("")], False),
    ],
    "jax-trains": [
        ([returns(20.0, 300.0, platform="gpu")], True),
        ([returns(20.0, 21.0, platform="gpu")], False),
        ([returns(20.0, 300.0, platform="cpu")], False),
    ],
    "jax-verify": [([equal(True, True)], True), ([equal(True, False)], False)],
    "walking": [([returns(1.0, 2.0)], True), ([returns(2.0, 2.0)], False)],
}
ALIKE = {
    **dict.fromkeys(("compile", "exact", "jax-exact"), "images"),
    **{"jax-bf16": "bf16", "jax-fsdp": "fsdp", "jax-images": "walking", "jax-resume": "resume"},
}
CASES = [(name, *case) for name, cases in JUDGED.items() for case in cases]


@pytest.mark.parametrize(("name", "outcomes", "passes"), CASES)
def test_checks_are_judged_by_what_their_commands_left(name, outcomes, passes):
    assert verdict(BY_NAME[name], outcomes).passed is passes


def test_rates_leave_out_the_first_quarter_of_a_run():
    assert ended().rate == 60 / 3.0
    with pytest.raises(KeyError, match="time/t_iter"):
        _ = TIMELESS.rate
    for rows in ([], ROWS[:1]):
        with pytest.raises(ValueError, match="too few for a speed"):
            _ = ended(metrics=rows).rate


def test_checks_that_only_measure_are_those_without_anything_to_be_seen():
    assert {check.name for check in CHECKS if check.measures} == {"images", "exact", "compile", "jax-exact"}


def test_every_judge_is_shown_what_it_passes_and_what_it_fails():
    assert set(JUDGED) | set(ALIKE) == set(BY_NAME)
    assert all({passes for _, passes in cases} == {True, False} for cases in JUDGED.values())
    assert all(BY_NAME[name].judge is BY_NAME[other].judge for name, other in ALIKE.items())


def test_a_failed_command_is_told_by_its_last_line():
    outcome = Outcome(1, "training\nlockstep: error: out of memory\n\n")
    assert verdict(BY_NAME["trains"], [outcome]) == Verdict(False, "exit status 1: lockstep: error: out of memory")


def test_a_summary_that_lacks_what_is_judged_fails():
    assert verdict(BY_NAME["trains"], [Outcome(0)]).figures == "what is judged can't be read: KeyError: 'final_return'"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_commands_are_ones_that_can_be_given(check):
    for command in check.commands:
        program, *words = shlex.split(command.format(root=on_gpu.ROOT))
        assert program in on_gpu.PROGRAMS
        scripts = [word for word in words if word.startswith("/")]
        assert all(on_gpu.Path(script).is_file() for script in scripts)
        if words[:1] == ["train"] and "--resume" not in words:
            assert read_request(words[1:]).config.device == "cuda"


def test_graphs_are_compared_with_runs_that_have_none():
    for name in ("graphs", "compile"):
        words = [command.partition(" train ")[2] for command in BY_NAME[name].commands]
        taken = [read_request(shlex.split(line)).config.cuda_graphs for line in words]
        assert taken == [True, False], name


TOY = Check("toy", ("lockstep one --name run", "lockstep two"), "it | runs", lambda one, two: Verdict(True, "1 ×"))


def run_main(monkeypatch, tmp_path, outcome=None, seen=TWO, checks=(TOY,)):
    """What ``main`` gives with a runner that gives ``outcome``, the commands that it ran, and the report."""
    monkeypatch.setattr(on_gpu, "CHECKS", checks)
    ran, out = [], tmp_path / "gpu.md"

    def run(command, check, directory):
        ran.append(command)
        return outcome or Outcome(0)

    code = on_gpu.main(["--out", str(out)], run=run, seen=seen)
    return code, ran, out.read_text() if out.exists() else None


def test_report_says_when_where_and_what_was_seen(monkeypatch, tmp_path):
    large = replace(TOY, name="large", gpus=4)
    code, ran, text = run_main(monkeypatch, tmp_path, checks=(TOY, large))
    assert code == 0
    assert ran == list(TOY.commands)
    assert text is not None
    assert "1 passed, 0 measured, 0 FAILED, 1 skipped" in text
    assert "| toy | passed | 1 × | 0 | it / runs | `lockstep one --name run; lockstep two` |" in text
    assert "| large | skipped | needs 4 GPUs, PyTorch sees 2 |" in text
    for fact in ("- date: 20", "- commit: ", "- versions: ", "- GPUs that PyTorch sees: Some GPU, Some GPU"):
        assert fact in text


def test_report_says_what_commands_warned_of(monkeypatch, tmp_path):
    lines = ["lockstep: warning: a step can't be captured", "step 4: 20.0", "  lockstep: warning: no video"]
    warned = Outcome(0, "\n".join([*lines, lines[0]]))
    code, _, text = run_main(monkeypatch, tmp_path, warned)
    assert code == 0
    assert text is not None
    assert f"| toy | passed | 1 ×; {lines[0]}; {lines[2].strip()} | 0 |" in text


def test_what_has_not_been_run_yet_is_said(monkeypatch, tmp_path):
    """As the table is where a program is ended between two checks."""
    first, last = (replace(TOY, name=name, timed=True) for name in ("first", "last"))
    monkeypatch.setattr(on_gpu, "CHECKS", (first, last))

    def run(command, check, directory):
        if check is last:
            raise KeyboardInterrupt
        return Outcome(0)

    with pytest.raises(KeyboardInterrupt):
        on_gpu.main(["--out", str(tmp_path / "gpu.md")], run=run, seen=TWO)
    text = (tmp_path / "gpu.md").read_text()
    assert "1 passed, 0 measured, 0 FAILED, 0 skipped, 1 not run" in text
    assert "| last | not run |  |  | it / runs |" in text


def test_at_least_one_check_runs_at_once(capsys):
    with pytest.raises(SystemExit):
        on_gpu.read_arguments(["--at-once", "0"])
    assert "--at-once: 0 must be at least 1" in capsys.readouterr().err


def test_commands_after_a_failed_one_are_not_run(monkeypatch, tmp_path):
    code, ran, text = run_main(monkeypatch, tmp_path, outcome=Outcome(1, "broken"))
    assert code == 1
    assert ran == [TOY.commands[0]]
    assert text is not None
    assert "| toy | FAILED | exit status 1: broken |" in text


def test_checks_without_speeds_may_run_beside_one_another_and_those_with_run_alone(monkeypatch, tmp_path):
    checks = (replace(TOY, name="b", timed=True), *(replace(TOY, name=name, commands=(name,)) for name in "ac"))
    monkeypatch.setattr(on_gpu, "CHECKS", checks)
    both, running, most = threading.Barrier(2, timeout=60), [], []

    def run(command, check, directory):
        running.append(check.name)
        most.append((check.name, sorted(running)))
        if not check.timed:
            both.wait()  # for the other one, which must have begun
        running.remove(check.name)
        return Outcome(0)

    out = tmp_path / "gpu.md"
    on_gpu.main(["--out", str(out), "--at-once", "2"], run=run, seen=TWO)
    assert [names for name, names in most if name == "b"] == [["b"], ["b"]]
    rows = [line.split("|")[1].strip() for line in out.read_text().splitlines() if line.startswith("| ")]
    assert rows[2:] == ["b", "a", "c"]


def test_a_missing_package_skips_with_a_reason(monkeypatch, tmp_path):
    _, ran, text = run_main(monkeypatch, tmp_path, checks=(replace(TOY, modules=("no_such_package",)),))
    assert ran == []
    assert text is not None
    assert "| toy | skipped | needs the package no_such_package |" in text


@pytest.mark.parametrize("seen", [NONE, {"torch": Seen(problem="PyTorch can't start CUDA: x"), "jax": Seen()}])
def test_without_a_gpu_one_line_and_no_report(monkeypatch, tmp_path, capsys, seen):
    monkeypatch.setattr(on_gpu, "DEVICES", tmp_path)
    code, ran, text = run_main(monkeypatch, tmp_path, seen=seen)
    assert (code, ran, text) == (2, [], None)
    assert capsys.readouterr().out == on_gpu.NO_GPU + "\n"


def test_speeds_are_measured_and_counted_apart(monkeypatch, tmp_path, capsys):
    check = replace(TOY, judge=speeds)
    code, _, text = run_main(monkeypatch, tmp_path, outcome=ended(), checks=(TOY, replace(check, name="speeds")))
    assert code == 0
    assert text is not None
    assert "1 passed, 1 measured, 0 FAILED, 0 skipped" in text
    assert "| speeds | measured | 20 against 20 steps/s: 1.00 × |" in text
    assert "speeds: measured (20 against" in capsys.readouterr().out
    code, _, text = run_main(monkeypatch, tmp_path, outcome=TIMELESS, checks=(check,))
    assert code == 1
    assert "| toy | FAILED | what is judged can't be read: KeyError: 'time/t_iter' |" in (text or "")


def test_a_framework_that_is_there_and_cannot_start_cuda_fails_its_checks(monkeypatch, tmp_path):
    broken = {"torch": TWO["torch"], "jax": Seen(problem="JAX can't start CUDA: no driver")}
    code, ran, text = run_main(
        monkeypatch, tmp_path, seen=broken, checks=(TOY, replace(TOY, name="other", engine="jax"))
    )
    assert (code, ran) == (1, list(TOY.commands))
    assert "| other | FAILED | JAX can't start CUDA: no driver |" in (text or "")
    assert "- GPUs that JAX sees: none: JAX can't start CUDA: no driver" in (text or "")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    monkeypatch.setattr(on_gpu, "DEVICES", tmp_path / "dev")
    alone = {"torch": Seen(problem="PyTorch can't start CUDA: no driver"), "jax": Seen()}
    assert run_main(monkeypatch, tmp_path, seen=alone)[:2] == (1, [])


def test_frameworks_are_asked_what_they_see(monkeypatch):
    monkeypatch.setattr(on_gpu, "SEEN_BY", {"json": 'print(\'["A", "B"]\')', "csv": "raise OSError('no driver')"})
    monkeypatch.setattr(on_gpu, "FRAMEWORKS", {"json": "This", "csv": "That", "nothing_such": "None"})
    assert on_gpu.devices_of("json") == Seen(["A", "B"])
    assert on_gpu.devices_of("csv") == Seen(problem="That can't start CUDA: OSError: no driver")
    assert on_gpu.devices_of("nothing_such") == Seen()


def test_list_needs_no_gpu(capsys):
    assert on_gpu.main(["--list"], seen=NONE) == 0
    said = capsys.readouterr().out
    assert all(f"{check.name} (" in said for check in CHECKS)


def test_only_runs_what_it_names_and_leaves_the_kept_results_alone(capsys):
    arguments = on_gpu.read_arguments(["--only", "bf16", "--only", "fsdp"])
    assert [check.name for check in arguments.checks] == ["bf16", "fsdp"]
    assert arguments.out == on_gpu.ROOT / "build/benchmarks/gpu.md"
    assert on_gpu.read_arguments([]).out == on_gpu.ROOT / "benchmarks/results/gpu.md"
    with pytest.raises(SystemExit):
        on_gpu.read_arguments(["--only", "bf17"])
    assert "'bf17' is no check; there are trains," in capsys.readouterr().err


def test_the_runner_reads_the_run_that_a_command_names(tmp_path):
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "summary.json").write_text('{"final_return": 3.0}')
    (run / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2}\n')
    assert on_gpu.run_directory(["train", "X", "--name", "a"], tmp_path) == run
    assert on_gpu.run_directory(["train", "--resume", "a"], tmp_path) == run
    assert on_gpu.run_directory(["verify", "X"], tmp_path) is None
    outcome = on_gpu.outcome_of(0, "out", "err", run)
    assert (outcome.summary["final_return"], len(outcome.metrics), outcome.last_line) == (3.0, 2, "out")
    assert on_gpu.outcome_of(1, "out", "err", None).last_line == "err"
    (run / "summary.json").write_text('[{"world_size": 1}]')
    assert on_gpu.outcome_of(0, "", "", run).summary == {"world_sizes": [{"world_size": 1}]}


def test_the_runner_runs_commands_of_this_tree(tmp_path):
    run = on_gpu.command_runner(100.0)
    assert run("lockstep --version", TOY, tmp_path).output.strip().startswith("lockstep ")
    refused = run("lockstep train CartPole-v1 --ppo.gamma 2 --name a", TOY, tmp_path)
    assert refused.code == 2
    assert "gamma" in refused.last_line


def test_what_commands_print_is_kept_where_it_is_asked_for(tmp_path):
    run = on_gpu.command_runner(100.0, tmp_path / "logs")
    check = replace(TOY, environment={"GREETING": "hello"})
    for word in ("there", "again"):
        run(f"python -c \"import os; print(os.environ['GREETING'], '{word}')\"", check, tmp_path)
    kept = (tmp_path / "logs" / "toy.log").read_text()
    assert kept.startswith("$ GREETING=hello python -c")
    assert kept.index("hello there") < kept.index("exit 0") < kept.index("hello again")


@pytest.mark.parametrize(("timed", "taken"), [(False, "false"), (True, "None")])
def test_checks_that_share_a_gpu_leave_one_another_memory(tmp_path, monkeypatch, timed, taken):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    ask = "python -c \"import os; print(os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE'))\""
    check = replace(TOY, timed=timed)
    assert on_gpu.command_runner(100.0, shared=True)(ask, check, tmp_path).last_line == taken
    assert on_gpu.command_runner(100.0)(ask, check, tmp_path).last_line == "None"


def test_a_command_that_hangs_is_given_up_with_what_it_started(tmp_path, monkeypatch):
    class Slow(subprocess.Popen):
        """Isn't done after any time, which begins when it has said something."""

        def wait(self, timeout=None):
            if timeout is not None:
                wait_until((tmp_path / "begun").exists, "it doesn't begin")
            return super().wait(None if timeout is None else 0.0)

    monkeypatch.setattr(on_gpu.subprocess, "Popen", Slow)
    started = "import pathlib, subprocess; p = subprocess.Popen(['sleep', '3600']); print(p.pid, flush=True); "
    started += "pathlib.Path('begun').touch(); p.wait()"
    outcome = on_gpu.command_runner(2.0)(f'python -c "{started}"', TOY, tmp_path)
    assert (outcome.code, outcome.last_line) == (124, "killed after 2 s")
    child = Path(f"/proc/{outcome.output.split()[0]}/cmdline")
    with suppress(FileNotFoundError, ProcessLookupError):
        while child.read_bytes():  # it was told to end
            time.sleep(0.01)


def test_tensor_environments_are_judged_by_the_steps_that_they_take():
    (command,) = BY_NAME["tensor-environments"].commands
    assert f"--num-steps {gpu_judges.TENSOR_STEPS} --total-steps {4096 * 128 * 20}" in command


def test_the_documented_checks_are_those_there_are():
    page = (on_gpu.ROOT / "docs" / "gpu.md").read_text().partition("## Checks on a GPU")[2]
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    assert {row[1].strip(" `"): int(row[2]) for row in rows} == {check.name: check.gpus for check in CHECKS}

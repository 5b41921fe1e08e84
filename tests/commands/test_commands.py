"""The commands as a user meets them: what they print, what they load, what they leave."""

import json
import re
import shlex
import subprocess
import sys

import pytest
from command_line import CARTPOLE, Run, lockstep, metrics_of, run_words, same, surroundings

import lockstep as package
from lockstep.cli import main
from lockstep.runs.shown.numerals import format_number

HEAVY = ("torch", "numpy", "gymnasium", "pydantic", "rich")


def loaded_after(code):
    """Heavy packages in memory after a piece of Python."""
    probe = f"import sys\n{code}\nprint([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env=surroundings("probe"),
    )
    return json.loads(done.stdout.splitlines()[-1].replace("'", '"'))


@pytest.mark.parametrize(
    "code",
    ["from lockstep.cli import main; main(['--help'])", "from lockstep.cli import main; main(['--version'])"],
)
def test_help_and_version_load_nothing_heavy(code):
    assert loaded_after(code) == []


def test_importing_lockstep_loads_no_engine():
    assert loaded_after("import lockstep") == []
    assert "numpy" in loaded_after("import lockstep.core.shards")


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"lockstep {name} " in text for name in ("train", "eval", "play", "verify"))
    assert main([]) == 2


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lockstep {package.__version__}\n"


def test_train_says_where_the_run_lies_and_what_comes_next(trained):
    run = trained(*CARTPOLE)
    name = f"runs/{run.path.name}"
    last = run.ended.stdout.splitlines()[-5:]
    score = run.summary["final_return"]
    assert re.fullmatch(
        rf"mean return of all \d+ episodes {format_number(score)} after 1,024 steps, \d+\.\d s", last[0]
    )
    assert last[1] == f"run: {name}   parameters sha256 {run.summary['params_sha256'][:16]}…"
    assert re.fullmatch(rf"evaluate:  .*lockstep eval {name} --episodes 20", last[2])
    assert re.fullmatch(rf"watch:     .*lockstep play {name} --video out.mp4", last[3])
    assert re.fullmatch(rf"curves:    .*tensorboard(\.main)? --logdir {name}/tensorboard", last[4])
    assert run.ended.stderr == ""


def test_the_next_step_works_as_it_is_printed(trained):
    run = trained(*CARTPOLE)
    words = shlex.split(run.ended.stdout.splitlines()[-3].removeprefix("evaluate: "))
    ended = run_words(words, run.path.parents[1])
    assert ended.code == 0, ended.stderr
    assert ended.stdout.startswith("CartPole-v1 after 1,024 training steps, 20 episodes: return ")


def test_tensorboard_is_named_as_the_shell_finds_it(trained):
    run = trained(*CARTPOLE)
    words = shlex.split(run.ended.stdout.splitlines()[-1].removeprefix("curves: "))
    ended = run_words([*words[: words.index("--logdir")], "--version"], run.path.parents[1])
    assert ended.code == 0, ended.stderr
    assert re.search(r"^\d+\.\d+", ended.stdout, re.MULTILINE), ended.stdout


def test_a_run_leaves_what_it_promises(trained):
    run = trained(*CARTPOLE)
    there = {path.name for path in run.path.iterdir()}
    assert there == {"config.json", "metrics.jsonl", "metrics.csv", "tensorboard", "checkpoints", "summary.json"}
    files = {path.suffix for path in (run.path / "checkpoints").rglob("*") if path.is_file()}
    assert files == {".safetensors", ".json"}


def test_what_goes_into_a_pipe_is_plain_lines(trained):
    lines = trained(*CARTPOLE).ended.stdout.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert re.match(r"step 128/1,024  12%  return .+ steps/s  eta –$", steps[0])
    assert steps[-1].startswith("step 1,024/1,024  100%")
    assert not any(control in "".join(lines) for control in ("\x1b", "\r"))


def test_quiet_says_nothing(tmp_path):
    ended = lockstep("train", *CARTPOLE, "--stop-at-step", 128, "--quiet", cwd=tmp_path)
    assert (ended.code, ended.stdout, ended.stderr) == (0, "", "")
    (path,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"CartPole-v1-seed0-\d{8}-\d{6}", path.name)
    assert len(metrics_of(path)) == 1


def test_a_runs_config_file_is_the_run_again(trained, tmp_path):
    run = trained(*CARTPOLE)
    ended = lockstep("train", run.path / "config.json", "--name", "again", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    same(run, Run(tmp_path / "runs" / "again", ended))


def test_a_name_that_is_taken_is_never_mixed_into(trained, capsys):
    run = trained(*CARTPOLE)
    before = (run.path / "metrics.jsonl").read_bytes()
    assert main(["train", "CartPole-v1", "--name", run.path.name, "--runs-dir", str(run.path.parent)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lockstep: error: name: run {run.path} exists already; --resume {run.path} continues it")
    assert (run.path / "metrics.jsonl").read_bytes() == before

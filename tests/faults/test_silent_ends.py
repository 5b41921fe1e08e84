"""Exit status 0 means done: whatever ends a rank early, or takes its run directory, is an error of one line."""

import itertools
import os
import shutil
import signal

import pytest
from command_line import (
    CARTPOLE,
    GATED,
    NEEDS_PROC,
    SMALL,
    Run,
    assert_no_orphans,
    ending,
    error_line,
    lockstep,
    metrics_of,
    resume,
    running,
    same,
    wait_until,
)
from variants import variants

from lockstep.core.temporary import of_this_host

LEAVES = """
import os, sys, gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
class Leaving(CartPoleEnv):
    steps = 0
    def step(self, action):
        Leaving.steps += 1
        if Leaving.steps == 100 and os.environ.get("RANK", "0") == os.environ["WHICH"]:
            HOW
        return super().step(action)
gymnasium.register("Leaving-v0", Leaving, max_episode_steps=500)
"""


@pytest.fixture
def leaving(tmp_path):
    def make(how):
        (tmp_path / "leaving.py").write_text(LEAVES.replace("HOW", how))
        return ("train", "leaving:Leaving-v0", *SMALL, "--name", "run")

    return make


WAYS = list(itertools.product([(1, 0), (2, 0), (2, 1)], ["os._exit(0)", "sys.exit(0)", "os._exit(3)"]))


@pytest.mark.parametrize(("place", "how"), variants(WAYS, [*WAYS[:4], WAYS[8]]))
def test_a_rank_that_leaves_has_not_done_its_work(leaving, tmp_path, place, how):
    ranks, which = place
    ended = lockstep(*leaving(how), "--nproc", ranks, cwd=tmp_path, WHICH=str(which))
    if how == "os._exit(3)" and ranks == 1:
        assert ended.code == 3  # nobody is left to say more
        return
    assert ended.code == 1
    said = (
        "raised in step: SystemExit"
        if how == "sys.exit(0)"
        else "exit code 3"
        if "3" in how
        else "before the run was done"
    )
    assert said in error_line(ended)
    assert_no_orphans(ended)
    assert not (tmp_path / "runs" / "run" / "summary.json").exists()


@pytest.mark.long
def test_jaxs_processes_too(leaving, tmp_path):
    words = ("--engine", "jax", "--nproc", 2, "--simulate-devices", 1)
    ended = lockstep(*leaving("os._exit(0)"), *words, cwd=tmp_path, WHICH="1")
    assert ended.code == 1
    assert "rank 1: this process ended with exit code 0 before the run was done" in error_line(ended)
    assert_no_orphans(ended)


@NEEDS_PROC
@pytest.mark.parametrize("ranks", variants([1, 2], [2]))
def test_a_run_directory_that_vanishes_ends_the_run(tmp_path, ranks):
    gate, path = tmp_path / "gate", tmp_path / "runs" / "gone"
    gate.touch()
    words = ("train", *GATED, "--nproc", ranks, "--name", path.name)
    with running(*words, cwd=tmp_path, GATE=str(gate)) as (process, mark):
        wait_until(lambda: len(metrics_of(path)) == 4, "the run doesn't reach the gate")
        wait_until((path / "checkpoints" / "step_384").is_dir, "no checkpoint of the third iteration")
        shutil.rmtree(path)
        gate.unlink()
        ended = ending(process, mark)
    assert ended.code == 1
    assert f"{path / 'metrics.jsonl'} can't be written: No such file or directory" in error_line(ended)
    assert not path.exists()


@NEEDS_PROC
@pytest.mark.skipif(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, reason="nohup: a closed terminal is ignored")
@pytest.mark.parametrize("ranks", variants([1, 2], [2]))
def test_a_closed_terminal_stops_a_run_with_a_checkpoint(trained, tmp_path, ranks):
    gate, path = tmp_path / "gate", tmp_path / "runs" / "stopped"
    gate.touch()
    words = ("train", *GATED, "--nproc", ranks, "--name", path.name)
    with running(*words, cwd=tmp_path, GATE=str(gate)) as (process, mark):
        wait_until(lambda: len(metrics_of(path)) == 4, "the run doesn't reach the gate")
        process.send_signal(signal.SIGHUP)
        gate.unlink()
        ended = ending(process, mark)
    assert ended.code == 128 + signal.SIGHUP
    assert Run(path, ended).summary["status"] == "stopped by signal 1"
    same(trained(*CARTPOLE), resume(path))


@pytest.mark.long
def test_an_environment_that_changes_the_directory_moves_no_file(trained, tmp_path):
    (tmp_path / "wandering.py").write_text(
        "import os, gymnasium\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Wandering(CartPoleEnv):\n"
        "    def step(self, action):\n        os.chdir('/')\n        return super().step(action)\n"
        "gymnasium.register('Wandering-v0', Wandering, max_episode_steps=500)\n"
    )
    words = ("train", "wandering:Wandering-v0", *SMALL, "--name", "run", "--log.jsonl", "second.jsonl")
    for ranks in (1, 2):
        ended = lockstep(*words, "--nproc", ranks, cwd=tmp_path)
        assert ended.code == 0, ended.stderr
        assert Run(tmp_path / "runs" / "run", ended).agent == trained(*CARTPOLE).agent
        assert (tmp_path / "second.jsonl").exists()
        shutil.rmtree(tmp_path / "runs")
        (tmp_path / "second.jsonl").unlink()
    assert not os.path.exists("/second.jsonl")


WANDERS = """
import os, gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
AT_IMPORT
class Wandering(CartPoleEnv):
    def __init__(self, **kwargs):
        WHEN_MADE
        open("asset.txt").close()
        super().__init__(**kwargs)
    def reset(self, **kwargs):
        open("asset.txt").close()
        return super().reset(**kwargs)
gymnasium.register("Wandering-v0", Wandering, max_episode_steps=500)
"""


@pytest.mark.parametrize(
    ("when", "ranks"),
    variants([(when, ranks) for when in ("AT_IMPORT", "WHEN_MADE") for ranks in (1, 2)], [("WHEN_MADE", 1)]),
)
def test_an_environment_that_goes_to_its_own_directory_finds_its_files_and_moves_none(trained, tmp_path, when, ranks):
    its_own, here = tmp_path / "its_own", tmp_path / "here"
    for folder in (its_own, here):
        folder.mkdir()
    goes = WANDERS.replace(when, "os.chdir(os.path.dirname(__file__))")
    (its_own / "wandering.py").write_text(goes.replace("AT_IMPORT", "").replace("WHEN_MADE", "pass"))
    (its_own / "asset.txt").touch()
    words = ("wandering:Wandering-v0", *SMALL, "--name", "run", "--log.jsonl", "second.jsonl", "--stop-at-step", 512)
    places = {"PYTHONPATH": os.pathsep.join([str(its_own), *filter(None, [os.environ.get("PYTHONPATH")])])}
    for asked in (words, ("--resume", "runs/run")):
        ended = lockstep("train", *asked, "--nproc", ranks, cwd=here, **places)
        assert ended.code == 0, ended.stderr
        assert " eval runs/run " in ended.stdout
    assert Run(here / "runs" / "run", ended).agent == trained(*CARTPOLE).agent
    ended = lockstep("eval", "runs/run", "--episodes", 2, "--json", "table.json", cwd=here, **places)
    assert ended.code == 0, ended.stderr
    assert {path.name for path in here.iterdir()} == {"runs", "second.jsonl", "table.json"}
    assert {path.name for path in its_own.iterdir()} - {"__pycache__"} == {"wandering.py", "asset.txt"}


def test_a_run_whose_temporary_files_are_tidied_up_meanwhile_is_done_all_the_same(leaving, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    tidies = "import glob, shutil; [shutil.rmtree(path) for path in glob.glob(os.environ['TMPDIR'] + '/lockstep-*')]"
    ended = lockstep(*leaving(tidies), "--nproc", 2, cwd=tmp_path, WHICH="0", TMPDIR=str(temporary))
    assert (ended.code, list(temporary.glob("lockstep-*"))) == (0, []), ended.stderr
    assert Run(tmp_path / "runs" / "run", ended).summary["status"] == "finished"


@pytest.mark.parametrize("nproc", [1, 2])
def test_what_killed_launchers_left_in_the_temporary_directory_is_swept(tmp_path, nproc):
    temporary = tmp_path / "tmp"
    stale, held, others = (temporary / f"lockstep-{of_this_host()}{name}" for name in ("stale", "held", "others"))
    for directory in (stale, held):
        directory.mkdir(parents=True)
        (directory / ".held").touch()
    others.mkdir()
    import fcntl

    with (held / ".held").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ended = lockstep("train", *CARTPOLE, "--nproc", nproc, cwd=tmp_path, TMPDIR=str(temporary))
    assert ended.code == 0
    assert {path.name for path in temporary.iterdir() if "lockstep" in path.name} == {held.name, others.name}

"""What environments depend on, or change, in the processes that step them: hashes of texts, and handlers of signals."""

import json
import signal
import sys

import pytest
from command_line import Run, command, lockstep, run_words
from variants import variants

SMALL = (
    "--num-envs",
    8,
    "--num-steps",
    16,
    "--ppo.num-minibatches",
    2,
    "--total-steps",
    512,
    "--env.max-episode-steps",
    64,
)
UNSEEDED = {"PYTHONHASHSEED": ""}
"""As the variables of a user are, who has never heard of it."""


def agent_of(tmp_path, name, ended):
    assert ended.code == 0, ended.stderr
    return Run(tmp_path / "runs" / name, ended).agent


@pytest.fixture(scope="module", params=variants(["torch", "jax"], ["torch"]))
def hashed(request, tmp_path_factory):
    """Trains in an environment that depends on hashes; the engine, a directory, and the agent of one rank."""
    tmp_path = tmp_path_factory.mktemp("hashed")
    words = ("train", "hashing:Hashing", *SMALL, "--engine", request.param)
    ended = run_words(command(*words, "--name", "first"), tmp_path, **UNSEEDED)
    return words, tmp_path, agent_of(tmp_path, "first", ended)


@pytest.mark.parametrize("more", [(), ("--nproc", 2), ("--env.workers", 2)], ids=["again", "ranks", "workers"])
def test_texts_have_the_same_hashes_in_every_process_and_start(hashed, more):
    words, tmp_path, agent = hashed
    name = "-".join(map(str, ("then", *more)))
    assert agent_of(tmp_path, name, run_words(command(*words, *more, "--name", name), tmp_path, **UNSEEDED)) == agent


def test_texts_have_the_same_hashes_in_runs_that_python_starts(hashed):
    words, tmp_path, agent = hashed
    config = {"engine": words[-1], "total_steps": 512, "num_envs": 8, "num_steps": 16, "ppo": {"num_minibatches": 2}}
    config["env"] = {"id": "hashing:Hashing", "max_episode_steps": 64}
    code = f"import lockstep; lockstep.train({config!r}, name='python')"
    assert agent_of(tmp_path, "python", run_words([sys.executable, "-c", code], tmp_path, **UNSEEDED)) == agent


def test_a_seed_that_the_user_chose_stays_and_is_recorded(hashed):
    words, tmp_path, agent = hashed
    ended = run_words(command(*words, "--name", "chosen"), tmp_path, PYTHONHASHSEED="3")
    assert agent_of(tmp_path, "chosen", ended) != agent
    first, chosen = (
        json.loads((tmp_path / "runs" / name / "checkpoints" / "step_512" / "state.json").read_text())["first_machine"]
        for name in ("first", "chosen")
    )
    assert "PYTHONHASHSEED=3" in chosen["kernel variables"]
    assert "PYTHONHASHSEED" not in first["kernel variables"]


@pytest.mark.parametrize("engine", variants(["torch", "jax"], ["torch"]))
@pytest.mark.parametrize(("when", "after"), [("made", 3), ("reset", 40)])
def test_an_environments_handlers_dont_take_the_runs_signals(tmp_path, engine, when, after):
    kwargs = json.dumps({"when": when, "number": int(signal.SIGTERM), "after": after})
    more = ("--total-steps", 1280, "--engine", engine, "--env.kwargs", kwargs, "--name", "run")
    ended = lockstep("train", "handling:Handling", *SMALL, *more, cwd=tmp_path)
    assert ended.code == 128 + signal.SIGTERM, ended.stderr
    run = Run(tmp_path / "runs" / "run", ended)
    assert run.summary["status"] == f"stopped by signal {int(signal.SIGTERM)}"
    assert (run.path / "checkpoints" / f"step_{run.summary['global_step']}").is_dir()


@pytest.mark.parametrize(("when", "after"), [("made", 3), ("reset", 200)])
def test_nor_in_a_worker_which_leaves_the_end_to_its_rank(tmp_path, when, after):
    kwargs = json.dumps({"when": when, "number": int(signal.SIGINT), "after": after})
    more = ("--total-steps", 2048, "--env.kwargs", kwargs, "--env.workers", 2, "--name", "run")
    ended = lockstep("train", "handling:Handling", *SMALL, *more, cwd=tmp_path)
    assert (ended.code, Run(tmp_path / "runs" / "run", ended).summary["status"]) == (0, "finished"), ended.stderr


BRIEF = "import sys, lockstep.cli as cli; cli.THREADS_SECONDS = 1; sys.exit(cli.command())"


def test_a_command_ends_though_an_environment_leaves_a_thread_running(tmp_path):
    words = ["train", "threaded:Threaded", *map(str, SMALL), "--name", "run"]
    ended = run_words([sys.executable, "-c", BRIEF, *words], tmp_path)
    assert (ended.code, Run(tmp_path / "runs" / "run", ended).summary["status"]) == (0, "finished")
    assert ended.stderr == (
        "lockstep: ended, though thread poller still runs; whoever starts it should make it a daemon, or end it: an "
        "environment in its close\n"
    )

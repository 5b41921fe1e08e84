"""Ranks that were started each by itself and aren't alike: none trains, and all say what differs."""

import pytest
from command_line import CARTPOLE, Ended, ending, running
from device_runs import CARTPOLE as JAX_CARTPOLE
from free_ports import free_port

WORDS = {"torch": (*CARTPOLE, "--stop-at-step", 128), "jax": (*JAX_CARTPOLE, "--stop-at-step", 128)}
KERNELS = {"ONEDNN_DEFAULT_FPMATH_MODE": "STRICT"}
"""What it is by default, so that it changes no number here."""


def ended_ranks(engine, cwd, words, variables) -> list[Ended]:
    """How two ranks end of which the second has more ``words`` and ``variables``."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    line = ("train", *WORDS[engine], "--name", "run", "--quiet")
    ranks = [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    with (
        running(*line, cwd=cwd, **ranks[0]) as (first, mark),
        running(*line, *words, cwd=cwd, **ranks[1], **variables) as (second, other),
    ):
        return [ending(first, mark), ending(second, other)]


@pytest.mark.parametrize("engine", WORDS)
def test_ranks_that_are_alike_train(tmp_path, engine):
    ended = ended_ranks(engine, tmp_path, (), {})
    assert [each.code for each in ended] == [0, 0], ended
    assert (tmp_path / "runs" / "run" / "summary.json").exists()


@pytest.mark.parametrize("engine", WORDS)
@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (("--seed", 1), {}, ("in config.seed: 1 against 0; ",)),
        ((), KERNELS, ("in kernel variables: ", "ONEDNN_DEFAULT_FPMATH_MODE=STRICT")),
    ],
    ids=["config", "kernel variables"],
)
def test_ranks_that_differ_are_refused_by_all_of_them(tmp_path, engine, words, variables, said):
    for ended in ended_ranks(engine, tmp_path, words, variables):
        assert ended.code == 2, ended
        assert ended.stderr.startswith(f"lockstep: error: rank 1 differs from rank 0 {said[0]}")
        assert said[-1] in ended.stderr
        assert ended.stderr.count("\n") == 1
    assert not list(tmp_path.glob("runs/*/checkpoints/step_*"))

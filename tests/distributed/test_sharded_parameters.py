"""FSDP: the agent of DDP, half of the memory on each of two ranks, and checkpoints that anyone can read."""

import json
import subprocess
import sys

import numpy as np
import pytest
from command_line import CARTPOLE, EVALUATED, TIMEOUT, Run, copy_of, error_line, lockstep, resume, surroundings
from free_ports import free_port
from variants import variants

from lockstep import load_policy
from lockstep.runs.checkpoint import read_checkpoint

FAST = ("--reduction", "fast", "--nproc", 2)
SILU = ("--network.activation", "silu", "--normalize.observations", "true")
NETS = {
    "SiLU": SILU,
    "GRU, accumulated": (
        *("--network.recurrent", "gru", "--network.recurrent-size", 7, "--network.sequence-length", 4),
        *("--ppo.gradient-accumulation", 2),
    ),
    "custom": ("--network.custom", "users_nets:Tiny", "--network.custom-kwargs", '{"units": 9}'),
}
STEPS = ("--total-steps", 256)


def arrays_of(run: Run) -> dict[str, np.ndarray]:
    return read_checkpoint(sorted((run.path / "checkpoints").glob("step_*"))[-1]).arrays


def apart(a: Run, b: Run) -> float:
    """The largest difference between two runs' parameters and moments, which have the same names and shapes."""
    one, other = arrays_of(a), arrays_of(b)
    assert {k: v.shape for k, v in one.items()} == {k: v.shape for k, v in other.items()}
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.parametrize("net", variants(NETS, ["SiLU"]))
def test_two_ranks_train_with_fsdp_as_they_do_with_ddp(trained, net):
    words = (*CARTPOLE, *STEPS, *FAST, *NETS[net], "--proof.interval", 1)
    replicated, sharded = trained(*words), trained(*words, "--fsdp")
    assert apart(replicated, sharded) < 1e-5
    assert arrays_of(sharded)["optimizer/step"] == 2 * 4 * 2
    assert "fsdp: each rank keeps a slice" in sharded.ended.stdout
    assert "fsdp" not in replicated.ended.stdout


def test_frozen_parameters_of_ones_own_network_get_no_gradient(trained):
    """And so stay bit for bit what they were: Adam's moments of them are zero."""
    arrays = arrays_of(trained(*CARTPOLE, *STEPS, *FAST, "--fsdp", "--network.custom", "users_nets:Frozen"))
    moved = {name.split("/")[-1] for name, x in arrays.items() if name.startswith("optimizer/exp_avg") and x.any()}
    assert moved == {"actor.weight", "actor.bias", "critic.weight", "critic.bias"}
    assert arrays["policy/body.0.weight"].any()


@pytest.mark.long
def test_a_sharded_run_goes_on_alone_and_a_lone_one_sharded(trained, tmp_path):
    words = (*CARTPOLE, *FAST, *SILU)
    sharded = trained(*words, "--fsdp", "--stop-at-step", 512)
    lone = trained(*words, "--nproc", 1, "--stop-at-step", 512)
    unsharded = resume(copy_of(sharded, tmp_path / "a"), "--no-fsdp", "--nproc", 1)
    alone_with_fsdp = resume(copy_of(sharded, tmp_path / "b"), "--nproc", 1)
    then_sharded = resume(copy_of(lone, tmp_path / "c"), "--fsdp", "--nproc", 2)
    whole = trained(*words)
    for run in (unsharded, alone_with_fsdp, then_sharded):
        assert run.summary["global_step"] == 1024
        assert apart(run, whole) < 1e-5
    assert unsharded.agent == alone_with_fsdp.agent
    assert "a single rank has nobody to share" in alone_with_fsdp.ended.stdout
    assert "each rank keeps a slice" in then_sharded.ended.stdout
    assert apart(lone, whole) > 1e-2


@pytest.mark.long
def test_a_sharded_run_evaluates_and_its_policy_loads(trained):
    run = trained(*EVALUATED, *FAST, *SILU, "--fsdp", "--proof.trace")
    replicated = trained(*EVALUATED, *FAST, *SILU)
    returns = [[m["eval/return_mean"] for m in r.metrics if "eval/return_mean" in m] for r in (run, replicated)]
    assert returns[0] == returns[1]
    assert len(returns[0]) == 2
    observations = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    actions = [load_policy(r.path)(observations) for r in (run, replicated)]
    assert np.array_equal(*actions)
    assert 0 < actions[0].sum() < 64


def weighed(iterations: int = 2, **changes) -> list[dict]:
    """What each of two ranks says that ran ``tests/modules/weighing.py``."""
    config = {
        "env": "CartPole-v1",
        "num_envs": 8,
        "num_steps": 8,
        "reduction": "fast",
        "collectives": "backend",
        "network": {"hidden_sizes": (255, 400), "activation": "silu"},
        **changes,
    }
    port = str(free_port())
    ranks = []
    for rank in range(2):
        launched = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        place = surroundings("", launched | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        words = [sys.executable, "-m", "weighing", json.dumps(config), str(iterations)]
        ranks.append(subprocess.Popen(words, env=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    out = []
    for process in ranks:
        stdout, stderr = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, stderr
        out.append(json.loads(stdout))
    return out


@pytest.mark.long
def test_a_rank_of_two_holds_half_of_the_parameters_and_moments():
    replicated, sharded = weighed(), weighed(fsdp=True)
    whole = replicated[0]["whole network"]
    for mine, theirs in zip(replicated, sharded, strict=True):
        assert mine["parameters and moments"] == 3 * whole
        assert 1.48 * whole < theirs["parameters and moments"] < 1.52 * whole  # the first rank has the odd rows
        assert theirs["all"] < 2.1 * whole < 0.5 * mine["all"]  # gradients too; DDP keeps buckets of them
        assert theirs["in a rollout"] == whole
    assert len({rank["parameters"] for rank in replicated}) == len({rank["parameters"] for rank in sharded}) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--fsdp",), "fsdp: true sums gradients in an order that depends on the ranks"),
        (("--fsdp", "--reduction", "fast", "--sync-period", 2), "sync_period: 2 needs whole parameters on every rank"),
        (
            ("--fsdp", "--reduction", "fast", "--nproc", 2, "--network.custom", "users_nets:Scaled"),
            "fsdp: parameter scale has no axis to be sharded along",
        ),
    ],
)
def test_fsdp_is_refused_in_one_line(tmp_path, words, said):
    assert said in error_line(lockstep("train", *CARTPOLE, *words, cwd=tmp_path))

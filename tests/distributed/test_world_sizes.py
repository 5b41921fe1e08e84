"""The same agent, byte for byte, whatever number of ranks, launcher, and worker processes."""

import sys

import pytest
from command_line import EVALUATED, SMALL, Run, run_words, same

WIDE = ("CartPole-v1", *SMALL, "--num-envs", 64, "--total-steps", 8192)
CHEETAH = (
    *("HalfCheetah-v5", *SMALL, "--env.max-episode-steps", 40, "--eval.interval", 0, "--network.activation", "elu"),
    *("--normalize.observations", "--normalize.returns"),
)
ODD_CHEETAH = (*CHEETAH, "--network.hidden-sizes", 17, 17)


@pytest.mark.parametrize("nproc", [2, 4, 8])
def test_cartpole_is_the_same_on_one_rank_and_on_more(trained, nproc):
    many = trained(*EVALUATED, "--nproc", nproc)
    assert many.summary["world_size"] == nproc
    assert many.summary["num_shards"] == 8
    same(trained(*EVALUATED), many)


def test_sixty_four_environments_are_the_same_on_one_rank_and_on_four(trained):
    one, four = trained(*WIDE), trained(*WIDE, "--nproc", 4)
    same(one, four)
    assert one.agent != trained(*EVALUATED).agent


def test_metrics_hold_what_was_learnt_and_not_only_zeros(trained):
    last = trained(*EVALUATED, "--nproc", 2).metrics[-1]
    assert last["global_step"] == 1024
    assert 8 < last["rollout/episode_return_mean"] < 500
    assert last["train/grad_norm"] > 0
    assert last["train/approx_kl"] != 0


def test_another_seed_is_another_agent(trained):
    one, other = trained(*EVALUATED), trained(*EVALUATED, "--seed", 1)
    assert one.summary["params_sha256"] != other.summary["params_sha256"]
    assert one.summary["state_sha256"] != other.summary["state_sha256"]
    assert all(a != b for a, b in zip(one.metrics, other.metrics, strict=True))


def test_normalised_continuous_control_is_the_same_on_one_rank_and_on_two(trained):
    one, two = trained(*CHEETAH), trained(*CHEETAH, "--nproc", 2)
    same(one, two)
    assert one.metrics[-1]["rollout/episode_return_mean"] is not None


def test_shards_run_one_by_one_where_batching_would_change_their_bits(trained):
    one, two = trained(*ODD_CHEETAH), trained(*ODD_CHEETAH, "--nproc", 2)
    same(one, two)
    mode = one.summary["shards_on_a_rank"]
    assert mode == two.summary["shards_on_a_rank"]
    assert (mode == "loop") == ("self-check: batching changes a shard's bits" in one.ended.stdout)
    assert trained(*EVALUATED).summary["shards_on_a_rank"] == "batched"
    if mode != "loop":
        pytest.skip("on this machine batching 17 units changes no bits")


def test_torchrun_gives_the_same_agent_as_one_rank(trained, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words = [*launcher, "lockstep", "train", *map(str, EVALUATED), "--name", "run"]
    ended = run_words(words, tmp_path)
    assert ended.code == 0, ended.stderr
    run = Run(tmp_path / "runs" / "run", ended)
    assert run.summary["world_size"] == 2
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["run"]
    same(trained(*EVALUATED), run)


@pytest.mark.parametrize("nproc", [1, 2])
def test_worker_processes_change_nothing(trained, nproc):
    same(trained(*EVALUATED), trained(*EVALUATED, "--env.workers", 2, "--nproc", nproc))


def test_array_environments_are_the_same_on_one_rank_and_on_two(trained):
    array = ("lockstep/CartPole-v1", *SMALL)
    one, two = trained(*array), trained(*array, "--nproc", 2)
    same(one, two)
    assert one.agent != trained(*EVALUATED).agent


def test_fast_reduction_repeats_itself_and_says_what_it_gives_up(trained):
    fast = (*EVALUATED, "--reduction", "fast", "--nproc", 2)
    one, again = trained(*fast), trained(*fast, "--proof.interval", 1)
    same(one, again)
    warning = "reduction fast: repeatable at this number of ranks; others agree up to summation order only"
    assert warning in one.ended.stdout
    assert one.summary["reduction"] == "fast"
    assert "repeatable at this number" not in trained(*EVALUATED, "--nproc", 2).ended.stdout

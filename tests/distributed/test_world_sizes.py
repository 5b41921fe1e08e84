"""The same agent, byte for byte, whatever number of ranks, launcher, and worker processes."""

import re
import sys

import pytest
from command_line import CARTPOLE, EVALUATED, SMALL, Run, error_line, lockstep, run_words, same
from device_runs import CARTPOLE as CARTPOLE_OF_JAX
from device_runs import devices, same_agent
from variants import variants

from lockstep.torch_engine.start.announcement import loop_notes

LONG = pytest.mark.long
WIDE = ("CartPole-v1", *SMALL, "--num-envs", 64, "--total-steps", 8192)
CHEETAH = (
    *("HalfCheetah-v5", *SMALL, "--env.max-episode-steps", 40, "--eval.interval", 0, "--network.activation", "elu"),
    *("--normalize.observations", "--normalize.returns"),
)
SIXTY_FOUR = (
    *("lockstep/CartPole-v1", "--num-envs", 64, "--num-shards", 64, "--num-steps", 8, "--ppo.num-minibatches", 2),
    *("--total-steps", 2048, "--eval.interval", 0),
)
TWELVE = (*CARTPOLE, "--num-envs", 12, "--num-shards", 12, "--total-steps", 1536)
LARGE = (*CARTPOLE, "--total-steps", 256, "--network.hidden-sizes", 384, 384, "--ppo.num-epochs", 1)
ODD_CHEETAH = (*CHEETAH, "--network.hidden-sizes", 17, 17)


@pytest.mark.parametrize("nproc", variants([2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 8]))
def test_cartpole_is_the_same_on_one_rank_and_on_more(trained, nproc):
    many = trained(*EVALUATED, "--nproc", nproc)
    assert many.summary["world_size"] == nproc
    assert many.summary["num_shards"] == 8
    same(trained(*EVALUATED), many)


def test_sixty_four_environments_are_the_same_on_one_rank_and_on_four(trained):
    one, four = trained(*WIDE), trained(*WIDE, "--nproc", 4)
    same(one, four)
    assert one.agent != trained(*EVALUATED).agent


@pytest.mark.parametrize("nproc", variants([3, 4, 5, 7, 12], [5]))
def test_twelve_shards_are_the_same_on_one_rank_and_on_more(trained, nproc):
    one, many = trained(*TWELVE), trained(*TWELVE, "--nproc", nproc)
    assert many.summary["num_shards"] == 12
    same(one, many)


@pytest.mark.long
def test_sixty_four_ranks_train_what_one_does(trained):
    one, many = trained(*SIXTY_FOUR), trained(*SIXTY_FOUR, "--nproc", 64)
    assert many.summary["world_size"] == 64
    same_agent(one, many)
    assert one.agent != trained(*SIXTY_FOUR, "--seed", 1).agent


@pytest.mark.long
def test_sixty_four_devices_train_what_one_does(trained):
    one, many = (trained(*SIXTY_FOUR, "--engine", "jax", *devices(number)) for number in (1, 64))
    same_agent(one, many)
    assert "jax · 64 devices [cpu] × 1 shard × 1 environment" in many.ended.stdout


HARD = {
    "bfloat16": (
        *("Hopper-v5", "--precision", "bf16", "--num-envs", 8, "--num-steps", 32, "--ppo.num-minibatches", 4),
        *("--total-steps", 4096),
    ),
    "rows that begin anywhere in memory": (
        *("MiniGrid-Empty-5x5-v0", "--num-envs", 9, "--num-shards", 3, "--num-steps", 5, "--ppo.num-minibatches", 5),
        *("--total-steps", 450, "--network.hidden-sizes", 7, 3, 9, "--network.activation", "gelu"),
        *("--ppo.learning-rate", 0.1, "--seed", 4),
    ),
    "a linear critic": ("CartPole-v1", "network.hidden_sizes=[]", "--total-steps", 8192),
    "layers of one unit": (
        *("lockstep/MountainCar-v0", "--network.hidden-sizes", 1, "--network.activation", "tanh", "--num-envs", 4),
        *("--num-shards", 4, "--num-steps", 8, "--ppo.num-minibatches", 4, "--ppo.num-epochs", 3),
        *("--ppo.learning-rate", 0.1, "--ppo.entropy-coef", 0.1, "--seed", 43, "--total-steps", 288),
    ),
}
"""In which the last bits of products once depended on the number of ranks, and the self-check didn't see it."""


@pytest.mark.parametrize(("case", "nproc"), list(zip(HARD, (8, 3, 8, 4), strict=True)))
def test_products_whose_bits_are_hard_to_keep_are_the_same_too(trained, case, nproc):
    if case.startswith("rows"):
        pytest.importorskip("minigrid")
    words = (*HARD[case], "--eval.interval", 0)
    same_agent(trained(*words), trained(*words, "--nproc", nproc))


@pytest.mark.long
def test_another_number_of_shards_is_another_agent(trained):
    """The negative of the above: what no number of ranks may change, the shards do."""
    assert trained(*TWELVE).agent != trained(*TWELVE, "--num-shards", 6).agent


@pytest.mark.parametrize(
    "ranks", [("--nproc", 3), pytest.param(("--nproc", 5, "--collectives", "backend"), marks=LONG)]
)
def test_large_sums_go_by_slices_to_the_same_agent(trained, ranks):
    one, many = trained(*LARGE), trained(*LARGE, *ranks)
    assert (one.summary["sums"], many.summary["sums"]) == ("none", "slices")
    same_agent(one, many)
    assert (
        trained(*EVALUATED, "--nproc", 2).summary["sums"]
        == trained(*EVALUATED, "--nproc", 3).summary["sums"]
        == "gather"
    )


def test_more_ranks_than_shards_are_refused_with_a_number_that_works(trained, tmp_path):
    line = error_line(lockstep("train", *CARTPOLE, "--num-shards", 8, "--nproc", 9, cwd=tmp_path))
    found = re.search(r"nproc: 9 ranks can't share 8 shards, at least one each; use at most (\d+), ", line)
    assert found, line
    assert list(tmp_path.iterdir()) == []
    assert trained(*EVALUATED, "--nproc", int(found[1])).summary["status"] == "finished"


def test_ranks_with_different_numbers_of_shards_are_told(trained):
    text = trained(*EVALUATED, "--nproc", 3).ended.stdout
    assert " 3 ranks × 3 or 2 shards × 1 environment " in text
    found = re.search(r"8 shards on 3 ranks: 3, 3, 2; (\d+) shards would be even", text)
    assert found
    assert int(found[1]) % 3 == 0
    text = trained(*EVALUATED, "--nproc", 2).ended.stdout
    assert " 2 ranks × 4 shards × 1 environment " in text
    assert "would be even" not in text


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


@pytest.mark.parametrize("nproc", variants([2, 3], [2]))
def test_normalised_continuous_control_is_the_same_on_one_rank_and_on_more(trained, nproc):
    one, many = trained(*CHEETAH), trained(*CHEETAH, "--nproc", nproc)
    same(one, many)
    assert one.metrics[-1]["rollout/episode_return_mean"] is not None


@pytest.mark.parametrize("nproc", variants([2, 3], [2]))
def test_shards_run_one_by_one_where_batching_would_change_their_bits(trained, nproc):
    """Odd layers are where it has been seen, on some machines."""
    one, many = trained(*ODD_CHEETAH), trained(*ODD_CHEETAH, "--nproc", nproc)
    same(one, many)
    mode = one.summary["shards_on_a_rank"]
    assert mode == many.summary["shards_on_a_rank"]
    assert (loop_notes(8, False)[0] in one.ended.stdout) == (mode == "loop")


def test_what_the_self_check_finds_is_told_and_decides_how_shards_run_but_not_what_is_learnt(trained):
    batched = trained(*EVALUATED)
    assert batched.summary["shards_on_a_rank"] == "batched"
    assert "one after the other" not in batched.ended.stdout
    looping = ("looping:CartPole-v1", *EVALUATED[1:])
    for words, shards in ((looping, 8), ((*looping, "--nproc", 2), 4)):
        run = trained(*words)
        assert run.summary["shards_on_a_rank"] == "loop"
        assert loop_notes(shards, False)[0] in run.ended.stdout
        same(batched, run)


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


def test_fast_reduction_repeats_itself_on_as_many_devices_of_jax(trained):
    fast = (*CARTPOLE_OF_JAX, "--reduction", "fast", *devices(2))
    one, again = trained(*fast), trained(*fast, "--proof.interval", 1)
    same_agent(one, again)
    assert (one.summary["engine"], one.summary["reduction"], one.summary["world_size"]) == ("jax", "fast", 2)
    assert one.agent != trained(*fast, "--seed", 1).agent

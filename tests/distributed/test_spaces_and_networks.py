"""Every kind of space, network and algorithm: ranks that stop and go on as half as many end as one that never did."""

import numpy as np
import pytest
from command_line import Run, copy_of, lockstep, resume
from variants import variants

from lockstep.runs.checkpoint import read_checkpoint

SHORT = (
    *("--num-envs", 8, "--num-steps", 16, "--total-steps", 512, "--ppo.num-epochs", 2, "--ppo.num-minibatches", 2),
    *("--ppo.learning-rate", 5e-3, "--network.hidden-sizes", "8", "--checkpoint.interval", 0),
)
"""Four iterations of 128 steps."""
LSTM = ("--network.recurrent", "lstm", "--network.recurrent-size", 8, "--network.sequence-length", 8)
GRPO = ("--algorithm", "grpo", "--grpo.group-size", 4, "--num-envs", 16, "--grpo.kl-coef", 0.1)
CASES = {
    "LSTM": ("CartPole-v1", *SHORT, *LSTM),
    "shared GRU, returns normalised": (
        *("lockstep/CartPole-v1", *SHORT, *LSTM[2:], "--network.recurrent", "gru"),
        *("--network.shared", "true", "--normalize.returns", "true"),
    ),
    "Dict with an image": ("small_worlds:Lantern-v0", *SHORT, "--normalize.observations", "true"),
    "shared convolutions": (
        *("small_worlds:Lantern-v0", *SHORT, "--network.shared", "true", "--network.image.kind", "impala"),
        *("--network.image.width", 0.25, "--network.image.depth", 1),
    ),
    "masked MultiDiscrete": (
        *("small_worlds:Doors-v0", *SHORT, "--env.action-mask", "info", "--normalize.observations", "true"),
    ),
    "squashed, std by state": (
        *("Pendulum-v1", *SHORT, "--network.squash", "true", "--network.state-dependent-std", "true"),
        *("--ppo.entropy-coef", 0.01),
    ),
    "GRPO": ("CartPole-v1", *SHORT, *GRPO, "--num-steps", 48, "--total-steps", 3072),
    "custom with dropout": (
        *("CartPole-v1", *SHORT, "--network.custom", "users_nets:Tiny", "--network.custom-kwargs", '{"dropout": 0.3}'),
    ),
}


def half(words: tuple) -> int:
    """Steps after which half of the iterations are done."""
    return int(words[len(words) - 1 - words[::-1].index("--total-steps") + 1]) // 2


ON_FOUR = ("LSTM", "GRPO")
"""Cases that begin on four ranks; the others on two."""


@pytest.mark.parametrize("case", variants(CASES, ["LSTM"]))
def test_ranks_that_go_on_as_half_as_many_end_as_one_that_never_stopped(trained, tmp_path, case):
    words, ranks = CASES[case], 4 if case in ON_FOUR else 2
    one = trained(*words)
    stopped = trained(*words, "--nproc", ranks, "--stop-at-step", half(words))
    assert stopped.summary["status"] == "stopped at step"
    resumed = resume(copy_of(stopped, tmp_path / "run"), "--nproc", ranks // 2)
    assert resumed.summary["world_size"] == ranks // 2
    assert resumed.summary["restarted_environments"] == []
    assert resumed.ended.stderr == ""
    assert resumed.metrics == one.metrics
    assert resumed.agent == one.agent
    assert len(one.metrics) == 4
    assert stopped.agent != one.agent


UNEVEN = ("LSTM", "GRPO", "Dict with an image", "masked MultiDiscrete", "custom with dropout")


@pytest.mark.long
@pytest.mark.parametrize("case", UNEVEN)
def test_three_ranks_that_go_on_as_two_end_as_one_that_never_stopped(trained, tmp_path, case):
    words = CASES[case]
    one, stopped = trained(*words), trained(*words, "--nproc", 3, "--stop-at-step", half(words))
    assert "shards on 3 ranks: " in stopped.ended.stdout
    resumed = resume(copy_of(stopped, tmp_path / "run"), "--nproc", 2)
    assert resumed.summary["restarted_environments"] == []
    assert resumed.metrics == one.metrics
    assert resumed.agent == one.agent


def live_carry(run: Run) -> np.ndarray:
    """What was carried at the end of a run, of all shards."""
    (path,) = (run.path / "checkpoints").glob("step_*")
    shards = read_checkpoint(path).env_shards
    return np.concatenate([shards[shard]["carry"] for shard in sorted(shards)])


@pytest.mark.long
def test_an_lstm_stops_in_the_middle_of_episodes_and_what_it_carries_matters(trained, tmp_path):
    """The negative of the resumed LSTM: without the carry it ends elsewhere."""
    words = CASES["LSTM"]
    stopped = trained(*words, "--nproc", 4, "--stop-at-step", half(words))
    carry = live_carry(stopped)
    assert carry.shape == (8, 2 * 16)  # hidden and cell state of an actor's and a critic's core
    assert (np.abs(carry).max(1) > 0).sum() >= 4
    forgetful = trained("forgets_carry:CartPole-v1", *words[1:], "--stop-at-step", half(words))
    assert forgetful.agent == stopped.agent
    resumed = resume(copy_of(forgetful, tmp_path / "run"))
    assert resumed.agent != trained(*words).agent


@pytest.mark.long
def test_grpos_episodes_are_uneven_and_a_ranks_own_count_is_caught(trained, tmp_path):
    words = CASES["GRPO"]
    returns = [(m["rollout/episode_return_min"], m["rollout/episode_return_max"]) for m in trained(*words).metrics]
    assert all(8 < least < 20 < most <= 48 for least, most in returns)
    mistaken = ("own_count:CartPole-v1", *words[1:])
    ended = lockstep("verify", *mistaken, "--world-sizes", "1,2", "--iterations", 2, cwd=tmp_path)
    assert ended.code == 1
    assert ended.stdout.splitlines()[-1].startswith("NOT VERIFIED")
    assert trained(*mistaken).agent == trained(*words).agent  # on one rank it makes no difference
    assert trained(*mistaken, "--nproc", 2).agent != trained(*words).agent


@pytest.mark.parametrize("case", variants(["Dict with an image", "custom with dropout"], ["custom with dropout"]))
def test_another_seed_is_another_agent(trained, case):
    assert trained(*CASES[case], "--seed", 1).agent != trained(*CASES[case]).agent


@pytest.mark.parametrize(("shards", "ranks"), variants([(2, 2), (8, 2), (8, 3), (8, 8)], [(2, 2)]))
def test_a_custom_network_mapped_over_shards_is_the_same_on_any_number_of_ranks(trained, shards, ranks):
    """A rank with one shard alone calls it for two."""
    words = ("CartPole-v1", *SHORT, "--network.custom", "users_nets:Tiny", "--num-shards", shards)
    one, many = trained(*words), trained(*words, "--nproc", ranks)
    assert " shards batched " in one.ended.stdout
    assert many.metrics == one.metrics
    assert many.agent == one.agent
    assert one.agent != trained(*words, "--seed", 1).agent


@pytest.mark.parametrize("how", [("--num-shards", 2), ("--num-shards", 1), ("--num-shards", 2, "--reduction", "fast")])
def test_a_custom_network_may_work_in_place_on_its_observations(trained, how):
    words = ("CartPole-v1", *SHORT, *how, "--network.custom", "users_nets:Scaling", "--network.custom-kwargs")
    in_place, not_so = trained(*words, "{}"), trained(*words, '{"in_place": false}')
    assert in_place.metrics == not_so.metrics
    assert in_place.agent == not_so.agent


@pytest.mark.long
def test_without_dropout_the_custom_network_ends_elsewhere(trained):
    words = tuple("{}" if word == '{"dropout": 0.3}' else word for word in CASES["custom with dropout"])
    assert trained(*words).agent != trained(*CASES["custom with dropout"]).agent

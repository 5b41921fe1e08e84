"""Snake: the first 20 iterations on 1, 2 and 4 ranks, and on 1, 2 and 4 devices, give one agent in each engine."""

from pathlib import Path

import pytest
from device_runs import devices, same_agent
from variants import variants

EXAMPLES = Path(__file__).parents[2] / "examples" / "snake"
SHORT = (
    *("--num-envs", 16, "--num-steps", 8, "--total-steps", 2560, "--ppo.num-epochs", 2, "--ppo.num-minibatches", 2),
    *("--network.image.width", 0.125, "--checkpoint.interval", 0, "--eval.interval", 10, "--eval.episodes", 4),
    *("--eval.max-steps", 100, "--log.no-tensorboard"),
)
SMALL = (EXAMPLES / "snake-small.yaml", *SHORT)
STACKED = (EXAMPLES / "snake-base-framestack.yaml", *SHORT, "--num-shards", 4, "--env.kwargs", '{"size": 5}')


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])  # many ranks
def test_ranks_play_as_one(trained, ranks):
    one, many = trained(*SMALL), trained(*SMALL, "--nproc", ranks)
    assert many.summary["world_size"] == ranks
    same_agent(one, many)
    assert len(one.metrics) == 20
    assert "eval/score_mean" in one.metrics[9]


@pytest.mark.long  # its network takes long to compile
@pytest.mark.parametrize("number", [2, 4])
def test_devices_play_as_one(trained, number):
    one, many = (trained(*SMALL, "--engine", "jax", *devices(n)) for n in (1, number))
    assert many.summary["world_size"] == number
    same_agent(one, many)
    assert "eval/score_mean" in one.metrics[9]


@pytest.mark.parametrize("words", variants([["--seed", 1], ["--engine", "jax", *devices(1)]], [["--seed", 1]]))
def test_another_seed_and_another_engine_are_other_agents(trained, words):
    assert trained(*SMALL).agent[0] != trained(*SMALL, *words).agent[0]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["auto", "tensor"])
def test_stacked_frames_play_as_one_too(trained, backend):
    words = (*STACKED, "--env.backend", backend)
    same_agent(trained(*words), trained(*words, "--nproc", 2))

"""Images: the same agent on any number of ranks, with each shard's image a batch of its own and with all in one."""

import pytest
from variants import variants

PIXELS = (
    *("lockstep/GridWorldPixels-v0", "--num-envs", 8, "--num-steps", 16, "--total-steps", 384),
    *("--ppo.num-epochs", 2, "--ppo.num-minibatches", 2, "--ppo.learning-rate", 5e-3, "--network.hidden-sizes", 8),
    *("--network.image.width", 0.25, "--checkpoint.interval", 0, "--seed", 3),
)
"""Three iterations of 128 steps; a shard has one environment, and so one image a step."""


@pytest.mark.parametrize("ranks", variants([2, 3, 8], [3]))
def test_images_train_the_same_agent_on_any_number_of_ranks(trained, ranks):
    one, many = trained(*PIXELS), trained(*PIXELS, "--nproc", ranks)
    assert many.agent == one.agent
    assert many.metrics == one.metrics
    mode = one.summary["shards_on_a_rank"]
    assert mode == many.summary["shards_on_a_rank"]
    assert mode.startswith("loop")
    assert f"exact, shards {mode}" in one.ended.stdout


def test_with_another_seed_it_is_another_agent(trained):
    assert trained(*PIXELS, "--seed", 4).agent != trained(*PIXELS).agent

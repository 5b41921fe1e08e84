"""The mistake of shuffling by rank: minibatches depend on how many ranks there are."""

import os

import numpy as np

from lockstep.torch_engine import train

_generator = np.random.default_rng(int(os.environ.get("RANK", "0")))


def minibatch_indices(config, plan, iteration):
    samples, ppo = config.num_steps * plan.envs_per_shard, config.ppo
    shape = (ppo.num_epochs, plan.local_num_shards)
    rows = np.stack([_generator.permutation(samples) for _ in range(shape[0] * shape[1])])
    return rows.reshape(*shape, ppo.num_minibatches, -1).swapaxes(1, 2)


train.minibatch_indices = minibatch_indices

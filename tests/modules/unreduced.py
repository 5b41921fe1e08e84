"""The mistake of a loss that bypasses the reduction: each rank steps with the gradient of its own shards."""

from lockstep.torch_engine.distributed.communicator import Communicator
from lockstep.torch_engine.distributed.ordered import tree_sum


def sum_here(self, x):
    return tree_sum(x)


Communicator.sum_shards = sum_here

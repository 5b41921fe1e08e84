"""The mistake of seeding by rank: each rank starts from parameters of its own."""

import os

from lockstep.torch_engine import state

_initial_parameters = state.initial_parameters


def initial_parameters(config, net):
    seed = config.seed + int(os.environ.get("RANK", "0"))
    return _initial_parameters(config.model_copy(update={"seed": seed}), net)


state.initial_parameters = initial_parameters

"""A machine on which batching changes a shard's bits, wherever an environment's id names this module."""

from lockstep.torch_engine.setup import choose_mode

choose_mode.shards_invariant_here = lambda state, config: False

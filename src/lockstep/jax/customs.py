"""Holds what a task changes in training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lockstep.jax_engine.distributed.reductions import BATCH_AXIS
from lockstep.jax_engine.program.program import Collect


@dataclasses.dataclass(frozen=True)
class Customs:
    """What a task customises: a maker of an Equinox module, its reduction of gradients, the name of the batch axis.

    See :class:`lockstep.jax.task.Task` and :class:`lockstep.jax_engine.nets.parameters.VectorLayout`; ``collect`` is
    that of :class:`lockstep.jax_engine.program.program.Program`, and ``first_envs`` returns observations and states
    ``[num_envs, …]`` that first episodes begin with.
    """

    policy: Callable[..., Any] | None = None
    synchronize: Callable[[Any], Any] | None = None
    axis_name: str = BATCH_AXIS
    collect: Collect | None = None
    first_envs: Callable[[], tuple[Any, Any] | None] | None = None

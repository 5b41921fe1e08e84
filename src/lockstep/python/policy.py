"""``lockstep.load_policy``: a run's policy, for a caller in Python."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from lockstep.policies import policy
from lockstep.policies.policy import Policy
from lockstep.python.run import Run
from lockstep.python.words import in_callers_words


def load_policy(
    run: str | PathLike[str],
    checkpoint: str | int = "latest",
    runs_dir: str | Path = "runs",
    engine: str | None = None,
    trust: bool = False,
    network: type | None = None,
) -> Policy:
    """Load the policy of a run.

    Args:
        run: name, run directory, checkpoint directory, or a :class:`lockstep.Run`, whose own network and ``trust``
            count where none are given here.
        checkpoint: ``latest``, ``best`` or a step number.
        runs_dir: where runs given by name lie.
        engine: ``torch`` or ``jax``, whichever trained it; None: the one that did.
        trust: whether to import what the run names (``module:attribute``), though this user hasn't trained with it.
        network: the class of its network, if it was trained with one that can't be imported.

    Raises:
        ValueError: there is no such run or checkpoint, or it is damaged, names code that this user hasn't trained
            with, or the engine can't compute it; one line.
    """
    if isinstance(run, Run):
        trust, network = trust or run.trusted, run.network if network is None else network
    with in_callers_words():
        return policy.load_policy(run, checkpoint, runs_dir, engine, trust, network)

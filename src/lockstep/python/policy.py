"""Provides ``lockstep.load_policy``, which loads a run's policy for a caller in Python."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from lockstep.config.on_off import switch
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
    """Loads the policy of a run.

    Args:
        run: a run's name, run directory or checkpoint directory, or a :class:`lockstep.Run`; a ``Run``'s network and
            ``trust`` apply unless they are given here.
        checkpoint: ``latest``, ``best`` or a step number.
        runs_dir: the directory of runs that are given by name.
        engine: ``torch`` or ``jax``, whichever engine trained the run; None: the one that did.
        trust: whether to import code that the run names (``module:attribute``), even if the user never trained with it.
        network: the class of the run's network, if it can't be imported.

    Raises:
        ValueError: there is no such run or checkpoint, it is damaged, its ``config.json`` was edited in what makes the
            policy, it names code that this user hasn't trained with, the engine can't compute it, or ``trust``
            is neither True nor False; one line.
    """
    trust = switch("trust", trust)
    if isinstance(run, Run):
        trust, network = trust or run.trusted, run.network if network is None else network
    with in_callers_words():
        return policy.load_policy(run, checkpoint, runs_dir, engine, trust, network)

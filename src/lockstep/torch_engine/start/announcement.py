"""Writes the lines that a run of this engine prints before it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.config.run import RunOptions
from lockstep.torch_engine.plain.functions import PlainFunctions, RecurrentFunctions
from lockstep.torch_engine.setup.choose_mode import shards_that_fit
from lockstep.training import announcement
from lockstep.training.announcement import quantity, shards_each

if TYPE_CHECKING:
    from lockstep.torch_engine.session import Session


def start_lines(session: Session, options: RunOptions) -> list[str]:
    """Returns the line that describes the set-up, and those that say what leaves the promise; a collective."""
    return announcement.start_lines(session, options, "ranks", _set_up(session), _own_notes(session))


def _set_up(session: Session) -> list[str]:
    plan = session.plan
    devices = session.communicator.gather_json(str(session.state.parameters.flat.device))
    spread = (
        quantity(plan.world_size, "rank"),
        shards_each(plan.tree),
        quantity(plan.envs_per_shard, "environment"),
    )
    return [
        "torch",
        " × ".join(spread),
        devices[0] if len(set(devices)) == 1 else ", ".join(devices),
        "fast" if session.config.reduction == "fast" else f"exact, shards {session.shards_on_a_rank}",
    ]


def _own_notes(session: Session) -> list[str]:
    config, communicator, out = session.config, session.communicator, []
    if config.reduction == "exact" and session.mode == "loop" and session.together == 1 and not config.compile:
        net = session.state.net
        custom = None if net.custom is None else net.custom.one_by_one
        if custom is not None or not net.convolutional or shards_that_fit(net, config) > 1:
            out += loop_notes(session.plan.tree.most_shards, net.convolutional, custom)
    if config.threads > 1 and isinstance(session.state.policy, PlainFunctions | RecurrentFunctions):
        out.append(
            f"threads: {config.threads}, but these networks are computed in NumPy, on one; with --threads 1 as many "
            "cores hold more ranks"
        )
    if config.fsdp and not session.communicator.alone:
        out.append("fsdp: each rank keeps a slice of parameters and moments; a whole copy is gathered for each rollout")
    elif config.fsdp:
        out.append("fsdp: a single rank has nobody to share its parameters with")
    if config.backend == "gloo" and communicator.transport == "shared memory":
        out.append("backend gloo: ranks of one host meet in memory; --collectives backend sends all by gloo")
    if communicator.no_slots is not None and session.topology.on_one_host:
        out.append(f"collectives go through {communicator.transport}, not memory: {communicator.no_slots}")
    return out


def loop_notes(shards: int, convolutional: bool, custom: str | None = None) -> list[str]:
    """Returns the line that says why a rank's ``shards`` run one after the other, what it costs and what avoids it.

    Returns no line for one shard. ``custom`` says why a custom network can't be called for several shards at once. The
    figures are those of docs/networks.md, "What `exact` costs".
    """
    if shards == 1:
        return []
    why = "self-check: batched, a shard's bits would change on this machine"
    if custom is not None:
        why = f"the custom network {custom}"
    elif convolutional:
        why = "the bits of convolutions may depend on the size of a batch"
    return [
        f"{why}, so shards run one after the other: {shards} calls of the networks instead of 1 (8 of them take 1 to "
        "5 times as long); more ranks, or fewer --num-shards in a new run, make that less, and --reduction fast "
        "avoids it, with other bits on other numbers of ranks"
    ]

"""Writes the lines that a run of this engine prints before it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.config.run import RunOptions
from lockstep.jax_engine.distributed.mesh import device_line
from lockstep.training import announcement
from lockstep.training.announcement import quantity, shards_each

if TYPE_CHECKING:
    from lockstep.jax_engine.session import Session


def start_lines(session: Session, options: RunOptions) -> list[str]:
    """Returns the line that describes the set-up, and those that say what leaves the promise; a collective."""
    return announcement.start_lines(session, options, "devices", _set_up(session), _own_notes(session))


def _set_up(session: Session) -> list[str]:
    program = session.program
    shards, environments = shards_each(program.tree), quantity(program.blocks.rows, "environment")
    where = "in the program" if program.env is not None else "on the host"
    return ["jax", f"{device_line(program.mesh)} × {shards} × {environments} ({where})", session.config.reduction]


def _own_notes(session: Session) -> list[str]:
    config, program, out = session.config, session.program, []
    alone = session.topology.world_size == 1 and not config.fsdp
    if program.layout.axes:
        cut = sum(axis is not None for axis in program.layout.axes.values())
        devices = program.mesh.shape["fsdp"]
        out.append(f"fsdp: {cut} of {len(program.layout.axes)} parameters are cut over {devices} devices")
    elif config.fsdp:
        out.append("fsdp: training goes on with a single device, which has nobody to share its parameters with")
    many = program.mesh.size > 1 and config.collectives == "auto" and config.device == "cpu"
    if program.apart is not None and many and alone:
        out.append(f"collectives go through XLA, which is slower, and not through memory: {program.apart}")
    if config.reduction == "fast" and not program.tree.even:
        out.append("devices that own different numbers of shards compute one after the other, not all as one batch")
    unclear = getattr(program.env, "limit_note", None)
    if unclear is not None:
        out.append(unclear)
    return out

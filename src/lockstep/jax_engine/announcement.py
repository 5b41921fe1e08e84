"""What a run says before it trains: its set-up in one line, and what leaves the promise."""

from __future__ import annotations

from lockstep.config.checks import grpo_notes
from lockstep.config.run import RunOptions
from lockstep.core.fingerprint import sha256_of
from lockstep.jax_engine.distributed.mesh import device_line
from lockstep.jax_engine.session import Session, check_ranks_in_sync
from lockstep.jax_engine.state import POLICY


def announcement(session: Session) -> str:
    """One line that confirms the set-up: devices, shards, environments, parameters in sync."""
    config, mesh = session.config, session.program.mesh
    check_ranks_in_sync(session, "at the start")
    digest = sha256_of({k: v for k, v in session.arrays().items() if k.startswith(POLICY)})[:8]
    shards, rows = session.program.blocks.shards, session.program.blocks.rows
    where = "in the program" if session.program.env is not None else "on the host"
    return (
        f"{config.env.id} · jax · {device_line(mesh)} × {shards} shard{'s' if shards > 1 else ''} × {rows} "
        f"environment{'s' if rows > 1 else ''} ({where}) · {config.reduction} · parameters in sync ({digest})"
    )


def notes(session: Session, options: RunOptions) -> list[str]:
    """What the user should know before training starts: what leaves the promise."""
    config, out, mesh = session.config, [], session.program.mesh
    alone = session.topology.world_size == 1 and not config.fsdp
    if config.reduction == "fast":
        out.append("reduction fast: repeatable at this number of devices; others agree up to summation order only")
    out += grpo_notes(config, session.description.max_episode_steps)
    if session.program.layout.axes:
        cut = sum(axis is not None for axis in session.program.layout.axes.values())
        out.append(
            f"fsdp: {cut} of {len(session.program.layout.axes)} parameters are cut over {mesh.shape['fsdp']} devices"
        )
    elif config.fsdp:
        out.append("fsdp: training goes on with a single device, which has nobody to share its parameters with")
    if config.sync_period > 1:
        out.append(
            f"sync_period {config.sync_period}: devices train apart between synchronisations; the agent depends on "
            "their number"
        )
    reason = session.program.apart
    if reason is not None and mesh.size > 1 and config.collectives == "auto" and config.device == "cpu" and alone:
        out.append(f"collectives go through XLA, which is slower, and not through memory: {reason}")
    unclear = getattr(session.program.env, "limit_note", None)
    if unclear is not None:
        out.append(unclear)
    if options.max_hours is not None:
        out.append("max-hours: where the run ends depends on the speed of this machine")
    return out

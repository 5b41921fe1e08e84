"""What a run says before it trains: its set-up in one line, and what leaves the promise."""

from __future__ import annotations

from lockstep.config.checks import grpo_notes
from lockstep.config.run import RunOptions
from lockstep.core.fingerprint import sha256_of
from lockstep.torch_engine.session import Session, check_ranks_in_sync
from lockstep.torch_engine.state import POLICY, state_arrays


def announcement(session: Session) -> str:
    """One line that confirms the set-up: ranks, shards, devices, parameters in sync."""
    config, plan = session.config, session.plan
    devices = session.communicator.gather_json(str(session.state.parameters.flat.device))
    listed = devices[0] if len(set(devices)) == 1 else ", ".join(devices)
    check_ranks_in_sync(session, "at the start")
    digest = sha256_of({k: v for k, v in state_arrays(session.state).items() if k.startswith(POLICY)})[:8]
    reduction = "fast" if config.reduction == "fast" else f"exact, shards {session.mode}"
    return (
        f"{config.env.id} · torch · {plan.world_size} rank{'s' if plan.world_size > 1 else ''} × "
        f"{plan.local_num_shards} shard{'s' if plan.local_num_shards > 1 else ''} × {plan.envs_per_shard} "
        f"environment{'s' if plan.envs_per_shard > 1 else ''} · {listed} · {reduction} · parameters in sync ({digest})"
    )


def notes(session: Session, options: RunOptions) -> list[str]:
    """What the user should know before training starts: what leaves the promise."""
    config, out = session.config, []
    if config.reduction == "fast":
        out.append("reduction fast: repeatable at this world size; other world sizes agree up to summation order only")
    elif session.mode == "loop" and not config.compile:
        out.append(
            "self-check: batching changes a shard's bits on this machine, so shards run one after the other (slower)"
        )
    out += grpo_notes(config, session.description.max_episode_steps)
    if session.state.sharded is not None:
        out.append("fsdp: each rank keeps a slice of parameters and moments; a whole copy is gathered for each rollout")
    elif config.fsdp:
        out.append("fsdp: a single rank has nobody to share its parameters with")
    if config.sync_period > 1:
        out.append(
            f"sync_period {config.sync_period}: ranks train apart between synchronisations; the agent depends on their "
            "number"
        )
    if session.communicator.no_slots is not None and session.topology.on_one_host:
        out.append(
            f"collectives go through {session.communicator.transport}, not memory: {session.communicator.no_slots}"
        )
    if options.max_hours is not None:
        out.append("max-hours: where the run ends depends on the speed of this machine")
    return out

"""Everything a rank holds while it trains, and how it is opened: devices, ranks, environments, state, self-check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lockstep.config.run import Config
from lockstep.core.fingerprint import compare_ranks, fingerprints
from lockstep.core.process import fail_now
from lockstep.core.shards import ShardPlan
from lockstep.core.topology import Topology
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.registry import make_envs
from lockstep.envs.restore.replay import ReplayLog
from lockstep.envs.restore.snapshot import load_shards, save_shards
from lockstep.policies.policy import Policy
from lockstep.runs.checkpoint import Checkpoint, pack, to_files
from lockstep.torch_engine.distributed.communicator import (
    Communicator,
    check_ranks_alike,
    open_process_group,
    uses_nccl,
)
from lockstep.torch_engine.envs import tensor_rollout
from lockstep.torch_engine.envs.tensor_envs import TensorEnvs
from lockstep.torch_engine.gradients import (
    GradientSource,
    exact_gradient,
    fast_gradient,
    local_gradient,
    shard_parameters,
)
from lockstep.torch_engine.rollout import Actor, Rollout, action_noise, collect, collect_random
from lockstep.torch_engine.setup.choose_mode import choose_mode
from lockstep.torch_engine.setup.devices import machine_facts, set_up_torch
from lockstep.torch_engine.setup.self_check import Mode
from lockstep.torch_engine.state import (
    FlatParameters,
    TrainState,
    carried,
    init_state,
    initial_parameters,
    load_state_arrays,
    policy_arrays,
    state_arrays,
)
from lockstep.torch_engine.statistics import initial_statistics
from lockstep.training.reference_policy import reference_arrays
from lockstep.training.session import checkpoint_facts, gather_shards, load_facts, make_eval_envs, policy_of


@dataclass
class Session:
    """What one rank trains with.

    Attributes:
        config: resolved.
        topology: this rank's place; ``plan`` its shards; ``communicator`` its collectives.
        description: the environment's spaces; ``envs`` its environments; ``replay`` their live episodes' actions.
        state: what training changes.
        mode: whether shards are batched or looped over.
        actor: the policy for rollouts; ``source`` gives reduced gradients; ``rollout`` are the buffers.
        restarted: environments that this resume couldn't restore exactly; ``restarted_before`` those of earlier ones.
    """

    config: Config
    topology: Topology
    plan: ShardPlan
    communicator: Communicator
    description: EnvDescription
    envs: HostEnvs
    replay: ReplayLog
    state: TrainState
    mode: Mode
    actor: Actor
    source: GradientSource
    rollout: Rollout
    restarted: list[int] = field(default_factory=list)
    restarted_before: list[int] = field(default_factory=list)
    wall_time_before: float = 0.0
    _eval_envs: HostEnvs | None = None

    @property
    def counted(self) -> TrainState:
        """Holds the counters."""
        return self.state

    def eval_envs(self) -> HostEnvs:
        """Returns the environments of evaluations, made at the first one: an equal number for each local shard."""
        if self._eval_envs is None:
            self._eval_envs = make_eval_envs(self.config, self.description, self.plan)
        return self._eval_envs

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns every array of the training state by name; with FSDP a collective."""
        return state_arrays(self.state)

    def check_in_sync(self, when: str) -> None:
        """Compares every array across ranks by fingerprint, in one small collective.

        Raises:
            DesyncError: on every rank, naming the tensor, the ranks and ``when``.
        """
        arrays = self.arrays()
        rows = self.communicator.gather_ranks(torch.from_numpy(fingerprints(arrays).copy()))
        compare_ranks(list(arrays), rows.numpy(), when)

    def checkpoint_files(self, wall_time: float, score: float | None) -> dict[str, bytes]:
        """Returns the files of a checkpoint; a collective that gathers the environments of all ranks."""
        state = self.state
        local = save_shards(self.envs, self.replay, state.counter, carried(state), self.plan)
        shards = gather_shards(local, self.communicator.gather_bytes)
        facts = checkpoint_facts(self, wall_time, score)
        return to_files(self.arrays(), {s: pack(a) for s, a in sorted(shards.items())}, facts)

    def facts(self) -> dict[str, Any]:
        """Returns what ``summary.json`` says of engine, ranks and machine."""
        return {
            "engine": "torch",
            "world_size": self.topology.world_size,
            "collectives": self.communicator.transport,
            "shards_on_a_rank": self.mode,
            **machine_facts(self.state.parameters.flat.device),
        }

    def collect(self) -> None:
        """Fill the rollout with this iteration's steps."""
        state, config, plan = self.state, self.config, self.plan
        if isinstance(self.envs, TensorEnvs):
            noise = tensor_rollout.device_noise(config, plan, state.net, state.iteration, self.envs.device)
            assert isinstance(self.rollout, tensor_rollout.TensorRollout)
            tensor_rollout.collect(state, self.envs, self.actor, noise, self.rollout)
        else:
            noise = action_noise(config, plan, state.net, state.iteration)
            collect(state, self.envs, self.actor, noise, self.rollout)

    def close(self) -> None:
        """Let the environments and the other ranks go."""
        self.envs.close()
        if self._eval_envs is not None:
            self._eval_envs.close()
        self.communicator.close()


def open_session(config: Config, topology: Topology, checkpoint: Checkpoint | None) -> Session:
    """Join the ranks, make the environments, and build or restore the state.

    Raises:
        ValueError: what the config asks for can't be had here, or ranks differ; one line.
    """
    device = set_up_torch(config, topology)
    plan = ShardPlan(config.envs, config.shards, topology.world_size, topology.rank)
    open_process_group(topology, config)
    communicator = Communicator(topology, plan, device, uses_nccl(config))
    check_ranks_alike(communicator, config)
    communicator.share_memory(config)
    description = describe(config.env)
    envs = make_envs(
        config.env,
        description,
        config.seed,
        plan.env_ids,
        fail_now,
        group_size=config.group_size,
        device=config.device,
        shard_size=plan.envs_per_shard,
    )
    state = init_state(config, description, plan, device)
    set_reference(state, config)
    mode = choose_mode(state, config, communicator)
    if config.fsdp and not communicator.alone:
        shard_parameters(state, config, communicator)
    session = Session(
        config=config,
        topology=topology,
        plan=plan,
        communicator=communicator,
        description=description,
        envs=envs,
        replay=ReplayLog(plan.local_num_envs, config.checkpoint.replay_limit),
        state=state,
        mode=mode,
        actor=Actor(state, plan, mode, device),
        source=gradient_source(state, config, communicator, mode),
        rollout=make_rollout(config, envs, state),
    )
    if checkpoint is None:
        begin(session)
    else:
        resume(session, checkpoint)
    return session


def make_rollout(config: Config, envs: HostEnvs, state: TrainState) -> Rollout:
    """The rollout's buffers, on the device if the environments are there."""
    normalized = state.observations is not None
    if isinstance(envs, TensorEnvs):
        return tensor_rollout.TensorRollout.on_device(config.num_steps, envs, state.net, normalized)
    return Rollout.empty(config.num_steps, envs, state.net, normalized)


def gradient_source(state: TrainState, config: Config, communicator: Communicator, mode: Mode) -> GradientSource:
    """Where the update's gradients come from: combined exactly, fast, or not at each step."""
    if config.reduction == "exact":
        return exact_gradient(state, config, communicator, mode)
    if config.sync_period > 1:
        return local_gradient(state, config, communicator)
    return fast_gradient(state, config, communicator)


def set_reference(state: TrainState, config: Config) -> None:
    """Gives the state GRPO's reference policy, if the config has a use for one.

    Raises:
        ValueError: there is no such run, or its networks have other shapes; one line.
    """
    shapes = state.net.shapes()
    arrays = reference_arrays(config, shapes, lambda: initial_parameters(config, state.net))
    if arrays is not None:
        state.reference = FlatParameters(shapes, state.parameters.flat.device)
        state.reference.load(state.reference.flat, arrays)


def begin(session: Session) -> None:
    """First episodes, and first statistics where something is normalised."""
    session.envs.reset()
    if session.state.observations is not None or session.state.rewards is not None:
        if isinstance(session.envs, TensorEnvs):
            assert isinstance(session.rollout, tensor_rollout.TensorRollout)
            tensor_rollout.collect_random(session.config, session.plan, session.envs, session.rollout)
        else:
            collect_random(session.config, session.plan, session.envs, session.rollout)
        initial_statistics(session.state, session.rollout, session.plan, session.config, session.communicator)


def current_policy(session: Session) -> Policy:
    """The policy as it stands, as a function of one observation: what ``load_policy`` would give of a checkpoint.

    With FSDP only while the whole parameters are gathered.
    """
    state = session.state
    return policy_of(session.config, session.description, policy_arrays(state), state.global_step)


def resume(session: Session, checkpoint: Checkpoint) -> None:
    """Restore state and environments; ``session.restarted`` names environments that began a new episode instead."""
    state = session.state
    load_state_arrays(state, checkpoint.arrays)
    load_facts(session, checkpoint.state)
    if session.config.algorithm == "grpo":
        session.envs.reset()  # every iteration begins with episodes of its own: there are none to go on with
        return
    per_env = carried(state)
    restarted = load_shards(session.envs, session.replay, state.counter, per_env, session.plan, checkpoint.env_shards)
    everyone = session.communicator.gather_json(restarted)
    session.restarted = sorted(env for ids in everyone for env in ids)

"""Holds everything a rank trains with, and opens it: devices, ranks, environments, state, self-check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lockstep.config.run import Config, EnvConfig
from lockstep.core.fingerprint import compare_ranks, fingerprints
from lockstep.core.process import fail_now
from lockstep.core.shards import ShardPlan
from lockstep.core.topology import Topology
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.registry import make_envs
from lockstep.envs.restore.replay import ReplayLog
from lockstep.envs.restore.snapshot import load_shards, load_states, save_shards
from lockstep.policies.policy import Policy
from lockstep.runs.checkpoint import Checkpoint, pack, to_files
from lockstep.torch_engine.accelerated.graphed_rollout import GraphedActor, GraphedCollector
from lockstep.torch_engine.accelerated.rollout import StagedCollector
from lockstep.torch_engine.accelerated.update import AcceleratedUpdate
from lockstep.torch_engine.distributed.communicator import Communicator, check_ranks_alike
from lockstep.torch_engine.distributed.process_group import own_backend
from lockstep.torch_engine.envs.tensor_envs import TensorEnvs
from lockstep.torch_engine.envs.tensor_rollout import TensorCollector
from lockstep.torch_engine.gradients import GradientSource, choose_source
from lockstep.torch_engine.nets.autograd import AutogradFunctions
from lockstep.torch_engine.nets.parameters import FlatParameters
from lockstep.torch_engine.nets.shards import Mode
from lockstep.torch_engine.rollout import Collector, HostCollector, Rollout
from lockstep.torch_engine.setup.choose_mode import (
    choose_mode,
    choose_rollout_mode,
    choose_together,
    takes_few_operations,
)
from lockstep.torch_engine.setup.devices import machine_facts, set_up_torch, uses_graphs
from lockstep.torch_engine.start.own_loss import check_own_loss
from lockstep.torch_engine.state import (
    TrainState,
    carried,
    init_state,
    initial_parameters,
    load_state_arrays,
    policy_arrays,
    state_arrays,
)
from lockstep.torch_engine.statistics import initial_statistics
from lockstep.training.beginning import agreed_beginning
from lockstep.training.own_loss.fingerprint import Fingerprint, check_loss_on_ranks
from lockstep.training.reference_policy import reference_arrays
from lockstep.training.session import (
    EvalEnvs,
    checkpoint_facts,
    gather_shards,
    load_facts,
    make_eval_envs,
    policy_of,
)
from lockstep.training.worker_processes import settle_workers


@dataclass
class Session:
    """Holds what one rank trains with.

    Attributes:
        envs: this rank's environments; ``replay`` holds the actions of their live episodes.
        mode: whether shards are batched or looped over; ``rollout_mode``: the same while actions are sampled.
        together: the most shards whose gradients are computed in one call, if shards are looped over.
        source: computes the gradients and reduces them.
        update: the update on an accelerator; None if the host takes its decisions.
        restarted: environments that this resume couldn't restore exactly; ``restarted_before``: those of earlier ones.
        wall_time_before: seconds of training before this resume.
        env_config: the config's, with the number of workers settled; ``workers_note`` names it if Lockstep chose it.
        own_loss: fingerprint of the user's own loss, if there is one.
        remembered: what the checkpoint that all ranks resume says of the run; None: the run begins.
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
    rollout_mode: Mode
    together: int
    collector: Collector
    source: GradientSource
    update: AcceleratedUpdate | None = None
    restarted: list[int] = field(default_factory=list)
    restarted_before: list[int] = field(default_factory=list)
    wall_time_before: float = 0.0
    env_config: EnvConfig | None = None
    workers_note: str | None = None
    own_loss: Fingerprint | None = None
    remembered: Mapping[str, Any] | None = None
    _eval_envs: EvalEnvs | None = None

    @property
    def counted(self) -> TrainState:
        """The state, which holds the counters."""
        return self.state

    def eval_envs(self) -> HostEnvs:
        """Returns the environments of an evaluation, an equal number for each local shard."""
        if self._eval_envs is None:
            where = (self.config, self.description, self.plan, self.env_config)
            self._eval_envs = EvalEnvs(lambda: make_eval_envs(*where))
        return self._eval_envs.begin()

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns every array of the training state by name; with FSDP a collective."""
        return state_arrays(self.state)

    def check_in_sync(self, when: str) -> None:
        """Compares every array across ranks by fingerprint, in one small collective.

        Raises:
            DesyncError: on every rank, if they differ; it names the tensor, the ranks and ``when``.
        """
        arrays = self.arrays()
        rows = self.communicator.gather_ranks(torch.from_numpy(fingerprints(arrays).copy()))
        compare_ranks(list(arrays), rows.numpy(), when)

    def checkpoint_files(self, recorded: Mapping[str, Any]) -> dict[str, bytes]:
        """Returns the files of a checkpoint; a collective that gathers the environments of all ranks."""
        state = self.state
        local = save_shards(self.envs, self.replay, state.counter, carried(state), self.plan)
        shards = gather_shards(local, self.communicator.gather_bytes)
        facts = checkpoint_facts(self, recorded)
        return to_files(self.arrays(), {s: pack(a) for s, a in sorted(shards.items())}, facts)

    def facts(self) -> dict[str, Any]:
        """Returns what ``summary.json`` says of engine, ranks and machine."""
        return {
            "engine": "torch",
            "world_size": self.topology.world_size,
            "collectives": self.communicator.transport,
            "shards_on_a_rank": self.shards_on_a_rank,
            "sums": self.communicator.sums or "none",
            **machine_facts(self.state.parameters.flat.device),
        }

    @property
    def shards_on_a_rank(self) -> str:
        """Whether a rank's shards are batched or looped over, in words."""
        lone = ", a lone one as one of two" if getattr(self.state.policy, "pairs", False) else ""
        rollouts = "" if self.rollout_mode == self.mode else f", {self.rollout_mode} in rollouts"
        gradients = "" if self.together == 1 else f", up to {self.together} at a time in gradients"
        return f"{self.mode}{lone}{rollouts}{gradients}"

    @property
    def rollout(self) -> Rollout:
        """The buffers of the last rollout."""
        return self.collector.rollout

    def collect(self) -> None:
        """Fills the rollout with this iteration's steps."""
        self.collector.collect()

    def close(self) -> None:
        """Closes the environments, and tells the other ranks that this one leaves."""
        try:
            self.envs.close()
            if self._eval_envs is not None:
                self._eval_envs.close()
        finally:
            self.communicator.close()


def open_session(config: Config, topology: Topology, checkpoint: Checkpoint | None) -> Session:
    """Joins the ranks, makes the environments, and builds or restores the state.

    Raises:
        ValueError: if the config asks for what can't be had here, or ranks differ; the message is one line.
    """
    device = set_up_torch(config, topology)
    plan = ShardPlan(config.envs, config.shards, topology.world_size, topology.rank)
    communicator = Communicator(topology, plan, device, own_backend(config))
    communicator.waits = config.log.timing
    communicator.join(config)
    check_ranks_alike(communicator, config)
    communicator.share_memory(config)
    checkpoint = agreed_beginning(checkpoint, topology.rank, communicator.gather_json, communicator.broadcast_bytes)
    description = describe(config.env)
    settled = settle_workers(config.env, description, plan.local_num_envs, topology, communicator.gather_json)
    env_config, workers_note = settled
    envs = make_envs(
        env_config,
        description,
        config.seed,
        plan.env_ids,
        fail_now,
        group_size=config.group_size,
        device=config.device,
        shard_size=plan.envs_per_shard,
        in_parts=config.reduction == "exact",
    )
    state = init_state(config, description, plan, device)
    set_reference(state, config)
    mode = choose_mode(state, config, communicator)
    rollout_mode = choose_rollout_mode(state, config, communicator, mode)
    together = choose_together(state, config, communicator, mode)
    beside = takes_few_operations(state.parameters.flat.numel(), config)
    source = choose_source(state, config, communicator, mode, together, beside)
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
        rollout_mode=rollout_mode,
        together=together,
        collector=make_collector(config, plan, state, envs, rollout_mode),
        source=source,
        update=make_update(state, config, plan, source),
        env_config=env_config,
        workers_note=workers_note,
        own_loss=check_own_loss(config, state.net),
    )
    check_loss_on_ranks(config.ppo.loss, session.own_loss, communicator.gather_json)
    if checkpoint is None:
        begin(session)
    else:
        resume(session, checkpoint)
    return session


def make_update(state: TrainState, config: Config, plan: ShardPlan, source: GradientSource) -> AcceleratedUpdate | None:
    """Makes the update that takes its decisions on the accelerator; None on a CPU, with FSDP, and with local steps."""
    if config.device == "cpu" or config.fsdp or config.sync_period > 1:
        return None
    return AcceleratedUpdate(state, config, plan, source, graphed=plan.world_size == 1 and uses_graphs(config))


def make_collector(config: Config, plan: ShardPlan, state: TrainState, envs: HostEnvs, mode: Mode) -> Collector:
    """Chooses where a rollout is collected: on the device if the environments are there, else on the host."""
    actor = state.policy.actor(plan, mode)
    graphed = uses_graphs(config)  # with any number of ranks, because a rollout has no collectives
    if isinstance(envs, TensorEnvs):
        repeats = graphed and bool(envs.arrays)  # a simulator launches work of its own
        return (GraphedCollector if repeats else TensorCollector)(config, plan, state, envs, actor)
    if config.device != "cpu":
        if graphed:
            actor = GraphedActor(actor, config.cuda_graphs is True)
        return StagedCollector(config, plan, state, envs, actor)
    return HostCollector(config, plan, state, envs, actor)


def set_reference(state: TrainState, config: Config) -> None:
    """Gives the state GRPO's reference policy, if the config uses one.

    Raises:
        ValueError: if there is no such run, or its networks have other shapes; the message is one line.
    """
    shapes = state.net.shapes()
    arrays = reference_arrays(config, shapes, lambda: initial_parameters(config, state.net))
    if arrays is not None:
        reference = FlatParameters(shapes, state.parameters.flat.device)
        reference.load(reference.flat, arrays)
        state.reference = AutogradFunctions(state.net, reference, config)


def begin(session: Session) -> None:
    """Starts the first episodes, and takes the first statistics if something is normalised."""
    state = session.state
    session.envs.reset()
    if state.observation_normalizer is not None or state.return_normalizer is not None:
        session.collector.collect_random()
        initial_statistics(state, session.rollout, session.plan, session.communicator)


def current_policy(session: Session) -> Policy:
    """Returns the current policy as a function of one observation, as ``load_policy`` returns a checkpoint's.

    With FSDP it works only while the whole parameters are gathered.
    """
    state = session.state
    return policy_of(session.config, session.description, policy_arrays(state), state.global_step)


def resume(session: Session, checkpoint: Checkpoint) -> None:
    """Restores state and environments; ``session.restarted`` names environments that began a new episode instead."""
    state = session.state
    load_state_arrays(state, checkpoint.arrays)
    load_facts(session, checkpoint.state)
    if session.config.algorithm == "grpo":
        load_states(session.envs, session.plan, checkpoint.env_shards)  # every iteration has episodes of its own
        return
    per_env = carried(state)
    restarted = load_shards(session.envs, session.replay, state.counter, per_env, session.plan, checkpoint.env_shards)
    everyone = session.communicator.gather_json(restarted)
    session.restarted = sorted(env for ids in everyone for env in ids)

"""Opens a process's training session: its devices, program, environments and state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from lockstep.config.run import Config, EnvConfig, RunOptions
from lockstep.core.episodes import RecentEpisodes
from lockstep.core.machine import one_torch_thread
from lockstep.core.shards import ShardPlan
from lockstep.core.topology import Topology
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.envs.host_envs import HostEnvs
from lockstep.jax_engine.distributed.mesh import Mesh, check_one_kind, cut_axis, fsdp_sharding, make_mesh
from lockstep.jax_engine.distributed.placement import connect, num_local_devices
from lockstep.jax_engine.distributed.processes import (
    broadcast_bytes,
    check_ranks_alike,
    gather_json,
    quiet_connections,
    set_up_jax,
)
from lockstep.jax_engine.envs.environments import is_jax_environment, make_environment
from lockstep.jax_engine.host.runner import HostRunner
from lockstep.jax_engine.nets.nets import PolicyNet
from lockstep.jax_engine.nets.parameters import Named, ParameterLayout, SlicedLayout, VectorLayout
from lockstep.jax_engine.program.fingerprints import Copies, check_copies
from lockstep.jax_engine.program.inference import Inference
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.program.runner import DeviceRunner, Runner
from lockstep.jax_engine.setup.set_up import (
    check_pool,
    lean_pool,
    machine_facts,
    pool_devices,
    roomy_pool,
    ynnpacks_convolutions,
)
from lockstep.jax_engine.start.own_loss import check_own_loss
from lockstep.jax_engine.state import (
    TrainState,
    check_networks,
    init_state,
    initial_parameters,
    load_state_arrays,
    policy_arrays,
    state_arrays,
)
from lockstep.jax_engine.statistics import check_first_statistics
from lockstep.policies.policy import Policy
from lockstep.runs.checkpoint import Checkpoint, pack, to_files
from lockstep.training.beginning import agreed_beginning
from lockstep.training.own_loss.fingerprint import Fingerprint, check_loss_on_ranks
from lockstep.training.reference_policy import config_facts, reference_arrays
from lockstep.training.session import EvalEnvs, checkpoint_facts, load_facts, make_eval_envs, policy_of
from lockstep.training.worker_processes import settle_workers


@dataclass
class Session:
    """Holds what one process trains with.

    Attributes:
        topology: this process's place; ``plan`` are the shards of its devices.
        program: the compiled program, with the mesh, the networks and the layout of parameters.
        runner: the state on the mesh, and the environments.
        policy: runs the networks outside the program.
        iteration: iterations done; ``global_step`` counts environment steps, ``optimizer_steps`` optimiser steps.
        recent: the last hundred episodes.
        learning_rate: of the last iteration.
        restarted: environments that this resume couldn't restore exactly; ``restarted_before`` are those of earlier
            ones.
        env_config: the config's, with the number of workers settled; ``workers_note`` names that number if it was
            chosen.
        own_loss: fingerprint of the user's own loss, or None.
        remembered: what the checkpoint says of the run that all ranks resume; None if they begin.
    """

    config: Config
    topology: Topology
    plan: ShardPlan
    program: Program
    runner: Runner
    policy: Inference
    description: EnvDescription
    iteration: int = 0
    global_step: int = 0
    optimizer_steps: int = 0
    recent: RecentEpisodes = field(default_factory=RecentEpisodes)
    learning_rate: float = 0.0
    restarted: list[int] = field(default_factory=list)
    restarted_before: list[int] = field(default_factory=list)
    wall_time_before: float = 0.0
    env_config: EnvConfig | None = None
    workers_note: str | None = None
    own_loss: Fingerprint | None = None
    remembered: Mapping[str, Any] | None = None
    _eval_envs: EvalEnvs | None = None

    @property
    def state(self) -> TrainState:
        """The training state, on the mesh."""
        return self.runner.state

    @property
    def counted(self) -> Session:
        """The object that holds the counters."""
        return self

    @property
    def mode(self) -> str:
        """How a device computes its shards: ``loop`` or ``batched``."""
        return "loop" if self.program.blocks.loops else "batched"

    def eval_envs(self) -> HostEnvs:
        """Returns the evaluation's environments, equally many for each local shard."""
        if self._eval_envs is None:
            where = (self.config, self.description, self.plan, self.env_config)
            self._eval_envs = EvalEnvs(lambda: make_eval_envs(*where))
        envs = self._eval_envs.begin()
        one_torch_thread()
        return envs

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns every array of the training state by name; with FSDP a collective."""
        return state_arrays(self.state, self.program.layout)

    def check_in_sync(self, when: str, copies: Copies | None = None) -> None:
        """Compares every array of the training state between all devices; see :func:`check_copies`.

        ``copies`` are the ones to compare if a call has taken the state over since.
        """
        check_copies(copies or Copies.of(self.state, self.program.layout), when)

    def checkpoint_files(self, recorded: Mapping[str, Any]) -> dict[str, bytes]:
        """Returns the files of a checkpoint; a collective that gathers the environments of all processes."""
        shards = {shard: pack(arrays) for shard, arrays in sorted(self.runner.env_arrays().items())}
        return to_files(self.arrays(), shards, checkpoint_facts(self, recorded))

    def facts(self) -> dict[str, Any]:
        """Returns what ``summary.json`` says of the engine, the devices and the machine."""
        return {
            "engine": "jax",
            "world_size": self.program.mesh.size,
            "processes": self.topology.world_size,
            "collectives": self.program.transport,
            "shards_on_a_rank": self.mode,
            "sums": self.program.sums,
            **machine_facts(),
        }

    def close(self) -> None:
        """Waits until nothing is under way, and closes the environments."""
        self.runner.close()
        if self._eval_envs is not None:
            self._eval_envs.close()


def parameter_layout(
    config: Config, net: PolicyNet, mesh: Mesh, synchronize: Callable[[Named], Named] | None = None
) -> ParameterLayout:
    """Chooses how parameters are held: as one vector, or with FSDP by name, large ones cut over the ``fsdp`` axis.

    ``synchronize`` is a user's reduction of gradients; see :class:`~lockstep.jax_engine.nets.parameters.VectorLayout`.
    """
    shapes = net.shapes()
    if not config.fsdp or mesh.shape["fsdp"] == 1:
        return VectorLayout(shapes, config.reduction == "exact", synchronize)
    structs = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    shardings = fsdp_sharding(structs, mesh)
    return SlicedLayout(shapes, {name: cut_axis(sharding) for name, sharding in shardings.items()})


def open_program(config: Config, topology: Topology, options: RunOptions) -> Program:
    """Joins the processes, makes the mesh, describes the environment, and makes the program to compile.

    Raises:
        ValueError: if this machine can't do what the config asks for, or processes differ; the message is one line.
    """
    on_cpu = config.device == "cpu"
    simulated = options.simulate_devices or options.devices if on_cpu else None
    description = None if config.env.jax_only else describe(config.env)
    pool = pool_of(config, simulated or 1, topology, description) if on_cpu else None
    gpus = None if on_cpu else options.devices
    set_up_jax(config.threads, config.device, simulated, topology, pool, gpus, config.silence)
    if pool and config.fsdp:
        check_pool(pool, "fsdp")
    each = options.devices or simulated
    devices = None if each is None else each * topology.world_size  # JAX may have started with more
    with quiet_connections():
        check_ranks_alike(config_facts(config))
        fsdp = options.fsdp_devices or devices or jax.device_count()
        mesh = make_mesh(fsdp if config.fsdp else 1, devices)
        check_one_kind(mesh)
        if topology.world_size > 1:
            connect(mesh)
    description = description or describe(config.env)
    net = check_networks(config, description)
    layout = parameter_layout(config, net, mesh)
    env = make_environment(config.env) if is_jax_environment(config.env) else None
    program = Program(config, description, net, layout, mesh, env, everywhere=topology.world_size > 1)
    if config.collectives == "shared" and program.apart:
        raise ValueError(f"collectives: shared can't be had: {program.apart}; use collectives auto")
    return program


def first_state(config: Config, program: Program) -> TrainState:
    """Makes the state before the first iteration, with GRPO's reference policy; on the host, without environments.

    Raises:
        ValueError: if the reference policy's run is missing or its networks have other shapes; the message is one line.
    """
    state, layout = init_state(config, program.net, program.layout), program.layout
    arrays = reference_arrays(config, layout.shapes, lambda: initial_parameters(config, program.net))
    return state._replace(reference=None if arrays is None else layout.of_arrays(arrays))


def open_session(config: Config, topology: Topology, options: RunOptions, checkpoint: Checkpoint | None) -> Session:
    """Opens the program and the environments, and builds or restores the state.

    Raises:
        ValueError: see :func:`open_program`.
    """
    program = open_program(config, topology, options)
    with quiet_connections():
        checkpoint = agreed_beginning(checkpoint, topology.rank, gather_json, broadcast_bytes)
    state, local = first_state(config, program), num_local_devices(program.mesh)
    plan = ShardPlan(config.envs, config.shards, program.mesh.size, topology.rank * local, local)
    with quiet_connections():
        settled = settle_workers(config.env, program.description, plan.local_num_envs, topology, gather_json)
    if program.env is not None:
        runner = DeviceRunner(program, state, local)
    else:
        runner = HostRunner(program, state, plan, local, settled[0])
    policy, rate = Inference(program), config.ppo.learning_rate
    session = Session(config, topology, plan, program, runner, policy, program.description, learning_rate=rate)
    session.env_config, session.workers_note = settled
    session.own_loss = check_own_loss(config, program.net)
    with quiet_connections():
        check_loss_on_ranks(config.ppo.loss, session.own_loss, gather_json)
    if checkpoint is None:
        runner.begin()
        check_first_statistics(runner.state)
    else:
        resume(session, state, checkpoint)
    return session


def pool_of(config: Config, devices: int, topology: Topology, description: EnvDescription | None) -> int:
    """Returns the number of threads in the pool that a process's CPU devices share.

    ``description`` is None if JAX steps the environment. The pool is roomy, and of one size for up to eight devices,
    where bits may depend on its size: for a user's own code, for environments that JAX steps, and for convolutions that
    aren't known to be YNNPACK's (in bfloat16 none are). It is roomy too where a device may wait in two collectives at
    once: FSDP's, or those of several processes. Else it is lean.
    """
    own = config.network.custom is not None or config.ppo.loss is not None
    room = description is None or own
    if description is not None and description.observation.image_bytes > 0:
        room |= config.precision == "bf16" or not ynnpacks_convolutions()
    if room:
        return roomy_pool(max(devices, pool_devices(config.shards)))
    if config.fsdp or topology.world_size > 1:
        return roomy_pool(devices)
    return lean_pool(devices)


def current_policy(session: Session) -> Policy:
    """Returns the current policy as a function of one observation, as ``load_policy`` returns it from a checkpoint.

    With FSDP this is a collective: every process must call it.
    """
    arrays = policy_arrays(session.state, session.program.layout)
    return policy_of(session.config, session.description, arrays, session.global_step)


def resume(session: Session, state: TrainState, checkpoint: Checkpoint) -> None:
    """Restores state and environments; ``session.restarted`` lists environments that began a new episode instead."""
    load_facts(session, checkpoint.state)
    state = load_state_arrays(state, checkpoint.arrays, session.program.layout, session.optimizer_steps)
    state = state._replace(learning_rate=np.float32(session.learning_rate))
    session.restarted = session.runner.restore(state, checkpoint.env_shards)

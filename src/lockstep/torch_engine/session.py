"""Everything a rank holds while it trains, and how it is opened: devices, ranks, environments, state, self-check."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from lockstep.config import Config
from lockstep.envs.description import EnvDescription, describe
from lockstep.envs.registry import make_envs
from lockstep.envs.replay import ReplayLog
from lockstep.envs.snapshot import load_shards, save_shards
from lockstep.envs.vector import HostEnvs
from lockstep.evaluation import run_episodes
from lockstep.launch.process import fail_now
from lockstep.proof.fingerprint import compare_ranks, fingerprints
from lockstep.runs.checkpoint import Checkpoint, pack, to_files, unpack
from lockstep.shards import ShardPlan, keyed_generator
from lockstep.topology import Topology
from lockstep.torch_engine import nets
from lockstep.torch_engine.batch import evaluate, to_shards
from lockstep.torch_engine.distributed import (
    Communicator,
    check_ranks_alike,
    open_process_group,
    set_up_torch,
    uses_nccl,
)
from lockstep.torch_engine.rollout import Actor, Rollout, aligned, collect_random, normalized, random_actions
from lockstep.torch_engine.self_check import Mode, by_shard, shard_invariant
from lockstep.torch_engine.state import TrainState, counters, init_state, load_counters, load_state_arrays, state_arrays
from lockstep.torch_engine.statistics import initial_statistics
from lockstep.torch_engine.update import GradientSource, exact_gradient, fast_gradient, loss_settings, shard_gradients

SELF_CHECK_DRAWS = 3


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

    def eval_envs(self) -> HostEnvs:
        """The environments of evaluations, made at the first one: an equal number for each local shard."""
        if self._eval_envs is None:
            each = eval_episodes_per_shard(self.config)
            ids = [e for shard in self.plan.shards for e in range(shard * each, (shard + 1) * each)]
            self._eval_envs = make_envs(self.config.env, self.description, self.config.seed, ids, fail_now, "eval")
        return self._eval_envs

    def close(self) -> None:
        """Let the environments and the other ranks go."""
        self.envs.close()
        if self._eval_envs is not None:
            self._eval_envs.close()
        self.communicator.close()


def eval_episodes_per_shard(config: Config) -> int:
    """Episodes of an evaluation that fall to one shard; rounded up so that every shard has as many."""
    return -(-config.eval.episodes // config.shards)


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
    envs = make_envs(config.env, description, config.seed, plan.env_ids, fail_now)
    state = init_state(config, description, plan, device)
    mode = choose_mode(state, config, description, communicator)
    source = (
        exact_gradient(state, config, communicator, mode)
        if config.reduction == "exact"
        else fast_gradient(state, config, communicator)
    )
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
        source=source,
        rollout=Rollout.empty(config.num_steps, envs),
    )
    if checkpoint is None:
        begin(session)
    else:
        resume(session, checkpoint)
    return session


def begin(session: Session) -> None:
    """First episodes, and first statistics where something is normalised."""
    session.envs.reset()
    if session.state.observations is not None or session.state.rewards is not None:
        collect_random(session.config, session.plan, session.envs, session.rollout)
        initial_statistics(session.state, session.rollout, session.plan, session.config, session.communicator)


def choose_mode(state: TrainState, config: Config, description: EnvDescription, communicator: Communicator) -> Mode:
    """Batched over shards where that can't change a shard's bits on this machine, else one by one; all ranks alike."""
    if config.reduction == "fast":
        return "batched"
    passed = shards_invariant_here(state, config, description)
    everyone = communicator.gather_ranks(torch.tensor([passed]))
    return "batched" if bool(everyone.all()) else "loop"


def shards_invariant_here(state: TrainState, config: Config, description: EnvDescription) -> bool:
    """Run action, evaluation and gradient of this run, at its shapes on keyed random data, alone and batched."""
    plan = ShardPlan(config.envs, config.shards)
    if plan.num_shards == 1:
        return True
    return all(_shards_invariant(state, config, description, plan, draw) for draw in range(SELF_CHECK_DRAWS))


def _shards_invariant(
    state: TrainState, config: Config, description: EnvDescription, plan: ShardPlan, number: int
) -> bool:
    """One draw of the self-check: raw outputs are compared, of which actions would hide the last bits."""
    device, net = state.parameters.flat.device, state.net
    generator = keyed_generator(config.seed, "self-check", number)
    samples = config.num_steps * plan.envs_per_shard
    rows = samples // config.ppo.num_minibatches

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(generator.standard_normal((plan.num_shards, *shape), np.float32)).to(device)

    def raw_actions(x: torch.Tensor) -> torch.Tensor:
        return nets.actor(net, state.parameters.expanded(len(x)), x)

    observations = draw(samples + plan.envs_per_shard, net.observation_size)
    actions = to_shards(torch.from_numpy(random_actions(config, plan, description)).to(device), plan.num_shards)
    gradients = shard_gradients(state, loss_settings(config))
    minibatch = (observations[:, :rows].contiguous(), actions[:, :rows].contiguous(), *(draw(rows) for _ in range(4)))
    with torch.no_grad():
        return (
            shard_invariant(raw_actions, observations[:, : plan.envs_per_shard].contiguous())
            and shard_invariant(lambda x, a: evaluate(state, "batched", x, a), observations, actions)
            and shard_invariant(gradients, *minibatch)
        )


def evaluate_policy(session: Session) -> np.ndarray:
    """Returns and lengths ``[episodes, 2]`` of the evaluation's episodes, in order; most likely actions.

    Each shard's episodes go through the networks as one batch of fixed shape, whatever the world size.
    """
    state, envs = session.state, session.eval_envs()
    device, shards = state.parameters.flat.device, session.plan.local_num_shards

    def mode_actions(x: torch.Tensor) -> torch.Tensor:
        weights = state.parameters.expanded(len(x))
        return nets.mode(state.net, nets.actor(state.net, weights, x))

    def act(observations: np.ndarray) -> np.ndarray:
        x = aligned(normalized(observations, state.observations), device)
        actions = by_shard("loop", mode_actions, x.view(shards, -1, x.shape[-1]))
        return actions.flatten(0, 1).cpu().numpy()

    with torch.inference_mode():
        episodes = run_episodes(envs, act, session.config.eval.max_steps)
    return session.communicator.gather_ranks(torch.from_numpy(episodes)).flatten(0, 1).numpy()


def check_ranks_in_sync(session: Session, when: str) -> None:
    """Compare every array of the training state across ranks by fingerprint, in one small collective.

    Raises:
        DesyncError: on every rank, naming the tensor, the ranks and ``when``.
    """
    arrays = state_arrays(session.state)
    rows = session.communicator.gather_ranks(torch.from_numpy(fingerprints(arrays).copy()))
    compare_ranks(list(arrays), rows.numpy(), when)


def checkpoint_files(session: Session, wall_time: float, score: float | None) -> dict[str, bytes]:
    """The files of a checkpoint; environments of all ranks are gathered."""
    state = session.state
    running = state.rewards.running if state.rewards is not None else None
    shards = save_shards(session.envs, session.replay, state.counter, running, session.plan)
    merged = {f"{shard}/{name}": array for shard, arrays in shards.items() for name, array in arrays.items()}
    gathered: dict[int, dict[str, np.ndarray]] = {}
    for content in session.communicator.gather_bytes(pack(merged)):
        for key, array in unpack(content).items():
            shard, _, name = key.partition("/")
            gathered.setdefault(int(shard), {})[name] = array
    facts = counters(state) | {
        "wall_time": wall_time,
        "score": score,
        "restarted_environments": session.restarted_before + session.restarted,
        "environment": asdict(session.description),
    }
    return to_files(state_arrays(state), {s: pack(a) for s, a in sorted(gathered.items())}, facts)


def resume(session: Session, checkpoint: Checkpoint) -> None:
    """Restore state and environments; ``session.restarted`` names environments that began a new episode instead."""
    state = session.state
    load_state_arrays(state, checkpoint.arrays)
    load_counters(state, checkpoint.state)
    session.wall_time_before = float(checkpoint.state.get("wall_time", 0.0))
    running = state.rewards.running if state.rewards is not None else None
    restarted = load_shards(session.envs, session.replay, state.counter, running, session.plan, checkpoint.env_shards)
    everyone = session.communicator.gather_json(restarted)
    session.restarted = sorted(env for ids in everyone for env in ids)
    session.restarted_before = list(checkpoint.state.get("restarted_environments", []))

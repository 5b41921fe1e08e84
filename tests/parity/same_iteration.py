"""One whole iteration, by either engine and by the float64 reference: same parameters, actions, starts, minibatches.

The engines' own functions do everything; only what they would draw is given to them: actions, the numbers that episodes
begin with, and the permutations of minibatches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax import numpy as jnp

from lockstep import reference
from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.core.process import fail_now
from lockstep.core.shards import KeyedDraws, ShardPlan
from lockstep.core.topology import Topology
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.envs.registry import make_envs
from lockstep.jax_engine import batch as jax_batch
from lockstep.jax_engine import rollout as jax_rollout
from lockstep.jax_engine import state as jax_state
from lockstep.jax_engine.distributed.mesh import make_mesh
from lockstep.jax_engine.envs.environments import make_environment
from lockstep.jax_engine.host.compiled import compile_learn
from lockstep.jax_engine.nets.parameters import VectorLayout
from lockstep.jax_engine.program.iterations import Inputs, coefficients_of
from lockstep.jax_engine.program.program import Program
from lockstep.runs.checkpoint import read_checkpoint
from lockstep.torch_engine import batch as torch_batch
from lockstep.torch_engine import minibatches, state
from lockstep.torch_engine import rollout as torch_rollout
from lockstep.torch_engine.distributed.communicator import Communicator
from lockstep.torch_engine.gradients import Gradient, exact_gradient
from lockstep.torch_engine.update import update

CPU = torch.device("cpu")
STEP = 1e-6
"""Of the differences that stand for the reference's gradient."""


@dataclass
class Iteration:
    """What an iteration computed.

    Attributes:
        batch: ``log_probs``, ``values``, ``advantages`` and ``returns``, each ``[shards, samples]``.
        terms: loss terms ``[optimiser steps, T]``: policy, value, entropy, KL, clip fraction.
        gradients: before clipping, ``[optimiser steps, P]``.
        arrays: parameters and moments after it, by name.
    """

    batch: dict[str, np.ndarray]
    terms: np.ndarray
    gradients: np.ndarray
    arrays: dict[str, np.ndarray]


@dataclass
class Given:
    """What is the same for all: the config, what a checkpoint holds, actions ``[T, E]`` and minibatches.

    Attributes:
        config: resolved, as an engine's; ``description`` of the environment.
        description: see ``config``.
        arrays: of the checkpoint.
        actions: int64.
        indices: ``[num_epochs, num_minibatches, shards, n]``, as the PyTorch engine has them.
        global_step: steps before the iteration, by which its schedules go.
    """

    config: Config
    description: EnvDescription
    arrays: dict[str, np.ndarray]
    actions: np.ndarray
    indices: np.ndarray
    global_step: int = 0

    @property
    def plan(self) -> ShardPlan:
        return ShardPlan(self.config.envs, self.config.shards)


COLUMNS = ("log_probs", "values", "advantages", "returns")


def config_of(**changes: Any) -> Config:
    """Eight environments, short episodes that are cut or end by themselves, every part of the loss at work."""
    values = {
        "env": {"id": "lockstep/CartPole-v1", "max_episode_steps": 14},
        "num_envs": 8,
        "num_shards": 4,
        "num_steps": 32,
        "network": {"hidden_sizes": (8, 6)},
        "ppo": {
            **{"num_minibatches": 2, "num_epochs": 2, "learning_rate": 1e-3, "schedule": "constant"},
            **{"entropy_coef": 0.01, "value_clip_range": 0.2, "max_grad_norm": 0.5, "gamma": 0.95},
        },
    }
    return resolve(Config.model_validate(values | changes))


def given_by(checkpoint: Path, config: Config) -> Given:
    """Actions are random, so that the iteration is one of a policy that has moved."""
    random = np.random.default_rng(0)
    actions = random.integers(0, 2, (config.num_steps, config.envs))
    indices = minibatches.minibatch_indices(config, ShardPlan(config.envs, config.shards), 0)
    return Given(config, describe(config.env), read_checkpoint(checkpoint).arrays, actions, indices)


# --- PyTorch --------------------------------------------------------------------------------------------------------


def torch_rollout_of(given: Given, current: state.TrainState) -> torch_rollout.Rollout:
    """The engine's rollout, by an actor that takes the actions in place of noise."""
    config = given.config
    envs = make_envs(config.env, given.description, config.seed, list(range(config.envs)), fail_now)
    envs.reset()
    out = torch_rollout.Rollout.empty(config.num_steps, envs, current.net, normalized=False)
    torch_rollout.collect(current, envs, TakesNoise(), given.actions, out)  # pyright: ignore[reportArgumentType]
    envs.close()
    return out


class TakesNoise:
    """The actor of a rollout whose noise is its actions."""

    def begin(self, recurrent_state: Any) -> None:
        """Nothing is carried."""

    def __call__(self, observations: np.ndarray, noise: np.ndarray, part: slice | None = None) -> np.ndarray:
        return noise


def torch_iteration(given: Given) -> tuple[Iteration, torch_rollout.Rollout]:
    """An iteration of the PyTorch engine, and its rollout."""
    config, plan = given.config, given.plan
    current = state.init_state(config, given.description, plan, CPU)
    state.load_state_arrays(current, given.arrays)
    current.global_step = given.global_step
    rollout = torch_rollout_of(given, current)
    batch = torch_batch.make_batch(current, rollout, plan, config, "batched")
    local = minibatches.advantage_moments(batch, given.indices)
    statistics = minibatches.minibatch_statistics(config, local, local)
    source, seen = exact_gradient(current, config, Communicator(Topology(), plan, CPU), "batched"), []

    def recorded(columns: Any, count: int) -> Gradient:
        gradient = source(columns, count)
        seen.append(torch.cat([gradient.vector, gradient.terms]).numpy())
        return gradient

    columns = {name: getattr(batch, name).numpy().copy() for name in COLUMNS}
    update(current, batch, given.indices, statistics, config, plan, recorded)
    rows, size = np.stack(seen), current.parameters.flat.numel()
    return Iteration(columns, rows[:, size:], rows[:, :size], state.state_arrays(current)), rollout


# --- JAX ------------------------------------------------------------------------------------------------------------


class TakesNoiseToo(jax_rollout.Actor):
    """The actor of a compiled rollout whose noise is its actions."""

    def __call__(self, rows: Any, recurrent_state: Any, noise: Any) -> jax_rollout.Acted:
        acted = super().__call__(rows, recurrent_state, jnp.zeros((len(rows), self.net.action.outputs)))
        return acted._replace(actions=noise)


def starts_of(given: Given, done: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers with which the other engine's episodes began: the first ones ``[E, n]``, the rest ``[T, E, n]``."""
    draws, env = KeyedDraws(), make_environment(given.config.env)
    size = env.reset_random(jax.random.key(0), (1,)).shape[-1]

    def of(env_id: int, episode: int) -> np.ndarray:
        return draws.generator(given.config.seed, "reset", env_id, episode).random(size, np.float32)

    episodes = np.cumsum(done, 0)
    first = np.stack([of(env_id, 0) for env_id in range(given.config.envs)])
    rest = [[of(env_id, int(k)) for env_id, k in enumerate(row)] for row in episodes]
    return first, np.array(rest, np.float32)


def jax_program(config: Config, description: EnvDescription) -> Program:
    """What a run on one device compiles."""
    mesh, net = make_mesh(num_devices=1), jax_state.check_networks(config, description)
    layout = VectorLayout(net.shapes(), exact=True)
    return Program(config, description, net, layout, mesh, make_environment(config.env), everywhere=False)


def jax_rollouts(given: Given, program: Program, parameters: Any, done: np.ndarray) -> list[jax_rollout.Rollout]:
    """The engine's rollout of each shard, with the same actions and starts."""
    first, rest = starts_of(given, done)
    env = program.env
    assert env is not None

    @jax.jit
    def one(first: Any, rest: Any, actions: Any) -> jax_rollout.Rollout:
        carry = jax_rollout.begin(program.net, env, first)
        draws = jax_rollout.Draws(actions, rest, None)
        actor = TakesNoiseToo(program.net, parameters)
        return jax_rollout.collect(actor, env, given.description.rewards, given.config, None, carry, draws)[1]

    out = []
    for ids in np.array(given.plan.env_ids).reshape(given.config.shards, -1):
        out.append(one(first[ids], rest[:, ids], given.actions[:, ids].astype(np.int32)))
    return out


def jax_iteration(given: Given, done: np.ndarray, patch: Any) -> tuple[Iteration, jax_rollout.Rollout]:
    """An iteration of the JAX engine, and its rollout by shard.

    Args:
        given: what is the same for all.
        done: where episodes ended in the other engine, ``[T, E]``.
        patch: pytest's ``monkeypatch``.
    """
    config, program = given.config, jax_program(given.config, given.description)
    empty = jax_state.init_state(config, program.net, program.layout)
    loaded = jax_state.load_state_arrays(empty, given.arrays, program.layout)
    parameters = program.layout.named(loaded.parameters)
    rollouts = jax_rollouts(given, program, parameters, done)
    make = jax.jit(partial(jax_batch.make_batch, program.net, config=config, scale=None, platform="cpu"))
    batches = [make(parameters, None, rollout)[0] for rollout in rollouts]
    columns = {name: np.stack([np.asarray(getattr(b, name)) for b in batches]) for name in COLUMNS}
    seen: list[np.ndarray] = []

    def reduced(self: Any, packed: Any, original: Any = VectorLayout.reduce) -> Any:
        total = original(self, packed)
        jax.debug.callback(lambda g, t: seen.append(np.concatenate([g, t])), *total, ordered=True)
        return total

    patch.setattr(VectorLayout, "reduce", reduced)
    patch.setattr(Program, "_indices", lambda *_: jnp.asarray(given.indices.transpose(2, 0, 1, 3), jnp.int32))
    specs = jax_state.state_specs(loaded, program.layout.specs)
    learn = compile_learn(program, specs)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rollouts)
    done_before = given.global_step // config.steps_per_iteration
    coefficients = coefficients_of(config, done_before, 1)
    coefficients = None if coefficients is None else {name: jnp.asarray(x[0]) for name, x in coefficients.items()}
    inputs = Inputs(jnp.int32(0), jnp.float32(config.ppo.learning_rate), coefficients)
    discounted = np.zeros((config.shards, config.envs // config.shards), np.float32)
    after, _, _ = learn(
        jax_state.place_state(loaded, specs, program.mesh),
        *(stacked, discounted, inputs, np.zeros(1, np.int32), np.full(1, config.shards, np.int32)),
    )
    arrays = jax_state.state_arrays(after, program.layout)
    jax.effects_barrier()
    rows, size = np.stack(seen), program.layout.size
    return Iteration(columns, rows[:, size:], rows[:, :size], arrays), stacked


# --- the reference --------------------------------------------------------------------------------------------------


def forward(named: dict[str, np.ndarray], name: str, rows: np.ndarray) -> np.ndarray:
    """A stack of layers with tanh between them, in float64."""
    layers = sum(key.startswith(f"{name}.") for key in named) // 2
    for number in range(layers):
        rows = rows @ named[f"{name}.{number}.weight"].T + named[f"{name}.{number}.bias"]
        rows = rows if number == layers - 1 else np.tanh(rows)
    return rows


class Parameters:
    """Parameters by name and as one float64 vector, in the order of the engines."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def vector(self, arrays: dict[str, np.ndarray], prefix: str) -> np.ndarray:
        return np.concatenate([arrays[prefix + name].astype(np.float64).ravel() for name in self.shapes])

    def named(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])
        parts = np.split(vector, ends[:-1])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


def by_shard(x: np.ndarray, shards: int) -> np.ndarray:
    """``[T, E]`` as both engines lay samples: ``[shards, T * E / shards]``."""
    parts = np.stack(np.split(x, shards, axis=1))
    return parts.reshape(shards, parts.shape[1] * parts.shape[2], *parts.shape[3:])


def reference_iteration(given: Given, rollout: torch_rollout.Rollout) -> Iteration:
    """The same in float64; gradients are differences of the reference's loss."""
    config, ppo, shards = given.config, given.config.ppo, given.config.shards
    held = Parameters(state.check_networks(config, given.description).shapes())
    vector, named = held.vector(given.arrays, "policy/"), held.named(held.vector(given.arrays, "policy/"))
    rows = rollout.observations.astype(np.float64)
    values = forward(named, "critic", rows)[..., 0]
    following = values[1:].copy()
    for (t, env), row in zip(np.argwhere(rollout.truncated), rollout.final, strict=True):
        following[t, env] = forward(named, "critic", row.astype(np.float64)[None])[0, 0]
    advantages, returns = reference.gae(
        *(rollout.rewards, values[:-1], following, rollout.terminated, rollout.truncated), ppo.gamma, ppo.gae_lambda
    )
    log_probs = reference.categorical_log_prob(forward(named, "actor", rows[:-1]), given.actions)
    columns = {"log_probs": log_probs, "values": values[:-1], "advantages": advantages, "returns": returns}
    columns = {name: by_shard(x, shards) for name, x in columns.items()}
    inputs = {"observations": by_shard(rows[:-1], shards), "actions": by_shard(given.actions, shards), **columns}
    m, v = (held.vector(given.arrays, f"optimizer/{name}/") for name in ("exp_avg", "exp_avg_sq"))
    step, terms, gradients = int(given.arrays["optimizer/step"][0]), [], []
    for index in given.indices.reshape(-1, *given.indices.shape[2:]):
        chosen = {k: np.concatenate([x[s][index[s]] for s in range(shards)]) for k, x in inputs.items()}
        losses = partial(reference_losses, held, chosen, given)
        gradient = difference(lambda x, losses=losses: losses(x)["loss"], vector)
        found = losses(vector)
        terms.append([found[k] for k in ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")])
        gradients.append(gradient)
        (clipped,), _ = reference.clip_by_global_norm([gradient], ppo.max_grad_norm or np.inf)
        step += 1
        first, second = ppo.adam_betas
        vector, m, v = reference.adam_step(vector, clipped, m, v, step, ppo.learning_rate, first, second, ppo.adam_eps)
    after = {"policy/": vector, "optimizer/exp_avg/": m, "optimizer/exp_avg_sq/": v}
    arrays = {prefix + name: part for prefix, x in after.items() for name, part in held.named(x).items()}
    return Iteration(columns, np.array(terms), np.array(gradients), arrays | {"optimizer/step": np.array([step])})


def reference_losses(held: Parameters, chosen: dict[str, np.ndarray], given: Given, vector: np.ndarray) -> Any:
    """The reference's loss and terms of a global minibatch under other parameters."""
    ppo, named = given.config.ppo, held.named(vector)
    left = 1.0 - given.global_step / given.config.total_steps
    clipped, entropy = (left if s == "linear" else 1.0 for s in (ppo.clip_schedule, ppo.entropy_schedule))
    logits = forward(named, "actor", chosen["observations"])
    count, mean, m2 = reference.moments(chosen["advantages"])
    return reference.ppo_loss(
        reference.categorical_log_prob(logits, chosen["actions"]),
        chosen["log_probs"],
        reference.normalize_advantages(chosen["advantages"], mean.item(), m2.item(), count),
        forward(named, "critic", chosen["observations"])[:, 0],
        chosen["values"],
        chosen["returns"],
        reference.categorical_entropy(logits),
        clip_range=ppo.clip_range * clipped,
        value_clip_range=ppo.value_clip_range and ppo.value_clip_range * clipped,
        entropy_coef=ppo.entropy_coef * entropy,
        value_coef=ppo.value_coef,
        count=len(logits),
    )


def difference(function: Any, x: np.ndarray) -> np.ndarray:
    """The gradient of a function ``[P] -> number`` by central differences."""
    steps = STEP * np.eye(len(x))
    return np.array([(function(x + step) - function(x - step)) / (2 * STEP) for step in steps])

"""Settings of :func:`small_programs.small_config` by what is trained with them."""

from typing import Any

EPOCHS, MINIBATCHES = 4, 2
STEPS = EPOCHS * MINIBATCHES
PPO = {"ppo": {"num_epochs": EPOCHS, "num_minibatches": MINIBATCHES}}
XLA = {"collectives": "backend"}
FAST = {**PPO, "reduction": "fast"}
PERIODIC = {**FAST, "sync_period": 4}
FSDP = {**FAST, "fsdp": True}
NORMALIZED = {**PPO, "normalize": {"observations": True, "returns": True}}
GRPO = {"algorithm": "grpo", "ppo": {**PPO["ppo"]}, "grpo": {"group_size": 4}, "num_envs": 32, "num_steps": 16}
KL = {"ppo": {**PPO["ppo"], "target_kl": 0.02}}
REMAINDER = {**FAST, "sync_period": 3}
RECURRENT = {**PPO, "network": {"recurrent": "lstm", "recurrent_size": 8, "sequence_length": 8}}
CHANGES: dict[str, dict[str, Any]] = {
    "exact": PPO,
    "fast": FAST,
    "periodic": PERIODIC,
    "fsdp": FSDP,
    "normalized": NORMALIZED,
    "grpo": GRPO,
    "grpo, steps draw": {**GRPO, "env": {"id": "lockstep/CartPole-v1", "backend": "jax", "sticky_actions": 0.25}},
}
CHANGES |= {f"{name} by xla": {**CHANGES[name], **XLA} for name in ("exact", "fast", "periodic", "normalized")}
CHANGES |= {"kl": KL, "remainder": REMAINDER, "recurrent": RECURRENT}
BY_SHARD = {"ppo": {**PPO["ppo"], "advantage_normalization": "local"}}
CHANGES["dropout"] = {**PPO, "network": {"custom": "equinox_nets:Tiny", "custom_kwargs": {"dropout": 0.5}}}
CHANGES["recurrent, a step at a time"] = {**PPO, "network": {**RECURRENT["network"], "sequence_length": 1}}
CHANGES["recurrent, normalized by shard"] = {**RECURRENT, **NORMALIZED, **BY_SHARD}

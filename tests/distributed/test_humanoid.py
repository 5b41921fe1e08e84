"""Engine jax: a simulated humanoid trains on two devices, through the command line; in small, and compiled in haste."""

import pytest
from command_line import Run, lockstep
from device_runs import JAX, devices

pytest.importorskip("brax.envs")

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""A program that runs for a few steps: most of its time goes into compiling it."""
WORDS = (
    *("brax/humanoid", *JAX, "--env.kwargs", '{"backend": "spring"}', "--num-envs", 2, "--num-shards", 2),
    *("--num-steps", 4, "--total-steps", 16, "--ppo.num-epochs", 1, "--ppo.num-minibatches", 1),
    *("--network.hidden-sizes", 8, "--normalize.observations", "false", "--checkpoint.interval", 0),
)


@pytest.mark.long  # MJX's humanoid compiles for half a minute
def test_the_humanoid_trains_on_two_devices(tmp_path):
    ended = lockstep("train", *WORDS, *devices(2), "--name", "run", cwd=tmp_path, XLA_FLAGS=QUICK)
    assert ended.code == 0, ended.stderr
    assert "brax/humanoid · jax · 2 devices [cpu] × 1 shard × 1 environment (in the program)" in ended.stdout
    run = Run(tmp_path / "runs" / "run", ended)
    assert run.summary["world_size"] == 2
    assert [record["iteration"] for record in run.metrics] == [1, 2]
    first, second = run.metrics
    assert first["train/grad_norm"] > 0
    assert first["train/value_loss"] != second["train/value_loss"]
    assert {"reward/alive", "reward/linvel"} <= set(second)

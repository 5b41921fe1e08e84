"""Setting JAX up: bits that neither cores nor devices decide, flags, the cache, platforms that aren't there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.config.run import Config
from lockstep.core import machine
from lockstep.core.topology import Topology
from lockstep.envs.describe import describe
from lockstep.jax_engine.session import pool_of
from lockstep.jax_engine.setup import kept_programs, set_up

ROOT = Path(__file__).parents[2]

CHILD = """
import hashlib, json, os, sys
devices, pool, cores, platform = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
from lockstep.jax_engine.distributed import processes
from lockstep.jax_engine.setup import kept_programs, set_up
from lockstep.core.topology import Topology
try:
    set_up.configure(1, platform, devices if platform == "cpu" else None, int(pool) if pool else None)
    import jax
    processes.check_device(platform)
except ValueError as error:
    print(json.dumps({"error": str(error)}))
    sys.exit()
import jax.numpy as jnp, numpy as np
random = np.random.default_rng(0)
a = random.normal(size=(2048, 64)).astype(np.float32)
x = random.normal(size=1_000_000).astype(np.float32)
from lockstep.jax_engine.nets.layers import product
w = random.normal(size=(64, 64)).astype(np.float32)
gradients = jax.grad(lambda w, a: jnp.square(jnp.tanh(product(a, w))).sum(), argnums=(0, 1))
results = jax.jit(lambda w, a, x: (gradients(w, a), x.sum()))(w, a, x)
for rows, inner, outer in ((64, 4, 64), (256, 17, 64), (512, 300, 300), (256, 1024, 512), (8192, 376, 64)):
    w = random.normal(size=(outer, inner)).astype(np.float32)
    flat = random.normal(size=(rows, inner)).astype(np.float32)
    for b in (flat, flat.reshape(16, -1, inner)):  # rows, and sequences of a recurrent network
        results = (results, jax.jit(lambda w, b: (product(b, w), gradients(w, b)))(w, b))
from lockstep.jax_engine.nets.convolution import convolve, usual_convolution
convolved = lambda f: jax.jit(jax.grad(lambda x, w: jnp.square(f(x, w, 1, 1)).sum(), (0, 1)))
for images, size, seen, out in ((1, 84, 3, 16), (7, 8, 3, 16), (2, 8, 16, 16), (2, 9, 64, 64)):
    x = random.normal(size=(images, size, size, seen)).astype(np.float32)
    w = random.normal(size=(out, seen, 3, 3)).astype(np.float32)
    results = (results, convolved(convolve)(x, w)[0 if seen > 3 else 1 :])  # nobody asks for an input's gradient
usual = convolved(lambda x, w, stride, padding: usual_convolution(stride, padding, x, w))(x[..., :3], w[:16, :3])
sha = lambda tree: hashlib.sha256(b"".join(np.asarray(r).tobytes() for r in jax.tree.leaves(tree))).hexdigest()
print(json.dumps({
    "devices": jax.device_count(),
    "bits": sha(results),
    "others": sha(jax.jit(lambda a: a.T @ jnp.tanh(a))(a)),
    "usual convolution": sha(usual),
    "flags": os.environ["XLA_FLAGS"],
    "cache": jax.config.values["jax_compilation_cache_dir"],
}))
"""


def child(directory, devices=1, pool: int | str = "", cores=1, platform="cpu", **variables):
    unset = ("XLA_FLAGS", "PJRT_NPROC", "NPROC", "JAX_PLATFORMS", kept_programs.CACHE_VARIABLE)
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(directory), **variables}
    command = [sys.executable, "-c", CHILD, str(devices), str(pool), str(cores), platform]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_neither_cores_nor_devices_decide_the_bits(tmp_path):
    own, users = tmp_path / "own", tmp_path / "users"
    flag = "--xla_cpu_enable_fast_math=false"
    one = child(own, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    eight = child(own, devices=8, cores=64, XLA_FLAGS=flag, JAX_COMPILATION_CACHE_DIR=str(users), PJRT_NPROC="1")
    assert (one["devices"], eight["devices"]) == (1, 8)
    assert one["bits"] == eight["bits"]
    # Those of a sum over rows that isn't transposed first depend on the pool, and with it on devices.
    assert one["others"] != eight["others"]
    # So do those of a convolution in its usual form.
    assert one["usual convolution"] != eight["usual convolution"]
    # What the user set is kept.
    assert one["flags"].split() == ["--xla_cpu_multi_thread_eigen=false"]
    assert eight["flags"].split() == [flag, "--xla_cpu_multi_thread_eigen=false"]
    assert one["cache"].startswith(str(own / "lockstep" / "jax"))
    assert eight["cache"] == str(users)
    # A program from the cache gives the same.
    kept = {file.name: file.stat().st_mtime_ns for file in Path(one["cache"]).glob("*-cache")}
    assert kept
    assert child(own, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0") == one
    assert {file.name: file.stat().st_mtime_ns for file in Path(one["cache"]).glob("*-cache")} == kept


def test_a_pool_has_two_threads_at_least():
    """With one XLA compiles large loops otherwise; ``test_device_counts.py`` has what comes of that."""
    assert [set_up.lean_pool(devices) for devices in (1, 2, 3, 8)] == [2, 2, 3, 8]


@pytest.mark.long
def test_a_lean_pool_gives_the_same_bits_as_a_roomy_one(tmp_path):
    roomy, *lean = child(tmp_path), child(tmp_path, pool=1), child(tmp_path, devices=2, pool=2)
    assert [found["bits"] for found in lean] == [roomy["bits"]] * 2


def test_a_pool_that_is_too_small_for_what_comes_later_is_one_line(monkeypatch):
    monkeypatch.setenv(set_up.POOL_VARIABLE, "2")
    set_up.check_pool(2, "fsdp")
    with pytest.raises(
        ValueError, match=r"^fsdp: needs a pool of 4 threads, but JAX has started with 2 in this process; "
    ):
        set_up.check_pool(4, "fsdp")
    monkeypatch.delenv(set_up.POOL_VARIABLE)
    set_up.check_pool(4, "fsdp")  # somebody else has started JAX, and nobody knows with how many


@pytest.mark.parametrize(
    ("changes", "topology", "threads"),
    [
        ({}, Topology(), 2),
        ({"env": {"id": "CartPole-v1"}}, Topology(), 2),
        ({"fsdp": True, "reduction": "fast"}, Topology(), 4),
        ({}, Topology(rank=0, world_size=2), 4),
        ({"env": {"id": "gymnax/CartPole-v1"}}, Topology(), 16),
        ({"env": {"id": "lockstep/GridWorldPixels-v0"}, "precision": "bf16"}, Topology(), 16),
        ({"network": {"custom": "nets:Net"}}, Topology(), 16),
    ],
)
def test_the_pool_is_lean_only_where_neither_bits_nor_waiting_devices_need_more(changes, topology, threads):
    values = {"engine": "jax", "env": {"id": "lockstep/CartPole-v1"}, "num_envs": 16, "num_shards": 8, **changes}
    config = Config.model_validate(values)
    description = None if config.env.jax_only else describe(config.env)
    assert pool_of(config, 2, topology, description) == threads


@pytest.mark.parametrize(
    ("patched", "value"),
    [("flags", "--xla_cpu_experimental_ynn_fusion_type="), ("version", "0.11.0"), ("machine", "aarch64"), (None, "")],
)
def test_the_pool_is_lean_with_images_only_where_convolutions_are_known_to_be_ynnpacks(patched, value, monkeypatch):
    monkeypatch.setattr(set_up.jaxlib.version, "__version__", value if patched == "version" else "0.10.2")
    monkeypatch.setattr(set_up.machine, "machine", lambda: value if patched == "machine" else "x86_64")
    monkeypatch.setenv("XLA_FLAGS", value if patched == "flags" else "--xla_cpu_enable_fast_math=false")
    values = {"engine": "jax", "env": {"id": "lockstep/GridWorldPixels-v0"}, "num_envs": 16, "num_shards": 8}
    config = Config.model_validate(values)
    assert set_up.ynnpacks_convolutions() == (patched is None)
    assert pool_of(config, 2, Topology(), describe(config.env)) == (2 if patched is None else 16)


def test_a_platform_that_isnt_there_is_one_line(tmp_path):
    message = child(tmp_path, platform="tpu")["error"]
    assert message.startswith("device: tpu, but JAX ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, "gpu", None), "device: gpu is none of cpu, cuda, tpu"),
        ((1, "cuda", 2), "simulate_devices: 2 devices can be simulated on device cpu, not on cuda"),
        ((1, "cpu", 0), "simulate_devices: 0 must be 1 to 64"),
        ((1, "cpu", 65), "simulate_devices: 65 must be 1 to 64"),
    ],
)
def test_what_cant_be_set_up(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        set_up.configure(*arguments)


def test_flags_are_appended_and_the_users_stay(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--mine=1  --xla_cpu_multi_thread_eigen=true")
    set_up.add_xla_flags({"xla_cpu_multi_thread_eigen": "false", "other": "2"})
    assert os.environ["XLA_FLAGS"] == "--mine=1 --xla_cpu_multi_thread_eigen=true --other=2"


def test_processors_that_differ_have_caches_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "cpu_features", lambda: ("avx2",))
    narrow = kept_programs.cache_directory()
    assert narrow == kept_programs.cache_directory()
    monkeypatch.setattr(machine, "cpu_features", lambda: ("avx2", "avx512f"))
    assert narrow != kept_programs.cache_directory()
    assert narrow is not None
    assert narrow.parent == tmp_path / "lockstep" / "jax"


LOOKS = """
import os
before = dict(os.environ)
import jax
from lockstep.jax_engine.setup import kept_programs, set_up
jax.config.update("jax_enable_x64", True)
set_up.look_with_cpu()
assert not jax.config.jax_enable_x64  # as runs have it
from lockstep.jax_engine.envs.registry import make
make("lockstep/CartPole-v1")
assert (jax.config.jax_platforms, jax.default_backend()) == ("cpu", "cpu")
names = ("XLA_FLAGS", "PJRT_NPROC", "OMP_NUM_THREADS", "JAX_PLATFORMS")
print([name for name in names if os.environ.get(name) != before.get(name)])
"""


def test_who_looks_with_the_cpu_leaves_the_processes_that_it_starts_their_variables():
    unset = ("XLA_FLAGS", "PJRT_NPROC", "JAX_PLATFORMS")
    environment = {k: v for k, v in os.environ.items() if k not in unset} | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", LOOKS], env=environment, capture_output=True, text=True)
    assert (done.stdout.splitlines(), done.returncode) == (["[]"], 0), done.stderr[-3000:]


def test_who_has_started_jax_looks_with_what_it_has(monkeypatch):
    import jax

    monkeypatch.setattr(set_up, "settle_numbers", None)
    before, devices = jax.config.values, jax.devices()
    set_up.look_with_cpu()
    assert (jax.config.values, jax.devices()) == (before, devices)


def test_only_a_version_that_knows_the_limit_of_a_first_collective_is_told_it(monkeypatch):
    name, usual = "xla_gpu_first_collective_call_terminate_timeout_seconds", set_up.GPU_FLAGS
    monkeypatch.setattr(set_up.jaxlib.version, "__version__", "0.11.0")
    assert set_up.gpu_flags() == usual
    monkeypatch.setattr(set_up.jaxlib.version, "__version__", "0.10.2")
    assert set_up.gpu_flags() == usual | {name: "600"}


@pytest.mark.skipif(not set_up.jaxlib.version.__version__.startswith("0.10."), reason="these flags are 0.10's")
def test_xla_knows_the_flags_that_it_is_given(tmp_path):
    """It ends a process whose flags it doesn't know."""
    flags = " ".join(f"--{name}={value}" for name, value in set_up.gpu_flags().items())
    assert flags in child(tmp_path, XLA_FLAGS=flags)["flags"]

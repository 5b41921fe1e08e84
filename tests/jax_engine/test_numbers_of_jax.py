"""What a user's own variables of JAX's say of numbers decides no agent, and NumPy's threads are one."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from command_line import SMALL, Run, lockstep, run_words
from device_runs import JAX, devices, same_agent
from jax.core import Tracer
from net_cases import CASES

from lockstep.config.run import Config
from lockstep.core.machine import JAX_PACKAGES, KERNEL_VARIABLES, MACHINE_FACTS, device_facts
from lockstep.jax.pmap import task
from lockstep.jax_engine.nets import distributions
from lockstep.jax_engine.planning import costs
from lockstep.jax_engine.planning.targets import VARIABLES
from lockstep.jax_engine.setup import set_up
from lockstep.jax_engine.shards.keys import key_of
from lockstep.jax_engine.state import make_net

jnp = jax.numpy
CODE = """if True:
    import jax, numpy, threadpoolctl
    from lockstep.jax_engine.setup.set_up import configure, machine_facts
    configure(1, "cpu", 1)
    blas = {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}
    print(jax.config.jax_enable_x64, jax.config.jax_threefry_partitionable, blas, "kernel variables" in machine_facts())
"""
OTHERS = {
    "jax_enable_x64": True,
    "jax_explicit_x64_dtypes": "allow",
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_random_seed_offset": 1,
    "jax_high_dynamic_range_gumbel": True,
    "jax_softmax_custom_jvp": True,
    "eager_constant_folding": True,
    "jax_disable_jit": True,
    "jax_use_shardy_partitioner": False,
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_legacy_prng_key": "error",
    set_up.PRECISION: "bfloat16",
}
"""Another value of each setting that is settled."""
OF_A_LIBRARY = ("jax_default_prng_impl", "jax_random_seed_offset", "jax_high_dynamic_range_gumbel")
"""Settings that stay a user's own where ``lockstep.jax`` is a library: it says itself what it draws with."""
TINY = (
    *("lockstep/CartPole-v1", *SMALL, *JAX, *devices(1), "--total-steps", 256, "--ppo.num-epochs", 1),
    *("--network.custom", "equinox_nets:Tiny", "--eval.interval", 0, "--checkpoint.interval", 0),
)
UNSETTLED = """if True:
    import sys
    from lockstep.cli import main
    from lockstep.jax_engine.setup import set_up
    del set_up.NUMBERS[sys.argv.pop(1)]
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def as_before():
    """Puts every setting back."""
    before = {name: jax.config.values[name] for name in OTHERS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def set_otherwise(*names):
    for name in names:
        jax.config.update(name, OTHERS[name])


def promoted():
    """Which sums JAX makes of arrays of two ranks, and of two dtypes."""
    made = []
    for other in (jnp.ones((2, 1)), jnp.ones(1, jnp.int32)):
        try:
            made.append((jnp.ones(1) + other).shape)
        except (ValueError, TypeError) as error:
            made.append(type(error))
    return made


def raw_keys():
    """Whether JAX draws with a key of plain words."""
    try:
        return bool(jax.random.bits(jnp.array([1, 2], jnp.uint32)).dtype == np.uint32)
    except (ValueError, TypeError):
        return False


def drawn_and_traced():
    """What JAX makes of a user's program, in which each of the settings shows."""
    seen = []

    @jax.jit
    def loss(x):
        seen.append(isinstance(x, Tracer))
        constant = jnp.sin(jnp.arange(3.0)) if isinstance(x, Tracer) else 0.0
        return (jax.nn.softmax(x @ x.T) * jnp.cos(x[:, :1]) ** 2).sum() + jnp.sum(constant)

    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    key = jax.random.key(3)
    draws = jax.random.normal(key_of(np.array([1, 2], np.uint32)), (5,), jnp.float32)
    gumbel = jax.random.gumbel(key_of(np.array([1, 2], np.uint32)), (5,), jnp.float32)
    wide = jnp.zeros(1, jnp.float64).dtype if not jax.config.values["jax_enable_x64"] else "x64"
    loss(x)
    with jax.disable_jit(False):
        text = jax.jit(jax.grad(loss)).lower(x).as_text()
        traced = str(jax.make_jaxpr(jax.grad(loss))(x))
        rows = jax.NamedSharding(jax.make_mesh((2,), ("rows",)), jax.P("rows"))
        text += jax.jit(jnp.sin, in_shardings=rows).lower(x).as_text()
    words = np.asarray(jax.random.key_data(key)).tolist()
    return str((promoted(), raw_keys(), words, np.asarray(draws), np.asarray(gumbel), str(wide), seen[0], text, traced))


def test_variables_of_jaxs_and_cores_change_no_number():
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    variables |= {"JAX_ENABLE_X64": "1", "JAX_THREEFRY_PARTITIONABLE": "0", "OPENBLAS_NUM_THREADS": "2"}
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=variables)
    assert ended.stdout == "False True {1} True\n", ended.stderr


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
@pytest.mark.parametrize("name", OTHERS)
def test_each_setting_decides_something_and_is_settled(name, monkeypatch):
    set_up.settle_numbers("cpu")
    settled = drawn_and_traced()
    set_otherwise(name)
    assert drawn_and_traced() != settled
    set_up.settle_numbers("cpu")
    assert drawn_and_traced() == settled
    set_otherwise(name)
    monkeypatch.setattr(set_up, "PRECISION", "no such setting")
    monkeypatch.delitem(set_up.NUMBERS, name, raising=False)
    set_up.settle_numbers("cpu")
    assert drawn_and_traced() != settled


def test_every_settled_setting_is_tried_here():
    assert set(OTHERS) == {*set_up.NUMBERS, set_up.PRECISION}
    set_up.settle_numbers("cpu")
    assert jax.config.values[set_up.PRECISION] is None


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_accelerators_multiply_in_float32_also_what_users_bring(platform):
    """In plans, too, which are compiled for a TPU on a CPU."""

    def lowered():
        x = np.ones((2, 2), np.float32)
        return jax.jit(lambda x: x @ x).trace(x).lower(lowering_platforms=(platform,)).as_text()

    set_up.settle_numbers("cpu")
    assert "HIGHEST" not in lowered()
    set_up.settle_numbers(platform)
    assert "HIGHEST" in lowered()


def test_a_plan_for_tpus_multiplies_as_its_run_does(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")  # put back at the end
    monkeypatch.setattr(costs, "set_up_jax", lambda _, platform, *__: set_up.settle_numbers(platform))
    costs.start_compiler("tpu")
    assert jax.config.values[set_up.PRECISION] == "highest"


def test_a_version_without_a_setting_goes_without_it(monkeypatch):
    monkeypatch.setitem(set_up.NUMBERS, "jax_of_another_version", True)
    set_up.settle_numbers("cpu")


def test_a_run_is_the_same_whatever_variables_say_of_numbers(trained, tmp_path):
    variables = {name.upper(): str(value) for name, value in OTHERS.items()}
    plain = trained(*TINY)
    words = [sys.executable, "-c", UNSETTLED, "jax_threefry_partitionable", "train", *map(str, TINY)]
    ended = [
        lockstep("train", *TINY, "--name", "settled", cwd=tmp_path, **variables),
        run_words([*words, "--name", "unsettled"], tmp_path, **variables),
    ]
    assert [each.code for each in ended] == [0, 0], ended
    settled, unsettled = (
        Run(tmp_path / "runs" / name, each) for name, each in zip(("settled", "unsettled"), ended, strict=True)
    )
    same_agent(plain, settled)
    assert plain.agent != unsettled.agent


@pytest.mark.parametrize("name", OF_A_LIBRARY)
def test_the_library_says_itself_what_it_draws_with(name):
    case = CASES["categorical"]

    def drawn():
        config = Config.model_validate({"network": {"custom": "equinox_nets:Tiny"}})
        net = make_net(config, case.observation, case.action)
        noise = distributions.action_noise(net, key_of(np.array([1, 2], np.uint32)), (3, 4))
        return {**net.custom.initial_parameters(), "noise": noise}

    before = drawn()
    set_otherwise(name)
    after = drawn()
    assert all(np.array_equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", OF_A_LIBRARY)
def test_users_hooks_of_a_task_are_given_the_same_keys(name):
    class Keys(task.DistributedPPOTask):
        def __init__(self):
            self.runner_config = task.RunnerConfig(1000, seed=5)

        def get_initial_model(self, rng):
            return np.asarray(jax.random.key_data(rng))

        get_initial_env_state = get_initial_model

    def given():
        asked = Keys()
        with pytest.raises(ValueError, match="return \\(obs, state\\)"):
            asked._first_envs()
        return asked._model

    before = given()
    set_otherwise(name)
    np.testing.assert_array_equal(given(), before)


def test_verifications_look_at_every_fact_that_processes_compare():
    facts = set_up.machine_facts() | device_facts("cuda", "13.0", JAX_PACKAGES)
    assert set(facts) <= set(MACHINE_FACTS)


@pytest.mark.parametrize("name", [*KERNEL_VARIABLES, *set_up.JAX_VARIABLES])
def test_variables_that_choose_kernels_are_facts_of_a_process(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    before = set_up.machine_facts()
    monkeypatch.setenv(name, "other")
    after = set_up.machine_facts()
    assert f"{name}=other" in after["kernel variables"].split()
    assert {key for key in before if before[key] != after[key]} == {"kernel variables"}

"""What one engine has and the other hasn't is refused in one line that says what to use instead."""

import pytest

from lockstep.config.checks import resolve
from lockstep.config.command_line import read_request
from lockstep.config.engines import check_engine_options, check_fsdp_devices
from lockstep.config.presets import preset_for
from lockstep.config.run import Config, RunOptions


def refused(function, *arguments):
    with pytest.raises(ValueError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def config(engine, **settings):
    return Config.model_validate({"engine": engine, **settings})


JAX_REFUSES = [
    ({"compile": True}, "compile: true is for engine torch", "anyway"),
    ({"compile": True, "device": "cuda", "cuda_graphs": True}, "compile: true", ""),
    ({"cuda_graphs": True, "device": "cuda"}, "cuda_graphs: true is for engine torch", "one program"),
    ({"threads": 4}, "threads: 4 is for engine torch", "--devices 4"),
    ({"backend": "nccl", "device": "cuda"}, "backend: nccl is for engine torch", "backend auto"),
    ({"backend": "gloo", "device": "cuda"}, "backend: gloo is for engine torch", "backend auto"),
    ({"env": {"backend": "envpool"}}, "env.backend: envpool is for engine torch", "env.backend auto"),
    ({"env": {"backend": "tensor"}}, "env.backend: tensor is for engine torch", "env.backend auto"),
]
TORCH_REFUSES = [
    ({"device": "tpu"}, "device: tpu is for engine jax", "--engine jax"),
    ({"ppo": {"drop_remainder": True}}, "ppo.drop_remainder: true is for engine jax", "ppo.num_minibatches"),
    ({"network": {"remat": True}}, "network.remat: true is for engine jax", "ppo.gradient_accumulation"),
]


@pytest.mark.parametrize(("settings", "start", "instead"), JAX_REFUSES)
def test_settings_of_torch_alone(settings, start, instead):
    text = refused(resolve, config("jax", **settings))
    assert text.startswith(start)
    assert instead in text


@pytest.mark.parametrize(("settings", "start", "instead"), TORCH_REFUSES)
def test_settings_of_jax_alone(settings, start, instead):
    text = refused(resolve, config("torch", **settings))
    assert text.startswith(start)
    assert instead in text
    assert resolve(config("jax", **settings)).engine == "jax"


@pytest.mark.parametrize("settings", [settings for settings, _, _ in JAX_REFUSES if "cuda_graphs" not in settings])
def test_torch_takes_what_jax_refuses(settings):
    assert resolve(config("torch", **settings)).engine == "torch"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"device": "cuda"},
        {"backend": "gloo"},
        {"reduction": "fast", "fsdp": True},
        {"reduction": "fast", "sync_period": 4},
        {"algorithm": "grpo"},
        {"env": {"backend": "gymnasium", "workers": 2}, "proof": {"interval": 1, "trace": True}},
        {"network": {"recurrent": "gru"}},
        preset_for("CartPole-v1"),
        preset_for("HalfCheetah-v5"),
        preset_for("ALE/Pong-v5"),
    ],
)
def test_both_engines_take_the_same_config(settings):
    one, other = (resolve(config(engine, num_envs=64, **{k: v for k, v in settings.items() if k != "num_envs"}))
                  for engine in ("torch", "jax"))  # fmt: skip
    assert one.model_dump() | {"engine": "jax"} == other.model_dump()


# ---- ranks are devices


def test_for_jax_the_world_is_made_of_devices():
    assert resolve(config("jax", num_envs=10), 2).shards == 2
    chosen, default = {"num_envs": 10, "num_shards": 5}, {"num_envs": 10}
    assert resolve(config("jax", **chosen), 3).shards == 5
    assert refused(resolve, config("jax", **chosen), 6).startswith("devices: 6 devices can't share 5 shards")
    assert refused(resolve, config("torch", **chosen), 6).startswith("nproc: 6 ranks can't share 5 shards")
    assert " by default and 3 devices need one each; " in refused(resolve, config("jax", **default), 3)
    assert " by default and 3 ranks need one each; " in refused(resolve, config("torch", **default), 3)
    for devices in (2, 3):
        grown = resolve(config("jax", num_envs_per_rank=4), devices)
        assert (grown.envs, grown.shards) == (4 * devices, devices)


# ---- options


@pytest.mark.parametrize(
    ("option", "value"),
    [("devices", 2), ("simulate_devices", 2), ("fsdp_devices", 2)],
)
def test_options_of_jax_alone(option, value):
    text = refused(check_engine_options, RunOptions.model_validate({option: value}), config("torch"))
    assert text.startswith(f"{option}: {value} is for engine jax")
    assert "--engine jax" in text
    jax = config("jax", fsdp=True, reduction="fast")
    check_engine_options(RunOptions.model_validate({option: value}), jax)


def test_coordinator_flags_are_for_jax():
    options = RunOptions(coordinator="127.0.0.1:4000", num_processes=2, process_id=0)
    assert "torchrun" in refused(check_engine_options, options, config("torch"))
    check_engine_options(options, config("jax"))


def test_options_that_jax_does_not_take():
    assert refused(check_engine_options, RunOptions(nproc="auto"), config("jax")).startswith("nproc: auto")
    check_engine_options(RunOptions(nproc="auto"), config("torch"))
    gpus = config("jax", device="cuda")
    assert "device is cuda" in refused(check_engine_options, RunOptions(simulate_devices=2), gpus)
    assert "--fsdp" in refused(check_engine_options, RunOptions(fsdp_devices=2), config("jax"))


def test_the_fsdp_axis_divides_the_devices():
    check_fsdp_devices(RunOptions(fsdp_devices=2), 4)
    check_fsdp_devices(RunOptions(), 4)
    text = refused(check_fsdp_devices, RunOptions(fsdp_devices=3), 4)
    assert text == "fsdp_devices: 3 doesn't divide the run's 4 devices; nearest that work: 2 or 4"


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["--devices", "0"], "command line: devices: '0'"),
        (["--simulate-devices", "two"], "command line: simulate_devices: 'two'"),
        (["--devices", "4", "--simulate-devices", "2"], "command line: devices: 4 of only 2 simulated ones"),
        (["--num-seeds", "0"], "command line: num_seeds: '0'"),
        (["--num-seeds", "10001"], "command line: num_seeds: 10001: at most 10,000 in all"),
        (["--coordinator", "node-0"], "command line: coordinator: 'node-0': a host and a port are wanted"),
        (["--coordinator", "a:1"], "command line: coordinator: given without num_processes and process_id"),
        (["--process-id", "0"], "command line: process_id: given without coordinator and num_processes"),
        (
            ["--coordinator", "a:1", "--num-processes", "2", "--process-id", "2"],
            "command line: process_id: 2 of num_processes 2; they count from 0 to 1",
        ),
        (
            ["--coordinator", "a:1", "--num-processes", "2", "--process-id", "1", "--nproc", "2"],
            "command line: nproc: 2 with coordinator",
        ),
    ],
)
def test_options_that_do_not_fit_together(words, start):
    assert refused(read_request, ["CartPole-v1", "--engine", "jax", *words]).startswith(start)


@pytest.mark.parametrize(
    "env", [{"id": "lockstep/CartPole-v1"}, {"id": "gymnax/CartPole-v1"}, {"id": "users:Env", "backend": "jax"}]
)
def test_the_program_counts_steps_of_an_episode_by_32_bits(env):
    text = refused(resolve, config("jax", env={**env, "max_episode_steps": 2**31}))
    assert text.startswith("env.max_episode_steps: 2147483648, but the compiled program counts")
    assert text.endswith("at most 2147483647")
    assert resolve(config("jax", env={**env, "max_episode_steps": 2**31 - 1})).engine == "jax"


@pytest.mark.parametrize(
    ("engine", "env"),
    [("torch", {}), ("jax", {"id": "CartPole-v1"}), ("jax", {"backend": "gymnasium"})],
)
def test_the_host_counts_as_many_steps_as_anybody_wants(engine, env):
    settings = {"id": "lockstep/CartPole-v1", **env, "max_episode_steps": 10**10}
    assert resolve(config(engine, env=settings)).env.max_episode_steps == 10**10


def test_options_that_fit_together():
    words = ["--coordinator", "[::1]:4000", "--num-processes", "2", "--process-id", "1", "--simulate-devices", "4"]
    options = read_request(["CartPole-v1", "--engine", "jax", *words, "--devices", "2"]).options
    assert (options.coordinator, options.num_processes, options.process_id) == ("[::1]:4000", 2, 1)
    assert (options.devices, options.simulate_devices) == (2, 4)


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"fsdp": True, "reduction": "fast"}])
def test_devices_of_jax_that_cannot_meet_in_memory(settings):
    text = refused(resolve, config("jax", collectives="shared", **settings))
    assert text.startswith("collectives: shared, but with ")
    assert "collectives auto" in text
    assert resolve(config("jax", collectives="backend", **settings)).collectives == "backend"

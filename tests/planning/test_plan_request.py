"""What is planned for which target, and what can't be."""

from typing import Any

import pytest

from lockstep.config.run import Config
from lockstep.launch.request import described_run
from lockstep.planning.hardware import parse_target
from lockstep.planning.request import PlanRequest, prices, world_sizes


def request_of(*targets, sizes=None, mode="strong", config=None, **more: Any):
    values = {"num_envs": 64, "num_steps": 16, "ppo": {"num_minibatches": 2}} | (config or {})
    return PlanRequest(Config.model_validate(values), tuple(map(parse_target, targets)), sizes, mode, **more)


def test_sizes_are_powers_of_two_as_far_as_target_and_shards_go():
    request = request_of("h100:8", "l40:3", "tpu:v5e:16x16", "cpu:2")
    assert [request.sizes_on(t) for t in request.targets] == [(1, 2, 4, 8), (1, 2, 3), (1, 2, 4, 8), (1, 2)]
    assert request.notes_on(request.targets[2])[2].startswith("tpu:v5e:16x16: 8 shards use 8 of 256 devices; for all")


def test_any_number_of_devices_up_to_the_shards_will_do():
    request = request_of("h100:8", sizes=(1, 3, 5, 8))
    request.check()
    assert request.sizes_on(request.targets[0]) == (1, 3, 5, 8)
    assert request.sized(request.run_on(request.targets[0]), 3).num_shards == 8
    assert request.notes_on(request.targets[0])[0].startswith("h100:8: 8 shards on 3 devices: 3, 3, 2; 9 shards")


def test_weak_grows_with_the_devices():
    request = request_of("tpu:v5e:2x4", mode="weak")
    run = request.run_on(request.targets[0])
    assert request.sizes_on(request.targets[0]) == (1, 2, 4, 8)
    assert [(request.sized(run, n).num_envs, request.sized(run, n).num_shards) for n in (1, 8)] == [(64, 8), (512, 64)]


def test_environments_of_each_rank_are_planned_as_they_grow_and_not_as_a_run_that_is_shared():
    settings = {"num_envs": None, "num_envs_per_rank": 64, "num_shards": 8}
    with pytest.raises(ValueError, match=r"^num_envs_per_rank: 64 grows with the devices, .*give num_envs, or --mode"):
        request_of("h100:8", config=settings).check()
    request = request_of("h100:8", mode="weak", config=settings)
    request.check()
    sized = [request.sized(request.run_on(request.targets[0]), n) for n in (1, 8)]
    assert [(one.num_envs, one.num_shards) for one in sized] == [(64, 8), (512, 64)]


@pytest.mark.parametrize("each", ["auto", "max"])
def test_what_is_said_of_environments_by_the_machine_works_if_it_is_done(each):
    settings = {"num_envs": None, "num_envs_per_rank": each}
    with pytest.raises(ValueError, match=f"^num_envs_per_rank: {each} .*give num_envs, or a number and --mode weak$"):
        request_of("h100:8", config=settings).check()
    with pytest.raises(ValueError, match=f"^num_envs_per_rank: {each} .*give a number$"):
        request_of("h100:8", mode="weak", config=settings).check()
    request_of("h100:8", mode="weak", config=settings | {"num_envs_per_rank": 64}).check()


def test_a_target_brings_its_device_and_engine():
    request = request_of("h100:8", "tpu:v5e:2x4", "cpu:2")
    runs = [request.run_on(target) for target in request.targets]
    assert [(run.device, run.engine) for run in runs] == [("cuda", "torch"), ("tpu", "jax"), ("cpu", "torch")]


def of_command_line(*words):
    return PlanRequest(described_run("plan", words[0], words[1:]), (parse_target("tpu:v5e:2x4"),))


@pytest.mark.parametrize("words", [("CartPole-v1",), ("CartPole-v1", "--env.backend", "gymnasium"), ("Snake-v0",)])
def test_a_run_on_tpus_is_the_one_that_is_trained_by_their_engine(words):
    said, given = of_command_line(*words), of_command_line(*words, "--engine", "jax")
    (target,) = said.targets
    assert said.run_on(target) == given.run_on(target)
    assert said.sized(said.run_on(target), 8) == given.sized(given.run_on(target), 8)


def test_an_environment_that_is_stepped_inside_of_a_program_is_noted():
    request = of_command_line("CartPole-v1")
    notes = request.notes_on(request.targets[0])
    assert notes[0] == "tpu:v5e:2x4: engine jax, which alone runs on TPUs"
    assert notes[1].startswith(
        "tpu:v5e:2x4: engine jax: CartPole-v1 is stepped inside the compiled program as lockstep"
    )


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (lambda: request_of(), "on: nothing to plan for"),
        (lambda: request_of("h100:8", sizes=(1, 16)), "world-sizes: 16 is more than any target has; 8 devices at most"),
        (lambda: request_of("h100:8", "cpu:2", sizes=(4, 8)), "world-sizes: cpu:2 has 2 devices, less than any of 4"),
        (lambda: request_of("h100:16", sizes=(16,)), "64 environments make 8 shards by default and 16 ranks need one"),
        (lambda: request_of("h100:8", prices={"a100:8": 3.0}), "price: a100:8 is none of the targets; those are h100"),
        (
            lambda: request_of("tpu:v5e:2x4", config={"threads": 2}),
            "threads: 2 is for engine torch",
        ),
    ],
)
def test_what_cant_be_planned_is_refused_before_anything_starts(request_, said):
    with pytest.raises(ValueError, match=r"^\w") as caught:
        request_().check()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_prices_are_of_targets():
    targets = [parse_target("h100:8"), parse_target("tpu:v5e:2x4")]
    assert prices(["98.32"], targets[:1]) == {"h100:8": 98.32}
    assert prices(["h100:8=98.32", "tpu:v5e:2x4=9.6"], targets) == {"h100:8": 98.32, "tpu:v5e:2x4": 9.6}
    assert prices([" H100:8 = 98.32"], [parse_target(" H100:8")]) == {"h100:8": 98.32}
    with pytest.raises(ValueError, match=r"price: 98.32: say of which target, such as h100:8=98.32"):
        prices(["98.32"], targets)
    for text in ("cheap", "-1", "h100:8=0", "nan"):
        with pytest.raises(ValueError, match="is no price"):
            prices([text], targets[:1])


def test_world_sizes_that_are_none_are_refused():
    assert world_sizes(None) is None
    assert world_sizes("4,1,2") == (1, 2, 4)
    with pytest.raises(ValueError, match="world-sizes: '1,x'"):
        world_sizes("1,x")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("h100:8", ["h100:8: --link, the rate between hosts, is not used: one host has all 8 devices"]),
        ("cpu:2", ["cpu:2: --link, the rate between hosts, is not used: one host has all 2 ranks"]),
        ("tpu:v5e:2x4", ["tpu:v5e:2x4: --link, the rate between hosts, is not used: a slice's hosts meet over its own "
                         "links (ICI, 2D torus)"]),
        ("cpu:2x1", []),
        ("h100:16", []),
    ],
)  # fmt: skip
def test_a_link_between_hosts_that_nothing_crosses_is_noted(target, said):
    request = request_of(target, network=1e9, config={"num_shards": 16})
    assert [line for line in request.notes_on(request.targets[0]) if "--link" in line] == said
    without = request_of(target, config={"num_shards": 16})
    assert not any("--link" in line for line in without.notes_on(without.targets[0]))

"""Predictions of accelerators, from costs that are written out by hand."""

from dataclasses import replace

import pytest

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.envs.describe import describe
from lockstep.planning.accelerators import Times, Workload, largest_num_envs, predict
from lockstep.planning.hardware import parse_target
from lockstep.planning.host_steps import HostSteps
from lockstep.planning.prediction import Outlook
from lockstep.planning.report import fits
from lockstep.training.costs import Collective, Costs, Grows, Kernel, Part

SLOW_STEPS = HostSteps((1e-3,))
VALUES = {"engine": "jax", "device": "cuda", "num_envs": 64, "num_steps": 16, "ppo": {"num_minibatches": 2}}
CONFIG = Config.model_validate(VALUES)
PARTS = (
    Part("rollout", (Kernel(1e9, 1e6, 100, "matmul"),), "size"),
    Part("evaluate", (Kernel(1e9, 1e6, 10, "matmul"),), "size"),
    Part("gradients", (Kernel(1e12, 1e6, 40, "matmul"),), "size"),
    Part("optimizer", (Kernel(0.0, 1e9, 40),), "not"),
)
MEMORY = {"parameters": 4e6, "moments": 8e6, "gradients": 8e6, "rollout": 1e6, "activations": 9e6}
COSTS = Costs(1, PARTS, MEMORY)


def work(devices, target="h100:8", config=CONFIG, host=None, costs=COSTS, **more):
    config = resolve(config, devices)
    return Workload(config, describe(config.env), parse_target(target), devices, costs, 8, host, **more)


def test_twice_the_devices_take_half_the_time_of_what_grows():
    one, two = (predict(work(n)) for n in (4, 8))
    for part in ("rollout", "gradients"):
        assert one.parts[part] == pytest.approx(2 * two.parts[part])
    assert one.parts["optimizer"] == two.parts["optimizer"]
    assert one.parts["collectives"] < two.parts["collectives"]
    assert predict(work(1)).parts["collectives"] == 0.0


def test_the_range_holds_what_is_likely():
    found = predict(work(8))
    assert found.seconds["best"] < found.seconds["likely"] < found.seconds["worst"]
    assert found.rates["best"] > found.rates["likely"] == found.steps / found.seconds["likely"]
    assert found.limit == "gradients (arithmetic)"
    assert sum(found.parts.values()) == pytest.approx(found.seconds["likely"])
    assert sum(found.limits.values()) == pytest.approx(found.seconds["likely"])


def test_the_largest_part_is_named_with_what_limits_it_and_not_another():
    times = Times.none()
    for part, limit, seconds in (
        ("environments", "host", 0.45),
        ("gradients", "launches", 0.30),
        ("optimizer", "launches", 0.25),
    ):
        times.add(part, limit, seconds)
    found = replace(predict(work(8)), parts=times.parts, limits=times.limits, limits_of=times.limits_of)
    assert found.limit == "environments (the host's processor)"


def test_gradients_at_the_roofline():
    # 40 products of 1e12 operations at half of 67e12 a second
    assert predict(work(8)).parts["gradients"] == pytest.approx(40 * 1e12 / (67e12 * 0.5))


def test_memory_of_fewer_devices_is_more_and_may_not_fit():
    huge = replace(COSTS, memory=MEMORY | {"rollout": 30e9})
    eight, two = (predict(work(n, costs=huge)) for n in (8, 2))
    assert two.memory["rollout"] == 120e9
    assert two.memory["gradients"] == eight.memory["gradients"] + 3 * MEMORY["parameters"]  # one for each more shard
    for kind in ("parameters", "activations"):  # shards are computed one by one
        assert two.memory[kind] == eight.memory[kind]
    whole = Outlook("h100:8", "H100", "jax", "", 8, 80e9, (two, eight))
    assert [row["fits"] for row in whole.to_json()["predictions"]] == [False, True]
    assert replace(whole, capacity=0.0).fits(two) is None  # nobody knows
    needed = whole.needed(two)
    for times, said in ((0.998, "yes, 100%"), (1.001, "no, by 1.01x"), (1.04, "no, by 1.04x"), (130, "no, by 130x")):
        assert fits(replace(whole, capacity=80e9 * needed / times), two) == said


def test_shards_that_are_computed_together_have_activations_each_and_one_gradient():
    fast = CONFIG.model_copy(update={"reduction": "fast"})
    eight, two = (predict(work(n, config=fast)) for n in (8, 2))
    assert two.memory["activations"] == 4 * eight.memory["activations"]
    assert two.memory["gradients"] == eight.memory["gradients"]


def test_memory_that_was_counted_for_fewer_devices_is_taken_as_it_is():
    counted = replace(COSTS, fewer={2: MEMORY | {"activations": 7.0}})
    assert predict(work(2, costs=counted)).memory["activations"] == 7.0
    assert predict(work(4, costs=counted)).memory["activations"] == MEMORY["activations"]


def test_the_most_environments_fill_the_memory_and_no_more():
    found = largest_num_envs(work(8))
    # 80e9 bytes less 1e9 of libraries and 20e6 that don't grow, 10e6 for 64 environments on 8 devices
    assert found == int(64 * (80e9 - 1e9 - 20e6) / 10e6 / 8) * 8
    assert largest_num_envs(work(8, costs=replace(COSTS, memory=MEMORY | {"parameters": 90e9}))) == 0


def test_compiled_collectives_count_for_the_devices_that_they_were_compiled_for():
    costs = replace(COSTS, collectives=(Collective("all-reduce", "gradients", 7.0, 100.0),))
    assert predict(work(8, costs=costs)).collectives == costs.collectives
    assert [x.kind for x in predict(work(4, costs=costs)).collectives] == ["all-to-all", "all-gather", "all-gather"]


def test_hosts_meet_over_their_network():
    inside, across = work(8), work(16, "h100:16", CONFIG.model_copy(update={"num_shards": 16}))
    slow = replace(across, network=1e9)
    assert predict(inside).parts["collectives"] < predict(across).parts["collectives"]
    assert predict(across).parts["collectives"] < predict(slow).parts["collectives"]


def test_rings_leave_a_host_by_all_of_its_network_cards():
    """And an exchange of all with all by each device's own, which half of the bytes need: 8 of 16 devices are here."""
    costs = replace(COSTS, collectives=(Collective("all-reduce", "gradients", 1.0, 1e9),))
    config = CONFIG.model_copy(update={"num_shards": 16})
    many = replace(work(16, "h100:16", config, costs=costs), counted=16)
    found = predict(many).limits["links"]
    assert found == pytest.approx(2 * 1e9 * 15 / 16 / (min(450e9, 8 * 50e9) * 0.7))
    assert predict(replace(many, network=25e9 / 8)).limits["links"] == pytest.approx(2 * 15 / 16 / (3.125 * 0.7))
    exchange = replace(costs, collectives=(Collective("all-to-all", "gradients", 1.0, 1e9),))
    assert predict(replace(many, costs=exchange)).limits["links"] == pytest.approx(0.5 * 1e9 / (50e9 * 0.7))


def test_environments_on_the_host_limit_what_the_device_could_do():
    found = predict(work(8, host=SLOW_STEPS, config=CONFIG.model_copy(update={"engine": "torch"})))
    # a rank's 8 environments, 16 steps, 1 ms each, and what is assumed for handing over
    assert found.parts["environments"] == pytest.approx(8 * 16 * 1e-3, rel=0.02)
    assert predict(work(8)).parts["environments"] == 0.0


def test_one_process_of_jax_steps_the_environments_of_all_of_its_devices():
    """So more devices of a host don't make that part shorter."""
    two, eight = (predict(work(n, host=SLOW_STEPS)) for n in (2, 8))
    assert two.parts["environments"] == pytest.approx(eight.parts["environments"])
    assert eight.parts["environments"] == pytest.approx(64 * 16 * 1e-3, rel=0.02)
    assert eight.limit == "gradients (arithmetic)"


def test_fsdp_holds_a_part_of_parameters_on_each_device_and_whole_gradients():
    config = CONFIG.model_copy(update={"fsdp": True, "reduction": "fast"})
    eight, two = (predict(work(n, config=config)) for n in (8, 2))
    for kind in ("parameters", "moments"):
        assert two.memory[kind] == 4 * eight.memory[kind]
    assert two.memory["gradients"] == eight.memory["gradients"] == MEMORY["gradients"]


def test_a_graph_of_one_rank_launches_what_python_would():
    many = replace(COSTS, parts=(Part("gradients", (Kernel(0.0, 0.0, 1000),), "not"),))
    torch = CONFIG.model_copy(update={"engine": "torch"})
    graph, none, two = (
        predict(work(n, config=torch.model_copy(update={"cuda_graphs": wanted}), costs=many)).parts["gradients"]
        for n, wanted in ((1, None), (1, False), (2, None))
    )
    assert graph == pytest.approx(1000 * 3e-6)
    assert none == two == pytest.approx(1000 * 30e-6)


def test_branches_of_a_graph_run_beside_one_another_as_far_as_there_are_shards():
    def seconds(devices, grows: Grows = "count", graphs=None):
        parts = (Part("gradients", (Kernel(0.0, 0.0, 1000),), grows, beside=4),)
        config = CONFIG.model_copy(update={"engine": "torch", "cuda_graphs": graphs})
        return predict(work(devices, config=config, costs=replace(COSTS, parts=parts))).parts["gradients"]

    assert COSTS.shards == 1
    assert resolve(CONFIG, 1).shards == 8
    assert seconds(1) == pytest.approx(8 * 1000 * 3e-6 / 4)
    assert seconds(1, "not") == pytest.approx(1000 * 3e-6)
    assert seconds(1, graphs=False) == pytest.approx(8 * 1000 * 30e-6)
    assert seconds(8) == pytest.approx(1000 * 30e-6)


def test_steps_of_rollouts_are_replayed_on_any_number_of_ranks():
    kernels = (Kernel(0.0, 0.0, 1000),)
    many = replace(COSTS, parts=(Part("rollout", kernels, "not"), Part("environments", kernels, "not")))

    def seconds(devices, graphs=None, **env):
        planned = work(devices, config=CONFIG.model_copy(update={"engine": "torch", "cuda_graphs": graphs}), costs=many)
        changed = planned.config.env.model_copy(update=env)
        parts = predict(replace(planned, config=planned.config.model_copy(update={"env": changed}))).parts
        return parts["rollout"], parts["environments"]

    of_copies, replayed, launched = CONFIG.num_steps * 30e-6, 1000 * 3e-6, 1000 * 30e-6
    arrays, simulators = (
        {"id": "lockstep/CartPole-v1", "backend": "tensor"},
        {"id": "users:factory", "backend": "tensor"},
    )
    for devices in (1, 2):
        assert seconds(devices, **arrays) == pytest.approx((replayed + 6 * of_copies, replayed))
        assert seconds(devices)[0] == pytest.approx(replayed + 3 * of_copies)
        for words in (seconds(devices, **simulators), seconds(devices, False, **arrays)):
            assert words == pytest.approx((launched, launched))


def test_the_host_takes_part_in_steps_that_are_cut_or_averaged():
    torch = CONFIG.model_copy(update={"engine": "torch", "reduction": "fast"})
    plain, apart = (predict(work(2, config=torch.model_copy(update={"sync_period": n}))) for n in (1, 4))
    steps = CONFIG.ppo.num_epochs * 2
    assert apart.parts["gradients"] - plain.parts["gradients"] == pytest.approx(steps * 40e-6)


def test_workers_are_chosen_as_a_run_chooses_them():
    def stepping(workers):
        env = CONFIG.env.model_copy(update={"workers": workers})
        config = CONFIG.model_copy(update={"engine": "torch", "env": env})
        return predict(work(8, config=config, host=SLOW_STEPS)).parts["environments"]

    # 8 environments of a rank, 1 ms each, on 14 cores: 1 ms and 8 times 0.09 ms is less than with any fewer workers
    assert stepping("auto") == stepping(8) < stepping(2) < stepping(0)


def test_what_a_graph_of_sampling_leaves_out_is_launched():
    kernels = (Kernel(0.0, 0.0, 1000),)
    alone, beside = (
        replace(COSTS, parts=(Part("rollout", kernels, "size"), Part("rollout", kernels, "size", sampling=inside)))
        for inside in (True, False)
    )
    torch = CONFIG.model_copy(update={"engine": "torch"})
    arrays = torch.model_copy(
        update={"env": torch.env.model_copy(update={"id": "lockstep/CartPole-v1", "backend": "tensor"})}
    )

    def seconds(config, costs):
        return predict(replace(work(1, config=config, costs=costs), counted=1)).parts["rollout"]

    assert seconds(torch, beside) - seconds(torch, alone) == pytest.approx(1000 * (30e-6 - 3e-6))
    assert seconds(arrays, beside) == seconds(arrays, alone)  # a graph of a whole step has it in it


def test_heads_take_as_long_as_float32_does_where_the_rest_is_bfloat16():
    def seconds(kind):
        costs = replace(COSTS, parts=(Part("gradients", (Kernel(1e12, 1e6, 40, kind),), "size"),))
        config = CONFIG.model_copy(update={"precision": "bf16"})
        return predict(work(8, config=config, costs=costs)).parts["gradients"]

    assert seconds("matmul") == pytest.approx(40 * 1e12 / (67e12 * 0.5))
    assert seconds("matmul_bf16") == pytest.approx(40 * 1e12 / (989e12 * 0.5))


def test_an_iteration_waits_for_its_minibatches_as_far_as_nothing_hides_that():
    def other(seconds=0.0, engine="torch", part="rollout", launches=1, **changes):
        """Of a device of 64 environments, a part of which takes so many seconds at half of 67e12 operations a second.

        Of more ``launches`` it is these that take long.
        """
        kernel = Kernel(seconds * 67e12 * 0.5 / launches, 0.0, launches, "matmul")
        parts = (Part(part, (kernel,), "not"),)
        ppo = CONFIG.ppo.model_copy(update={"num_epochs": 20})
        values = {"engine": engine, "reduction": "fast", "num_steps": 1000, "cuda_graphs": False, "ppo": ppo, **changes}
        planned = work(1, config=CONFIG.model_copy(update=values), costs=replace(COSTS, parts=parts))
        return predict(replace(planned, counted=1)).parts["other"]

    samples, python = 64 * 1000, 1.5e-3
    drawing, counting = 20 * samples * 17e-9, samples * 40e-9
    assert other(drawing / 2) == pytest.approx(python + drawing / 2)
    assert other(drawing) == other(2 * drawing) == pytest.approx(python + counting)
    assert other(drawing, part="gradients") == pytest.approx(python + counting)
    launched = round(drawing / 30e-6)
    assert other(drawing / 2, part="gradients", launches=2 * launched) == pytest.approx(python + drawing)
    assert other(2 * drawing, sync_period=2) == pytest.approx(python + counting + drawing)
    lstm = CONFIG.network.model_copy(update={"recurrent": "lstm", "sequence_length": 4})
    assert other(drawing / 40, network=lstm) == pytest.approx(python + drawing / 4 - drawing / 40)
    assert other(engine="jax") == pytest.approx(0.5e-3)

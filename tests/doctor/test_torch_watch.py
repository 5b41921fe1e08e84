"""What is seen of a training loop in its own process: steps, phases, tensors and their names, inputs, statistics."""

import gc
import json
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from watching import trace_of

from lockstep.doctor.judge.compare import relative_difference, same
from lockstep.doctor.judge.traces import Kept, Moment
from lockstep.doctor.watch.schedule import Schedule
from lockstep.doctor.watch.torch import checks, forward_passes
from lockstep.doctor.watch.torch import hooks as torch_hooks
from lockstep.doctor.watch.torch.inspection import bare, look_around
from lockstep.doctor.watch.torch.optimizer_watch import was_made
from lockstep.doctor.watch.torch.own_gradients import NUMBERS, OwnGradients
from lockstep.doctor.watch.torch.running_statistics import numbers_of, statistics_of
from lockstep.doctor.watch.torch.values import (
    DENSE_NUMBERS,
    SPARSE_NUMBERS,
    _device_sum,
    digest,
    input_digests,
    sampled,
    take_part,
)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.register_buffer("mean", torch.zeros(3))

    def act(self, obs):
        return self.actor(obs - self.mean)


def train(agent, optimizer, steps, phase=4, look=None):
    """Phases of forward passes without gradients, each followed by ``phase`` steps."""
    for step in range(steps):
        if step % phase == 0:
            with torch.no_grad():
                agent.act(torch.ones(2, 3))
        optimizer.zero_grad()
        agent.act(torch.full((2, 3), float(step))).pow(2).mean().backward()
        if look is not None:
            look(step + 1)
        optimizer.step()


def test_steps_phases_rates_and_tensors(watch, tmp_path):
    agent, gradients = Agent(), {}
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.1)

    def look(step):
        gradients[step] = next(agent.parameters()).grad.clone()  # pyright: ignore[reportOptionalMemberAccess]
        optimizer.param_groups[0]["lr"] = 0.1 if step < 4 else 0.05

    train(agent, optimizer, 11, look=look)
    trace = trace_of(watch, tmp_path)
    assert trace.steps == {0: 11}
    assert trace.boundaries == {0: [4, 8]}
    assert trace.rates == {0: [(0, [0.1]), (3, [0.05])]}
    assert sorted(m.step for m in trace.checks if m.when == "after") == [1, 2, 3, 5, 10]
    assert Moment(0, 11, "end") in trace.checks
    for step in (1, 2, 3, 5, 10):
        kept = trace.checks[Moment(0, step, "before")].parts["gradients"]["0.0"]
        assert np.array_equal(kept.numbers, gradients[step].flatten().numpy())
    after = trace.checks[Moment(0, 1, "after")].parts
    assert list(trace.names[0].values()) == [name for name, _ in agent.named_parameters()]
    assert list(after["parameters"]) == list(trace.names[0])
    assert {"0.0.exp_avg", "0.0.exp_avg_sq"} <= set(after["moments"])
    assert list(after["buffers"]) == ["mean"]
    assert "parameters" in trace.checks[Moment(0, 1, "before")].parts


def test_a_learning_rate_may_be_none(watch, tmp_path):
    """As that of an optimiser which computes its own: Adafactor with ``relative_step``."""

    class Relative(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__([{"params": parameters}, {"params": [torch.zeros(1)], "lr": 0.1}], {"lr": None})

        def step(self, closure=None):
            return None

    agent = Agent()
    train(agent, Relative(agent.parameters()), 3)
    trace = trace_of(watch, tmp_path)
    assert trace.failures == []
    assert trace.rates == {0: [(0, [None, 0.1])]}
    assert len(trace.checks[Moment(0, 1, "before")].parts["gradients"]) == 4


class Rate(torch.Tensor):
    """A learning rate on an accelerator: whoever reads it waits."""

    read = 0

    def __bool__(self):
        Rate.read += 1
        return super().__bool__()

    def __float__(self):
        Rate.read += 1
        return super().__float__()


def test_a_rate_that_is_a_tensor_is_read_at_compared_steps_only(watch, tmp_path):
    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": torch.tensor(0.1).as_subclass(Rate)})

        def step(self, closure=None):
            return None

    agent, read = Agent(), []
    Rate.read = 0
    train(agent, Plain(agent.parameters()), 10, look=lambda step: read.append(Rate.read))
    read.append(Rate.read)
    trace = trace_of(watch, tmp_path)
    assert trace.rates == {0: [(0, [pytest.approx(0.1)])]}
    seen = {step for step in range(1, 11) if read[step] > read[step - 1]}
    assert seen <= {m.step for m in trace.checks if m.when == "after"} != set(range(1, 11))
    assert 1 in seen


def test_an_error_at_the_learning_rates_costs_no_gradients(watch, tmp_path, monkeypatch):
    def fail(*_):
        raise IndexError("a mistake")

    monkeypatch.setattr("lockstep.doctor.watch.torch.checks.StepRecorder.note_rates", fail)
    agent = Agent()
    train(agent, torch.optim.SGD(agent.parameters(), lr=0.1), 2)
    trace = trace_of(watch, tmp_path)
    assert trace.failures == ["IndexError: a mistake"]
    assert len(trace.checks[Moment(0, 2, "before")].parts["gradients"]) == 4


def test_buffers_are_those_of_models_that_are_used_and_of_modules_without_parameters(watch, tmp_path):
    class Statistics(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(3))

    agent, statistics, resting = Agent(), Statistics(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    train(agent, optimizer, 1)
    resting(torch.ones(2, 3))
    train(agent, optimizer, 1)
    trace = trace_of(watch, tmp_path)
    names = [{name.rpartition(".")[2] for name in trace.checks[Moment(0, step, "after")].parts["buffers"]}
             for step in (1, 2)]  # fmt: skip
    assert names[0] == {"mean", "center"}
    assert names[1] == {"mean", "center", "running_mean", "running_var", "num_batches_tracked"}
    assert statistics.center is not None


def test_inputs_are_those_of_the_passes_with_gradients_since_the_last_step(watch, tmp_path):
    agent = Agent()
    train(agent, torch.optim.SGD(agent.parameters(), lr=0.0), 3)
    trace = trace_of(watch, tmp_path)
    seen = [trace.checks[Moment(0, step, "before")].facts["inputs"] for step in (1, 2, 3)]
    assert len(set(seen)) == 3
    assert "" not in seen


def test_inputs_are_told_in_order_and_as_often_as_they_were_given(watch, tmp_path):
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for state in (2.0, 1.0, 2.0, 3.0):
        net(torch.full((1, 2), state)).sum().backward()
    optimizer.step()
    first, second, third, fourth = trace_of(watch, tmp_path).checks[Moment(0, 1, "before")].facts["inputs"].split(",")
    assert first == third
    assert len({first, second, fourth}) == 3


def test_inputs_of_passes_that_backward_does_not_come_to_are_none(watch, tmp_path):
    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError(x)

    class Made(nn.Sequential):
        def forward(self, input):
            return {"made": (super().forward(input),)}

    net, failing = Made(nn.Linear(2, 2), nn.Linear(2, 1)), Made(nn.Linear(2, 2), Failing())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for probe in ([1.0, 2.0], [], [3.0]):
        net(torch.ones(1, 2))["made"][0].sum().backward()
        for state in probe:
            net(torch.full((1, 2), state + 1))
            with pytest.raises(ValueError, match="tensor"):
                failing(torch.full((1, 2), state))
        optimizer.step()
    net(torch.ones(1, 2))
    optimizer.step()
    trace = trace_of(watch, tmp_path)
    words = [trace.checks[Moment(0, step, "before")].facts["inputs"] for step in (1, 2, 3)]
    assert len(set(words)) == 1
    assert "," in words[0]  # of the module and of its first layer


def test_calls_that_raise_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(forward_passes, "MOST_PASSES", 8)
    passes = forward_passes.ForwardPasses()
    for _ in range(100):
        passes.note(nn.Linear(2, 1), (torch.ones(1, 2),))
    assert sum(isinstance(thing, forward_passes.Use) for thing in gc.get_objects()) <= 2 * 8


def test_inputs_count_if_what_a_module_returns_does_not_show_their_use(watch, tmp_path):
    class Hidden(nn.Linear):
        def forward(self, input):
            return SimpleNamespace(made=super().forward(input))

    net = Hidden(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for state in (1.0, 2.0):
        net(torch.full((1, 2), state)).made.sum().backward()
    nn.Identity()(net.weight * 2).sum().backward()
    optimizer.step()
    assert trace_of(watch, tmp_path).checks[Moment(0, 1, "before")].facts["inputs"].count(",") == 1


def test_two_optimizers_are_told_apart(watch, tmp_path):
    agents = [Agent(), Agent()]
    optimizers = [torch.optim.SGD(agent.parameters(), lr=0.1) for agent in agents]
    for _ in range(2):
        for agent, optimizer in zip(agents, optimizers, strict=True):
            train(agent, optimizer, 1)
    trace = trace_of(watch, tmp_path)
    assert trace.steps == {0: 2, 1: 2}
    names = [set(trace.names[o].values()) for o in (0, 1)]
    assert all(len(each) == 4 for each in names)
    assert names[0].isdisjoint(names[1])
    assert all(trace.checks[Moment(1, step, "before")].facts["inputs"] for step in (1, 2))


def test_data_belong_to_the_optimizers_whose_parameters_they_went_through(watch, tmp_path):
    actor, critic, alpha = nn.Linear(3, 1), nn.Linear(3, 1), nn.Parameter(torch.zeros(()))
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in (actor.parameters(), critic.parameters(), [alpha])]
    (actor(torch.full((2, 3), 1.0)).sum() * alpha + critic(torch.full((2, 3), 2.0)).sum()).backward()
    for optimizer in optimizers:
        optimizer.step()
    trace = trace_of(watch, tmp_path)
    inputs = [trace.checks[Moment(o, 1, "before")].facts["inputs"] for o in range(3)]
    assert len(set(inputs)) == 3
    assert "" not in inputs


@pytest.mark.parametrize("known", [True, False])
def test_many_optimizers_are_not_each_a_reason_to_look_at_all_objects(watch, tmp_path, monkeypatch, known):
    agents, looks, optimizers = [Agent() for _ in range(10)], [], []

    def make(agent):
        for parameter in agent.parameters():
            optimizers.append(torch.optim.SGD([parameter], lr=0.1))
            yield optimizers[-1]

    monkeypatch.setattr(checks, "look_around", lambda before=None: looks.append(before) or look_around(before))
    made = [list(make(agent)) for agent in agents] if known else []
    for number, agent in enumerate(agents):
        agent.act(torch.ones(2, 3)).sum().backward()
        for optimizer in made[number] if known else make(agent):
            optimizer.step()
    trace = trace_of(watch, tmp_path)
    assert len(trace.steps) == 40
    assert len(looks) == (checks.FEW_LOOKS if known else checks.MANY_LOOKS + 2)
    names = [name for optimizer in range(checks.MANY_LOOKS) for name in trace.names[optimizer].values()]
    assert [name.split("actor.")[-1] for name in names[:4]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert len(names) == checks.MANY_LOOKS


def test_parameters_of_optimizers_whose_steps_are_not_seen_are_kept_until_one_is(watch, tmp_path):
    actor, critic, resting = Agent(), Agent(), Agent()
    optimizers = [torch.optim.SGD(agent.parameters(), lr=0.1) for agent in (actor, critic)]
    train(actor, optimizers[0], 2)
    train(critic, optimizers[1], 1)
    trace = trace_of(watch, tmp_path)
    names = {when: set(trace.checks[Moment(*when, "after")].parts["unstepped"]) for when in ((0, 1), (0, 2), (1, 1))}
    mine = {when: {name for name in found if ".critic." in name} for when, found in names.items()}
    assert [len(mine[when]) for when in ((0, 1), (0, 2), (1, 1))] == [4, 4, 0]
    assert not any(".actor.actor" in name or ".resting" in name for found in names.values() for name in found)
    assert resting.mean is not None


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_steps_in_compiled_code_are_not_seen_but_what_they_train_is(watch, tmp_path):
    actor, critic = Agent(), Agent()
    optimizers = [torch.optim.Adam(agent.parameters(), lr=0.1) for agent in (actor, critic)]
    compiled = torch.compile(optimizers[1].step, backend="eager")
    for _ in range(3):
        critic.act(torch.ones(2, 3)).sum().backward()
        compiled()
        train(actor, optimizers[0], 1)
    assert watch.tally()["compiled"]
    trace = trace_of(watch, tmp_path)
    assert trace.steps == {0: 3}
    checks = [trace.checks[Moment(0, step, "after")].parts for step in (1, 2, 3)]
    names = [name for name in checks[0]["unstepped"] if name.endswith("critic.actor.0.weight")]
    assert len({check["unstepped"][name].numbers.tobytes() for check in checks for name in names}) == 3
    assert not any("exp_avg" in name for check in checks for name in check["buffers"])


def test_modules_that_dynamo_made_of_compiled_code_are_none_of_the_scripts():
    traced, compiled = (torch.fx.symbolic_trace(nn.Sequential(nn.BatchNorm1d(3))) for _ in range(2))
    vars(compiled)["compile_subgraph_reason"] = None
    found = look_around().names
    assert id(traced) in found
    assert id(compiled) not in found


def test_optimizers_inside_of_others_are_parts_of_them(watch, tmp_path):
    class Outer(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})
            self.inner = torch.optim.SGD(self.param_groups[0]["params"][:1], lr=0.1)

        def step(self, closure=None):
            self.inner.step(closure)

    agent, other = Agent(), Agent()
    train(agent, Outer(list(agent.parameters())), 3)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), 2)
    trace = trace_of(watch, tmp_path)
    assert trace.steps == {0: 3, 1: 2}
    assert len(trace.names[0]) == 4


def test_a_step_in_another_s_closure_is_one_of_its_own(watch, tmp_path):
    """PyTorch's wrapper of ``step`` is the same code for all optimisers."""
    actor, critic = Agent(), Agent()
    optimizers = [torch.optim.SGD(agent.parameters(), lr=0.1) for agent in (actor, critic)]

    def closure():
        train(critic, optimizers[1], 1)
        loss = actor.act(torch.ones(2, 3)).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizers[0].step(closure)  # pyright: ignore[reportArgumentType, reportCallIssue]
    trace = trace_of(watch, tmp_path)
    assert trace.steps == {0: 3, 1: 3}
    assert len(trace.checks[Moment(1, 2, "before")].parts["gradients"]) == 4


def test_a_step_in_a_closure_that_updates_the_same_parameters_is_part_of_the_other(watch, tmp_path):
    agent = Agent()
    outer, inner = (torch.optim.SGD(agent.parameters(), lr=0.1) for _ in range(2))
    outer.step(lambda: train(agent, inner, 1) or 0.0)
    assert trace_of(watch, tmp_path).steps == {0: 1}


def test_a_step_that_calls_its_base_s_is_one_step(watch, tmp_path):
    """Their base's step has hooks of its own once an optimiser of that class was made."""

    class Mine(torch.optim.Adam):
        def step(self, closure=None):
            return super().step(closure)

    agent, other = Agent(), Agent()
    train(other, torch.optim.Adam(other.parameters(), lr=0.1), 1)
    train(agent, Mine(agent.parameters(), lr=0.1), 3)
    trace = trace_of(watch, tmp_path)
    assert trace.steps == {0: 1, 1: 3}
    seen = [trace.checks[Moment(1, step, "before")].facts["inputs"] for step in (1, 2, 3)]
    assert len(set(seen)) == 3
    assert "" not in seen
    assert set(trace.checks[Moment(1, 2, "before")].parts["own"]) == {"0.0", "0.1", "0.2", "0.3"}


def test_steps_after_one_that_failed_are_seen(watch, tmp_path):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("not now")

    agents = [Agent(), Agent()]
    with pytest.raises(ValueError, match="not now"):
        Failing(agents[0].parameters(), lr=0.1).step()
    optimizer = torch.optim.SGD(agents[1].parameters(), lr=0.1)
    agents[1].act(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert trace_of(watch, tmp_path).steps == {0: 0, 1: 1}


def test_groups_of_parts_that_are_stepped_one_after_another_are_told_apart(watch, tmp_path):
    """As DeepSpeed does it; what the model held before the first group's step is given to all of them."""
    agent, parts = Agent(), [torch.zeros(5, requires_grad=True), torch.zeros(3, requires_grad=True)]
    for parameter in agent.parameters():
        parameter._hp_mapping = SimpleNamespace(hp_fragment=parts[0][:2])  # pyright: ignore[reportAttributeAccessIssue]
    optimizer = torch.optim.Adam([{"params": [part]} for part in parts])
    groups = optimizer.param_groups
    for step in range(2):
        agent.act(torch.ones(2, 3)).sum().backward()
        for number, (group, part) in enumerate(zip(groups, parts, strict=True)):
            part.grad = torch.ones_like(part)
            optimizer.param_groups = [group]
            optimizer.step()
            with torch.no_grad():
                next(agent.parameters()).fill_(step + 0.1 * number)
        optimizer.param_groups = groups
    trace = trace_of(watch, tmp_path)
    assert (trace.steps, trace.by_parts) == ({0: 2, 1: 2}, {0})
    for group, size in ((0, 5), (1, 3)):
        kept = [
            trace.checks[Moment(group, step, when)].parts["parameters"] for step, when in ((2, "after"), (2, "end"))
        ]
        assert [{place: k.elements for place, k in part.items()} for part in kept] == [{"0.0": size}] * 2
        gathered = trace.checks[Moment(group, 2, "before")].parts["gathered"]
        assert len(gathered) == 4
        weight = next(kept for name, kept in gathered.items() if name.endswith("actor.0.weight"))
        assert np.allclose(weight.numbers, 0.1)


def test_the_end_of_an_optimizer_is_what_it_was_when_another_began_after_its_last_step(watch, tmp_path):
    agents = [Agent(), Agent(), Agent()]
    optimizers = [torch.optim.SGD(agent.parameters(), lr=0.0) for agent in agents]
    for number in (0, 1, 0, 2, 1):  # rank 1 may be killed now, and rank 0 go on
        train(agents[number], optimizers[number], 1)
    with torch.no_grad():
        for agent in agents:
            next(agent.parameters()).fill_(5.0)
    trace = trace_of(watch, tmp_path)
    ends = [trace.checks[Moment(number, steps, "end")] for number, steps in ((0, 2), (1, 2), (2, 1))]
    assert [bool((end.parts["parameters"]["0.0"].numbers == 5.0).all()) for end in ends] == [False, True, True]


def test_an_optimizer_that_the_script_lets_go_dies_when_another_begins(watch, tmp_path):
    agents = [Agent(), Agent()]
    optimizer = torch.optim.Adam(agents[0].parameters(), lr=0.1)
    train(agents[0], optimizer, 5)
    gone, weight = weakref.ref(optimizer), weakref.ref(agents[0].actor[0].weight)
    del optimizer, agents[0]
    train(agents[0], torch.optim.Adam(agents[0].parameters(), lr=0.1), 6)
    gc.collect()
    assert gone() is None
    assert weight() is None
    trace = trace_of(watch, tmp_path)
    assert trace.steps == {0: 5, 1: 6}
    assert {Moment(0, 5, "end"), Moment(1, 6, "end")} <= trace.checks.keys()


def test_what_is_gone_with_all_that_it_updated_is_told(watch, tmp_path):
    """The last one isn't, and neither is one whose parameters are still there."""
    weight, agent = torch.zeros(2, requires_grad=True), Agent()
    for tensors in ([torch.zeros(2, requires_grad=True)], [weight], [torch.zeros(2, requires_grad=True)]):
        optimizer = torch.optim.SGD(tensors, lr=0.1)
        tensors[0].sum().backward()
        optimizer.step()
        del optimizer, tensors[0]
    train(agent, torch.optim.SGD(agent.parameters(), lr=0.1), 1)
    trace = trace_of(watch, tmp_path)
    assert (trace.steps, trace.gone) == ({0: 1, 1: 1, 2: 1, 3: 1}, {0, 2})


def test_phases_of_one_step_each_need_no_room(watch):
    agent = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    for _ in range(300):
        with torch.no_grad():
            agent(torch.ones(1, 1))
        agent(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert len(json.dumps(watch.tally())) < 200


def test_what_modules_make_of_data_counts_for_those_behind_them(watch, tmp_path):
    """A head with an optimiser of its own, which is given a constant beside features."""
    body, head = nn.Linear(3, 3), nn.Bilinear(3, 3, 1)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (body, head)]
    words = []
    for value in (1.0, 2.0):
        head(body(torch.full((2, 3), value)), torch.ones(2, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    trace = trace_of(watch, tmp_path)
    words = [trace.checks[Moment(1, step, "before")].facts["inputs"] for step in (1, 2)]
    assert len(set(words)) == 2


def test_an_optimizer_that_was_given_up_keeps_nothing_waiting(watch, monkeypatch):
    monkeypatch.setattr(torch_hooks, "GIVEN_UP", 5)
    agents = [Agent(), Agent()]
    train(agents[0], torch.optim.SGD(agents[0].parameters(), lr=0.1), 1)
    train(agents[1], torch.optim.SGD(agents[1].parameters(), lr=0.1), 8)
    assert not watch._hot


def test_what_an_optimizer_keeps_beside_its_moments_is_no_moment(watch, tmp_path):
    class Counting(torch.optim.Adam):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            cast("dict[Any, Any]", self.state)["step"] = 0

    agent = Agent()
    optimizer = Counting(agent.parameters())
    train(agent, optimizer, 2)
    trace = trace_of(watch, tmp_path)
    assert trace.failures == []
    assert list(trace.names[0].values()) == [name for name, _ in agent.named_parameters()]
    assert "0.0.exp_avg" in trace.checks[Moment(0, 2, "after")].parts["moments"]


def test_objects_that_answer_no_question_hide_no_others(watch, tmp_path):
    gone = weakref.proxy(Agent())
    holder = SimpleNamespace(mean=gone, var=gone, count=gone, kept={"proxy": gone})
    cast("dict[Any, Any]", vars(holder))[1] = 1.0
    agent = Agent()
    train(agent, torch.optim.SGD(agent.parameters(), lr=0.1), 1)
    trace = trace_of(watch, tmp_path)
    assert trace.failures == []
    assert list(trace.names[0].values()) == [name for name, _ in agent.named_parameters()]
    assert holder.kept


def test_statistics_of_every_dtype_are_kept_and_others_are_none():
    kept = numbers_of(SimpleNamespace(count=3, mean=torch.ones(2, dtype=torch.bfloat16), var=np.ones(2, np.float16)))
    assert {name: value.tolist() for name, value in kept.items()} == {"count": 3, "mean": [1, 1], "var": [1, 1]}
    for mean in (np.array(["a"]), np.array([None]), torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
        assert statistics_of(SimpleNamespace(count=3, mean=mean, var=mean)) is None


def test_moments_that_are_parts_of_their_parameters_are_sharded(watch, tmp_path):
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.1)
    train(agent, optimizer, 2)
    first = next(agent.parameters())
    optimizer.state[first]["part"] = torch.ones(first.numel() - 1)
    part = trace_of(watch, tmp_path).checks[Moment(0, 2, "end")].parts["moments"]
    assert (part["0.0.part"].shards, part["0.0.exp_avg"].shards, part["0.0.step"].shards) == (1, 0, 0)


def test_nothing_is_seen_after_the_hooks_are_gone(watch, tmp_path):
    agent = Agent()
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    train(agent, optimizer, 2)
    watch.remove()
    train(agent, optimizer, 2)
    assert trace_of(watch, tmp_path).steps == {0: 2}


def test_between_checked_steps_forward_passes_cost_nothing(watch):
    agent = Agent()
    train(agent, torch.optim.SGD(agent.parameters(), lr=0.1), 6)
    with torch.no_grad():
        agent.act(torch.ones(2, 3))
        calls = watch._calls
        for _ in range(10):
            agent.act(torch.ones(2, 3))
    assert watch._calls == calls
    assert watch.own_seconds() > 0


def test_running_statistics_are_found_by_what_they_hold(watch, tmp_path):
    class Statistics:
        def __init__(self, value):
            self.mean, self.var, self.count = np.full(3, value), np.ones(3), 7

    class Wrapper:
        def __init__(self):
            self.obs_rms = Statistics(2.0)
            self.rms_by_key = {"camera": Statistics(3.0)}

    wrapper, agent = Wrapper(), Agent()
    train(agent, torch.optim.SGD(agent.parameters(), lr=0.1), 1)
    found = trace_of(watch, tmp_path).checks[Moment(0, 1, "after")].parts["normalizers"]
    mine = {name: kept.numbers.tolist() for name, kept in found.items() if name.startswith("Wrapper.")}
    place = "test_running_statistics_are_found_by_what_they_hold.wrapper"
    assert mine[f"Wrapper.obs_rms ({place}.obs_rms).mean"] == [2.0] * 3
    assert mine[f"Wrapper.rms_by_key[camera] ({place}.rms_by_key['camera']).count"] == [7.0]
    assert wrapper.obs_rms.count == 7


def test_statistics_that_take_anothers_place_are_found_there():
    class Wrapper:
        def __init__(self):
            self.rms = SimpleNamespace(n=3, mean=np.ones(2), S=np.ones(2), std=np.ones(2))

    wrapper = Wrapper()
    (find,) = (find for name, find in look_around().normalizers.items() if name.startswith("Wrapper.rms ("))
    assert find() is wrapper.rms
    wrapper.rms = SimpleNamespace(n=4, mean=np.ones(2), S=np.ones(2), std=np.ones(2))
    assert numbers_of(find())["n"] == 4


class Running:
    """As in ``modular_rl`` and what was copied from it."""

    def __init__(self):
        self._n, self._M, self._S = 3, np.ones(2), np.ones(2)


@dataclass(slots=True)
class Slotted:
    mean: np.ndarray = field(default_factory=lambda: np.ones(2))
    var: np.ndarray = field(default_factory=lambda: np.ones(2))
    count: float = 3.0


class Computing:
    """Its statistics are properties, made of sums under names that nobody knows."""

    mean = property(lambda self: self.total / self.steps)
    std = property(lambda self: self.total)

    def __init__(self):
        self.total, self.steps = 2.0, 1


@pytest.mark.parametrize("cls", [Running, Slotted])
def test_running_statistics_under_other_names_and_in_slots_are_found(cls, watch, tmp_path):
    filter_of_observations, agent = cls(), Agent()
    train(agent, torch.optim.SGD(agent.parameters(), lr=0.1), 1)
    found = trace_of(watch, tmp_path).checks[Moment(0, 1, "after")].parts["normalizers"]
    place = "test_running_statistics_under_other_names_and_in_slots_are_found.filter_of_observations"
    mine = [kept for name, kept in found.items() if name.startswith(f"{cls.__name__} ({place})")]
    assert sorted(kept.numbers.tolist() for kept in mine) == [[1.0, 1.0], [1.0, 1.0], [3.0]]
    assert filter_of_observations is not None


def test_what_is_in_slots_is_let_go_with_the_script_s_last_reference():
    statistics = Slotted()
    (find,) = (find for name, find in look_around().normalizers.items() if name.startswith("Slotted"))
    assert find() is statistics
    mean = weakref.ref(statistics.mean)
    del statistics
    assert find() is None
    assert mean() is None


def test_objects_that_compute_a_mean_and_a_spread_are_noted():
    computing = Computing()
    assert "Computing" in look_around().unknown
    assert computing.mean == 2.0


@pytest.mark.parametrize(
    "thing",
    [
        SimpleNamespace(mean=1.0, var=2.0),
        SimpleNamespace(n=1, mean=2.0),
        SimpleNamespace(mean="a", var="b", count="c"),
        {"mean": 1},
        3,
        nn.Linear(1, 1),
    ],
)
def test_what_holds_no_running_statistics(thing):
    assert statistics_of(thing) is None
    assert statistics_of(SimpleNamespace(mean=1.0, var=2.0, count=3)) is not None


def test_names_are_the_modules_own():
    agent = nn.Sequential(Agent())
    found = look_around()
    assert found.names[id(next(agent.parameters()))].endswith("0.actor.0.weight")
    assert bare("module._orig_mod.actor.0.weight") == "actor.0.weight"
    assert bare("submodule.0.weight") == "submodule.0.weight"


def test_whether_an_optimizer_was_made_is_known_of_one_that_is_gone():
    class Rule(torch.optim.Optimizer):
        def step(self, closure=None):
            return None

    class Derived(Rule):
        pass

    assert not was_made(Rule)
    Derived([torch.zeros(1)], {})
    gc.collect()
    assert was_made(Rule)
    assert was_made()


# --- values -----------------------------------------------------------------------------------------------------


def test_small_tensors_are_kept_wholly_and_large_ones_as_samples_with_a_digest():
    small, large = torch.arange(10.0), torch.arange(100_000.0)
    entries, numbers = take_part({"small": small, "large": large}, 2000)
    assert entries[0] == ["small", 10, 10, 0, ""]
    assert entries[1][1] <= 1000 < entries[1][2]
    assert np.array_equal(numbers[:10], small.numpy())
    changed = large.clone()
    changed[1] += 1  # no element of the sample
    other, same_numbers = take_part({"small": small, "large": changed}, 2000)
    assert np.array_equal(numbers, same_numbers)
    assert other[1][4] != entries[1][4]


def kept_of(tensors, most, name):
    """What is kept of one of the tensors, as it is read."""
    entries, numbers = take_part(tensors, most)
    start = 0
    for found, count, elements, shards, word in entries:
        if found == name:
            return Kept(numbers[start : start + count], elements, shards, word)
        start += count
    raise AssertionError(name)


@pytest.mark.parametrize("elements", [10, 1000, 4096, 5000, 65_537, 300_000])
def test_what_is_kept_of_a_tensor_is_compared_however_many_there_are_beside_it(elements):
    tensor, beside = torch.randn(elements), {f"other {number}": torch.randn(64) for number in range(7)}
    dense, sparse = DENSE_NUMBERS, SPARSE_NUMBERS
    everything = [
        kept_of({"x": tensor, **others}, most, "x") for most in (dense, sparse, 100) for others in ({}, beside)
    ]
    assert all(same(a, b) for a in everything for b in everything)
    first, later = tensor.clone(), tensor.clone()
    first[0], later[-1] = first[0] + 1, later[-1] + 1
    changed = kept_of({"x": first}, sparse, "x")
    assert not any(same(changed, kept) for kept in everything)
    assert relative_difference(changed, everything[0]) > 0
    sampled_elsewhere = kept_of({"x": later}, 100, "x")
    assert not any(same(sampled_elsewhere, kept) for kept in everything if kept.digest or elements < 100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_digests_see_every_bit_of_every_dtype(dtype):
    tensor = torch.ones(33, dtype=dtype)
    other = tensor.clone()
    other[32] = 0
    assert digest(tensor) == digest(tensor.clone())
    assert len({digest(tensor), digest(other), digest(tensor[:32]), digest(tensor.reshape(3, 11))}) == 4
    assert take_part({"x": tensor}, 100)[1].size == (66 if dtype.is_complex else 33)


def test_both_parts_of_complex_elements_are_kept():
    one, other = torch.tensor([3 + 1j]), torch.tensor([3 + 2j])
    assert take_part({"x": one}, 100)[1].tolist() == [3, 1]
    assert take_part({"x": other}, 100)[0] == [["x", 2, 2, 0, ""]]


def test_data_are_the_arguments_that_no_parameter_touched():
    data, made = torch.ones(3), torch.ones(3, requires_grad=True) * 2
    assert len(input_digests((data, {"a": data}, [made, 3, None], made))) == 2
    assert input_digests((data,)) != input_digests((data * 2,))
    assert sampled(data, 10) is not made


def test_steps_that_are_compared_become_rarer():
    schedule = Schedule(first=3, interval=10)
    chosen = [step for step in range(1, 20_001) if schedule.includes(step)]
    assert chosen[:6] == [1, 2, 3, 10, 20, 30]
    assert chosen[-1] - chosen[-2] > 10
    assert len(chosen) < 64 * 8


def test_sums_on_a_device_depend_on_places():
    words = torch.tensor([1, 2, 3, 4])
    sums = {_device_sum(words), _device_sum(words.flip(0)), _device_sum(torch.tensor([2, 1, 3, 4]))}
    assert len(sums) == 3
    assert _device_sum(words) == _device_sum(words.clone())


def test_normalizers_of_known_libraries_are_found():
    sb3 = pytest.importorskip("stable_baselines3.common.vec_env")
    env = sb3.VecNormalize(sb3.DummyVecEnv([lambda: gym.make("CartPole-v1")]))
    other = gym.wrappers.NormalizeReward(gym.wrappers.NormalizeObservation(gym.make("CartPole-v1")))
    found = look_around().normalizers
    known = {"VecNormalize.obs_rms", "VecNormalize.ret_rms", "NormalizeObservation.obs_rms"}
    bases = {name.partition(" (")[0]: find for name, find in found.items()}
    assert known <= set(bases)
    assert any(name.startswith("NormalizeReward.") for name in found)
    assert bases["VecNormalize.obs_rms"]() is env.obs_rms
    env.close()
    other.close()


def test_statistics_that_rest_are_an_evaluation_environments():
    sb3 = pytest.importorskip("stable_baselines3.common.vec_env")
    env = sb3.VecNormalize(sb3.DummyVecEnv([lambda: gym.make("CartPole-v1")]))
    resting = sb3.VecNormalize(sb3.DummyVecEnv([lambda: gym.make("CartPole-v1")]), training=False)
    found = [reference() for reference in look_around().normalizers.values()]
    assert any(item is env.obs_rms for item in found)
    assert all(item is not resting.obs_rms and item is not resting.ret_rms for item in found)


# --- gradients as backward left them ----------------------------------------------------------------------------------


def backward(*parameters):
    """Gradients of the parameters: all of parameter ``n`` are ``n + 1``."""
    sum((n + 1) * parameter.sum() for n, parameter in enumerate(parameters)).backward()  # pyright: ignore[reportAttributeAccessIssue]


def test_own_gradients_are_kept_beside_what_becomes_of_them():
    own, weight = OwnGradients(), nn.Parameter(torch.ones(3))
    own.listen([weight])
    backward(weight)
    assert weight.grad is not None
    weight.grad *= 5
    kept, now = own.beside({"0.0": weight})
    assert kept["0.0"].tolist() == [1.0] * 3
    assert now["0.0"].tolist() == [5.0] * 3
    assert own.seconds > 0
    assert own.beside({"0.0": weight}) == ({}, {})  # until the next backward pass


def test_of_large_gradients_the_same_sample_is_kept_twice():
    own, weight = OwnGradients(), nn.Parameter(torch.ones(8 * NUMBERS))
    own.listen([weight])
    backward(weight)
    kept, now = own.beside({"0.0": weight})
    assert len(kept["0.0"]) == len(now["0.0"]) == NUMBERS


def test_who_is_not_listened_to_any_more_has_no_hook():
    own, first, second = OwnGradients(), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    own.listen([first, second])
    own.listen([second])
    backward(first, second)
    kept, _ = own.beside({"0.0": first, "0.1": second})
    assert list(kept) == ["0.1"]
    own.listen([])
    backward(first, second)
    assert own.beside({"0.0": first, "0.1": second}) == ({}, {})
    assert not first._post_accumulate_grad_hooks
    assert not second._post_accumulate_grad_hooks


def test_nothing_is_added_to_a_graph_that_the_script_captures(monkeypatch):
    own, weight = OwnGradients(), nn.Parameter(torch.ones(2))
    own.listen([weight])
    monkeypatch.setattr("lockstep.doctor.watch.torch.own_gradients.capturing", lambda: True)
    backward(weight)
    assert own.beside({"0.0": weight}) == ({}, {})


def test_a_script_is_left_without_hooks_once_its_steps_are_no_longer_checked(watch):
    agent = Agent()
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    train(agent, optimizer, 2)
    weight = agent.actor[0].weight
    assert weight._post_accumulate_grad_hooks
    train(agent, optimizer, 1)  # the third is the last of the first ones
    assert not weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("minibatch", [[0, 1, 2, 3], [4, 5], [0, 4, 5]])
def test_rows_that_a_rollout_has_more_than_once_tell_no_sample(watch, tmp_path, minibatch):
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 2)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    observed = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 2]])
    with torch.no_grad():
        net(observed[:2])
        net(observed[2:])
    net(observed[minibatch]).sum().backward()
    optimizer.step()
    facts = trace_of(watch, tmp_path).checks[Moment(0, 1, "before")].facts
    assert len(facts.get("rows", ())) == len({4, 5}.intersection(minibatch))


def test_rows_tell_no_sample_if_a_rollout_is_longer_than_what_is_recorded(watch, tmp_path, monkeypatch):
    monkeypatch.setattr(forward_passes, "MOST_COLLECTED", 2)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with torch.no_grad():
        for row in (torch.ones(1, 3), torch.zeros(1, 3), torch.ones(1, 3)):
            net(row)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert "rows" not in trace_of(watch, tmp_path).checks[Moment(0, 1, "before")].facts

"""Tensors that can't be read as others can, and errors of the doctor's own: a script that has them runs on."""

import pytest
import torch
from stories import Story, kinds
from torch import nn
from watching import trace_of

from lockstep.doctor.judge.traces import Moment
from lockstep.doctor.watch.torch import hooks as torch_hooks
from lockstep.doctor.watch.torch.inspection import look_around
from lockstep.doctor.watch.torch.values import TAKEN_NUMBERS, input_digests, readable, take_part


class Graph(nn.Module):
    """A layer on a graph: it is given a sparse matrix, and holds another one as a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mask", torch.eye(3).to_sparse())
        self.register_buffer("scale", torch.ones(1))

    def forward(self, edges, x):
        return self.layer(torch.sparse.mm(edges, x)) * self.scale


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def test_sparse_inputs_and_buffers_break_no_script(watch, tmp_path):
    net = Graph()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for value in (1.0, 2.0):
        edges = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.tensor([value]), (3, 3))
        net(edges, torch.ones(3, 3)).sum().backward()
        optimizer.step()
    trace = trace_of(watch, tmp_path)
    words = [trace.checks[Moment(0, step, "before")].facts["inputs"] for step in (1, 2)]
    assert len(set(words)) == 2
    assert list(trace.checks[Moment(0, 1, "after")].parts["buffers"]) == ["scale"]
    assert trace.failures == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_inputs_break_no_script(watch, layout, tmp_path):
    net = nn.Identity()
    net(nested(layout))
    assert input_digests((nested(layout), torch.ones(2))) == input_digests(torch.ones(2))
    assert trace_of(watch, tmp_path).failures == []


def test_models_inside_of_torch_func_break_no_script(watch, tmp_path):
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def loss(parameters, x):
        return torch.func.functional_call(net, parameters, (x,)).sum()

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(net.named_parameters()), torch.ones(4, 3))
    for name, parameter in net.named_parameters():
        parameter.grad = each[name].mean(0).detach()
    optimizer.step()
    trace = trace_of(watch, tmp_path)
    assert trace.checks[Moment(0, 1, "before")].facts["inputs"] == ""
    assert trace.failures == []


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own use, in forward mode
@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "jacrev", "vmap", "hessian"])
@pytest.mark.parametrize("learned", [False, True])
def test_a_rollout_inside_of_torch_func_breaks_nothing_and_is_a_phase(watch, tmp_path, transform, learned):
    net, other, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), nn.Linear(2, 2), torch.ones(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def called(given):
        other(torch.ones(1, 2))  # what no transform follows
        return net(given)

    calls = {"jvp": lambda: torch.func.jvp(called, (x,), (x,))}
    for name in ("jacfwd", "jacrev", "vmap", "hessian"):
        calls[name] = lambda name=name: getattr(torch.func, name)(called)(x)
    for _ in range(2):
        with torch.set_grad_enabled(learned):
            calls[transform]()
        with torch.no_grad():
            net(x)
        net(x).sum().backward()
        optimizer.step()
    trace = trace_of(watch, tmp_path)
    assert trace.failures == []
    assert len(trace.boundaries[0]) >= 1
    assert set(trace.checks[Moment(0, 2, "after")].parts["parameters"]) == {"0.0", "0.1", "0.2", "0.3"}


def test_what_has_no_memory_is_not_readable():
    zero = torch._efficientzerotensor((2, 2))  # pyright: ignore[reportPrivateImportUsage]
    assert not readable(zero)
    assert input_digests((zero, torch.ones(2))) == input_digests(torch.ones(2))


def test_what_can_not_be_read_is_left_out_of_what_is_kept():
    tensors = {"dense": torch.ones(2), "sparse": torch.eye(2).to_sparse(), "csr": torch.eye(2).to_sparse_csr()}
    entries, numbers = take_part(tensors | {"meta": torch.ones(2, device="meta")}, 100)
    assert [entry[0] for entry in entries] == ["dense"]
    assert numbers.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("place", ["before", "after", "models", "note"])
def test_an_error_of_the_doctors_own_is_told_once_and_the_script_runs_on(watch, monkeypatch, tmp_path, place):
    def fail(*_):
        raise IndexError("a mistake\nof the doctor")

    owner = torch_hooks.ForwardPasses if place == "note" else torch_hooks.StepRecorder
    monkeypatch.setattr(owner, place, fail)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        with torch.no_grad():
            net(torch.ones(1, 3))
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    trace = trace_of(watch, tmp_path)
    assert trace.failures == ["IndexError: a mistake"]
    assert trace.steps == {0: 3}


def test_the_report_says_that_it_failed_and_leaves_the_verdict_open(tmp_path):
    found = Story(failures={1: ["IndexError: a mistake"]}).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["blindness"])
    assert found.reason == "the doctor itself failed on rank 1, and didn't see all: IndexError: a mistake"


def test_what_is_gathered_is_taken_without_its_memory(watch):
    module = nn.Linear(300, 200)
    watch._recorder.inventory.names[id(module)] = "layer"
    watch._note_gathered(module)
    taken = watch._gathered
    assert set(taken) == {"layer.weight", "layer.bias"}
    assert taken["layer.weight"].numbers.untyped_storage().nbytes() <= 4 * TAKEN_NUMBERS
    before = take_part(dict(taken), 100_000)
    assert [entry[:3] for entry in before[0]] == [["layer.weight", 938, 60_000], ["layer.bias", 200, 200]]
    assert [bool(entry[4]) for entry in before[0]] == [True, False]  # a digest of what is kept in part
    with torch.no_grad():
        module.weight[-1, -1] += 1  # no element of the sample
    watch._note_gathered(module)
    after = take_part(dict(watch._gathered), 100_000)
    assert after[1].tolist() == before[1].tolist()
    assert after[0] != before[0]
    fewer = take_part(dict(watch._gathered), 100)
    assert [entry[1] for entry in fewer[0]] == [30, 50]
    assert all(entry[4] for entry in fewer[0])


def test_parameters_of_which_a_rank_holds_a_part_are_no_frozen_copies():
    net = nn.Linear(3, 2)
    found = look_around()
    used = {id(net)}
    assert {id(p) for _, p in found.frozen(used)} == {id(net.weight), id(net.bias)}
    found.sharded.add(id(net.weight))  # as of FSDP1
    assert [id(p) for _, p in found.frozen(used)] == [id(net.bias)]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_models_are_not_compiled_anew_in_each_phase(watch, fullgraph):
    """Programs of modules with hooks of their own are made for the global hooks' ids."""
    torch.compiler.reset()
    programs, net, eager = [], nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3)
    net[0].register_forward_pre_hook(lambda module, args: None)

    def backend(graph, _):
        programs.append(graph)
        return graph

    model = torch.compile(lambda x: net(x), backend=backend, fullgraph=fullgraph)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(8):
        with torch.no_grad():
            eager(torch.ones(2, 3))
            model(torch.ones(2, 3))
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    assert len(programs) <= 4  # with and without gradients, with and without the hook
    torch.compiler.reset()

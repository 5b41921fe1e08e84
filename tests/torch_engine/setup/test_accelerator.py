"""What is asked of accelerators before a run and in it, on modules that stand in for PyTorch's."""

import contextlib
import types
from functools import partial

import pytest
import torch

from lockstep.torch_engine.nets.shards import independently
from lockstep.torch_engine.setup import accelerator
from lockstep.torch_engine.setup.devices import check_device, chosen_device, count_accelerators, device_memory


def module(count=2, fp64=True, memory=8, **more):
    """What PyTorch's module of a kind of device has, with so many devices."""
    properties = types.SimpleNamespace(has_fp64=fp64, total_memory=memory)
    names = dict.fromkeys(accelerator.NEEDED, lambda *_: None)
    stands = {"is_available": lambda: count > 0, "device_count": lambda: count}
    return types.SimpleNamespace(**names | stands | {"get_device_properties": lambda _: properties} | more)


def complaint(*words):
    with pytest.raises(ValueError) as caught:
        accelerator.check_accelerator(*words)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_every_kind_of_device_is_asked_the_same(device, monkeypatch):
    monkeypatch.setattr(torch, device, module(memory=80))
    check_device(device, 2)
    assert (count_accelerators(device), device_memory(device)) == (2, 80)
    assert accelerator.names_of_ranks(device, 2) == [f"{device}:0", f"{device}:1"]
    assert complaint(device, 3).startswith("nproc: 3 ranks need 3 GPUs and 2 are visible")
    monkeypatch.setattr(torch, device, module(count=0))
    assert complaint(device, 1).startswith(f"device: {device}, but PyTorch")


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_repeat_and_new_tensors_are_not_filled(deterministic, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *words, **more: asked.append((words, more)))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    accelerator.pin_down_kernels(deterministic, warn_only=True)
    assert asked == ([((True,), {"warn_only": True})] if deterministic else [])
    filled = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    assert filled == (not deterministic)


def test_what_a_device_lacks_is_named(monkeypatch):
    monkeypatch.setattr(torch, "xpu", module(fp64=False))
    assert "lacks float64" in complaint("xpu", 1)
    without = module()
    del without.get_rng_state
    monkeypatch.setattr(torch, "xpu", without)
    assert complaint("xpu", 1) == "device: xpu lacks get_rng_state; use --device cpu"


def test_graphs_are_asked_for_only_where_they_are_wanted(monkeypatch):
    monkeypatch.setattr(torch, "xpu", module())
    accelerator.check_accelerator("xpu", 1)
    assert complaint("xpu", 1, True).startswith("cuda_graphs: true, but PyTorch")
    monkeypatch.setattr(torch, "xpu", module(XPUGraph=object))
    accelerator.check_accelerator("xpu", 1, True)


@pytest.mark.parametrize(
    ("cuda", "xpu", "chosen"),
    [(2, 2, "cuda"), (0, 1, "xpu"), (0, 0, "cpu")],
)
def test_auto_takes_the_first_kind_that_is_here(cuda, xpu, chosen, monkeypatch):
    monkeypatch.setattr(torch, "cuda", module(cuda))
    monkeypatch.setattr(torch, "xpu", module(xpu))
    assert chosen_device() == chosen


def test_auto_passes_over_a_device_without_float64(monkeypatch):
    monkeypatch.setattr(torch, "cuda", module(0))
    monkeypatch.setattr(torch, "xpu", module(fp64=False))
    assert chosen_device() == "cpu"


def test_a_cpu_has_nothing_to_wait_for():
    cpu = torch.device("cpu")
    accelerator.synchronize(cpu)
    assert accelerator.peak_memory(cpu) == 0.0
    assert accelerator.generator_state(cpu) is None
    assert accelerator.name_of(cpu) == "cpu"
    host = torch.zeros(3)
    copied = accelerator.upload(host, cpu)
    host += 1.0
    assert copied.tolist() == [0.0] * 3
    assert accelerator.Download(copied, accelerator.host_buffer((3,), torch.float32, cpu)).wait().tolist() == [0.0] * 3


def test_what_a_device_was_told_is_waited_for_by_an_event(monkeypatch):
    done = []

    class Event:
        def record(self):
            done.append("recorded")

        def synchronize(self):
            done.append("waited for")

    monkeypatch.setattr(accelerator, "pins", lambda device: True)
    monkeypatch.setattr(accelerator, "_module", lambda device: types.SimpleNamespace(Event=Event))
    mark = accelerator.Mark(torch.device("xpu"))
    assert done == ["recorded"]
    mark.wait()
    assert done == ["recorded", "waited for"]


class Streams:
    """Streams and graphs as PyTorch's module of a device has them; a capture that fails leaves its stream current."""

    def __init__(self, name="first"):
        self.name, self.waited = name, []

    def wait_stream(self, other):
        self.waited.append(other.name)

    def module(self, error):
        current: list[Streams] = [self]

        @contextlib.contextmanager
        def stream(other):
            before, current[0] = current[0], other
            try:
                yield
            finally:
                current[0] = before

        @contextlib.contextmanager
        def graph(captured):
            before, current[0] = current[0], Streams("of the graph")
            yield
            if error is not None:
                raise error
            current[0] = before

        return types.SimpleNamespace(
            CUDAGraph=lambda: types.SimpleNamespace(replay="replayed"),
            Stream=lambda device: Streams("side"),
            current_stream=lambda device: current[0],
            stream=stream,
            graph=graph,
        )


FAILURES = [
    (None, None),
    (RuntimeError("invalidated\nand so on"), accelerator.CaptureError),
    (torch.OutOfMemoryError("invalidated"), torch.OutOfMemoryError),
]


@pytest.mark.parametrize(("error", "raised"), FAILURES)
def test_a_capture_ends_on_the_stream_that_it_began_on(error, raised, monkeypatch):
    first, device, on = Streams(), torch.device("cuda"), []
    made = first.module(error)
    monkeypatch.setattr(accelerator, "_module", lambda device: made)

    def work():
        on.append(made.current_stream(device).name)

    with pytest.raises(raised, match=r"invalidated$") if error is not None else contextlib.nullcontext() as caught:
        assert accelerator.capture(device, work) == "replayed"
    assert on == ["side"] * accelerator.WARM_UP + ["of the graph"]
    assert caught is None or type(caught.value) is raised
    assert made.current_stream(device) is first
    assert first.waited == ["side"]


@pytest.mark.parametrize(("calls", "streams"), [(3, 3), (10, 8)])
def test_calls_of_a_capture_are_branches_that_begin_and_end_together(calls, streams, monkeypatch):
    made, device, told = Streams().module(None), torch.device("cuda"), []
    names = iter(["warms up", *(f"branch {number}" for number in range(8))])
    made.Stream = lambda device: Streams(next(names))
    monkeypatch.setattr(accelerator, "_module", lambda device: made)
    accelerator._branches.cache_clear()

    def call(number: int) -> int:
        told.append((number, made.current_stream(device)))
        return number

    def work():
        told.clear()
        results = independently.get()([partial(call, number) for number in range(calls)])
        assert results == list(range(calls))
        told.append(made.current_stream(device))
        assert independently.get()([lambda: made.current_stream(device)]) == [told[-1]]  # a lone call needs none

    accelerator.capture(device, work)
    *called, graph = told
    assert [(number, stream.name) for number, stream in called] == [(n, f"branch {n % 8}") for n in range(calls)]
    assert [stream.waited for _, stream in called[:streams]] == [["of the graph"]] * streams
    assert graph.waited == [f"branch {number}" for number in range(streams)]
    accelerator._branches.cache_clear()
    work()
    assert {stream.name for _, stream in told[:-1]} == {"first"}  # outside of a capture one follows the other


def test_branches_end_together_also_where_one_fails(monkeypatch):
    made, device, graphs = Streams().module(None), torch.device("cuda"), []
    monkeypatch.setattr(accelerator, "_module", lambda device: made)
    accelerator._branches.cache_clear()

    def fails():
        raise torch.OutOfMemoryError("full")

    def work():
        if made.current_stream(device).name == "of the graph":
            graphs.append(made.current_stream(device))
            independently.get()([lambda: 1, fails, lambda: 3])

    with pytest.raises(torch.OutOfMemoryError, match="full"):
        accelerator.capture(device, work)
    accelerator._branches.cache_clear()
    assert graphs[0].waited == ["side"] * 3


def test_what_fails_while_it_warms_up_is_no_capture_that_fails(monkeypatch):
    made = Streams().module(None)
    monkeypatch.setattr(accelerator, "_module", lambda device: made)

    def work():
        raise RuntimeError("shapes")

    with pytest.raises(RuntimeError, match="shapes") as caught:
        accelerator.capture(torch.device("cuda"), work)
    assert not isinstance(caught.value, accelerator.CaptureError)


def test_what_a_device_computes_with_has_a_version(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    gpu = torch.device("cuda", 0)
    assert accelerator.platform_version(gpu) == "CUDA 13.0, cuDNN 92000"
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert accelerator.platform_version(gpu) == "ROCm 7.1"
    assert accelerator.platform_version(torch.device("cpu")) == ""

"""Watches a script's optimiser steps and forward passes through PyTorch's own global hooks.

Between checked steps a step costs two short calls; a forward pass costs nothing once its phase is known.
"""

from __future__ import annotations

import functools
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.doctor.watch.schedule import Schedule
from lockstep.doctor.watch.side_store import SideWriter
from lockstep.doctor.watch.torch.checks import StepRecorder
from lockstep.doctor.watch.torch.flat_parts import tensors_of
from lockstep.doctor.watch.torch.forward_passes import ForwardPasses
from lockstep.doctor.watch.torch.inner_steps import is_inner_step
from lockstep.doctor.watch.torch.optimizer_watch import OptimizerWatch, was_made
from lockstep.doctor.watch.torch.process_group import group_facts
from lockstep.doctor.watch.torch.values import Taken, capturing, has_compiled, readable, take

CALIBRATION = 1000
GIVEN_UP = 1000
"""An optimiser counts as abandoned when all of them together have taken this many steps since its last one."""


def _guarded(hook: Callable[..., None]) -> Callable[..., None]:
    """Wraps a hook so that the doctor's own errors don't reach the script; they are recorded for the report.

    Within a transform of ``torch.func`` it runs outside of it: what is computed within, also of plain tensors such as
    parameters, has no memory that can be read.
    """

    @functools.wraps(hook)
    def guarded(self: TorchWatch, *args: Any) -> None:
        try:
            with temporarily_clear_interpreter_stack():
                hook(self, *args)
        except Exception as error:
            self.note_failure(error)

    return guarded


class SwitchedHook:
    """Switches one of PyTorch's global hooks on and off under one id, because compiled code is guarded on the id."""

    def __init__(self, register: Callable[..., Any], hook: Callable[..., None]) -> None:
        self._handle, self._hook = register(hook), hook

    def put_in(self) -> None:
        """Switches the hook on."""
        self._handle.hooks_dict_ref()[self._handle.id] = self._hook

    def put_out(self) -> None:
        """Switches the hook off."""
        self._handle.remove()


class TorchWatch:
    """Watches this process's optimisers and modules.

    Attributes:
        seconds: time spent here so far, without calls of the forward hook that record nothing (see
            :meth:`own_seconds`).
        signs_of_life: changes with every event that is seen.
    """

    def __init__(self, writer: SideWriter, schedule: Schedule) -> None:
        self._writer, self._schedule = writer, schedule
        self._recorder = StepRecorder(writer, schedule)
        self._optimizers: list[OptimizerWatch] = []
        self._known: dict[int, list[OptimizerWatch]] = {}
        self._passes = ForwardPasses()
        self._gathered: dict[str, Taken] = {}
        self._hot = False  # whether the coming step of an optimiser is a checked one
        self._stepped = False
        self._learned = False  # whether there was a forward pass with gradients since the last phase began
        self._phases = 0
        self._used: set[int] = set()
        self._steps_of_all = 0
        self._calls = 0
        self._world: dict[str, Any] = {}
        self._captured = False
        self.seconds = 0.0
        self.signs_of_life = 0
        self._failures: set[str] = set()
        self._call_seconds = self._calibrate()
        self._hot = True
        self._steps = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]
        self._entry = SwitchedHook(register_module_forward_pre_hook, self._enters)
        self._exit = SwitchedHook(register_module_forward_hook, self._leaves)

    # --- what the rest of the doctor asks ---------------------------------------------------------------------

    def tally(self) -> dict[str, Any]:
        """Returns counts so far, as JSON types."""
        counts = [{"steps": watch.steps, "run": watch.boundaries.run} for watch in list(self._optimizers)]
        facts = {
            "world": self._world,
            "captured": self._captured,
            "made_optimizer": was_made(),
            "compiled": has_compiled(),
        }
        return {"optimizers": counts} | facts

    @property
    def joined(self) -> bool:
        """Whether the script was ever in a process group of several ranks."""
        return self._world.get("size", 1) > 1

    @property
    def on_gpu(self) -> bool:
        """Whether the script uses a CUDA device."""
        return torch.cuda.is_initialized()

    def own_seconds(self) -> float:
        """Returns the seconds that the doctor took from the script's threads."""
        return self.seconds + self._recorder.own_gradients.seconds + self._calls * self._call_seconds

    def look_at_process_group(self) -> None:
        """Records the script's process group if it is at least as large as the largest so far."""
        facts = group_facts()
        if facts.get("size", 0) >= self._world.get("size", 1):
            self._world = facts

    def finish(self) -> None:
        """Removes all hooks and writes what is only known at the end."""
        self.remove()
        self.look_at_process_group()
        for watch in self._optimizers:
            event = {"kind": "phases", "optimizer": watch.index, "run": watch.boundaries.run}
            self._writer.add(event | {"steps": watch.steps, "gone": watch.gone})
            if watch.kept is not None:  # else it was written when the next optimiser came
                self._write_last(watch)

    def remove(self) -> None:
        """Removes all hooks."""
        self._recorder.listen(())
        for handle in self._steps:
            handle.remove()
        self._entry.put_out()
        self._exit.put_out()

    def note_failure(self, error: Exception) -> None:
        """Writes an error of the doctor's own, each message once."""
        line = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
        if line not in self._failures:
            self._failures.add(line)
            self._writer.add({"kind": "failure", "error": line})

    # --- optimiser steps ----------------------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and not is_inner_step(optimizer, sys._getframe(1)):
            self._step_begins(optimizer)

    @_guarded
    def _step_begins(self, optimizer: Optimizer) -> None:
        began = time.perf_counter()
        self.signs_of_life += 1
        watch = self._watch_of(optimizer) or self._first_seen(optimizer)
        watch.kept = optimizer
        if capturing():
            self._captured = True
            return
        self._note_rates(watch)
        if self._schedule.includes(watch.steps + 1):
            self._recorder.before(watch, *self._passes.before_step(watch), self._gathered_for(watch))
        self.seconds += time.perf_counter() - began

    @_guarded
    def _note_rates(self, watch: OptimizerWatch) -> None:
        """Writes learning rates; guarded by itself, so that an error here costs no gradients."""
        self._recorder.note_rates(watch)

    def _watch_of(self, optimizer: Optimizer) -> OptimizerWatch | None:
        return next((watch for watch in self._known.get(id(optimizer), ()) if watch.updates(optimizer)), None)

    def _first_seen(self, optimizer: Optimizer) -> OptimizerWatch:
        """Begins to watch an optimiser; writes the others' last state and stops keeping them alive."""
        for other in self._optimizers:
            if other.kept is not None:
                self._write_last(other)
                other.kept = None
        watch = OptimizerWatch(len(self._optimizers), optimizer)
        others = [other for other in self._known.get(id(optimizer), ()) if other.optimizer is optimizer]
        self._known[id(optimizer)] = [*others, watch]
        self._optimizers.append(watch)
        self._recorder.first_seen(watch)
        self.look_at_process_group()
        return watch

    def _write_last(self, watch: OptimizerWatch) -> None:
        """Writes an optimiser's current state as its last, unless the optimiser is gone."""
        try:
            if watch.optimizer is not None and not capturing():
                self._recorder.last(watch)
        except RuntimeError:
            return  # the device may have failed with the script
        except Exception as error:
            self.note_failure(error)

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and not is_inner_step(optimizer, sys._getframe(1)):
            self._step_ends(optimizer)

    @_guarded
    def _step_ends(self, optimizer: Optimizer) -> None:
        began = time.perf_counter()
        watch = self._watch_of(optimizer)
        if watch is None:
            return  # its pre-hook failed and recorded that
        watch.steps += 1
        self._steps_of_all += 1
        watch.last_step = self._steps_of_all
        if self._schedule.includes(watch.steps) and not capturing():
            stepped = {
                id(tensor) for other in self._optimizers if other.optimizer for tensor in tensors_of(other.optimizer)
            }
            self._recorder.after(watch, self._used, stepped)
        self._stepped = True
        live = [w for w in self._optimizers if w.optimizer is not None and self._steps_of_all - w.last_step <= GIVEN_UP]
        checked = [other for other in live if self._schedule.includes(other.steps + 1)]
        self._hot = bool(checked)
        self._recorder.listen(checked)
        if not self._hot:
            self._passes.clear()
        self._listen()
        self.seconds += time.perf_counter() - began

    def _gathered_for(self, watch: OptimizerWatch) -> dict[str, Taken]:
        """Removes and returns an optimiser's parameters as forward passes gathered them; all, if no name is known."""
        mine = set(self._recorder.names(watch).values())
        names = [name for name in self._gathered if name in mine] or list(self._gathered)
        return {name: self._gathered.pop(name) for name in names}

    # --- forward passes -----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Switches the forward hooks on: both, because compiled code has a variant for each state."""
        self._entry.put_in()
        self._exit.put_in()

    def _enters(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # first: Dynamo would compile and guard anything before it
            return
        self._calls += 1
        self._used.add(id(module))
        if not torch.is_grad_enabled():
            if self._stepped or self._learned:
                self._begin_phase()
            if self._hot:
                self._note_pass(self._passes.note_collected, module, args)
            else:
                self._entry.put_out()
                self._exit.put_out()
        elif self._hot:
            self._learned = True
            self._note_pass(self._passes.note, module, args)

    @_guarded
    def _begin_phase(self) -> None:
        began = time.perf_counter()
        self._stepped = self._learned = False
        self._passes.begin_phase()
        self.signs_of_life += 1
        self._phases += 1
        if self._schedule.includes(self._phases) and not capturing():
            self._recorder.models(self._phases)
        for watch in self._optimizers:
            if run := watch.boundaries.add(watch.steps):
                self._writer.add({"kind": "boundaries", "optimizer": watch.index, "run": run})
        self.seconds += time.perf_counter() - began

    @_guarded
    def _note_pass(self, note: Callable[[nn.Module, Any], None], module: nn.Module, args: Any) -> None:
        began = time.perf_counter()
        self.signs_of_life += 1
        if not capturing():
            note(module, args)
        self.seconds += time.perf_counter() - began

    def _leaves(self, module: nn.Module, _args: Any, output: Any) -> None:
        """Records a call's output, and a layer of an FSDP model: its parameters are gathered now, and must be equal."""
        if not torch.compiler.is_compiling() and self._hot and torch.is_grad_enabled():
            self._note_pass(self._passes.note_output, module, output)
            if {"fsdp1", "fsdp2"} & self._recorder.inventory.wrappers:
                self._note_gathered(module)

    @_guarded
    def _note_gathered(self, module: nn.Module) -> None:
        began = time.perf_counter()
        name = self._recorder.inventory.names.get(id(module))
        held = {} if name is None else vars(module) | module._parameters  # FSDP1 leaves plain attributes
        for key, parameter in held.items():
            if isinstance(parameter, Tensor) and not hasattr(parameter, "placements") and readable(parameter):
                self._gathered[f"{name}.{key}".lstrip(".")] = take(parameter)
        self.seconds += time.perf_counter() - began

    def _calibrate(self) -> float:
        """Measures the seconds of a call's two hooks if they record nothing, with PyTorch's cost of calling them."""
        module, calls = nn.Identity(), self._calls
        without = _time(module, CALIBRATION)
        handles = register_module_forward_pre_hook(self._enters), register_module_forward_hook(self._leaves)
        with torch.enable_grad():
            hooked = _time(module, CALIBRATION)
        for handle in handles:
            handle.remove()
        self._calls = calls
        return max(0.0, hooked - without)


def _time(call: Callable[[Any], Any], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call(None)
    return (time.perf_counter() - began) / times

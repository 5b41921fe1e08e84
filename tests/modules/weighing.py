"""A rank that trains some iterations and weighs what it holds: ``python -m weighing CONFIG_JSON ITERATIONS``.

It has torchrun's variables set and prints one JSON line: bytes of the tensors that live between iterations, of
parameters, gradients and moments among them, and a hash of all the parameters.
"""

import gc
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from lockstep.config.checks import resolve
from lockstep.config.run import Config, RunOptions
from lockstep.core.topology import from_environment
from lockstep.runs.directory import RunDirectory
from lockstep.torch_engine.distributed.process_group import close_process_group
from lockstep.torch_engine.nets.parameters import MOMENTS
from lockstep.torch_engine.session import open_session
from lockstep.torch_engine.state import POLICY, state_arrays
from lockstep.torch_engine.train import Trainer
from lockstep.training.recorder import Recorder
from lockstep.training.stop import StopRequest


def storage_bytes(tensors):
    """Bytes of the memory behind tensors, counted once."""
    storages = {}
    for x in tensors:
        part = getattr(x, "_local_tensor", x).untyped_storage()
        storages[part.data_ptr()] = part.nbytes()
    return sum(storages.values())


def weigh(state):
    """Of everything that lives, and of what training changes."""
    gc.collect()
    live = [x for x in gc.get_objects() if type(x) is torch.Tensor or type(x) is torch.nn.Parameter]
    optimizer = state.optimizer
    if hasattr(optimizer, "slices"):
        parameters, moments = optimizer._sharded.slices, [x for name in MOMENTS for x in optimizer.slices(name)]
    else:
        parameters, moments = [optimizer.parameters()], [optimizer.moments()[name] for name in MOMENTS]
    return {
        "all": storage_bytes(live),
        "parameters and moments": storage_bytes([*parameters, *moments, state.parameters.flat]),
        "whole network": 4 * state.parameters.flat.numel(),
    }


def train():
    config = resolve(Config.model_validate_json(sys.argv[1]))
    topology = from_environment()
    session = open_session(config, topology, None)
    run = RunDirectory(Path(tempfile.mkdtemp()), is_writer=False)
    recorder = Recorder(session, run, time.monotonic())
    trainer = Trainer(session, recorder, RunOptions(), StopRequest())
    seen = []
    end_step = session.envs.end_step

    def weighed(part: int = 0) -> None:
        seen.append(session.state.parameters.flat.untyped_storage().nbytes())
        end_step(part)

    session.envs.end_step = weighed
    for _ in range(int(sys.argv[2])):
        trainer.iterate()
    told = weigh(session.state) | {"in a rollout": max(seen)}
    arrays = {name: a for name, a in state_arrays(session.state).items() if name.startswith(POLICY)}
    told["parameters"] = hashlib.sha256(b"".join(a.tobytes() for a in arrays.values())).hexdigest()
    print(json.dumps(told), flush=True)
    session.close()


train()
close_process_group()

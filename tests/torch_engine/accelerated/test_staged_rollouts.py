"""When the host's memory that an accelerator copies from is written again."""

import numpy as np
import torch
from small_runs import CPU, ScriptedEnvs
from torch import Tensor

from lockstep.torch_engine.accelerated import rollout as staged
from lockstep.torch_engine.accelerated.rollout import StagedActor
from lockstep.torch_engine.nets.functions import Actor


class First(Actor):
    """Takes the first action always."""

    def tensors(self, observations: Tensor, noise: Tensor, part: slice | None = None) -> Tensor:
        return torch.zeros(len(observations), dtype=torch.int64)


def test_what_went_up_last_is_waited_for_before_its_memory_is_written_again(monkeypatch):
    actor = StagedActor(First(), ScriptedEnvs(range(2)), 2, CPU)  # pyright: ignore[reportAbstractUsage]
    memory, seen = actor._stage(None)._up, []

    class Mark:
        """Notes what the memory holds when the copy is launched, and when it is waited for."""

        def __init__(self, device: torch.device) -> None:
            seen.append(("launched", memory.tolist()))

        def wait(self) -> None:
            seen.append(("waited for", memory.tolist()))

    monkeypatch.setattr(staged, "Mark", Mark)
    rows, noise = np.ones((2, 2), np.float32), np.zeros((2, 2, 3), np.float32)
    actor.draw(noise)
    for _ in range(2):
        actor.begin(None)
        assert not any(launched == memory.tolist() for _, launched in seen)  # marks of ends are taken back
        for t in range(2):
            actor(rows * t, noise[t])
            actor.forget(torch.tensor([False, True]))
        actor.finish(rows * 2)
    assert [what for what, _ in seen] == ["launched", "waited for", "launched"]
    assert seen[0][1] == seen[1][1]

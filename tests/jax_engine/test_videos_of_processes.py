"""A video of a policy whose parameters are cut over processes: fetching it is everybody's business."""

import types
from typing import Any

import numpy as np

from lockstep.config.run import Config
from lockstep.jax_engine import train
from lockstep.jax_engine.train import Trainer
from lockstep.policies import videos
from lockstep.runs.directory import RunDirectory
from lockstep.training.recorder import Recorder


def evaluated(monkeypatch, tmp_path, path, fails=False):
    """What a process calls in two evaluations, if it has a place for videos (the writer) or none."""
    calls = []

    def record(policy, path):
        calls.append(("record", policy))
        if fails:
            raise OSError("no codec")

    monkeypatch.setattr(train, "evaluate_policy", lambda session: np.array([[1.0, 4.0, 0.0, np.nan]]))
    monkeypatch.setattr(train, "current_policy", lambda session: calls.append("fetch") or "policy")
    monkeypatch.setattr(videos, "record_evaluation", record)
    config = Config.model_validate({"eval": {"interval": 1, "record_video": True}})
    facts = {"world_size": 2}
    session: Any = types.SimpleNamespace(
        iteration=1, global_step=8, config=config, facts=lambda: facts, remembered=None
    )
    session.counted = session
    run = RunDirectory(tmp_path, is_writer=False, quiet=True)
    monkeypatch.setattr(run, "video_path", lambda step: path)
    trainer: Any = object.__new__(Trainer)
    trainer.config, trainer.session, trainer.recorder = config, session, Recorder(session, run, 0.0)
    for _ in range(2):
        assert trainer.evaluate()["eval/return_mean"] == 1.0
    return calls


def test_every_process_fetches_the_policy_and_one_records(monkeypatch, tmp_path):
    assert evaluated(monkeypatch, tmp_path, None) == ["fetch", "fetch"]
    assert evaluated(monkeypatch, tmp_path, tmp_path / "x.mp4") == ["fetch", ("record", "policy")] * 2


def test_a_writer_that_gave_up_recording_goes_on_fetching(monkeypatch, tmp_path):
    assert evaluated(monkeypatch, tmp_path, tmp_path / "x.mp4", fails=True) == ["fetch", ("record", "policy"), "fetch"]

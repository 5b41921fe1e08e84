"""On accelerators each of a ceiling's independent runs sees a device of its own."""

import subprocess
from typing import Any

import pytest

from lockstep.config.run import Config
from lockstep.scaling import measure
from lockstep.scaling.plan import Job, Plan

VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


@pytest.mark.parametrize(("device", "variable"), VARIABLES.items())
def test_each_copy_sees_the_next_device_of_those_that_are_visible(monkeypatch, device, variable):
    monkeypatch.delenv(variable, raising=False)
    assert measure.own_devices(device, 3) == [{variable: "0"}, {variable: "1"}, {variable: "2"}]
    monkeypatch.setenv(variable, "5, 1.0,GPU-7")
    assert measure.own_devices(device, 2) == [{variable: "5"}, {variable: "1.0"}]


def test_copies_on_cpus_share_all_cores(monkeypatch):
    monkeypatch.setenv("ZE_AFFINITY_MASK", "1")
    assert measure.own_devices("cpu", 2) == [{}, {}]


@pytest.mark.parametrize(("device", "variable"), VARIABLES.items())
def test_a_ceiling_starts_its_copies_so(monkeypatch, tmp_path, device, variable):
    seen = []

    def start(words: Any, env: dict[str, str], **more: Any) -> Any:
        seen.append(env[variable])
        return popen(["true"], env=env, **more)

    popen = subprocess.Popen
    monkeypatch.setenv(variable, "1,0")
    monkeypatch.setattr(measure.subprocess, "Popen", start)
    plan = Plan(Config.model_validate({"num_envs": 8, "device": device}), "weak", (1, 2))
    outcome = measure.measure(Job("ceiling", 2, 0), plan, tmp_path / "job", lambda *_: None)
    assert seen == ["1", "0"]
    assert outcome.error is not None  # ``true`` trains nothing

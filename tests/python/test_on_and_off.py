"""Arguments that are on or off are no text: Python takes ``"False"`` for true."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.config.on_off import switch
from lockstep.python.run import Run

SMALL: dict[str, Any] = {"num_steps": 16, "total_steps": 256, "quiet": True}
untyped: Any = lockstep


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lockstep.train("handed_envs:Counting", name="a", **SMALL)


@pytest.mark.parametrize("value", ["False", "no", "", b"", 2, 0.5, None, np.zeros(2), [True]])
def test_a_switch_is_nothing_else(value):
    with pytest.raises(ValueError, match=r"^trust: .+ must be True or False$"):
        switch("trust", value)


def test_a_switch_may_be_of_another_library():
    for on, off in ((True, False), (np.True_, np.False_), (np.array(True), np.array(False)), (1, 0)):
        assert (switch("trust", on), switch("trust", off)) == (True, False)
        assert type(switch("trust", on)) is bool


def test_text_trusts_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))  # an account that never trained with it
    refused = r"^trust: 'False' must be True or False$"
    uses = (
        lambda: untyped.load_run("a", trust="False"),
        lambda: untyped.load_policy("a", trust="False"),
        lambda: untyped.train("CartPole-v1", trust="False", **SMALL),
        lambda: run.resume(512, trust="False"),
        lambda: untyped.Run(run.path, trust="False"),
    )
    for use in uses:
        with pytest.raises(ValueError, match=refused):
            use()
    with pytest.raises(ValueError, match="names handed_envs:Counting"):
        untyped.load_run("a", trust=np.False_).evaluate(1)
    assert untyped.load_run("a", trust=np.True_).evaluate(1)["episodes"] == 1


def test_a_run_is_trusted_as_it_was_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, trust in (("a", "no"), ("b", True), ("c", False)):  # in a config it is read as on the command line
        run = lockstep.train({"env": "CartPole-v1", "trust": trust}, name=name, **SMALL)
        assert run.trust is (trust is True)
    assert run.resume(512, trust=True, quiet=True).trust


def test_actions_are_sampled_or_not(run):
    refused = r"^deterministic: 'False' must be True or False$"
    row = np.zeros((1, 2), np.float32)
    uses = (
        lambda: run.policy([0.0, 0.0], deterministic="False"),
        lambda: run.policy.predict([0.0, 0.0], deterministic="False"),
        lambda: run.policy.act(row, deterministic="False"),
        lambda: run.policy.native(row, deterministic="False"),
        lambda: run.evaluate(1, deterministic="False"),
        lambda: run.record_video(Path("a.gif"), deterministic="False"),
    )
    for use in uses:
        with pytest.raises(ValueError, match=refused):
            use()
    drawn = {run.policy([0.0, 0.0], deterministic=np.False_) for _ in range(50)}
    assert drawn == {0, 1}


def test_a_run_prints_and_waits_or_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^observe_only: 'no' must be True or False$"):
        untyped.train("CartPole-v1", observe_only="no", **SMALL)
    with pytest.raises(ValueError, match=r"^observe_only: 'no' must be True or False$"):
        Run(tmp_path).resume(512, observe_only="no")
    with pytest.raises(ValueError, match=r"^quiet: 'no' must be True or False$"):
        untyped.train("CartPole-v1", quiet="no")
    assert not (tmp_path / "runs").exists()

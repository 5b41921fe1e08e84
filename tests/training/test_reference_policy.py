"""GRPO's reference policy: of a checkpoint, the initial one, or none."""

import numpy as np
import pytest
from fake_session import FakeSession

from lockstep.config.run import Config
from lockstep.runs.directory import RunDirectory
from lockstep.training.recorder import Recorder
from lockstep.training.reference_policy import reference_arrays
from lockstep.training.stop import FINISHED

SHAPES = {"w": (3,)}


def initial():
    return {"w": np.full(3, 7, np.float32)}


@pytest.fixture
def finished(tmp_path):
    """A run that ended with weights of one."""
    session, run = FakeSession(), RunDirectory(tmp_path, quiet=True)
    run.write_config(session.config)
    recorder = Recorder(session, run, 0.0)
    session.advance()
    recorder.finish(FINISHED)
    recorder.close()
    return str(tmp_path)


def grpo(reference=None, kl_coef=0.1):
    return Config.model_validate({"algorithm": "grpo", "grpo": {"kl_coef": kl_coef, "reference": reference}})


@pytest.mark.parametrize("config", [Config(), grpo(kl_coef=0.0)])
def test_without_a_weight_there_is_none(config):
    assert reference_arrays(config, SHAPES, lambda: pytest.fail("nobody asked")) is None


def test_without_a_run_it_is_the_initial_one():
    arrays = reference_arrays(grpo(), SHAPES, initial)
    assert arrays is not None
    assert arrays["w"].tolist() == [7, 7, 7]


def test_a_runs_parameters_are_read_and_no_others(finished):
    arrays = reference_arrays(grpo(finished), SHAPES, initial)
    assert arrays is not None
    assert {name: array.tolist() for name, array in arrays.items()} == {"w": [1, 1, 1]}


@pytest.mark.parametrize("shapes", [{"w": (4,)}, {"w": (3,), "b": (1,)}])
def test_other_networks_are_refused(finished, shapes):
    with pytest.raises(ValueError, match=rf"^grpo\.reference: {finished} has no parameter \w of shape \(\d,\)$"):
        reference_arrays(grpo(finished), shapes, initial)


def test_a_run_that_isnt_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no run directory"):
        reference_arrays(grpo(str(tmp_path / "none")), SHAPES, initial)

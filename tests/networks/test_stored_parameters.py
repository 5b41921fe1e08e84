"""Parameters of a checkpoint are those of the networks that compute with them, or are refused."""

import numpy as np
import pytest

from lockstep.networks.checks import stored_parameters

SHAPES = {"actor.0.weight": (2, 3), "actor.0.bias": (2,)}
ARRAYS = {f"policy/{name}": np.ones(shape, np.float32) for name, shape in SHAPES.items()}
OTHERS = {"normalizers/mean": np.zeros(3), "policies": np.zeros(1)}


def test_parameters_come_by_the_networks_names():
    found = stored_parameters(ARRAYS | OTHERS, "policy/", SHAPES)
    assert {name: array.shape for name, array in found.items()} == SHAPES


def test_another_shape_is_refused():
    said = r"^network: actor\.0\.bias has shape \(4,\) in the checkpoint, but \(2,\) in the networks"
    with pytest.raises(ValueError, match=said):
        stored_parameters(ARRAYS | {"policy/actor.0.bias": np.ones(4)}, "policy/", SHAPES)


def test_a_parameter_that_the_networks_do_not_have_is_refused():
    """As of a layer that is gone from a user's class: without it the policy would silently be another one."""
    said = (
        r"^network: norm\.weight is in the checkpoint, but the networks that the run's config describes have no such "
    )
    with pytest.raises(ValueError, match=said):
        stored_parameters(ARRAYS | {"policy/norm.weight": np.ones(2)}, "policy/", SHAPES)

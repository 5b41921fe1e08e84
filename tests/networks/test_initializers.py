import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.shards import keyed_generator
from lockstep.networks.initial import orthogonal, orthogonal_parameters

SIZES = (5, 64, 32, 3)


def mlp_parameters(seed, name, sizes, output_gain):
    """The parameters of one multilayer perceptron."""
    shapes = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        shapes |= {f"{name}.{layer}.weight": (outputs, inputs), f"{name}.{layer}.bias": (outputs,)}
    return orthogonal_parameters(seed, shapes, {f"{name}.{len(sizes) - 2}.weight": output_gain})


def generator(seed=0):
    return keyed_generator(seed, "init/test")


# ---- one matrix


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.01, 10), st.integers(0, 2**32))
def test_rows_or_columns_are_orthogonal_and_as_long_as_the_gain(rows, cols, gain, seed):
    matrix = orthogonal(generator(seed), (rows, cols), gain)
    assert (matrix.shape, matrix.dtype) == ((rows, cols), np.float32)
    assert matrix.flags.c_contiguous
    wide = matrix.astype(np.float64) if rows <= cols else matrix.T.astype(np.float64)
    np.testing.assert_allclose(wide @ wide.T, gain**2 * np.eye(min(rows, cols)), atol=2e-6 * gain**2)


def test_an_ordinary_random_matrix_is_not_orthogonal():
    matrix = generator().standard_normal((8, 8)) / np.sqrt(8)
    assert np.abs(matrix @ matrix.T - np.eye(8)).max() > 0.1


def test_no_sign_is_preferred():
    """Without the correction by the signs of R's diagonal, the first entries would nearly all be negative."""
    firsts = [orthogonal(generator(seed), (4, 4), 1.0)[0, 0] for seed in range(200)]
    assert 70 < np.sum(np.array(firsts) > 0) < 130


# ---- a network


def test_names_shapes_and_biases():
    parameters = mlp_parameters(0, "actor", SIZES, 0.01)
    assert {name: array.shape for name, array in parameters.items()} == {
        "actor.0.weight": (64, 5),
        "actor.0.bias": (64,),
        "actor.1.weight": (32, 64),
        "actor.1.bias": (32,),
        "actor.2.weight": (3, 32),
        "actor.2.bias": (3,),
    }
    for name, array in parameters.items():
        assert array.dtype == np.float32
        assert np.any(array) == name.endswith("weight")


@pytest.mark.parametrize("output_gain", [0.01, 1.0])
def test_gains_of_hidden_and_output_layers(output_gain):
    parameters = mlp_parameters(0, "critic", SIZES, output_gain)
    gains = [np.linalg.norm(parameters[f"critic.{layer}.weight"], 2) for layer in range(3)]
    np.testing.assert_allclose(gains, [np.sqrt(2), np.sqrt(2), output_gain], rtol=1e-5)


def test_a_network_of_one_layer_has_the_output_gain():
    parameters = mlp_parameters(0, "actor", (5, 3), 0.01)
    assert parameters.keys() == {"actor.0.weight", "actor.0.bias"}
    np.testing.assert_allclose(np.linalg.norm(parameters["actor.0.weight"], 2), 0.01, rtol=1e-5)


def test_parameters_are_a_function_of_seed_and_name():
    first = mlp_parameters(3, "actor", SIZES, 0.01)
    np.random.default_rng(0).normal(size=100)
    mlp_parameters(4, "critic", SIZES, 0.01)
    again = mlp_parameters(3, "actor", SIZES, 0.01)
    assert all(first[name].tobytes() == again[name].tobytes() for name in first)
    for other in (mlp_parameters(4, "actor", SIZES, 0.01), mlp_parameters(3, "critic", SIZES, 0.01)):
        for a, b in zip(first.values(), other.values(), strict=True):
            assert not np.any(a) or not np.array_equal(a, b)


def test_layers_of_one_shape_differ():
    parameters = mlp_parameters(0, "actor", (16, 16, 16, 16), np.sqrt(2.0))
    weights = [parameters[f"actor.{layer}.weight"] for layer in range(3)]
    assert not np.array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[1], weights[2])


# ---- other shapes


def test_a_convolution_is_one_orthogonal_matrix_and_a_recurrent_core_has_gain_1():
    shapes = {
        "actor.encoder.image.0.weight": (8, 3, 4, 4),
        "actor.encoder.core.0.weight": (8, 3, 4, 4),  # of an image by that name
        "actor.core.hidden.weight": (16, 4),
        "actor.0.weight": (4, 4),
    }
    parameters = orthogonal_parameters(0, shapes, {})
    assert {name: array.shape for name, array in parameters.items()} == shapes
    for image in ("image", "core"):
        kernel = parameters[f"actor.encoder.{image}.0.weight"].reshape(8, 48)
        np.testing.assert_allclose(kernel @ kernel.T, 2 * np.eye(8), atol=1e-5)
    gains = [np.linalg.norm(parameters[f"actor.{name}.weight"], 2) for name in ("core.hidden", "0")]
    np.testing.assert_allclose(gains, [1.0, np.sqrt(2)], rtol=1e-5)


def test_networks_draw_from_generators_of_their_own():
    actor, critic = {"actor.0.weight": (4, 5)}, {"critic.0.weight": (4, 5)}
    both, alone = orthogonal_parameters(0, actor | critic, {}), orthogonal_parameters(0, critic, {})
    assert both["critic.0.weight"].tobytes() == alone["critic.0.weight"].tobytes()
    assert not np.array_equal(both["actor.0.weight"], both["critic.0.weight"])

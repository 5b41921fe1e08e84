"""Operations by which a network may be mapped over shards round a number alike wherever it lies in a tensor."""

import pytest
import torch
from torch.nn import functional

from lockstep.torch_engine.setup.mapped_operations import ELEMENTS, KNOWN, OtherOperations

NUMBERS = torch.linspace(-4.0, 4.0, 257)  # the last one fills no vector
FUNCTIONS = {
    "abs": torch.abs,
    "add": lambda x: torch.add(x, x, alpha=0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "atan": torch.atan,
    "cos": torch.cos,
    "div": lambda x: x / (x + 9),
    "erf": torch.erf,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
    "hardtanh": functional.hardtanh,
    "leaky_relu": functional.leaky_relu,
    "lerp": lambda x: torch.lerp(x, x + 1, 0.3),
    "log": lambda x: torch.log(x.abs() + 0.1),
    "log1p": lambda x: torch.log1p(x.abs()),
    "log_sigmoid_forward": functional.logsigmoid,
    "pow": lambda x: x**3 + x**2 + (x.abs() + 1) ** 0.5 + (x + 9) ** -1,
    "reciprocal": lambda x: (x + 9).reciprocal(),
    "relu": torch.relu,
    "remainder": lambda x: torch.remainder(x, 0.7),
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "sin": torch.sin,
    "rsub": lambda x: torch.rsub(x, x, alpha=0.3),
    "sqrt": lambda x: (x.abs() + 0.1).sqrt(),
    "sub": lambda x: torch.sub(x, 0.5, alpha=0.3),
    "tanh": torch.tanh,
    "threshold": lambda x: functional.threshold(x, 0.1, 0.2),
    "_prelu_kernel": lambda x: functional.prelu(x.view(1, 1, -1), torch.tensor([0.2])).view(-1),
}
"""Those of ``ELEMENTS`` in which a number may be rounded twice."""
EXACT = """
    bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min eq equal floor ge gt isfinite isinf isnan le
    logical_and logical_not logical_or lt maximum minimum mul ne neg round sgn sign trunc where _local_scalar_dense
"""
"""Those that round once, or not at all."""
OTHERS = {
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "elu": functional.elu,
    "softplus": functional.softplus,
    "mish": functional.mish,
    "sinh": torch.sinh,
    "pow": lambda x: x.abs() ** 1.7,
}


def both(function, x):
    """The function's values and gradients."""
    x = x.clone().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_number_has_the_same_bits_alone_as_among_others(name):
    values, gradients = both(FUNCTIONS[name], NUMBERS)
    for place in range(len(NUMBERS)):
        value, gradient = both(FUNCTIONS[name], NUMBERS[place : place + 1])
        assert torch.equal(value, values[place : place + 1]), float(NUMBERS[place])
        assert torch.equal(gradient, gradients[place : place + 1]), float(NUMBERS[place])


def seen(function):
    with OtherOperations() as others:
        both(function, NUMBERS)
    return others.names


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_measured_is_known_with_its_gradient(name):
    assert seen(FUNCTIONS[name]) == set()
    assert name == "pow" or name in ELEMENTS.split()


def test_nothing_else_is_known():
    measured = {name.removesuffix("_forward") for name in FUNCTIONS if name != "pow"}
    backward = {name for name in ELEMENTS.split() if name.removesuffix("_backward") in measured}
    assert set(ELEMENTS.split()) == (FUNCTIONS.keys() - {"pow"}) | backward | set(EXACT.split())


def test_half_precision_is_not():
    with OtherOperations() as others:
        NUMBERS.half().abs()
    assert others.names == {"abs of half precision"}


@pytest.mark.parametrize("name", OTHERS)
def test_what_rounds_by_its_place_is_not(name):
    assert name in seen(OTHERS[name])
    assert name not in KNOWN

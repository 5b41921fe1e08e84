"""A checkpoint's policy gives the same actions in either engine, whichever trained it."""

from dataclasses import asdict

import numpy as np
import pytest
from net_cases import CASES, Case, noise_of, rows_of

from lockstep.config.run import Config
from lockstep.core.spaces import ActionLayout
from lockstep.jax_engine import policy as jax_policy
from lockstep.jax_engine.state import make_net as jax_net
from lockstep.torch_engine import policy as torch_policy
from lockstep.torch_engine.state import initial_parameters
from lockstep.torch_engine.state import make_net as torch_net

ROWS = 6
NETWORKS = {
    "categorical": {},
    "squashed": {"squash": True, "activation": "silu"},
    "squashed, std by state": {"squash": True, "state_dependent_std": True},
    "several categoricals, masked": {"shared": True},
    "Dict, masked": {"image": {"width": 0.125}},
    "Dict, shared": {"shared": True, "image": {"kind": "impala", "width": 0.25, "depth": 1}},
    "nature": {"image": {"kind": "nature", "width": 0.125}},
    "LSTM": {"recurrent": "lstm", "recurrent_size": 6, "state_dependent_std": True},
    "GRU": {"recurrent": "gru", "recurrent_size": 6, "shared": True},
}


def config_of(name: str) -> Config:
    return Config.model_validate({"network": {"hidden_sizes": (8,)} | NETWORKS[name]})


def arrays_of(config: Config, case: Case) -> dict[str, np.ndarray]:
    """As training leaves them: initial parameters that have moved."""
    rng = np.random.default_rng(0)
    initial = initial_parameters(config, torch_net(config, case.observation, case.action))
    return {f"policy/{name}": x + 0.2 * rng.normal(size=x.shape).astype(np.float32) for name, x in initial.items()}


def functions(name: str, arrays: dict[str, np.ndarray] | None = None) -> list:
    case, config = CASES[name], config_of(name)
    environment = {"observation": asdict(case.observation), "action": asdict(case.action)}
    arrays = arrays or arrays_of(config, case)
    return [module.PolicyFunction(config, environment, arrays) for module in (torch_policy, jax_policy)]


@pytest.mark.parametrize("name", NETWORKS)
def test_actions_are_the_other_engines(name):
    case = CASES[name]
    torch_function, jax_function = functions(name)
    assert jax_function.state_size == torch_function.state_size
    assert (jax_function.observation, jax_function.action) == (case.observation, case.action)
    carries = [np.full((ROWS, jax_function.state_size), 0.2, np.float32)] * 2
    seen = []
    for step in range(3):
        rows = rows_of(case, ROWS, seed=step)
        noise = noise_of(case.action, ROWS, step) if step else None
        found = [f(rows, noise, x) for f, x in zip((torch_function, jax_function), carries, strict=True)]
        (theirs, _), (ours, _) = found
        carries = [carry for _, carry in found]
        assert (ours.dtype, ours.shape) == (case.action.row_dtype, theirs.shape)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=2e-6)
        np.testing.assert_allclose(carries[1], carries[0], rtol=1e-5, atol=1e-6)
        seen.append(ours)
    assert len(np.unique(np.concatenate(seen), axis=0)) > 1


@pytest.mark.parametrize("name", NETWORKS)
def test_a_checkpoint_has_the_same_arrays_in_both(name):
    case, config = CASES[name], config_of(name)
    ours, theirs = (make(config, case.observation, case.action).shapes() for make in (jax_net, torch_net))
    assert list(ours.items()) == list(theirs.items())


def test_other_parameters_give_other_actions():
    """The negative of the comparison above."""
    name = "squashed"
    config, case = config_of(name), CASES[name]
    arrays = {key: 1.01 * value for key, value in arrays_of(config, case).items()}
    torch_function, jax_function = functions(name)[0], functions(name, arrays)[1]
    rows, carry = rows_of(case, ROWS), np.zeros((ROWS, 0), np.float32)
    assert np.abs(torch_function(rows, None, carry)[0] - jax_function(rows, None, carry)[0]).max() > 1e-4


def test_each_number_of_rows_gives_the_same_actions_for_the_same_rows():
    _, function = functions("squashed")
    rows = rows_of(CASES["squashed"], ROWS)
    together = function(rows, None, np.zeros((ROWS, 0), np.float32))[0]
    for row in range(ROWS):
        alone = function(rows[row : row + 1], None, np.zeros((1, 0), np.float32))[0]
        np.testing.assert_allclose(alone[0], together[row], rtol=1e-6, atol=1e-6)


def test_a_network_that_does_not_fit_the_spaces_is_refused_alike():
    config, said = Config.model_validate({"network": {"squash": True}}), []
    for make in (torch_net, jax_net):
        with pytest.raises(ValueError) as caught:
            make(config, CASES["categorical"].observation, CASES["categorical"].action)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert said[0].startswith("network.squash: needs continuous actions")


def test_bounds_whose_span_float32_does_not_hold_are_none():
    largest = float(np.finfo(np.float32).max)
    config = Config.model_validate({"network": {"squash": True}})
    for make in (torch_net, jax_net):
        near, far = (ActionLayout("continuous", shape=(1,), low=(-x,), high=(x,)) for x in (largest / 2, largest))
        assert make(config, CASES["categorical"].observation, near).squashed
        with pytest.raises(ValueError, match="with finite bounds, whose span float32 holds, and they are"):
            make(config, CASES["categorical"].observation, far)

"""Parameters that a network of the user's own keeps from being trained: they stay as they are, bit for bit."""

import numpy as np
import pytest
from small_runs import (
    alone,
    described,
    of_rank,
    plan_of,
    random_batch,
    run_ranks,
    small_config,
    small_state,
    statistics_of,
)

from lockstep.config.run import Config
from lockstep.torch_engine.gradients import exact_gradient, fast_gradient, local_gradient
from lockstep.torch_engine.minibatches import minibatch_indices
from lockstep.torch_engine.periodic import update_periodically
from lockstep.torch_engine.setup.choose_mode import choose_mode
from lockstep.torch_engine.state import check_networks, init_state, state_arrays
from lockstep.torch_engine.update import update

FROZEN = {"body.0.weight", "body.0.bias"}


def config_of(kwargs: dict | None = None, **changes) -> Config:
    network = {"custom": "users_nets:Frozen", "custom_kwargs": kwargs or {}}
    return small_config(network=network, num_shards=4, **changes)


def check_frozen(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> None:
    """Of a state's arrays, the frozen parameters are what they were, and no others; their moments are zero."""
    policy = {name.removeprefix("policy/") for name in before if name.startswith("policy/")}
    assert {name for name in policy if np.array_equal(before[f"policy/{name}"], after[f"policy/{name}"])} == FROZEN
    for name in policy:
        moments = [after[f"optimizer/{moment}/{name}"].any() for moment in ("exp_avg", "exp_avg_sq")]
        assert moments == [name not in FROZEN] * 2


@pytest.mark.parametrize("way", ["shard by shard", "mapped", "fast"])
def test_frozen_parameters_stay_bit_for_bit(way):
    config = config_of(reduction="fast" if way == "fast" else "exact")
    state, communicator, plan = small_state(config, described()), alone(config), plan_of(config)
    batch, before = random_batch(config, state.net), state_arrays(state)
    if way == "fast":
        source = fast_gradient(state, config, communicator)
    else:
        mode = "loop" if way == "shard by shard" else choose_mode(state, config, communicator)
        assert state.net.custom.batched == (way == "mapped")
        source = exact_gradient(state, config, communicator, mode)
    norms = []

    def watched(columns, count):
        gradient = source(columns, count)
        parts = state.parameters.split(gradient.vector)
        norms.append((float(gradient.norm), sum(float(parts[name].square().sum()) for name in parts.keys() - FROZEN)))
        return gradient

    update(state, batch, minibatch_indices(config, plan, 0), statistics_of(config, batch), config, plan, watched)
    check_frozen(before, state_arrays(state))
    assert [norm for norm, _ in norms] == pytest.approx([square**0.5 for _, square in norms])


def test_a_mean_of_three_ranks_leaves_them_alone():
    """Three times a number, divided by three, is another one for every seventh of them."""
    config = config_of(reduction="fast", sync_period=2)
    states = [small_state(config, described(), plan_of(config, 3, rank)) for rank in range(3)]

    def rank(plan, communicator):
        communicator.all_reduce = lambda x: communicator.gather_ranks(x).sum(0)
        state = states[plan.rank]
        whole, before = random_batch(config, state.net), state_arrays(state)
        given = state, of_rank(whole, plan), minibatch_indices(config, plan, 0), statistics_of(config, whole)
        update_periodically(*given, config, plan, local_gradient(state, config, communicator), communicator)
        return before, state_arrays(state)

    for before, after in run_ranks(config, 3, rank):
        check_frozen(before, after)


ACTOR = {"parts": ["body", "actor"]}
NOTHING = [(ACTOR, 4), ({"parts": ["body", "actor", "critic"]}, 6), ({"parts": [], "detached": True}, 0)]
GRPO = {"algorithm": "grpo", "grpo": {"group_size": 2}}


@pytest.mark.parametrize("algorithm", [{}, GRPO], ids=["ppo", "grpo"])
@pytest.mark.parametrize(("kwargs", "frozen"), NOTHING)
def test_a_network_whose_actions_could_never_change_is_refused(kwargs, frozen, algorithm):
    said = rf"^network\.custom: users_nets:Frozen has nothing to train: .* \({frozen} of 6 have requires_grad False\)"
    with pytest.raises(ValueError, match=said):
        check_networks(config_of(kwargs, **algorithm), described())


def test_where_a_standard_deviation_learns_there_is_something_to_train():
    config, continuous = config_of(ACTOR), described(discrete=False)
    assert init_state(config, continuous, plan_of(config), alone(config).device).net.custom.frozen
    assert check_networks(config_of({"parts": ["actor", "critic"]}), described()).custom

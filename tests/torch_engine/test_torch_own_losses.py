"""Losses of the user's own in the PyTorch engine: a shard's bits, who computes, and what is refused."""

import pytest
import torch
from small_runs import alone, described, joined, random_batch, shards_gradients, small_config, small_state

from lockstep.torch_engine.gradients import exact_gradient, fast_gradient
from lockstep.torch_engine.nets.autograd import AutogradFunctions
from lockstep.torch_engine.nets.shards import part_of
from lockstep.torch_engine.plain.functions import PlainFunctions
from lockstep.torch_engine.start.own_loss import check_own_loss

LSTM = {"network": {"recurrent": "lstm", "recurrent_size": 4, "sequence_length": 2}}


def config_of(loss, **changes):
    ppo = {"loss": f"users_losses:{loss}"} | changes.pop("ppo", {})
    return small_config(**changes, ppo=ppo)


def test_a_shards_gradient_has_the_same_bits_whatever_shards_are_with_it():
    """A sigmoid rounds by an element's place in memory, and a shard has 12 rows, which fill no vector."""
    config = config_of("of_sigmoids", num_envs=12, num_shards=4)
    state = small_state(config, described())
    columns = random_batch(config, state.net).columns()
    gradients = shards_gradients(state, config)
    whole = gradients(columns, 48).clone()
    for first in range(4):
        assert torch.equal(gradients(part_of(columns, first, first + 1), 48)[0], whole[first])
    assert torch.equal(gradients(part_of(columns, 1, 4), 48), whole[1:])


@pytest.mark.parametrize("make", [exact_gradient, fast_gradient], ids=["exact", "fast"])
def test_ppos_own_by_name_is_what_is_trained_without(make):
    found = []
    for loss in ("same", None):
        config = config_of(loss) if loss else small_config()
        config = config.model_copy(update={"reduction": "exact" if make is exact_gradient else "fast"})
        state = small_state(config, described())
        assert isinstance(state.policy, AutogradFunctions if loss else PlainFunctions)
        mode = ("batched",) if make is exact_gradient else ()
        columns = random_batch(config, state.net).columns()
        found.append(make(state, config, alone(config), *mode)(columns, 32))
    torch.testing.assert_close(found[0].vector, found[1].vector, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[0].terms[:5], found[1].terms, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", [LSTM, {"ppo": {"gradient_accumulation": 2}}], ids=["LSTM", "in parts"])
def test_sequences_and_parts_of_minibatches_have_it_too(changes):
    results = []
    for loss in ("same", "penalised"):
        config = config_of(loss, **changes)
        state = small_state(config, described())
        columns = dict(random_batch(config, state.net).columns())
        if state.net.core:
            columns = {name: x.unflatten(1, (-1, 2)) for name, x in columns.items()}
            shape = columns["actions"].shape[:2]
            columns |= {"recurrent_state": torch.zeros(*shape, state.net.state_size)}
            columns |= {"resets": torch.zeros(*shape, 2)}
        results.append(joined(exact_gradient(state, config, alone(config), "batched")(columns, 32)))
    assert results[0].isfinite().all()
    assert (results[0] - results[1]).abs().max() > 1e-4
    assert results[1][-1] > results[0][-1]  # the penalty


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("mean", "users_losses:mean returned a single number for 29 samples; return the loss of each sample, [rows]"),
        ("by_output", "users_losses:by_output returned shape (3,) for 29 samples"),
        ("number", "users_losses:number returned float"),
        ("infinite", "which isn't finite"),
        ("without_gradient", "users_losses:without_gradient has no gradient"),
        ("counting", "gave other numbers when it was called again"),
        ("by_sign", "; choose by torch.where instead of by if, and, or"),
        ("of_numpy", "; compute with torch instead of numpy"),
        ("misspelt", "; it is entropy here"),
        ("misspelt", "AttributeError: 'LossSample' object has no attribute 'entropies' (users_losses.py, line"),
    ],
)
def test_what_is_no_loss_is_one_line_before_anything_is_trained(loss, said):
    config = config_of(loss)
    net = small_state(config, described()).net
    with pytest.raises(ValueError) as caught:
        check_own_loss(config, net)
    assert said in str(caught.value)
    assert str(caught.value).startswith("ppo.loss: ")
    assert "\n" not in str(caught.value)


def test_scheduled_coefficients_are_tensors_where_it_is_tried():
    ppo = {"clip_schedule": "linear", "entropy_schedule": "linear", "entropy_coef": 0.1}
    config = config_of("spo", ppo=ppo)
    state = small_state(config, described())
    assert set(state.coefficients) == {"clip_range", "entropy_coef"}
    columns, source = random_batch(config, state.net).columns(), exact_gradient(state, config, alone(config), "batched")
    first = source(columns, 32).terms.clone()
    state.coefficients["clip_range"].fill_(0.1)
    assert source(columns, 32).terms[-1] > first[-1]  # a penalty that weighs more
    assert torch.equal(source(columns, 32).terms[1:4], first[1:4])

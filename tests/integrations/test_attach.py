"""A plain loop under ``lockstep.attach`` on 2 and 3 ranks: one rank's updates, and an error where it would not be."""

import pytest
from spawned_ranks import spawn_ranks

from lockstep.torch_engine.distributed.shared_memory import obstacle

CLOSE = 1e-6
CLOSE_GRADIENT = 3e-6  # of gradients up to 5, in float32
FAR = 1e-2
OPTIMIZERS = ("SGD", "Adam")


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def ranks(request):
    return spawn_ranks("attaching", request.param, "everything")


def every(ranks, what, fact):
    return [rank[what][fact] for rank in ranks]


def only(ranks, what, fact):
    """What every rank saw alike."""
    values = every(ranks, what, fact)
    assert all(value == values[0] for value in values), values
    return values[0]


# --- gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_an_update_by_parts_is_the_update_by_the_whole(ranks, optimizer, clip):
    assert max(every(ranks, f"update {optimizer} {clip}", "difference")) <= CLOSE
    assert only(ranks, f"update {optimizer} {clip}", "equal")


def test_many_updates_stay_together(ranks):
    assert max(every(ranks, "updates", "difference")) <= CLOSE
    assert only(ranks, "updates", "equal")


def test_without_attach_ranks_would_part(ranks):
    assert min(every(ranks, "update detached", "difference")) > FAR
    assert not only(ranks, "update detached", "equal")


def test_two_runs_are_bitwise_equal(ranks):
    assert only(ranks, "repeats", "first") == only(ranks, "repeats", "second")
    assert only(ranks, "repeats", "other") != only(ranks, "repeats", "first")


def test_memory_and_backend_give_the_same_bits(ranks):
    assert only(ranks, "transport", "shared") == (obstacle() is None)
    assert only(ranks, "transport", "difference") == 0.0


def test_sums_serve_unequal_parts(ranks):
    assert max(every(ranks, "sum", "difference")) <= CLOSE_GRADIENT
    assert sum(every(ranks, "sum", "rows")) == 12
    assert len(set(every(ranks, "sum", "rows"))) > 1 or len(ranks) == 3


def test_what_ddp_wraps_is_attached_as_it_is(ranks):
    assert only(ranks, "wrapped", "equal")
    assert not only(ranks, "bypassed", "equal")


THROUGH_DDP = {
    "sum through ddp": "reduction 'sum' is lost in a loss that went through DDP's forward: its mean takes its place",
    "sum through ddp of its module": "reduction 'sum' is lost in a loss that went through DDP's forward",
    "bucket view": "DDP(gradient_as_bucket_view=True) reduces the memory that attach reads, at the same time",
}


@pytest.mark.parametrize("what", ["mean through ddp", *THROUGH_DDP])
def test_what_ddp_s_own_reduction_would_spoil_is_refused(ranks, what):
    text = THROUGH_DDP.get(what)
    assert only(ranks, what, "type") == (None if text is None else "ValueError")
    assert text is None or text in only(ranks, what, "text")
    total = sum(range(len(ranks)))
    expected = total if what.startswith("sum") else total / len(ranks)
    assert only(ranks, f"{what}, round it", "gradient") == pytest.approx(expected)
    assert only(ranks, f"{what}, of a copy", "type") is None
    assert only(ranks, f"{what}, detached", "type") is None


def test_no_sync_with_that_of_ddp_reduces_both_passes_once(ranks):
    mean = sum(range(len(ranks))) / len(ranks)
    assert only(ranks, "no_sync through ddp", "gradient") == pytest.approx(2 * mean)


@pytest.mark.parametrize(
    "what",
    [
        *("accumulate", "accumulate on clipped", "zeroed True", "zeroed False", "no_sync", "no_sync upon reduced"),
        *("no_sync then zeroed True", "no_sync then zeroed False", "no_sync from None then zeroed"),
    ],
)
def test_accumulation_reduces_only_what_was_added(ranks, what):
    assert max(every(ranks, what, "difference")) <= CLOSE_GRADIENT


def test_accumulation_keeps_the_gradient_tensor(ranks):
    assert only(ranks, "accumulate keeps the tensor", "same")
    assert only(ranks, "accumulate", "reductions") == 2


def test_no_sync_reduces_nothing_inside(ranks):
    assert only(ranks, "no_sync", "before") == 0
    assert min(every(ranks, "no_sync", "local")) > FAR
    assert only(ranks, "no_sync then zeroed True", "left") == []
    assert only(ranks, "no_sync then zeroed False", "left") == [0.0, 0.0]


def test_parameters_that_no_rank_used_have_no_gradient(ranks):
    absent = ["spare.weight", "spare.bias"]
    assert only(ranks, "unused", "absent") == absent  # one rank used the actor, the others the critic
    assert only(ranks, "unused", "equal")


def test_several_modules_are_reduced_when_they_are_used(ranks):
    assert only(ranks, "several", "critic_before") == []
    assert only(ranks, "several", "reductions") == 3
    assert only(ranks, "several", "equal")


@pytest.mark.parametrize(
    ("what", "reductions"),
    [
        ("reentrant checkpoint", 2),  # the engine ends a pass within the pass
        ("checkpoint", 1),
        ("retained graph", 2),
        ("compiled", 1),
        ("compiled module", 1),
        ("penalised", 1),
    ],
)
def test_any_way_to_compute_the_loss_is_reduced(ranks, what, reductions):
    assert max(every(ranks, what, "difference")) <= CLOSE_GRADIENT
    assert only(ranks, what, "reductions") == reductions


def test_one_rank_s_overflow_skips_the_step_of_all(ranks):
    assert only(ranks, "scaler True", "scale") == 512.0
    assert not only(ranks, "scaler True", "stepped")
    assert only(ranks, "scaler False", "scale") == 512.0
    assert only(ranks, "scaler False", "stepped")
    assert only(ranks, "scaler True", "equal")
    assert only(ranks, "scaler False", "equal")


@pytest.mark.parametrize(("dtype", "relative"), [("torch.bfloat16", 0.02), ("torch.float64", 1e-14)])
def test_gradients_keep_their_type(ranks, dtype, relative):
    assert only(ranks, f"type {dtype}", "dtypes") == [dtype]
    assert only(ranks, f"type {dtype}", "equal")
    assert max(every(ranks, f"type {dtype}", "relative")) < relative
    assert only(ranks, "mixed types", "dtypes") == ["torch.float32", "torch.float64"]


# --- what is refused --------------------------------------------------------------------------------------------

UNREDUCED = {
    "autograd.grad": "did not come by a backward pass since the last step",
    "autograd.grad after a good step": "did not come by a backward pass since the last step",
    "step before the reduction": "the last one before a step must be outside of no_sync()",
    "changed before it is reduced": "was changed before it was reduced, by the script",
    "changed before it is reduced, from None": "was changed before it was reduced, by the script",
    "replaced before it is reduced, from None": "was changed before it was reduced, by the script",
    "no_sync through ddp alone": "or DDP outside of its own no_sync(): change gradients after the backward pass",
    "unfrozen": "parameter spare.weight began to require gradients after attach",
    "stepped though added": "steps a parameter of shape (3,) that wasn't there at attach",
    "step inside of backward True": "the last one before a step must be outside of no_sync() and must end",
    "step inside of backward False": "was taken away before the backward pass ended",
}
OUT_OF_STEP = {
    "other number of steps": "rank 0 had taken 1 optimiser steps and rank 1 0",
    "another place": "rank 0 came to the end of a backward pass (of Agent) while rank 1 came to stop_if",
    "another companion": "rank 0 came to all_mean while rank 1 came to stop_if",
    "another shape": "at all_mean, rank 0 brought 2 elements and rank 1 3",
    "other rate": "rank 0 steps with learning rate 0.2 and rank 1 with 0.3: decide it from lockstep.all_mean",
    "other rate for one step": "rank 0 steps with learning rate 0.2 and rank 1 with 0.3",
    "other rate in a tensor": "rank 0 steps with learning rate 0.2 and rank 1 with 0.3",
    "other number of backward passes": "rank 0 had run 1 backward passes since the last reduction and rank 1 2",
}
REFUSED = {
    "replaced module": "parameter actor.weight of Agent is replaced after attach",
    "replaced parameter": "parameter weight of Linear is replaced after attach",
    "attached twice": "parameter trunk.0.weight is attached already",
    "ddp": "in the hands of DistributedDataParallel; attach the bare module",
    "other optimiser": "SGD steps 8 tensors that are no parameters of the module",
    "reduction": "reduction 'median' is unknown; use mean or sum",
    "complex": "parameter weight is complex",
    "nothing to train": "no parameter of the module requires gradients",
    "sparse": "the gradient of weight is sparse",
    "all_mean of integers": "torch.int64 values; make them floating-point first",
    "normalize one": "needs at least 2 elements over all ranks, not 1",
}
MISMATCHED = {
    "other shapes": "rank 1 differs from rank 0: weight [[3, 2], 'torch.float32', 'trained']",
    "other count": "rank 1 has other parameters or optimisers than rank 0",
    "other learning rate": "optimizer 0 (SGD) group 0 lr 0.2 against optimizer 0 (SGD) group 0 lr 0.1",
    "other optimiser state": "optimizer 0 (Adam) state empty against optimizer 0 (Adam) state",
}


@pytest.mark.parametrize(
    ("kind", "what", "text"),
    [
        *[("UnreducedGradientError", *item) for item in UNREDUCED.items()],
        *[("OutOfStepError", *item) for item in OUT_OF_STEP.items()],
        *[("ValueError", *item) for item in REFUSED.items()],
        *[("RankMismatchError", *item) for item in MISMATCHED.items()],
    ],
)
def test_every_rank_raises_one_clear_line(ranks, kind, what, text):
    assert only(ranks, what, "type") == kind
    for said in every(ranks, what, "text"):
        assert text in said
        assert "\n" not in said


def test_a_rank_that_left_its_epochs_early_is_noticed(ranks):
    assert only(ranks, "local stop", "type") == "OutOfStepError"
    said = f"rank 0 had begun 0 rollouts since its last backward pass and rank {len(ranks) - 1} 1"
    assert said in only(ranks, "local stop", "text")
    assert only(ranks, "local stop unchecked", "type") is None
    assert said in only(ranks, "local stop under eval", "text")


def test_what_nobody_holds_is_freed(ranks):
    assert only(ranks, "forgotten", "alive") == 0


def test_a_module_or_an_optimiser_keeps_itself_attached(ranks):
    for what in ("module", "optimizer"):
        assert max(every(ranks, f"kept by its {what}", "difference")) <= CLOSE
    assert "is replaced after attach" in only(ranks, "replaced module, kept", "text")


@pytest.mark.parametrize(
    "what",
    [
        *("two steps with one gradient", "added to the optimiser", "copy", "attached again after detach"),
        *("one rank evaluates", "one rank evaluates, then again", "back in step"),
        *("rates together", "rates together, in a tensor", "rates together, two groups", "rates together, closures"),
        "rates rounded",
    ],
)
def test_what_is_right_raises_nothing(ranks, what):
    assert only(ranks, what, "type") is None, only(ranks, what, "text")


def test_a_rank_that_has_ended_ends_the_others(ranks):
    last = len(ranks) - 1
    for rank in ranks[:last]:
        assert rank["a rank has ended"]["type"] == "PeerFailureError"
        assert f"rank {last} has " in rank["a rank has ended"]["text"] or last > 1
        assert "waited at the end of a backward pass" in rank["a rank has ended"]["text"]
    assert "a rank has ended" not in ranks[last]


# --- buffers and companions ---------------------------------------------------------------------------------------


def test_buffers_follow_the_first_rank(ranks):
    assert only(ranks, "buffers True", "started")
    assert only(ranks, "buffers True", "after")
    assert not only(ranks, "buffers False", "started")
    assert not only(ranks, "buffers False", "after")


def test_buffers_whose_elements_share_memory_are_the_first_ranks(ranks):
    assert only(ranks, "expanded", "mask") == [[0.0] * 3] * 4
    assert only(ranks, "expanded", "rows") == [[0, 1, 2]] * 2


def test_large_weights_and_buffers_are_the_first_ranks(ranks):
    assert only(ranks, "large", "wrong") == {"weight": 0, "table": 0}
    assert only(ranks, "large", "equal")
    assert only(ranks, "large of another seed", "wrong") > 1_000_000


@pytest.mark.parametrize(
    ("kind", "type_name"),
    [
        ("float", "float"),
        ("int", "float"),
        ("tensor", "Tensor torch.float32"),
        ("scalar tensor", "Tensor torch.bfloat16"),
        ("array", "ndarray float32"),
        ("numpy scalar", "float32 float32"),
    ],
)
def test_all_mean_keeps_the_type(ranks, kind, type_name):
    assert only(ranks, f"all_mean {kind}", "kind") == type_name
    mean = (len(ranks) - 1) / 2
    expected = {"tensor": [[mean, 1.0]], "array": [mean, 2.0]}.get(kind, mean)
    assert only(ranks, f"all_mean {kind}", "value") == expected


def test_normalize_takes_all_ranks_elements(ranks):
    assert max(every(ranks, "normalize", "difference")) <= CLOSE
    assert every(ranks, "normalize", "n") == [5, 43, *[0] * (len(ranks) - 2)]
    assert only(ranks, "normalize locally", "difference") > FAR
    assert only(ranks, "normalize array", "kind") == "ndarray float64"


def test_decisions_are_taken_together(ranks):
    assert only(ranks, "stop_if", "one") is True  # the last rank alone said so
    assert only(ranks, "stop_if", "none") is False


def test_seeds_are_each_rank_s_own_and_one_rank_writes(ranks):
    seeds = every(ranks, "who", "seed")
    assert len({*seeds, *every(ranks, "who", "other")}) == 2 * len(ranks)
    assert only(ranks, "who", "first") == seeds[0]
    assert every(ranks, "who", "writer") == [True, *[False] * (len(ranks) - 1)]


@pytest.mark.long
def test_a_script_s_own_process_group_is_used_beside_it():
    for rank in spawn_ranks("attaching", 2, "own_group"):
        assert rank["own group"]["sum"] == [2.0] * 3
        assert rank["own group"]["difference"] <= CLOSE_GRADIENT

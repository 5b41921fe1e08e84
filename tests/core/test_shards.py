from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.shards import (
    ShardPlan,
    check_shards,
    check_world_size,
    keyed_generator,
    keyed_seed,
    nearest_divisors,
    uneven,
)

PLANS = st.tuples(st.integers(1, 16), st.integers(1, 6)).map(lambda pair: (pair[0] * pair[1], pair[0]))
KEYS = st.lists(st.integers(0, 2**31), max_size=3).map(tuple)
PURPOSES = st.sampled_from(["init", "action", "minibatch", "reset", "eval"])


# ---- who owns what


@given(PLANS)
def test_ranks_own_every_shard_and_environment_once_and_in_order(sizes):
    num_envs, num_shards = sizes
    for world_size in range(1, num_shards + 1):
        plans = [ShardPlan(num_envs, num_shards, world_size, rank) for rank in range(world_size)]
        assert [s for plan in plans for s in plan.shards] == list(range(num_shards))
        assert [e for plan in plans for e in plan.env_ids] == list(range(num_envs))
        for plan in plans:
            assert len(plan.shards) == plan.local_num_shards
            assert len(plan.env_ids) == plan.local_num_envs == plan.local_num_shards * plan.envs_per_shard
            assert plan.local_num_shards in (num_shards // world_size, -(-num_shards // world_size))


@given(PLANS, st.data())
def test_a_process_with_several_ranks_owns_what_they_own(sizes, data):
    num_envs, num_shards = sizes
    world_size = data.draw(st.integers(1, num_shards))
    ranks = data.draw(st.integers(1, world_size))
    first = data.draw(st.integers(0, world_size - ranks))
    process = ShardPlan(num_envs, num_shards, world_size, first, ranks)
    alone = [ShardPlan(num_envs, num_shards, world_size, rank) for rank in range(first, first + ranks)]
    assert list(process.shards) == [s for plan in alone for s in plan.shards]
    assert list(process.env_ids) == [e for plan in alone for e in plan.env_ids]
    assert process.local_num_envs == sum(plan.local_num_envs for plan in alone)


def envs_of(plan: ShardPlan, shard: int) -> range:
    """What its rank steps of a shard, whose rows lie one after another."""
    first = (shard - plan.shards.start) * plan.envs_per_shard
    return plan.env_ids[first : first + plan.envs_per_shard]


@given(PLANS)
def test_a_shards_environments_do_not_depend_on_the_world_size(sizes):
    num_envs, num_shards = sizes
    alone = ShardPlan(num_envs, num_shards)
    for world_size in range(1, num_shards + 1):
        plan = ShardPlan(num_envs, num_shards, world_size, world_size - 1)
        for shard in plan.shards:
            assert envs_of(plan, shard) == envs_of(alone, shard)


def test_what_a_plan_of_sixteen_environments_on_two_ranks_says():
    plan = ShardPlan(num_envs=16, num_shards=8, world_size=2, rank=1)
    assert (plan.envs_per_shard, plan.local_num_shards, plan.local_num_envs) == (2, 4, 8)
    assert plan.shards == range(4, 8)
    assert plan.env_ids == range(8, 16)
    assert envs_of(plan, 5) == range(10, 12)


def test_what_a_plan_of_sixteen_environments_on_three_ranks_says():
    plans = [ShardPlan(num_envs=16, num_shards=8, world_size=3, rank=rank) for rank in range(3)]
    assert [plan.shards for plan in plans] == [range(3), range(3, 6), range(6, 8)]
    assert [plan.env_ids for plan in plans] == [range(6), range(6, 12), range(12, 16)]
    assert [plan.local_num_envs for plan in plans] == [6, 6, 4]


@pytest.mark.parametrize(
    ("world_size", "num_shards", "num_envs", "text"),
    [
        (3, 8, 24, "8 shards on 3 ranks: 3, 3, 2; 12 shards would be even"),
        (3, 8, 8, "8 shards on 3 ranks: 3, 3, 2; 9 shards would be even, with as many environments each"),
        (5, 12, 60, "12 shards on 5 ranks: 3, 3, 2, 2, 2; 15 shards would be even"),
        (9, 16, 144, "16 shards on 9 ranks: 2 on 7 and 1 on 2; 18 shards would be even"),
        (4, 8, 8, None),
        (1, 7, 7, None),
        (7, 7, 7, None),
    ],
)
def test_uneven_ranks_are_told_with_what_would_be_even(world_size, num_shards, num_envs, text):
    assert uneven(world_size, num_shards, num_envs) == text


def test_uneven_devices_are_called_devices():
    assert uneven(3, 7, 63, "devices") == "7 shards on 3 devices: 3, 2, 2; 9 shards would be even"


@pytest.mark.parametrize(
    ("sizes", "text", "fix"),
    [
        ((10, 4), "num_shards: 10 environments can't be cut into 4 ", "num_shards 2 or 5, or num_envs 8 or 12"),
        ((12, 5), "num_shards: 12 environments can't be cut into 5 ", "num_shards 4 or 6, or num_envs 10 or 15"),
        ((8, 0), "num_shards: 8 environments can't be cut into 0 ", "num_shards 1 or 2"),
        ((8, 8, 9), "nproc: 9 ranks can't share 8 shards, ", "use at most 8, or for a new run --num-shards 9 or more"),
        ((8, 8, 0), "nproc: 0 ranks can't share 8 shards, ", "use at most 8"),
        ((8, 1, 2), "nproc: 2 ranks can't share 1 shard, ", "use at most 1, or for a new run --num-shards 2 or more"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_in_one_line(sizes, text, fix):
    with pytest.raises(ValueError) as caught:
        ShardPlan(*sizes)
    assert str(caught.value).startswith(text)
    assert fix in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ranks_and_devices_are_named_by_the_option_that_makes_them():
    with pytest.raises(ValueError, match=r"^devices: 9 devices can't share 8 shards"):
        check_world_size(9, 8, "devices", "devices")


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 100))
def test_what_the_checks_let_pass_fits(num_envs, num_shards, world_size):
    def passes(check, *arguments):
        try:
            check(*arguments)
        except ValueError:
            return False
        return True

    assert passes(check_shards, num_envs, num_shards) == (num_envs % num_shards == 0)
    assert passes(check_world_size, world_size, num_shards) == (world_size <= num_shards)


def test_the_nearest_divisors_of_a_number():
    assert nearest_divisors(12, 5) == "4 or 6"
    assert nearest_divisors(8, 3) == "2 or 4"
    assert nearest_divisors(1, 7) == "1"
    assert nearest_divisors(9, 4) == "1 or 3"
    assert nearest_divisors(65_536 * 2**24, 5_000_000_000) == "2147483648 or 4294967296"  # not by hours of looking


# ---- keyed random numbers


def draw(seed, purpose, *key):
    generator = keyed_generator(seed, purpose, *key)
    return np.concatenate([generator.standard_normal(3), generator.integers(0, 2**60, 3)])


@given(st.integers(0, 2**63), PURPOSES, KEYS)
def test_the_same_key_gives_the_same_numbers_whatever_was_drawn_before(seed, purpose, key):
    first, first_seed = draw(seed, purpose, *key), keyed_seed(seed, purpose, *key)
    keyed_generator(seed, purpose, *key).random(5)
    keyed_generator(seed + 1, purpose, *key).random(1000)
    np.random.default_rng(0).random(3)
    np.testing.assert_array_equal(draw(seed, purpose, *key), first)
    assert keyed_seed(seed, purpose, *key) == first_seed


@given(st.tuples(st.integers(0, 5), PURPOSES, KEYS), st.tuples(st.integers(0, 5), PURPOSES, KEYS))
def test_another_seed_purpose_or_key_gives_other_numbers(a, b):
    same = a == b
    assert np.array_equal(draw(a[0], a[1], *a[2]), draw(b[0], b[1], *b[2])) == same
    assert (keyed_seed(a[0], a[1], *a[2]) == keyed_seed(b[0], b[1], *b[2])) == same


def test_neighbouring_keys_are_unrelated():
    """Seed and key don't add up: (seed 1, env 2), (seed 2, env 1) and (seed 0, env 12) are three streams."""
    keys = [(seed, *key) for seed in range(4) for key in [(), *((e,) for e in range(13)), (0, 0), (0, 1), (1, 0)]]
    first = [float(draw(seed, "reset", *key)[0]) for seed, *key in keys]
    assert len(set(first)) == len(keys)
    assert len({keyed_seed(seed, "reset", *key) for seed, *key in keys}) == len(keys)
    normals = np.stack([keyed_generator(0, "action", i).standard_normal(64) for i in range(64)])
    correlations = np.asarray(np.corrcoef(normals))[np.triu_indices(64, 1)]
    assert np.abs(correlations).max() < 0.6  # 2,016 pairs of 64 samples: 4.8 standard deviations


@given(st.integers(0, 2**63), PURPOSES, KEYS)
def test_keyed_seeds_are_31_bit(seed, purpose, key):
    assert 0 <= keyed_seed(seed, purpose, *key) < 2**31


def test_numpy_integers_are_keys_like_any_other():
    key: Any = np.int64(3)
    np.testing.assert_array_equal(draw(0, "reset", key), draw(0, "reset", 3))
    assert keyed_seed(0, "reset", key) == keyed_seed(0, "reset", 3)


def test_the_derivation_of_keys_stays_as_it_is():
    """Runs are functions of these numbers: whoever changes them changes every run, and should know."""
    assert keyed_seed(0, "reset", 0, 0) == 29944790
    assert keyed_generator(0, "action", 0, 0).integers(0, 2**63) == 7626435003809735367

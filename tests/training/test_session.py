"""What sessions of both engines do on the host."""

import json

import numpy as np
import pytest
from fake_session import FakeSession

from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.envs.describe import describe
from lockstep.runs.checkpoint import pack
from lockstep.training.session import checkpoint_facts, counters, gather_shards, load_facts, make_eval_envs

CONFIG = Config.model_validate({"env": {"id": "lockstep/CartPole-v1"}, "num_envs": 8, "num_shards": 4})


def session(iteration=0, restarted=(), before=()):
    out = FakeSession()
    for _ in range(iteration):
        out.advance()
    out.restarted, out.restarted_before = list(restarted), list(before)
    return out


def test_a_session_goes_on_where_the_one_before_stopped():
    before = session(3, [4], [1])
    facts = json.loads(json.dumps(checkpoint_facts(before, {"wall_time": 7.0, "score": 0.5})))
    resumed = session()
    load_facts(resumed, facts)
    assert counters(resumed) == counters(before)
    assert counters(resumed) != counters(session())
    assert (resumed.wall_time_before, resumed.restarted_before, resumed.restarted) == (7.0, [1, 4], [])
    assert facts["score"] == 0.5


@pytest.mark.parametrize("wall_time", [10**400, None, "long"], ids=["huge", "none", "text"])
def test_seconds_that_no_clock_has_counted_are_none(wall_time):
    facts = json.loads(json.dumps(checkpoint_facts(session(3), {"wall_time": wall_time})))
    resumed = session()
    load_facts(resumed, facts)
    assert resumed.wall_time_before == 0.0


def test_a_checkpoint_without_counters_is_refused():
    with pytest.raises(KeyError, match="iteration"):
        load_facts(session(), {})


def test_shards_of_all_ranks_come_together():
    ours, theirs = {0: {"a": np.arange(2)}}, {1: {"a": np.arange(3), "b": np.ones(1)}}
    other = pack({f"{shard}/{name}": x for shard, arrays in theirs.items() for name, x in arrays.items()})
    gathered = gather_shards(ours, lambda content: [content, other])
    assert {s: {n: x.tolist() for n, x in arrays.items()} for s, arrays in gathered.items()} == {
        0: {"a": [0, 1]},
        1: {"a": [0, 1, 2], "b": [1]},
    }
    assert gather_shards(ours, lambda content: [content]).keys() == {0}


@pytest.mark.parametrize(("episodes", "each"), [(4, 1), (5, 2), (8, 2)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_shard_evaluates_as_many_episodes_the_same_ones_for_every_world_size(episodes, each, world_size):
    config = CONFIG.model_copy(update={"eval": CONFIG.eval.model_copy(update={"episodes": episodes})})
    ids = []
    for rank in range(world_size):
        envs = make_eval_envs(config, describe(CONFIG.env), ShardPlan(8, 4, world_size, rank))
        ids += list(envs.env_ids)
        envs.close()
    assert ids == list(range(4 * each))

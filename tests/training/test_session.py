"""What sessions of both engines do on the host."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.config.run import Config
from lockstep.core.episodes import RecentEpisodes
from lockstep.core.shards import ShardPlan
from lockstep.envs.description import describe
from lockstep.runs.checkpoint import pack
from lockstep.training.session import checkpoint_facts, gather_shards, load_facts, make_eval_envs

CONFIG = Config.model_validate({"env": {"id": "lockstep/CartPole-v1"}, "num_envs": 8, "num_shards": 4})


def counted(iteration=0) -> Any:
    recent = RecentEpisodes()
    recent.extend_newest([(1.5, 5, 1)] * iteration, iteration)
    return SimpleNamespace(
        iteration=iteration, global_step=8 * iteration, optimizer_steps=iteration, learning_rate=1e-3, recent=recent
    )


def session(restarted=(), before=()) -> Any:
    return SimpleNamespace(
        description=describe(CONFIG.env),
        restarted=list(restarted),
        restarted_before=list(before),
        wall_time_before=0.0,
    )


def test_a_session_goes_on_where_the_one_before_stopped():
    facts = json.loads(json.dumps(checkpoint_facts(session([4], [1]), counted(3), wall_time=7.0, score=0.5)))
    resumed, counters = session(), counted()
    load_facts(resumed, counters, facts)
    assert counters == counted(3)
    assert (resumed.wall_time_before, resumed.restarted_before, resumed.restarted) == (7.0, [1, 4], [])
    assert facts["score"] == 0.5


def test_a_checkpoint_without_counters_is_refused():
    with pytest.raises(KeyError, match="iteration"):
        load_facts(session(), counted(), {})


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

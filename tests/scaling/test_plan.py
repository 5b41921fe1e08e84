"""What a sweep measures, at which sizes, in which order, and when two sweeps are one."""

from dataclasses import replace
from typing import Any

import pytest

from lockstep.config.run import Config
from lockstep.scaling import plan as module
from lockstep.scaling.plan import Plan, identities_apart, parse_world_sizes, source_digest


def plan_of(mode: Any = "weak", world_sizes=(1, 2), config=None, **changes):
    values = {"num_envs": 8, "num_steps": 16, "ppo": {"num_minibatches": 2}} | (config or {})
    return Plan(Config.model_validate(values), mode, world_sizes, **changes)


def sizes(plan, world_size):
    config = plan.sized(world_size)
    return config.num_envs, config.num_shards


def test_weak_every_rank_has_the_same_shards_of_the_same_shape():
    plan = plan_of("weak", config={"num_envs": 24})
    assert [sizes(plan, n) for n in (1, 2, 3, 4, 16)] == [(24, 8), (48, 16), (72, 24), (96, 32), (384, 128)]


@pytest.mark.parametrize(
    ("world_sizes", "repeats", "iters", "words"),
    [
        ((1,), 1, 1, "strong scaling on 1 rank · once, 5 + 1 iteration each"),
        ((2,), 3, 30, "strong scaling on 2 ranks · 3 repeats, 5 + 30 iterations each"),
        ((1, 2), 3, 30, "strong scaling on 1, 2 ranks · 3 repeats, 5 + 30 iterations each"),
    ],
)
def test_a_sweep_in_words_counts_what_there_is(world_sizes, repeats, iters, words):
    assert str(plan_of("strong", world_sizes, repeats=repeats, iters=iters)) == f"CartPole-v1 · {words}"


def test_weak_takes_shards_as_those_of_one_rank():
    plan = plan_of("weak", config={"num_envs": 8, "num_shards": 2})
    assert [sizes(plan, n) for n in (1, 2, 4)] == [(8, 2), (16, 4), (32, 8)]


def test_weak_with_environments_per_rank_is_the_run_of_train():
    plan = plan_of("weak", config={"num_envs": None, "num_envs_per_rank": 6})
    assert [sizes(plan, n) for n in (1, 2, 4)] == [(6, 1), (12, 2), (24, 4)]


def test_strong_is_one_config_at_every_size():
    plan = plan_of("strong", (1, 2, 8))
    assert len({plan.sized(n).model_dump_json() for n in (1, 2, 8)}) == 1
    assert sizes(plan, 8) == (8, 8)


def test_what_is_no_part_of_an_iteration_is_off():
    config = {"eval": {"interval": 2}, "log": {"jsonl": "x.jsonl"}, "proof": {"interval": 3, "trace": True}}
    config["checkpoint"] = {"seconds": 0.02}
    sized = plan_of(config=config).sized(2)
    assert (sized.eval.interval, sized.checkpoint.interval, sized.log.tensorboard, sized.log.jsonl) == (
        0,
        0,
        False,
        None,
    )
    assert (sized.log.timing, sized.proof.trace, sized.proof.interval) == (True, False, 3)
    assert sized.checkpoint.seconds is None


def test_steps_of_a_run():
    assert plan_of("weak", warmup_iters=2, iters=3).steps(4) == 5 * 32 * 16
    assert plan_of("strong", warmup_iters=2, iters=3).steps(4) == 5 * 8 * 16


def test_repeats_are_interleaved_and_every_second_runs_backwards():
    names = [job.name for job in plan_of(world_sizes=(1, 2), repeats=2).jobs()]
    once = ["ranks_1_repeat_{}", "copies_2_repeat_{}", "ranks_2_repeat_{}"]
    assert names == [n.format(1) for n in once] + [n.format(2) for n in reversed(once)]


def test_without_a_ceiling_only_runs_are_measured():
    assert {job.kind for job in plan_of(ceiling=False).jobs()} == {"run"}
    assert [str(job) for job in plan_of(world_sizes=(2,), repeats=1).jobs()] == [
        "2 independent runs, repeat 1",
        "2 ranks, repeat 1",
    ]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (plan_of("strong", (1, 9)), "num_envs: 8 environments make 8 shards by default and 9 ranks need one each"),
        (
            plan_of("strong", (1, 9), {"num_shards": 8}),
            "nproc: 9 ranks can't share 8 shards, at least one each; use at",
        ),
        (plan_of("wide"), "mode: 'wide' is none of weak, strong"),
        (plan_of(iters=0), "iters: 0 is below 1"),
        (plan_of(repeats=0), "repeats: 0 is below 1"),
        (plan_of(warmup_iters=-1), "warmup-iters: -1 is below 0"),
        (plan_of("strong", config={"num_envs": None, "num_envs_per_rank": 4}), "num_envs_per_rank: 4 grows with"),
        (plan_of("strong", config={"num_envs": None, "num_envs_per_rank": "auto"}), "or a number and --mode weak$"),
        (plan_of(config={"num_envs": 9, "num_shards": 2}), "num_shards: 9 environments can't be cut"),
    ],
)
def test_what_cannot_be_measured_is_one_line(plan, said):
    with pytest.raises(ValueError, match=said) as error:
        plan.check()
    assert "\n" not in str(error.value)


def test_what_can_be_measured_passes():
    for plan in (
        plan_of("weak", (1, 2, 3, 64)),
        plan_of("strong", (2, 3, 4, 8)),
        plan_of(warmup_iters=0, iters=1, repeats=1),
    ):
        plan.check()


@pytest.mark.parametrize(("text", "expected"), [("1", (1,)), ("4,1,2", (1, 2, 4)), (" 2, 8 ", (2, 8))])
def test_world_sizes_are_sorted(text, expected):
    assert parse_world_sizes(text) == expected


@pytest.mark.parametrize("text", ["", "0,1", "1,2,2", "two", "1;2", "-1", "1,,2", "1.5"])
def test_what_is_no_list_of_world_sizes(text):
    with pytest.raises(ValueError, match=r"world-sizes: .* is not a list of different numbers of ranks"):
        parse_world_sizes(text)


def changed_keys(a, b):
    return [key for key, _, _ in identities_apart(a.identity(), b.identity())]


def test_the_same_measurement_has_the_same_identity_whatever_is_asked_of_it():
    plan = plan_of(world_sizes=(1, 2), repeats=3)
    assert changed_keys(plan, replace(plan, world_sizes=(2, 4), repeats=9, ceiling=False)) == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"config": {"num_steps": 32}}, "num_steps"),
        ({"config": {"ppo": {"num_minibatches": 4}}}, "ppo.num_minibatches"),
        ({"config": {"env": {"id": "Acrobot-v1"}}}, "env.id"),
        ({"config": {"seed": 1}}, "seed"),
        ({"mode": "strong"}, "mode"),
        ({"iters": 31}, "iters"),
        ({"warmup_iters": 6}, "warmup-iters"),
    ],
)
def test_another_measurement_has_another_identity(changes, key):
    assert changed_keys(plan_of(), plan_of(**changes)) == [key]


def test_other_code_is_another_measurement(monkeypatch):
    before = plan_of().identity()
    monkeypatch.setattr(module, "source_digest", lambda: "edited")
    assert [key for key, _, _ in identities_apart(before, plan_of().identity())] == ["lockstep's source"]


def test_code_in_c_is_our_code_too(monkeypatch, tmp_path):
    package = tmp_path / "lockstep"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(module.lockstep, "__file__", str(package / "__init__.py"))
    digests = [source_digest()]
    for text in ("int a;", "int b;"):
        (package / "meeting.c").write_text(text)
        digests.append(source_digest())
    assert len(set(digests)) == 3

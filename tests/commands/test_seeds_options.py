"""Several seeds in one run: what doesn't go together with them is one line, before anything starts."""

from pathlib import Path

import pytest
from made_runs import make_run, summary_of

from lockstep.commands.next_steps import next_steps
from lockstep.config.command_line import read_request
from lockstep.config.run import Config, RunOptions
from lockstep.core.topology import Topology
from lockstep.envs import describe as describing
from lockstep.launch.one_program import why_not_one_program
from lockstep.launch.request import request_of
from lockstep.launch.seeds.checks import check_resumed_seeds, check_seeds
from lockstep.launch.start import start_run
from lockstep.runs.finding import find_run
from lockstep.runs.making import default_name

JAX_INSIDE = {"env": "lockstep/CartPole-v1", "engine": "jax"}


def refused(folder, *words):
    with pytest.raises(ValueError) as caught:
        start_run(request_of([*words, "--runs-dir", str(folder / "out"), "--quiet"]))
    assert not (folder / "out").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "start", "instead"),
    [
        (("--seeds", "0-4", "--num-seeds", "2"), "command line: num_seeds: 2 with seeds 0-4", "leave one of them out"),
        (("--seeds", "0-4", "--seed", "2"), "seed: 2 with seeds 0-4", "leave seed out"),
        (("--seeds", "0,3,0"), "command line: seeds: 0,3,0: one stands there twice", ""),
        (("--seeds", "4-0"), "command line: seeds: 4-0: from the lower to the higher one", "at most 10,000"),
        (("--seeds", "0-10000"), "command line: seeds: 0-10000: from the lower", "at most 10,000"),
        (("--seeds", "five"), "command line: seeds: 'five': numbers are wanted", "0-4, or 0,3,7"),
        (("--seeds", "1", "--log.jsonl", "x.jsonl"), f"log.jsonl: {Path('x.jsonl').absolute()}", "leave it out"),
        (
            ("--seeds-at-once", "3", "--total-steps", "128"),
            "seeds_at_once: 3, but there is one seed",
            "give --seeds 0-4",
        ),
        (("--seeds", "1", "--devices", "2"), "devices: 2 is for engine jax", "add --engine jax"),
        (("--seeds", "1", "--num-envs", "8", "--num-shards", "3"), "num_shards: 8 environments", "2 or 4"),
    ],
)
def test_what_does_not_go_with_seeds_is_refused(tmp_path, words, start, instead):
    text = refused(tmp_path, "CartPole-v1", *words)
    assert text.startswith(start)
    assert instead in text


def test_a_seed_may_be_as_large_as_seed_may_be():
    assert RunOptions(seeds=f"{2**62},{2**100}").seeds_from(0) == [2**62, 2**100]


def test_a_group_is_resumed_with_the_seeds_it_has(tmp_path):
    for name in ("seed_2", "seed_10"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(Config().model_dump_json())
    assert check_resumed_seeds(tmp_path, [10, 2]) == [2, 10]
    with pytest.raises(ValueError, match=r"^seeds: 2 with --resume .*, which has seeds 2, 10; leave seeds out$"):
        check_resumed_seeds(tmp_path, [2])
    with pytest.raises(ValueError, match=r"^seeds: 2, 10 with --resume .*seed_2, which is one run; leave seeds out$"):
        check_resumed_seeds(tmp_path / "seed_2", [2, 10])


def test_a_run_that_has_trained_or_has_another_seed_is_no_group_that_was_killed(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(Config(seed=3).model_dump_json())
    with pytest.raises(ValueError, match=r"^seeds: 2, 3 with --resume .*run, which is one run; leave seeds out$"):
        check_resumed_seeds(run, [2, 3])
    (run / "metrics.jsonl").write_text('{"iteration": 1, "global_step": 8}\n')
    with pytest.raises(ValueError, match=r"^seeds: 3, 4 with --resume .*run, which is one run; leave seeds out$"):
        check_resumed_seeds(run, [3, 4])
    assert not list(run.glob("seed_*"))


def test_a_launcher_of_ranks_starts_one_run():
    with pytest.raises(ValueError, match=r"^num_seeds: 2, but another launcher started this rank"):
        check_seeds(request_of(["CartPole-v1", "--num-seeds", "2"]), Topology(rank=0, world_size=2, launched=True))


@pytest.mark.parametrize(
    ("config", "options", "why"),
    [
        ({}, {"stop_at_step": 5, "max_hours": 1.0}, None),
        ({"log": {"timing": True}}, {}, None),
        ({"engine": "torch"}, {}, "engine torch trains one agent a process"),
        ({"env": "InvertedPendulum-v5"}, {}, "InvertedPendulum-v5 is stepped on the host"),
        ({"env": {"id": "CartPole-v1", "backend": "gymnasium"}}, {}, "CartPole-v1 is stepped on the host"),
        ({}, {"nproc": 2}, "with nproc each seed is a program of its own"),
        ({}, {"max_restarts": 3}, "with max_restarts each seed is a program of its own"),
        ({"fsdp": True, "reduction": "fast"}, {}, "with fsdp each seed is a program of its own"),
        ({"eval": {"interval": 5}}, {}, "with eval.interval each seed is a program of its own"),
        ({"proof": {"trace": True}}, {}, "with proof.trace each seed is a program of its own"),
        (
            {"checkpoint": {"mirror": "s3://bucket/runs"}},
            {},
            "with checkpoint.mirror each seed is a program of its own",
        ),
        ({"log": {"mlflow": True}}, {}, "with log.mlflow each seed is a program of its own"),
    ],
)
def test_seeds_share_a_program_where_nothing_keeps_them_apart(config, options, why):
    asked = RunOptions(seeds="0-2", **options)
    assert why_not_one_program(asked, Config.model_validate(JAX_INSIDE | config), options.get("nproc", 1)) == why


@pytest.mark.parametrize(
    ("given", "expected"),
    [("0-4", [0, 1, 2, 3, 4]), ("7", [7]), (7, [7]), ("0,3-5", [0, 3, 4, 5]), ([9, 1], [9, 1]), (None, [6])],
)
def test_seeds_in_any_form(given, expected):
    options = RunOptions.model_validate({} if given is None else {"seeds": given})
    assert (options.seeds_from(6), options.is_group) == (expected, given is not None)
    assert RunOptions(num_seeds=3).seeds_from(6) == [6, 7, 8]


def test_a_run_of_seeds_is_no_single_run(tmp_path):
    config = Config().model_dump_json()
    for name in ("runs/all/seed_10", "runs/all/seed_9", "runs/one"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "runs/all/config.json").write_text(config)
    with pytest.raises(ValueError, match=r"^run: .*all holds a run for each of 2 seeds; .*e\.g\. .*all/seed_9$"):
        find_run("all", str(tmp_path / "runs"))
    assert find_run("all/seed_10", str(tmp_path / "runs"))[1] == "latest"
    assert find_run("one", str(tmp_path / "runs"))[0] == tmp_path / "runs/one"


def test_the_default_name_names_all_seeds():
    config = Config(seed=4)
    assert default_name(config, [4, 5, 6]).startswith("CartPole-v1-seeds4-6-")
    assert default_name(config).startswith("CartPole-v1-seed4-")


def test_the_end_of_a_run_of_seeds_in_words(tmp_path):
    summary = {
        "status": "stopped at step",
        "global_step": 1000,
        "wall_time": 2.0,
        "steps_per_second": 1000.0,
        "final_return": 12.5,
        "final_return_interval": [10.0, 14.0],
        "environment": "CartPole-v1",
        "seeds": [{"directory": "seed_0", "global_step": 1000}, {"directory": "seed_1", "global_step": 1000}],
    }
    text = next_steps(tmp_path, summary)
    covers = "(with 2 seeds it covers about 50 %)"
    assert f"interquartile mean over 2 seeds of the return 12.50, 95 % interval 10.00 … 14.00 {covers} after " in text
    small = next_steps(tmp_path, summary | {"final_return": 0.74, "final_return_interval": [0.71, 0.78]})
    assert "of the return 0.74, 95 % interval 0.71 … 0.78 (with 2 seeds it covers" in small
    assert f"lockstep train --resume {tmp_path}\n" in text
    assert f"run: {tmp_path}   curves: {tmp_path}/curves.csv\n" in text
    assert text.endswith(f"lockstep report {tmp_path}")
    (tmp_path / "curves.png").touch()
    assert f"curves: {tmp_path}/curves.png\n" in next_steps(tmp_path, summary)
    alone = {**summary, "seeds": summary["seeds"][:1], "final_return": 0.74, "final_return_interval": None}
    assert next_steps(tmp_path, alone).startswith("return of the only seed 0.74 after 1,000 steps, 2.0 s")
    (tmp_path / "group.json").write_text('{"seeds": [0, 1, 2, 3, 4]}')
    first = next_steps(tmp_path, {**alone, "status": "stopped at time limit"})
    assert first.startswith("return of seed_0 (1 of 5 seeds) 0.74 after 1,000 steps, 2.0 s")
    unknown = next_steps(
        tmp_path, summary | {"status": "finished", "final_return": None, "final_return_interval": None}
    )
    assert unknown.startswith("some seed has finished no episode yet")
    assert "--resume" not in unknown
    assert "after 1,000 steps of each, 2.0 s" in text
    summary["seeds"][1]["global_step"] = 4000
    assert "after 1,000 steps, which each has taken (the furthest 4,000), 2.0 s" in next_steps(tmp_path, summary)
    handed = next_steps(tmp_path, summary, Config.model_validate({"env": {"id": "python:Reach2D"}}))
    assert f"go on:     lockstep.load_run({str(tmp_path)!r}, env=Reach2D) has resume() and seeds" in handed
    assert "lockstep eval" not in handed


@pytest.mark.parametrize(
    ("env", "drawn"),
    [
        ({"id": "CartPole-v1"}, True),
        ({"id": "CartPole-v1", "backend": "envpool"}, False),
        ({"id": "simulators:isaac", "backend": "tensor"}, False),
        ({"id": "lockstep/CartPole-v1", "backend": "tensor"}, True),
    ],
)
def test_a_video_is_offered_where_play_would_take_the_run(tmp_path, env, drawn):
    text = next_steps(tmp_path, summary_of(episodes=3), Config.model_validate({"env": env}))
    assert (f"lockstep play {tmp_path} --video out.mp4" in text) == drawn
    assert f"lockstep eval {tmp_path} --episodes 20" in text


@pytest.mark.parametrize(
    ("env_id", "drawn"),
    [("undrawable:UndrawableCartPole", True), ("straying:Straying", False), ("small_worlds:Lantern", False)],
)
def test_a_video_is_offered_of_ones_own_environment_if_its_metadata_lists_pictures(
    tmp_path, monkeypatch, env_id, drawn
):
    monkeypatch.setattr(describing, "_drawable", {})
    config = Config.model_validate({"env": {"id": env_id}})
    assert "lockstep play" not in next_steps(tmp_path, summary_of(episodes=3), config)  # nobody has looked at it
    describing.describe(config.env)
    assert ("lockstep play" in next_steps(tmp_path, summary_of(episodes=3), config)) == drawn


@pytest.mark.parametrize(
    ("episodes", "said"), [(250, "the last 100 episodes"), (3, "all 3 episodes"), (1, "the only episode")]
)
def test_the_end_of_a_run_says_of_how_many_episodes_its_return_is(tmp_path, episodes, said):
    text = next_steps(tmp_path, summary_of(episodes=episodes, environment="CartPole-v1"))
    assert text.startswith(f"mean return of {said} 40.50 after 10,240 steps")


def test_seeds_of_the_command_line_take_the_place_of_a_files_seed(tmp_path):
    file = make_run(tmp_path / "run", seed=7) / "config.json"
    assert "seed" not in read_request([str(file), "--seeds", "0-4"]).overrides
    assert read_request([str(file)]).overrides["seed"] == 7


def test_the_command_line_replaces_a_files_seeds(tmp_path):
    (tmp_path / "a.yaml").write_text("env: CartPole-v1\nnum_seeds: 3\n")
    (tmp_path / "b.yaml").write_text("env: CartPole-v1\nseeds: 0-4\n")
    options = read_request([str(tmp_path / "a.yaml"), "--seeds", "0-1"]).options
    assert (options.seeds, options.num_seeds) == ("0-1", 1)
    options = read_request([str(tmp_path / "b.yaml"), "--num-seeds", "2"]).options
    assert (options.seeds, options.num_seeds) == (None, 2)

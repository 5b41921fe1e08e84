"""Several seeds in one run: what doesn't go together with them is one line, before anything starts."""

from pathlib import Path

import pytest

from lockstep.commands.next_steps import next_steps
from lockstep.config.run import Config, RunOptions
from lockstep.launch.defaults import request_of
from lockstep.launch.seeds import check_seeds
from lockstep.launch.start import start_run
from lockstep.runs.directory import default_name, find_run

SEEDS = ("--engine", "jax", "--num-seeds", "3")


def refused(folder, *words):
    with pytest.raises(ValueError) as caught:
        start_run(request_of([*words, "--runs-dir", str(folder / "out"), "--quiet"]))
    assert not (folder / "out").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "start", "instead"),
    [
        (("--nproc", "2"), "num_seeds: 3 with 2 processes", "start a run for each --seed"),
        (("--fsdp", "--reduction", "fast"), "fsdp: true with num_seeds 3", "leave it out"),
        (("--eval.interval", "5"), "eval.interval: 5 with num_seeds 3", "lockstep eval RUN/seed_N"),
        (("--proof.trace",), "proof.trace: true with num_seeds 3", "start a run for each --seed"),
        (("--log.jsonl", "x.jsonl"), f"log.jsonl: {Path('x.jsonl').absolute()} with num_seeds 3", "leave it out"),
        (("--log.mlflow",), "log.mlflow: true with num_seeds 3", "start a run for each --seed"),
        (("--env.backend", "gymnasium"), "num_seeds: 3: CartPole-v1 is stepped on the host", "for each --seed"),
    ],
)
def test_what_does_not_go_with_seeds_is_refused(tmp_path, words, start, instead):
    text = refused(tmp_path, "CartPole-v1", *SEEDS, *words)
    assert text.startswith(start)
    assert instead in text


def test_host_environments_and_the_other_engine_are_refused(tmp_path):
    assert "InvertedPendulum-v5 is stepped on the host" in refused(tmp_path, "InvertedPendulum-v5", *SEEDS)
    assert "add --engine jax" in refused(tmp_path, "CartPole-v1", "--num-seeds", "3")


def test_resuming_is_refused():
    config = Config.model_validate({"env": "lockstep/CartPole-v1", "engine": "jax"})
    with pytest.raises(ValueError, match=r"^num_seeds: 2 with --resume x; .* --resume RUN/seed_N$"):
        check_seeds(RunOptions(num_seeds=2, resume="x"), config, 1)


def test_what_goes_together_is_left_alone():
    config = Config.model_validate({"env": "lockstep/CartPole-v1", "engine": "jax", "log": {"timing": True}})
    check_seeds(RunOptions(num_seeds=2, stop_at_step=5, max_hours=1.0), config, 1)
    alone = config.model_copy(update={"eval": config.eval.model_copy(update={"interval": 5})})
    check_seeds(RunOptions(resume="x"), alone, 4)


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
    assert default_name(config, 3).startswith("CartPole-v1-seeds4-6-")
    assert default_name(config).startswith("CartPole-v1-seed4-")


def test_the_end_of_a_run_of_seeds_in_words(tmp_path):
    summary = {
        "status": "stopped at step",
        "global_step": 1000,
        "wall_time": 2.0,
        "steps_per_second": 1000.0,
        "final_return": 12.5,
        "final_return_interval": [10.0, 14.0],
        "seeds": [{"directory": "seed_0"}, {"directory": "seed_1"}],
    }
    text = next_steps(tmp_path, summary)
    assert "interquartile mean over 2 seeds of the return 12.5 (95 % interval 10.0 … 14.0)" in text
    assert f"lockstep train --resume {tmp_path / 'seed_0'}" in text
    unknown = next_steps(
        tmp_path, summary | {"status": "finished", "final_return": None, "final_return_interval": None}
    )
    assert unknown.startswith("some seed has finished no episode yet")
    assert "--resume" not in unknown

"""Several seeds in one program: each is its own single run's agent, with a run directory of its own."""

import json
import shutil
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from command_line import SMALL, error_line, lockstep, trained
from safetensors.numpy import load_file

from lockstep.config.checks import resolve
from lockstep.config.run import Config, RunOptions
from lockstep.core.topology import Topology
from lockstep.jax_engine.seeds.train import SeedsTrainer, train
from lockstep.launch.request import request_of
from lockstep.runs.curves import METRIC, curve_of
from lockstep.runs.directory import RunDirectory
from lockstep.runs.finding import seeds_in
from lockstep.runs.groups import seeds_of
from lockstep.runs.stored import stored_config

pytestmark = pytest.mark.exact

__all__ = ["trained"]

BASE = ("CartPole-v1", *SMALL, "--engine", "jax", "--checkpoint.interval", 1, "--checkpoint.keep-last", 9)
BASE = (*BASE, "--normalize.observations", "--normalize.returns")
SEEDS = (*BASE, "--seed", 5, "--num-seeds", 2, "--stop-at-step", 512)
STEPS = 128


def arrays(path, step):
    files = ("policy", "optimizer", "normalizers")
    found = [load_file(path / f"checkpoints/step_{step}/{name}.safetensors") for name in files]
    return {f"{file}/{name}": x for file, part in zip(files, found, strict=True) for name, x in part.items()}


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name].astype(np.float64) - other[name]).max()) for name in one)


def metrics(path):
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


@pytest.fixture(scope="module")
def exact(trained):
    return trained(*SEEDS, "--devices", 1)


@pytest.fixture(scope="module")
def own(trained):
    """The second seed's single run, on another number of devices and an iteration longer."""
    return trained(*BASE, "--seed", 6, "--simulate-devices", 2, "--stop-at-step", 640)


def test_exactly_reduced_each_seed_has_the_bytes_of_its_own_run(exact, own):
    seed = exact.path / "seed_6"
    for step in (STEPS, 4 * STEPS):
        assert largest_difference(arrays(seed, step), arrays(own.path, step)) == 0
        for shard in range(8):
            file = f"checkpoints/step_{step}/envs/shard_{shard}.safetensors"
            one, other = load_file(seed / file), load_file(own.path / file)
            assert all(np.array_equal(one[name], other[name]) for name in one)
    assert metrics(seed) == own.metrics[:4]
    summary = json.loads((seed / "summary.json").read_text())
    assert (summary["seed"], summary["global_step"]) == (6, 512)


def test_the_command_of_each_seed_trains_it_by_itself(exact):
    for seed in (5, 6):
        path = exact.path / f"seed_{seed}"
        words = json.loads((path / "summary.json").read_text())["command"]
        left = [str(word) for word in (*BASE, "--stop-at-step", 512, "--devices", 1, "--seed", seed)]
        assert words == ["lockstep", "train", *left]
        request = request_of(words[2:])
        assert not request.options.is_group
        assert resolve(request.config) == stored_config(path)


@pytest.mark.long
def test_each_seed_of_a_users_network_begins_with_its_own_parameters(trained):
    words = (*BASE, "--network.custom", "equinox_nets:Tiny", "--stop-at-step", STEPS, "--devices", 1)
    together, alone = trained(*words, "--seed", 5, "--num-seeds", 2), trained(*words, "--seed", 6)
    first, second = together.summary["seeds"]
    assert second["params_sha256"] == alone.summary["params_sha256"]
    assert first["params_sha256"] != second["params_sha256"]


def test_a_network_that_draws_more_than_parameters_is_refused(tmp_path):
    words = (*BASE, "--network.custom", "equinox_nets:RandomSigns", "--num-seeds", 2, "--quiet")
    ended = lockstep("train", *words, cwd=tmp_path)
    assert "equinox_nets:RandomSigns makes more than parameters of its key" in error_line(ended)


def test_the_seeds_of_a_group_are_there_before_programs_are_compiled(tmp_path, monkeypatch):
    """So that a group which is killed meanwhile can go on."""
    config, seen = Config(seed=5), []

    def open_sessions(*_):
        seen.extend((seed.name, stored_config(seed).seed) for seed in seeds_in(tmp_path))
        seen.append(seeds_of(tmp_path))
        raise ValueError("it can't be had here")

    monkeypatch.setattr("lockstep.jax_engine.seeds.train.open_sessions", open_sessions)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    topology = Topology(rank=0, world_size=1)
    with pytest.raises(ValueError, match="can't be had"):
        train(config, RunDirectory(tmp_path), topology, RunOptions(num_seeds=2))
    assert seen == [("seed_5", 5), ("seed_6", 6), [5, 6]]
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]  # the name is free again


def test_seeds_differ(exact):
    first, second = (arrays(exact.path / f"seed_{seed}", STEPS) for seed in (5, 6))
    assert largest_difference(first, second) > 0.1


@pytest.mark.long
def test_an_iteration_of_a_batch_of_seeds_is_that_of_single_runs(trained, exact):
    batched = trained(*SEEDS, "--reduction", "fast")
    for seed in (5, 6):
        one, other = arrays(exact.path / f"seed_{seed}", STEPS), arrays(batched.path / f"seed_{seed}", STEPS)
        assert largest_difference(one, other) < 1e-5
    after = [arrays(run.path / "seed_5", 4 * STEPS) for run in (exact, batched)]
    assert largest_difference(*after) < 0.05
    before = arrays(exact.path / "seed_5", 2 * STEPS)
    assert largest_difference(before, arrays(exact.path / "seed_5", STEPS)) > 1e-3  # what an iteration changes


def test_the_run_sums_up_its_seeds(exact):
    summary = exact.summary
    parts = [json.loads((exact.path / f"seed_{seed}/summary.json").read_text()) for seed in (5, 6)]
    assert summary["num_seeds"] == 2
    assert [(s["seed"], s["directory"], s["params_sha256"]) for s in summary["seeds"]] == [
        (seed, f"seed_{seed}", part["params_sha256"]) for seed, part in zip((5, 6), parts, strict=True)
    ]
    assert (summary["status"], summary["global_step"]) == ("stopped at step", 512)
    assert summary["steps_per_second"] == pytest.approx(2 * 512 / summary["wall_time"])
    curve = curve_of([metrics(exact.path / f"seed_{seed}") for seed in (5, 6)])
    assert summary["final_return"] == curve.iqm[-1] == np.mean([part["final_return"] for part in parts])
    assert summary["final_return_interval"] == sorted(part["final_return"] for part in parts)
    points = json.loads((exact.path / "curves.json").read_text())["points"]
    assert [point["seed_6"] for point in points] == [row[METRIC] for row in metrics(exact.path / "seed_6")]
    assert "interquartile mean over 2 seeds" in exact.ended.stdout
    assert "each seed's agent has the bytes of its own single run" in exact.ended.stdout


def test_a_seed_is_evaluated_and_the_whole_is_not(exact, tmp_path):
    ended = lockstep("eval", exact.path / "seed_6", "--episodes", 3, "--json", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["episodes"], found["environment"], found["global_step"]) == (3, "lockstep/CartPole-v1", 512)
    line = error_line(lockstep("eval", exact.path, cwd=tmp_path))
    assert "holds a run for each of 2 seeds; give one of them" in line


def test_a_seed_goes_on_as_its_own_run(exact, own, tmp_path):
    path = shutil.copytree(exact.path / "seed_6", tmp_path / "seed_6")
    ended = lockstep("train", "--resume", path, "--stop-at-step", 640, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["params_sha256"], summary["state_sha256"]) == own.agent
    assert metrics(path) == own.metrics


def test_the_progress_of_seeds_counts_whole_iterations():
    lengths, config = [], Config(num_envs=6, num_steps=16, total_steps=600)
    runner, directory = SimpleNamespace(config=config), SimpleNamespace(open_progress=lengths.append)
    SeedsTrainer(cast(Any, runner), cast(Any, [None, None]), cast(Any, directory), 0.0)
    assert lengths == [2 * 7 * 96]

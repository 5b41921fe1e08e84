"""What ``lockstep clone`` takes of a config: networks, by any of its names, and nothing that is for training alone."""

import json
from dataclasses import replace

import pytest
from commands_here import printed, refused
from made_runs import config_of, make_run

from lockstep import load_policy
from lockstep.cli import main
from lockstep.policies.cloning import CloneSettings
from lockstep.policies.recordings import read_recording, write_recording

QUICK = ("--epochs", 1, "--batch", 64)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Episodes of CartPole at random."""
    file = tmp_path_factory.mktemp("recorded") / "a.npz"
    assert main(["record", "CartPole-v1", "--policy", "random", "--episodes", "4", "--out", str(file)]) == 0
    return file


def like(config, file, folder, policy="trained"):
    """A copy of a recording that says it was played by a policy of this config."""
    recording = read_recording(file)
    out = folder / "recorded.npz"
    write_recording(out, replace(recording, facts=recording.facts | {"config": config, "policy": policy}))
    return out


def cloned(capsys, file, out, *words):
    """Clones, and returns the config of the run that came of it, which can be evaluated."""
    printed(capsys, "clone", file, "--out", out, *QUICK, *words)
    assert "by a cloned policy, 2 episodes" in printed(capsys, "eval", out, "--episodes", 2, *words)
    return json.loads((out / "config.json").read_text())


@pytest.mark.parametrize(
    ("epochs", "learnt", "passes"),
    [(None, 500, (2000, 1)), (None, 100_000, (11, 196)), (None, 1_000_000, (10, 1954)), (3, 500, (3, 1))],
)
def test_few_steps_are_learnt_in_more_passes(epochs, learnt, passes):
    """Ten passes over ten episodes of CartPole are a hundred steps of the optimiser, which imitate little."""
    assert CloneSettings(epochs).passes(learnt) == passes


def test_without_a_number_a_clone_takes_the_passes_that_few_steps_need(recorded, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.policies.cloning.STEPS", 30)
    rows = []
    for words in ((), ("--epochs", 2)):
        out = tmp_path / f"clone{len(words)}"
        printed(capsys, "clone", recorded, "--out", out, "--batch", 10_000, *words)
        rows.append([json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()])
    assert [len(each) for each in rows] == [30, 2]
    assert rows[0][-1]["clone/loss"] < rows[1][-1]["clone/loss"]


def test_networks_are_those_of_a_run_by_name_directory_or_checkpoint(recorded, capsys, tmp_path):
    run = make_run(tmp_path / "runs" / "wide", network={"hidden_sizes": [9, 3]})
    checkpoint = run / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    for number, named in enumerate(("wide", run, checkpoint)):
        words = ("--like", named, "--runs-dir", tmp_path / "runs", "--out", tmp_path / str(number), *QUICK)
        printed(capsys, "clone", recorded, *words)
        assert load_policy(tmp_path / str(number)).config.network.hidden_sizes == (9, 3)
        said = printed(capsys, "eval", named, "--runs-dir", tmp_path / "runs", "--policy", "random", "--episodes", 2)
        assert said.startswith("CartPole-v1 random, 2 episodes")


def test_networks_are_those_of_a_config_file_whose_environment_is_elsewhere(recorded, capsys, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"env": "not_installed:Robot-v0", "network": {"hidden_sizes": [7]}}))
    printed(capsys, "clone", recorded, "--like", file, "--out", tmp_path / "a", *QUICK)
    assert load_policy(tmp_path / "a").config.network.hidden_sizes == (7,)


@pytest.mark.parametrize(
    ("named", "line"),
    [
        ("widd", "env.id: no environment 'widd' is registered"),
        ("not_installed:Robot-v0", "env.id: not_installed:Robot-v0: No module named 'not_installed'"),
    ],
)
def test_what_is_neither_file_nor_run_nor_environment_is_refused(recorded, capsys, tmp_path, named, line):
    said = refused(capsys, "clone", recorded, "--like", named, "--out", tmp_path / "a")
    assert said.startswith(f"lockstep: error: {line}")
    assert not (tmp_path / "a").exists()


OF_TRAINING = {
    "remainders": {"engine": "jax", "num_steps": 10, "ppo": {"num_minibatches": 3, "drop_remainder": True}},
    "activations computed again": {"engine": "jax", "network": {"remat": True}},
    "collectives of GPUs": {"device": "cuda", "backend": "nccl"},
    "graphs": {"device": "cuda", "cuda_graphs": True},
    "shared memory": {"device": "cuda", "backend": "gloo", "collectives": "shared"},
    "sharded parameters": {"device": "cuda", "reduction": "fast", "fsdp": True},
    "a TPU": {"engine": "jax", "device": "tpu"},
    "a loss and places of one's own": {
        "ppo": {"loss": "not_installed:mine", "loss_kwargs": {"weight": 2.0}},
        "log": {"wandb": True, "jsonl": "/nowhere/a.jsonl"},
        "checkpoint": {"mirror": "s3://nowhere/runs"},
    },
}


@pytest.mark.parametrize("settings", OF_TRAINING.values(), ids=OF_TRAINING)
def test_settings_of_training_alone_stand_in_nobodys_way(recorded, capsys, tmp_path, settings):
    config = config_of(**settings)
    found = cloned(capsys, like(config, recorded, tmp_path), tmp_path / "a")
    assert (found["engine"], found["device"], found["env"]) == ("torch", "cpu", config["env"])
    assert found["ppo"]["learning_rate"] == config["ppo"]["learning_rate"]


@pytest.mark.parametrize("sizes", [{"num_envs_per_rank": "auto"}, {"num_envs": 8, "num_shards": 3}, {"fsdp": True}])
def test_sizes_that_fit_no_run_are_none_of_a_baselines(capsys, tmp_path, sizes):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"env": "CartPole-v1", "ppo": {"num_minibatches": 1000}, **sizes}))
    printed(capsys, "record", file, "--policy", "random", "--episodes", 2, "--out", tmp_path / "a.npz")
    cloned(capsys, tmp_path / "a.npz", tmp_path / "a")


def test_what_jax_alone_steps_is_cloned_for_engine_jax(capsys, tmp_path):
    env = {"id": "lockstep/GridWorld-v0", "backend": "jax", "max_episode_steps": 8, "frame_stack": 2}
    (tmp_path / "a.json").write_text(json.dumps({"env": env, "threads": 2, "normalize": {"observations": True}}))
    printed(capsys, "record", tmp_path / "a.json", "--policy", "random", "--episodes", 4, "--out", tmp_path / "a.npz")
    found = cloned(capsys, tmp_path / "a.npz", tmp_path / "a")
    assert (found["engine"], found["env"]["backend"]) == ("jax", "jax")
    assert "lockstep/GridWorld-v0: return" in printed(capsys, "play", tmp_path / "a", "--terminal")
    assert load_policy(tmp_path / "a", engine="torch").config.normalize.observations
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"env": "CartPole-v1", "network": {"custom": "users_nets:Tiny"}}))
    said = refused(capsys, "clone", tmp_path / "a.npz", "--like", own, "--out", tmp_path / "b")
    assert "network.custom: users_nets:Tiny, but a clone learns with PyTorch and plays lockstep/GridWorld-v0" in said


def test_simulators_stay_simulators(capsys, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"env": {"id": "simulators:maniskill", "backend": "tensor"}}))
    printed(capsys, "record", tmp_path / "a.json", "--policy", "random", "--episodes", 4, "--out", tmp_path / "a.npz")
    assert cloned(capsys, tmp_path / "a.npz", tmp_path / "a", "--trust")["env"]["backend"] == "tensor"


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("Frozen", {"parts": ["body", "actor"]}, "has nothing to train"),
        ("AlwaysDropping", {}, "draws random numbers outside of training too"),
        ("Precise", {}, "has a parameter scale of torch.float64"),
    ],
)
def test_networks_of_ones_own_that_training_refuses_are_refused(recorded, capsys, tmp_path, name, kwargs, said):
    file = tmp_path / "a.json"
    network = {"custom": f"users_nets:{name}", "custom_kwargs": kwargs}
    file.write_text(json.dumps({"env": "CartPole-v1", "network": network}))
    line = refused(capsys, "clone", recorded, "--like", file, "--out", tmp_path / "a", *QUICK)
    assert line.startswith(f"lockstep: error: network.custom: users_nets:{name} {said}")
    assert not (tmp_path / "a").exists()


def test_a_negative_seed_is_refused_before_anything_is_made(recorded, capsys, tmp_path):
    said = refused(capsys, "clone", recorded, "--out", tmp_path / "a", "--seed", -1, *QUICK)
    assert said == "lockstep: error: seed: -1: use 0 or more\n"
    assert not (tmp_path / "a").exists()


def test_deviations_that_could_not_learn_are_refused_as_in_training(capsys, tmp_path):
    network = {"state_dependent_std": True, "log_std_init": -6.0}
    (tmp_path / "a.json").write_text(json.dumps({"env": "Pendulum-v1", "network": network}))
    recording = tmp_path / "a.npz"
    printed(capsys, "record", "Pendulum-v1", "--policy", "random", "--episodes", 2, "--out", recording)
    line = refused(capsys, "clone", recording, "--like", tmp_path / "a.json", "--out", tmp_path / "a", *QUICK)
    assert line.startswith("lockstep: error: network.log_std_init: -6, but network.state_dependent_std keeps it within")

"""Policies of runs on accelerators, where there is none."""

import json
import shutil

import pytest
from golden_cases import JAX, SHORT

import lockstep
from lockstep.cli import main
from lockstep.config.run import Config
from lockstep.policies.evaluation import check_device


@pytest.fixture
def of_a_gpu(trained, tmp_path):
    """Copies a run, whose files say then that it was trained on a GPU."""

    def make(*words):
        path = tmp_path / "of_a_gpu"
        shutil.copytree(trained(*words).path, path)
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"device": "cuda"}))
        return path

    return make


@pytest.mark.parametrize("words", [(), JAX], ids=["torch", "jax"])
@pytest.mark.parametrize("environment", ["CartPole-v1", "lockstep/CartPole-v1"])
def test_a_policy_of_a_gpu_plays_on_the_cpu(of_a_gpu, trained, capsys, environment, words):
    if environment == "CartPole-v1" and words:
        words = (*words, "--env.backend", "gymnasium")
    run = of_a_gpu(environment, *SHORT, *words)
    found = []
    for each in (run, trained(environment, *SHORT, *words).path):
        assert main(["eval", str(each), "--episodes", "3", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["return_mean"])
    assert found[0] == found[1]
    assert main(["compare", str(run), str(run / ".." / run.name), "--episodes", "2"]) == 0
    assert lockstep.load_run(run).config.device == "cuda"


def test_simulators_that_were_stepped_on_a_gpu_need_one():
    config = Config.model_validate({"env": {"id": "simulators:Push", "backend": "tensor"}, "device": "cuda"})
    with pytest.raises(ValueError, match=r"^device: simulators:Push was stepped on cuda when .* where there is one"):
        check_device(config)
    check_device(config.model_copy(update={"device": "cpu"}))
    ours = Config.model_validate({"env": {"id": "lockstep/CartPole-v1", "backend": "tensor"}, "device": "cuda"})
    check_device(ours)

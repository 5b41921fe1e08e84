"""The examples of Python: a script of an environment of one's own, and a search with pruning."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from variants import variants

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_trains_stops_and_writes_a_policy(tmp_path):
    ended = subprocess.run(
        [sys.executable, EXAMPLES / "from_python.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert "stopped by a callback -3." in ended.stdout
    assert "action at 0.5: 0" in ended.stdout  # to the left, where the origin is
    assert (run / "policy.pt2").is_file()
    assert "python:Reach" in (run / "report.html").read_text()
    assert "lockstep eval" not in ended.stdout  # which wouldn't find an environment without a module
    assert f"lockstep.load_run('{run.relative_to(tmp_path)}', env=Reach)" in ended.stdout


def test_the_loss_of_a_script_is_trained(tmp_path):
    ended = subprocess.run(
        [sys.executable, EXAMPLES / "own_loss.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "python:spo finished loss: " in ended.stdout
    assert ", loss=spo)" in ended.stdout  # how it is opened again


@pytest.mark.parametrize(("trials", "steps"), variants([(5, 6144), (10, 20_000)], []))
def test_a_search_is_the_same_on_any_number_of_ranks(tmp_path, trials, steps):
    search = load("optuna_search").search
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    alone, both = (search(trials, nproc, steps, tmp_path / str(nproc)) for nproc in (1, 2))
    said = [[(trial.params, trial.state, trial.intermediate_values) for trial in each.trials] for each in (alone, both)]
    assert said[0] == said[1]
    assert optuna.trial.TrialState.PRUNED in {trial.state for trial in alone.trials}
    assert optuna.trial.TrialState.COMPLETE in {trial.state for trial in alone.trials}

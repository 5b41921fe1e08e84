"""A search with Optuna that ends trials which do worse than the others, each on two ranks.

    pip install optuna
    python examples/optuna_search.py --trials 10

A run is a function of its config, so the search is one of its seed: the same trials, values and prunings on any
number of ranks.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna

import lockstep


class ReportToTrial(lockstep.BaseCallback):
    """Tells a trial each iteration's return, and ends the run where the pruner says so."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_iteration(self, record: dict[str, Any]) -> bool | None:
        value = record["rollout/episode_return_mean"]
        if value is None:  # no episode has ended so far
            return None
        self.trial.report(value, record["iteration"])
        return not self.trial.should_prune()


def train_trial(trial: optuna.Trial, nproc: int, total_steps: int, folder: Path) -> float:
    """Trains with a trial's settings; returns the mean return of the last 100 episodes."""
    ppo = {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        "gae_lambda": trial.suggest_float("gae_lambda", 0.8, 1.0),
        "num_epochs": trial.suggest_int("num_epochs", 1, 10),
    }
    run = lockstep.train(
        "CartPole-v1",
        nproc=nproc,
        ppo=ppo,
        total_steps=total_steps,
        callbacks=[ReportToTrial(trial)],
        name=f"trial_{trial.number}",
        runs_dir=folder,
        quiet=True,
    )
    if run.status != "finished":
        raise optuna.TrialPruned
    return run.final_return


def search(trials: int, nproc: int, total_steps: int, folder: Path, seed: int = 0) -> optuna.Study:
    """Runs the search; trials of another search in the folder are an error."""
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=5)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner)
    study.optimize(lambda trial: train_trial(trial, nproc, total_steps, folder), n_trials=trials)
    return study


def main(argv: Sequence[str] | None = None) -> None:
    """Searches, and prints what was best."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--total-steps", type=int, default=50_000)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/search"))
    options = parser.parse_args(argv)
    study = search(options.trials, options.nproc, options.total_steps, options.runs_dir)
    pruned = sum(trial.state is optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"{len(study.trials)} trials, {pruned} pruned; the best reached {study.best_value:.1f} with")
    for name, value in study.best_params.items():
        print(f"  ppo.{name} {value:.4g}")


if __name__ == "__main__":
    main()

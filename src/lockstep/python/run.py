"""A run as an object: what it left, its policy, and how it goes on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.files import merge, nested
from lockstep.core.files import path_of
from lockstep.core.temporary import temporary_directory
from lockstep.launch.seeds.making import place_of_seeds
from lockstep.policies.policy import Policy, load_policy
from lockstep.python.command import run_command
from lockstep.python.handed import Handed, handed_again, variables_for, with_objects
from lockstep.python.start import start
from lockstep.python.words import in_callers_words
from lockstep.report.packages import check_installed
from lockstep.runs.checkpoint import checkpoints_in
from lockstep.runs.directory import CHECKPOINTS, REPORT, SUMMARY
from lockstep.runs.finding import find_run, seeds_in
from lockstep.runs.stored import stored_config
from lockstep.runs.trackers import METRICS_JSONL
from lockstep.runs.trackers.jsonl import read_jsonl
from lockstep.runs.trust import MIRROR, OF_TRAINING, names_in

if TYPE_CHECKING:
    import pandas

    from lockstep.config.run import Config

NO_SUMMARY = "not finished"


class Run:
    """A run's directory, read when it is asked for.

    Args:
        path: the directory.
        given: its environment, network and loss, as far as they were objects that no name finds.
        trust: whether to import what it names, though this user hasn't trained with it.
        named: what this process has trained it with, by name, and so may be imported wherever no list is kept of that.

    Attributes:
        path: the directory.
        given: its environment, network and loss, as far as they were objects.
        trust: whether what it names is imported in any case.
        named: what this process has trained it with, by name.
    """

    def __init__(
        self, path: Path, given: Sequence[Handed] = (), trust: bool = False, named: Collection[str] = ()
    ) -> None:
        self.path, self.given = path, tuple(given)
        self.trust, self.named = trust, frozenset(named)
        self._policy: Policy | None = None
        self._policy_from: list[Path] = []

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status!r})"

    def __fspath__(self) -> str:
        """The directory, where a path is taken: ``lockstep.load_policy(run)``."""
        return str(self.path)

    @property
    def trusted(self) -> bool:
        """Whether the code that its policy needs may be imported: by ``trust``, or as this process has trained it."""
        return self.trust or (bool(self.named) and self.named.issuperset(names_in(self.config, OF_TRAINING)))

    def resumed_with(self) -> dict[str, Any]:
        """Settings by which it may import, when it is resumed, what it may here beside what was :attr:`named`."""
        return {"trust": True} if self.trust else {}

    @property
    def network(self) -> type | None:
        """The class of its network, if it was given as one."""
        return next((each.given for each in self.given if each.key == "network.custom"), None)

    @property
    def config(self) -> Config:
        """What the run is a function of."""
        return stored_config(self.path)

    @property
    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` holds; empty while no session has ended well."""
        file = self.path / SUMMARY
        return json.loads(file.read_text()) if file.is_file() else {}

    @property
    def status(self) -> str:
        """``finished``, ``stopped at step`` and its like; ``not finished`` of one that runs, or failed."""
        return self.summary.get("status", NO_SUMMARY)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl``, one an iteration.

        Raises:
            ValueError: it is a group of seeds, each of which has its own, or a row but the last is damaged; one line.
        """
        if seeds := self.seeds:
            raise ValueError(f"metrics: {self.path} holds a run for each of {len(seeds)} seeds; see those of run.seeds")
        file = self.path / METRICS_JSONL
        return read_jsonl(file) if file.is_file() else []

    def dataframe(self) -> pandas.DataFrame:
        """:attr:`metrics` as a pandas DataFrame, an iteration a row; needs the extra ``pandas``.

        A group of seeds has those of all, one seed after the other, under a first column ``seed``.

        Raises:
            ImportError: pandas isn't installed; one line.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError(
                "Run.dataframe needs pandas: pip install 'lockstep-rl[pandas]'; Run.metrics doesn't"
            ) from None
        seeds = [(run.config.seed, run.metrics) for run in self.seeds]
        rows = [{"seed": seed, **row} for seed, rows in seeds for row in rows] if seeds else self.metrics
        return pandas.DataFrame(rows)

    @property
    def checkpoints(self) -> list[Path]:
        """Directories of its checkpoints, newest first."""
        return checkpoints_in(self.path / CHECKPOINTS)

    @property
    def seeds(self) -> list[Run]:
        """The runs of a group of seeds, in the order of their seeds; empty of a single run."""
        paths, named = seeds_in(self.path), self.named
        if paths and named and MIRROR in (key for name, key in names_in(self.config).items() if name in named):
            named |= {place_of_seeds(self.path, self.config) or ""}
        return [Run(path, self.given, self.trust, named) for path in paths]

    @property
    def policy(self) -> Policy:
        """The policy of the newest checkpoint, from observations to actions; see :func:`lockstep.load_policy`.

        It is the same object, which remembers what a recurrent policy has seen, until there is a newer checkpoint.
        """
        newest = self.checkpoints[:1]
        if self._policy is None or newest != self._policy_from:
            self._policy, self._policy_from = self.load_policy(), newest
        return self._policy

    def load_policy(self, checkpoint: str | int | Path = "latest", engine: str | None = None) -> Policy:
        """The policy of a checkpoint: ``latest``, ``best``, a step or one of :attr:`checkpoints`.

        Arguments are :func:`lockstep.load_policy`'s.
        """
        which = self._which(checkpoint)
        with in_callers_words():
            return load_policy(self.path, which, engine=engine, trust=self.trusted, network=self.network)

    def _which(self, checkpoint: str | int | Path) -> str:
        """What a command calls a checkpoint; of a directory of this run's its name."""
        if isinstance(checkpoint, Path) and checkpoint.resolve().parent == (self.path / CHECKPOINTS).resolve():
            return checkpoint.name
        return str(checkpoint)

    def evaluate(
        self,
        episodes: int = 20,
        *,
        seed: int | None = None,
        deterministic: bool = True,
        checkpoint: str | int | Path = "latest",
    ) -> dict[str, Any]:
        """Plays whole episodes with keyed starts, as ``lockstep eval`` does, in a process of its own.

        Args:
            episodes: how many.
            seed: of their starts; None: the run's.
            deterministic: the most likely actions, else samples.
            checkpoint: ``latest``, ``best``, a step or one of :attr:`checkpoints`.

        Returns:
            ``return_mean``, ``return_std``, ``return_min``, ``return_max``, ``length_mean`` and what else
            ``lockstep eval --json`` says, with every episode's in ``per_episode``.

        Raises:
            ValueError: there is no such checkpoint, or the environment can't be made; one line.
            RunError: an environment failed.
        """
        words = self._episodes_words("eval", episodes, seed, deterministic, checkpoint)
        with temporary_directory() as directory, variables_for(self.given) as variables:
            file = directory / "episodes.json"
            with in_callers_words():
                run_command([*words, "--json", str(file)], variables, quiet=True)
            return json.loads(file.read_text())

    def record_video(
        self,
        out: str | Path,
        episodes: int = 1,
        *,
        seed: int | None = None,
        deterministic: bool = True,
        checkpoint: str | int | Path = "latest",
    ) -> Path:
        """Records whole episodes, as ``lockstep play --video`` does in a process of its own; needs the extra ``video``.

        Args:
            out: an mp4 or gif file.
            episodes: how many.
            seed: of their starts; None: the run's.
            deterministic: the most likely actions, else samples.
            checkpoint: ``latest``, ``best``, a step or one of :attr:`checkpoints`.

        Returns:
            The file.

        Raises:
            ValueError: the environment can't be drawn, or ``out`` is no mp4 or gif file; one line.
            RunError: the environment failed, or the file can't be written.
        """
        words = self._episodes_words("play", episodes, seed, deterministic, checkpoint)
        with variables_for(self.given) as variables, in_callers_words():
            run_command([*words, "--video", str(out)], variables, quiet=True)
        return Path(os.path.expanduser(out))

    def _episodes_words(
        self, command: str, episodes: int, seed: int | None, deterministic: bool, checkpoint: str | int | Path
    ) -> list[str]:
        """The words of a command that plays episodes."""
        words = [command, str(self.path), "--episodes", str(episodes), "--checkpoint", self._which(checkpoint)]
        words += [] if seed is None else ["--seed", str(seed)]
        words += [] if deterministic else ["--stochastic"]
        return words + (["--trust"] if self.trusted else [])

    def export(
        self,
        *,
        onnx: str | Path | None = None,
        torch: str | Path | None = None,
        checkpoint: str | int | Path = "latest",
    ) -> None:
        """Writes the policy for other programs, as ``lockstep export`` does, checked against :attr:`policy`.

        Args:
            onnx: file of an ONNX model, ``….onnx``; needs the extra ``onnx``.
            torch: file of a ``torch.export`` program, ``….pt2``.
            checkpoint: ``latest``, ``best``, a step or one of :attr:`checkpoints`.

        Raises:
            ValueError: neither file is given, or the policy can't be written so; one line.
        """
        files = [(f"--{name}", str(path)) for name, path in (("onnx", onnx), ("torch", torch)) if path is not None]
        if not files:
            raise ValueError("export: which file? give onnx=, torch=, or both")
        words = [
            "export",
            str(self.path),
            "--checkpoint",
            self._which(checkpoint),
            *(word for pair in files for word in pair),
        ]
        words += ["--trust"] if self.trusted else []
        with variables_for(self.given) as variables, in_callers_words():
            run_command(words, variables, quiet=True)

    def report(self, out: str | Path | None = None) -> Path:
        """Writes one HTML page about the run, as ``lockstep report`` does; needs the extra ``report``.

        Args:
            out: the file; None: ``report.html`` in the run's directory.

        Returns:
            The file.

        Raises:
            ValueError: a package is missing, or the file can't be written; one line.
        """
        check_installed()
        from lockstep.report.page import write_report  # which imports what may be missing

        return write_report(
            [(self.path, self.path.name)], self.path / REPORT if out is None else Path(os.path.expanduser(out))
        )

    def resume(self, total_steps: int | None = None, **settings: Any) -> Run:
        """Goes on with the run, to ``total_steps`` if that is given; settings as :func:`lockstep.train`'s.

        Returns:
            This run, anew.

        Raises:
            ValueError: a setting would change what the run is a function of; one line.
        """
        callbacks, observe_only = settings.pop("callbacks", ()), settings.pop("observe_only", False)
        settings |= {} if total_steps is None else {"total_steps": total_steps}
        asked = merge(self.resumed_with(), nested(settings) | {"resume": str(self.path)})
        given = with_objects(asked, self.given)

        def run_at(path: Path, named: Collection[str]) -> Run:
            return Run(path, given, self.trust, self.named.union(named))

        return start(asked, given, run_at, callbacks, observe_only, self.named)

    @property
    def final_return(self) -> float:
        """Mean return of the last 100 episodes; NaN where none has ended."""
        value = self.summary.get("final_return")
        return math.nan if value is None else float(value)


def load_run(
    run: str | PathLike[str],
    *,
    runs_dir: str | Path = "runs",
    env: Callable[..., Any] | str | None = None,
    network: type | str | None = None,
    loss: Callable[..., Any] | str | None = None,
    trust: bool = False,
) -> Run:
    """Opens a run.

    Args:
        run: name, run directory, or a :class:`Run`, whose own objects and ``trust`` count where none are given here.
        runs_dir: where runs given by name lie.
        env: what makes its environment, if it was trained with an object that couldn't be imported; the object's own
            name and module may be others now. A run that finds its environment by an id takes that one alone.
        network: the class of its network, likewise.
        loss: its loss, likewise; :meth:`Run.resume` alone needs it.
        trust: whether to import what the run names (``module:attribute``), though this user hasn't trained with it.

    Raises:
        ValueError: there is no such run, or it was trained with something else than is given; one line.
    """
    path, _ = find_run(path_of(run), str(runs_dir), single=False)
    again = {"env.id": env, "network.custom": network, "ppo.loss": loss}
    given = []
    if any(each is not None for each in again.values()):
        config = stored_config(path)
        recorded = {"env.id": config.env.id, "network.custom": config.network.custom, "ppo.loss": config.ppo.loss}
        found = [handed_again(key, each, recorded[key], path) for key, each in again.items() if each is not None]
        given = [each for each in found if each is not None]
    if not isinstance(run, Run):
        return Run(path.absolute(), given, trust)
    kept = [each for each in run.given if each.key not in {new.key for new in given}]
    return Run(path.absolute(), [*kept, *given], trust or run.trust, run.named)

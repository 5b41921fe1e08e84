"""Represents a run as an object: its files, its policy, and methods that evaluate, film, export or resume it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.on_off import switch
from lockstep.core.files import check_suffix
from lockstep.core.temporary import temporary_directory
from lockstep.launch.seeds.making import place_of_seeds
from lockstep.policies.policy import Policy, load_policy
from lockstep.python.arguments import file_given
from lockstep.python.asked import settings_asked, settings_of
from lockstep.python.command import run_command
from lockstep.python.environments import refusal
from lockstep.python.handed import Handed, handed_again, variables_for, with_objects
from lockstep.python.start import start
from lockstep.python.words import in_callers_words
from lockstep.report.packages import SUFFIXES, check_installed
from lockstep.runs.checkpoint import checkpoints_in
from lockstep.runs.directory import CHECKPOINTS, REPORT, SUMMARY
from lockstep.runs.finding import seeds_in
from lockstep.runs.listing import UnreadableError, object_if_any, read_object
from lockstep.runs.stored import stored_config
from lockstep.runs.trackers import METRICS_JSONL
from lockstep.runs.trackers.jsonl import read_jsonl
from lockstep.runs.trust import MIRROR, OF_TRAINING, names_in

if TYPE_CHECKING:
    import pandas

    from lockstep.config.run import Config

NO_SUMMARY = "not finished"


class Run:
    """A run's directory; files are read when they are asked for.

    Args:
        path: the directory.
        given: those of its environment, network and loss that were given as objects.
        trust: whether to import code that the run names, even if the user never trained with it.
        named: names of code and places that this process trained it with; trusted even if no list of them can be kept.

    The arguments are also attributes.
    """

    def __init__(
        self, path: Path, given: Sequence[Handed] = (), trust: bool = False, named: Collection[str] = ()
    ) -> None:
        self.path, self.given = path, tuple(given)
        self.trust, self.named = switch("trust", trust), frozenset(named)
        self._policy: Policy | None = None
        self._policy_from: list[Path] = []

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out a policy whose network can't be imported, for pickle; it is loaded again if it is asked for."""
        handed = any(each.key == "network.custom" and each.pickled is not None for each in self.given)
        return self.__dict__ | ({"_policy": None, "_policy_from": []} if handed else {})

    def __fspath__(self) -> str:
        """Returns the directory, so that a run can be passed as a path: ``lockstep.load_policy(run)``."""
        return str(self.path)

    @property
    def trusted(self) -> bool:
        """Whether the code that the policy needs may be imported: ``trust`` is set, or this process trained with it."""
        return self.trust or (bool(self.named) and self.named.issuperset(names_in(self.config, OF_TRAINING)))

    def resumed_with(self) -> dict[str, Any]:
        """Returns the settings that pass ``trust`` on when the run is resumed; :attr:`named` is passed separately."""
        return {"trust": True} if self.trust else {}

    @property
    def network(self) -> type | None:
        """The class of the run's network; None if it wasn't given as a class."""
        return next((each.given for each in self.given if each.key == "network.custom"), None)

    @property
    def config(self) -> Config:
        """The run's resolved config."""
        return stored_config(self.path)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``; empty until a session has ended well. ``ValueError``: it is damaged."""
        file = self.path / SUMMARY
        try:
            return read_object(file) if file.is_file() else {}
        except UnreadableError as error:
            raise ValueError(str(error)) from None

    @property
    def status(self) -> str:
        """``finished``, ``stopped at step`` or the like; ``not finished`` if no whole summary says how it ended."""
        return object_if_any(self.path / SUMMARY).get("status", NO_SUMMARY)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl``, one per iteration.

        Raises:
            ValueError: this is a group, whose seeds have their own, or a row other than the last is damaged; one line.
        """
        if seeds := self.seeds:
            raise ValueError(f"metrics: {self.path} holds a run for each of {len(seeds)} seeds; see those of run.seeds")
        file = self.path / METRICS_JSONL
        return read_jsonl(file) if file.is_file() else []

    def dataframe(self) -> pandas.DataFrame:
        """Returns :attr:`metrics` as a pandas DataFrame, one row per iteration; needs the extra ``pandas``.

        For a group it has the rows of all seeds, one seed after the other, with a first column ``seed``.

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
        """The directories of the run's checkpoints, newest first."""
        return checkpoints_in(self.path / CHECKPOINTS)

    @property
    def seeds(self) -> list[Run]:
        """The runs of a group, in the order of their seeds; empty for a single run."""
        paths, named = seeds_in(self.path), self.named
        if paths and named and MIRROR in (key for name, key in names_in(self.config).items() if name in named):
            named |= {place_of_seeds(self.path, self.config) or ""}
        return [Run(path, self.given, self.trust, named) for path in paths]

    @property
    def policy(self) -> Policy:
        """The policy of the newest checkpoint, from observations to actions; see :func:`lockstep.load_policy`.

        Until there is a newer checkpoint it is the same object, so that a recurrent policy keeps its state.
        """
        newest = self.checkpoints[:1]
        if self._policy is None or newest != self._policy_from:
            self._policy, self._policy_from = self.load_policy(), newest
        return self._policy

    def load_policy(self, checkpoint: str | int | Path = "latest", engine: str | None = None) -> Policy:
        """Returns the policy of a checkpoint: ``latest``, ``best``, a step or one of :attr:`checkpoints`.

        ``engine`` is as in :func:`lockstep.load_policy`.
        """
        which = self._which(checkpoint)
        with in_callers_words():
            return load_policy(self.path, which, engine=engine, trust=self.trusted, network=self.network)

    def _which(self, checkpoint: str | int | Path) -> str:
        """Returns a checkpoint as commands name it; a directory of this run's is given by its name."""
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
        """Plays whole episodes with keyed starts, as ``lockstep eval`` does, in a separate process.

        Args:
            episodes: number of episodes.
            seed: keys the episodes' starts; None: the run's seed.
            deterministic: whether to take the most likely actions instead of samples.
            checkpoint: ``latest``, ``best``, a step or one of :attr:`checkpoints`.

        Returns:
            ``return_mean``, ``return_std``, ``return_min``, ``return_max``, ``length_mean`` and the other values of
            ``lockstep eval --json``; each episode's own are in ``per_episode``.

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
        """Films whole episodes, as ``lockstep play --video`` does, in a separate process; needs the extra ``video``.

        Args:
            out: an mp4 or gif file.
            episodes: number of episodes.
            seed: keys the episodes' starts; None: the run's seed.
            deterministic: whether to take the most likely actions instead of samples.
            checkpoint: ``latest``, ``best``, a step or one of :attr:`checkpoints`.

        Returns:
            The file.

        Raises:
            ValueError: the environment can't be drawn, or ``out`` isn't an mp4 or gif file; one line.
            RunError: the environment failed, or the file can't be written.
        """
        words = self._episodes_words("play", episodes, seed, deterministic, checkpoint)
        with variables_for(self.given) as variables, in_callers_words():
            run_command([*words, "--video", str(out)], variables, quiet=True)
        return Path(os.path.expanduser(out))

    def _episodes_words(
        self, command: str, episodes: int, seed: int | None, deterministic: bool, checkpoint: str | int | Path
    ) -> list[str]:
        """Returns the words of a command that plays episodes."""
        words = [command, str(self.path), "--episodes", str(episodes), "--checkpoint", self._which(checkpoint)]
        words += [] if seed is None else ["--seed", str(seed)]
        words += [] if switch("deterministic", deterministic) else ["--stochastic"]
        return words + (["--trust"] if self.trusted else [])

    def export(
        self,
        *,
        onnx: str | Path | None = None,
        torch: str | Path | None = None,
        checkpoint: str | int | Path = "latest",
    ) -> None:
        """Writes the policy for other programs and checks the files against it, as ``lockstep export`` does.

        Args:
            onnx: file to write an ONNX model to, ``….onnx``; needs the extra ``onnx``.
            torch: file to write a ``torch.export`` program to, ``….pt2``.
            checkpoint: ``latest``, ``best``, a step or one of :attr:`checkpoints`.

        Raises:
            ValueError: neither file is given, or the policy can't be written in that format; one line.
        """
        files = [(f"--{name}", str(path)) for name, path in (("onnx", onnx), ("torch", torch)) if path is not None]
        if not files:
            raise ValueError("export: which file? give onnx=, torch=, or both")
        words = ["export", str(self.path), "--checkpoint", self._which(checkpoint)]
        words += [word for pair in files for word in pair] + (["--trust"] if self.trusted else [])
        with variables_for(self.given) as variables, in_callers_words():
            run_command(words, variables, quiet=True)

    def report(self, out: str | Path | None = None) -> Path:
        """Writes one HTML page about the run, as ``lockstep report`` does; needs the extra ``report``.

        Args:
            out: the file, ``….html``; None: ``report.html`` in the run's directory.

        Returns:
            The file.

        Raises:
            ValueError: ``out`` names no HTML file, a package is missing, or the file can't be written; one line.
        """
        file = self.path / REPORT if out is None else file_given(out, "out")
        check_suffix(file, SUFFIXES, "out")
        check_installed()
        from lockstep.report.page import write_report  # imports packages that may be missing

        return write_report([(self.path, self.path.name)], file)

    def resume(self, total_steps: int | None = None, **settings: Any) -> Run:
        """Continues the run, up to ``total_steps`` if given; ``settings`` are as in :func:`lockstep.train`.

        If the run was trained with an object that can't be imported, ``env`` may give it again, as in
        :func:`lockstep.load_run`.

        Returns:
            A new object for the continued run.

        Raises:
            ValueError: a setting would change what the run computes, or ``name`` or ``resume`` is given; one line.
                Others as in :func:`lockstep.train`.
        """
        config, given = settings.pop("config", None), self.given
        for place in (settings, settings_of(config)):
            if place.get("resume") is not None:
                raise ValueError(f"resume: {place['resume']!r} is given, but this resumes {self.path}; leave it out")
        callbacks, observe_only = settings.pop("callbacks", ()), settings.pop("observe_only", False)
        settings |= {} if total_steps is None else {"total_steps": total_steps}
        env = settings.get("env")
        if env is not None and not isinstance(env, str | Mapping):
            if not callable(env):
                raise ValueError(refusal(env))
            again = handed_again("env.id", settings.pop("env"), self.config.env.id, self.path)
            given = given if again is None else (*(each for each in given if each.key != again.key), again)
        asked = settings_asked(self.resumed_with(), config, settings | {"resume": self.path})
        given = with_objects(asked, given)

        def run_at(path: Path, named: Collection[str], trust: bool) -> Run:
            return Run(path, given, trust, self.named.union(named))

        return start(asked, given, run_at, callbacks, observe_only, self.named)

    @property
    def final_return(self) -> float:
        """The mean return of the last 100 episodes, from :attr:`summary`; NaN if it has none."""
        value = self.summary.get("final_return")
        return math.nan if value is None else float(value)

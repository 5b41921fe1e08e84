"""Writes the results of an evaluation: in words, its episodes as JSON and CSV, and a histogram of their returns."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.files import as_json, check_suffix, check_writable, draft_of, replace_text
from lockstep.envs.description import arguments_of
from lockstep.policies.baselines import Actor, Baseline
from lockstep.policies.evaluation import success_of, summarize
from lockstep.policies.policy import Policy
from lockstep.runs.curves import CURVES_CSV, CURVES_JSON, CURVES_PNG, without_latex
from lockstep.runs.directory import OWN_NAMES
from lockstep.runs.finding import is_run
from lockstep.runs.groups import GROUP_JSON
from lockstep.runs.shown.labels import in_a_picture, write_out
from lockstep.runs.shown.numerals import format_points, format_share, spec_of

COLUMN_NAMES = ("return", "length", "success", "score")
NEEDED = ("return", "length")
LARGEST, LONGEST = 1e150, 2**53
"""Returns from here on have squares that no float holds, and lengths are no whole numbers any more."""
BAR, MEAN = "#1f5fa8", "#d9822b"
MOST_BINS = 40
FEW_BINS = 12  # with fewer, an axis has room for this many
GAME = {"kwargs", "max_episode_steps", "frame_skip", "sticky_actions", "atari"}
"""Settings of an environment that change the game."""
RECORDS = {*OWN_NAMES, GROUP_JSON, CURVES_CSV, CURVES_JSON, CURVES_PNG}
"""Names of files that belong to a run or a group."""
COMPARED = {"policies", "against", "differences"}
"""Keys of a comparison, see :func:`lockstep.policies.comparison.comparison`."""


def facts_of(actor: Actor, table: np.ndarray, deterministic: bool = True) -> dict[str, Any]:
    """Summarises an evaluation's table, with the environment, how actions were chosen, and where episodes are cut."""
    env = actor.config.env
    settings = env.model_dump(mode="json", include=GAME) | {"kwargs": arguments_of(env)}
    facts = {"environment": env.id, "env_settings": settings}
    sampled = None if isinstance(actor, Baseline) else not deterministic  # a baseline has no most likely action
    played = {"stochastic": sampled, "max_steps": actor.config.eval.max_steps}
    return summarize(table) | facts | played | {"global_step": actor.global_step}


def in_words(actor: Actor, facts: dict[str, Any]) -> str:
    """Returns an evaluation's facts as one line."""
    more = f", success rate {format_share(facts['success_rate'])}" if "success_rate" in facts else ""
    if (mean := facts.get("score_mean")) is not None:
        more += f", score {mean:{spec_of(mean)}} (max {format_points(facts['score_max'])})"
    form = spec_of(facts["return_mean"], facts["return_std"])
    mean, std, low, high = (format(facts[f"return_{name}"], form) for name in ("mean", "std", "min", "max"))
    trained = f"after {actor.global_step:,} training steps"
    if isinstance(actor, Baseline):
        trained = actor.name
    elif isinstance(actor, Policy) and actor.cloned:
        trained = "by a cloned policy"
    if facts["episodes"] == 1:
        played, spread = "1 episode", ""
    else:
        played = f"{facts['episodes']} episodes"
        spread = f" ± {std} (min {low}, max {high})"
    return (
        f"{facts['environment']} {trained}, {played}: return {mean}{spread}, length {facts['length_mean']:,.1f}{more}"
    )


def check_files(
    json_file: Path | None,
    csv_file: Path | None,
    picture: Path | None,
    option: str = "histogram",
    compares: bool = False,
) -> None:
    """Checks the files that a command is about to write; ``option`` is the picture's option.

    The JSON file is an evaluation, or a comparison if the command ``compares``.

    Raises:
        ValueError: a file has a wrong suffix, a file of another kind would be overwritten, its directory can't be
            written to, or a picture can't be drawn; one line.
    """
    files = (("json", json_file, (".json",)), ("csv", csv_file, (".csv",)), (option, picture, (".png", ".svg", ".pdf")))
    for name, path, known in files:
        if path is not None:
            check_suffix(path, known, name)
    ours = (COMPARISON if compares else EVALUATION, EPISODES, PICTURE)
    for (name, path, _), (is_ours, what) in zip(files, ours, strict=True):
        if path is None:
            continue
        if path.name in RECORDS and is_run(path.parent):
            raise ValueError(f"{name}: {path} is the name of one of the run's own files; name another file")
        if path.exists() and not (path.is_file() and (not path.stat().st_size or is_ours(path))):
            raise ValueError(f"{name}: {path} is there and {what}, and would be lost; name another file")
        check_writable(path, name)
    if picture is not None:
        check_plot(option)


def is_evaluation(path: Path) -> bool:
    """Returns whether ``lockstep eval --json FILE`` wrote a file."""
    try:
        read_json(path)
    except ValueError:
        return False
    return True


def _is_comparison(path: Path) -> bool:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() >= COMPARED


def _is_csv(path: Path) -> bool:
    with path.open("rb") as file:
        return file.readline(1000).startswith(b"episode,return,length")


def _is_figure(path: Path) -> bool:
    return b"atplotlib" in path.read_bytes()  # matplotlib names itself in each of its formats


Kind = tuple[Callable[[Path], bool], str]
"""Recognises a file that may be overwritten, and describes one that may not."""
EVALUATION: Kind = (is_evaluation, "no evaluation")
COMPARISON: Kind = (_is_comparison, "no comparison")
EPISODES: Kind = (_is_csv, "no list of episodes")
PICTURE: Kind = (_is_figure, "no picture of matplotlib's")


def check_plot(option: str) -> None:
    """Raises a one-line ``ValueError`` if matplotlib isn't installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option}: needs matplotlib; pip install 'lockstep-rl[plot]'")


def written(*paths: Path | None) -> str:
    """Returns `` → FILE, FILE`` for the files that were asked for."""
    names = [str(path) for path in paths if path is not None]
    return f" → {', '.join(names)}" if names else ""


def columns_of(table: np.ndarray) -> dict[str, list[Any]]:
    """Returns an evaluation's table ``[n, 4]`` as lists by name, without those that no episode has a value for.

    A return or score that isn't finite is None.
    """
    success = [success_of(value) for value in table[:, 2].tolist()]
    returns, scores = ([x if math.isfinite(x) else None for x in table[:, place].tolist()] for place in (0, 3))
    lists = (returns, table[:, 1].astype(int).tolist(), success, scores)
    named = dict(zip(COLUMN_NAMES, lists, strict=True))
    return {name: values for name, values in named.items() if any(value is not None for value in values)}


def write_json(path: Path, facts: Mapping[str, Any], table: np.ndarray) -> None:
    """Writes an evaluation's facts, and each column of its table as a list under ``per_episode``."""
    write_text(path, as_json({**facts, "per_episode": columns_of(table)}, indent=1) + "\n")


def read_json(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """Reads an evaluation that :func:`write_json` wrote; returns and scores from :data:`LARGEST` on are NaN.

    Raises:
        ValueError: the file isn't an evaluation; one line.
    """
    try:
        facts = json.loads(path.read_text())
        if not isinstance(facts, dict) or not isinstance(columns := facts.pop("per_episode", None), dict):
            raise ValueError("it has no per_episode")
        if not isinstance(facts.get("environment"), str):
            raise ValueError("it names no environment")
        return facts, _table_of(columns)
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is no evaluation (lockstep eval RUN --json {path}): {error}") from None


def _table_of(columns: Mapping[str, Any]) -> np.ndarray:
    """Returns an evaluation's table ``[n, 4]`` of its columns; raises a ``ValueError`` or ``OverflowError`` without."""
    lists = {name: columns[name] for name in COLUMN_NAMES if columns.get(name) is not None}
    if not all(isinstance(lists.get(name), list) for name in COLUMN_NAMES if name in lists or name in NEEDED):
        raise ValueError(f"it has no lists of {' and '.join(NEEDED)}")
    count = len(lists[NEEDED[0]])
    if not count or any(len(values) != count for values in lists.values()):
        raise ValueError("it has no episodes, or lists of different lengths")
    table = np.full((count, len(COLUMN_NAMES)), np.nan)
    table[:, COLUMN_NAMES.index("success")] = 0.0
    for name, values in lists.items():
        if not all(value is None or isinstance(value, int | float) for value in values):
            raise ValueError(f"a {name} is no number")
        if name == "success":
            values = [0 if value is None else 1 if value else -1 for value in values]
        table[:, COLUMN_NAMES.index(name)] = [math.nan if value is None else float(value) for value in values]
    lengths = table[:, COLUMN_NAMES.index("length")]
    if not ((lengths >= 0) & (lengths < LONGEST)).all():
        raise ValueError("a length is no number of steps")
    table[np.abs(table) >= LARGEST] = math.nan
    return table


def write_csv(path: Path, table: np.ndarray) -> None:
    """Writes one line per episode, with its number."""
    columns, text = columns_of(table), io.StringIO()
    rows = zip(range(len(table)), *columns.values(), strict=True)
    csv.writer(text, lineterminator="\n").writerows([("episode", *columns), *rows])
    write_text(path, text.getvalue())


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all, and makes its directory; of a link, the target is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path.resolve(), text)


def edges_of(values: np.ndarray) -> np.ndarray:
    """Returns the edges of a histogram's bins: one per whole number if there are few, else evenly spaced."""
    low, high = float(values.min()), float(values.max())
    if np.all(values == np.round(values)) and high - low < MOST_BINS and max(-low, high) < LONGEST:
        return np.arange(low, high + 2) - 0.5
    return np.linspace(low, high if high > low else low + max(1.0, 1e-6 * abs(low)), MOST_BINS + 1)


@without_latex()
def draw_histogram(title: str, table: np.ndarray) -> Any:
    """Draws histograms of returns (scores, if there are any) and lengths, with their means; returns the figure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    columns = columns_of(table)
    first = "score" if None not in columns.get("score", [None]) else "return"
    for axis, name in zip(figure.subplots(1, 2), (first, "length"), strict=True):
        values = np.asarray(columns[name], np.float64)
        edges = edges_of(values)
        axis.hist(values, edges, color=BAR)
        axis.axvline(values.mean(), color=MEAN, label=f"mean {values.mean():{spec_of(values.mean())}}")
        axis.set_xlabel(name)
        axis.set_ylabel("episodes")
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        if len(edges) < FEW_BINS:  # thin bars, as those of many values
            middle, half = (edges[0] + edges[-1]) / 2, FEW_BINS * (edges[1] - edges[0]) / 2
            axis.set_xlim(middle - half, middle + half)
        write_out(axis.xaxis, integer=bool(np.all(values == np.round(values))))
        axis.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0))  # above the bars
    figure.suptitle(in_a_picture(title))
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure in the format of its file's suffix, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft_of(path.resolve()) as draft, warnings.catch_warnings(), without_latex():
        warnings.filterwarnings("ignore", message="Glyph ")  # a name may have letters that the font lacks
        figure.savefig(draft, dpi=120)

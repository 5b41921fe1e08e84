"""Assembles the page: one file that fetches nothing, and runs only its own scripts, allowed by their hashes."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from lockstep import __version__
from lockstep.config.redact import shown_value
from lockstep.core.files import replace_text, why_unwritten
from lockstep.report.again import Again, again_of
from lockstep.report.charts import Chart, charts_of, extent_of
from lockstep.report.evaluations import Evaluation, evaluations_of
from lockstep.report.pictures import chart_svg, histogram_svg
from lockstep.report.promise import ranks_matter
from lockstep.report.proof import Proof, proof_of, shared
from lockstep.report.reading import RunFiles, objects, read_run
from lockstep.report.results import Result, result_of
from lockstep.report.settings import configs_of, differing, own_settings
from lockstep.report.timing import Times, times_of
from lockstep.report.videos import ROOM, Video, video_of
from lockstep.report.words import date, duration, in_digits, percent, setting, size, typed
from lockstep.runs.listing import printable
from lockstep.training.run_history import utc_date

ASSETS = Path(__file__).parent / "assets"
TEMPLATES = Path(__file__).parent / "templates"
LIBRARIES = ("lockstep", "torch", "jax", "jaxlib", "numpy", "gymnasium", "mujoco", "python")
MACHINE = ("machine", "cpu", "cpu capability", "device", "platform", "xla flags")


@dataclass(frozen=True)
class Section:
    """A run's part of the page.

    Attributes:
        run: the run's files.
        problems: the run's, and the videos that couldn't be read, one line each.
        key: prefix of the section's ids on the page.
        result: what the run has reached, in words.
        again: how to train, evaluate and verify it again.
        asked: the command that trained it; None if unknown.
        compared_with: what ``settings`` differ from, in words.
        settings: key, the run's value and the other value, for each setting that differs.
        config: the whole config, as JSON text.
        histograms: an ``svg`` element or None for each of the evaluations.
        proofs: proof of the run, or of each seed, by name.
        shared_proofs: the same, with seeds together whose proofs differ only in hashes.
        ranks_matter: whether the number of ranks decides the agent, too.
        incidents: interruptions of the run, or of each seed, by name: ``restarts``, one row each, and the values of
            ``restarted_environments`` and ``missing_rows``.
    """

    run: RunFiles
    problems: list[str]
    key: str
    result: Result
    again: Again
    asked: str | None
    compared_with: str
    settings: list[tuple[str, Any, Any]]
    config: str
    libraries: list[tuple[str, Any]]
    machine: list[tuple[str, Any]]
    evaluations: list[Evaluation]
    histograms: list[Any]
    video: Video | None
    times: Times | None
    proofs: list[tuple[str, Proof]]
    shared_proofs: list[tuple[list[str], Proof]]
    ranks_matter: bool
    incidents: dict[str, list[tuple[str, Any]]]


def write_report(runs: Sequence[tuple[Path, str]], out: Path) -> Path:
    """Writes the page about runs, each given by its directory and its name on the page.

    Args:
        runs: one run, or several that are compared; also directories of several seeds.
        out: the file to write; it is replaced atomically.

    Returns:
        ``out``.

    Raises:
        ValueError: one line, if the file can't be written, a directory of the runs can't be read, or one of their files
            is nested too deeply.
    """
    try:
        text = page_of([read_run(path, name) for path, name in runs]).encode(errors="replace").decode()
    except RecursionError:
        raise ValueError("report: a file of these runs is nested too deeply") from None
    except OSError as error:  # a directory, or an asset of the page
        what = error.filename or "a file of these runs"
        raise ValueError(f"report: {what} can't be read: {error.strerror or error}") from None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(out, text)
    except OSError as error:
        raise ValueError(f"report: {out} can't be written: {why_unwritten(error)}") from None
    return out


def page_of(runs: Sequence[RunFiles]) -> str:
    """Returns the page as text."""
    charts = charts_of(runs)
    extents = {over: extent_of(charts, over) for over in {chart.over for chart in charts}}
    pictures = {chart.key: chart_svg(chart, f"chart{n}", extents[chart.over]) for n, chart in enumerate(charts)}
    scripts = [(ASSETS / name).read_text(encoding="utf-8") for name in ("uPlot.iife.min.js", "report.js")]
    styles = [(ASSETS / name).read_text(encoding="utf-8") for name in ("uPlot.min.css", "report.css")]
    room, sections = ROOM, []
    for place, run in enumerate(runs):
        sections.append(_section(run, f"run{place}", room))
        video = sections[-1].video
        room -= video.size if video is not None and video.source is not None else 0
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {"digits": in_digits, "duration": duration, "percent": percent, "size": size, "date": date}
    environment.filters.update({**filters, "setting": setting, "printable": printable, "typed": typed})
    return environment.get_template("page.html").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}",
        sections=sections,
        charts=charts,
        pictures=pictures,
        differing=differing(configs_of(runs)) if len(runs) > 1 else [],
        data=Markup(json_in_html([_chart_data(chart) for chart in charts])),
        styles=[Markup(text) for text in styles],
        scripts=[Markup(text) for text in scripts],
        policy=content_policy(scripts),
        version=__version__,
        now=utc_date(),
    )


def _chart_data(chart: Chart) -> dict[str, Any]:
    facts = {"key": chart.key, "large": chart.is_large, "over": chart.over}
    return facts | {"series": [series.to_json() for series in chart.series]}


def json_in_html(value: Any) -> str:
    """Returns JSON without ``<``, ``>`` and ``&``, so that it can't end the ``script`` element that holds it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def content_policy(scripts: Sequence[str]) -> str:
    """Returns a content security policy that lets the page run only these scripts and fetch nothing."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; media-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _section(run: RunFiles, key: str, room: int) -> Section:
    compared_with, settings = own_settings(run)
    evaluations, histograms = evaluations_of(run), []
    for place, evaluation in enumerate(evaluations):
        words = f"Returns of the episodes of {evaluation.where}: " + ", ".join(
            f"{name} {in_digits(value)}" for name, value in evaluation.facts
        )
        returns = evaluation.returns
        histograms.append(None if returns is None else histogram_svg(returns, words, f"{key}histogram{place}"))
    said = run.summary.get("command")
    asked = [word for word in said if isinstance(word, str)] if isinstance(said, list) else []
    proofs = [(each.name, proof_of(each)) for each in run.seeds or [run]]
    problems = list(run.problems)
    video = video_of(run.first.path, room, problems)
    return Section(
        run,
        problems,
        key,
        result_of(run),
        again_of(run),
        printable(shlex.join(asked)) or None,
        compared_with,
        settings,
        json.dumps(shown_value(run.config), indent=2, ensure_ascii=False),
        [(name, run.summary[name]) for name in LIBRARIES if name in run.summary],
        [(name, run.summary[name]) for name in MACHINE if run.summary.get(name)],
        evaluations,
        histograms,
        video,
        times_of(run),
        proofs,
        shared(proofs),
        bool(ranks_matter(run.config)),
        _incidents(run.seeds or [run]),
    )


def _incidents(runs: Sequence[RunFiles]) -> dict[str, list[tuple[str, Any]]]:
    """Gathers interruptions from the summaries of runs."""
    named = ("restarted_environments", "missing_rows")
    found = {name: [(run.name, run.summary[name]) for run in runs if run.summary.get(name)] for name in named}
    return {"restarts": [(run.name, row) for run in runs for row in objects(run.summary, "restarts")], **found}

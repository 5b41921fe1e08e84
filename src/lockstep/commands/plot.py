"""``lockstep plot`` draws learning curves of runs, or any other metric, into one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.commands.parser import CommandParser, add_runs_dir
from lockstep.core.files import check_suffix, check_writable
from lockstep.policies.results import check_plot, save_figure, written
from lockstep.runs.curves import METRIC
from lockstep.runs.finding import find_run
from lockstep.runs.listing import printable
from lockstep.runs.plot import X_LABELS, draw, lines_of

SUFFIXES = (".png", ".svg", ".pdf")


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep plot RUN …``: draws a line per run; for several seeds, their interquartile mean and a band."""
    parser = CommandParser(prog="lockstep plot", description="Draw a metric of runs into one picture.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="names or run directories, also of several seeds")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="png, svg or pdf (default: curves.png)")
    parser.add_argument("--x", choices=tuple(X_LABELS), default="steps", help="over what (default: steps)")
    parser.add_argument("--y", metavar="KEY", default=METRIC, help=f"a key of metrics.jsonl (default: {METRIC})")
    add_runs_dir(parser)
    options = parser.parse_args(argv)
    check_suffix(options.out, SUFFIXES, "out")
    check_writable(options.out, "out")
    check_plot("plot")
    paths = list(dict.fromkeys(find_run(run, options.runs_dir, single=False)[0] for run in options.runs))
    names = [printable(path.resolve().name) for path in paths]
    labels = [name if names.count(name) == 1 else printable(str(path)) for name, path in zip(names, paths, strict=True)]
    lines, x = lines_of(dict(zip(paths, labels, strict=True)), options.x, options.y)
    save_figure(draw(lines, x, options.y), options.out)
    print(", ".join(line.label for line in lines) + written(options.out))
    return 0

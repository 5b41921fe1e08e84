"""``lockstep report`` writes one page about a run, or about several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.commands.parser import CommandParser, add_runs_dir
from lockstep.core.files import check_suffix
from lockstep.report.packages import SUFFIXES, check_installed
from lockstep.runs.directory import REPORT
from lockstep.runs.finding import find_run
from lockstep.runs.listing import printable


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep report RUN …``: writes one self-contained page about a run, or several runs compared."""
    parser = CommandParser(
        prog="lockstep report", description="Write one self-contained HTML page about runs; nothing of theirs is run."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="names or run directories, also of several seeds")
    parser.add_argument("--out", type=Path, default=Path(REPORT), help=f"the page (default: {REPORT})")
    add_runs_dir(parser)
    options = parser.parse_args(argv)
    check_suffix(options.out, SUFFIXES, "out")
    paths = list(dict.fromkeys(find_run(run, options.runs_dir, single=False)[0] for run in options.runs))
    check_installed()
    from lockstep.report.page import write_report  # after the check: it imports optional packages

    names = [path.resolve().name for path in paths]
    labels = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]
    write_report(list(zip(paths, labels, strict=True)), options.out)
    print(f"{printable(', '.join(labels))} → {printable(str(options.out))}")
    return 0

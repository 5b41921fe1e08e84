"""Kills training runs at random and says whether any promise broke.

``python -m benchmarks.chaos --kills 500 --seed 1`` attacks run after run, of both engines in turn, until that many
faults have been done. Every run is resumed on a world size that is drawn anew, and at its end it is compared with an
undisturbed one: agent, rows, files, processes. It exits with 1 if anything differs. ``--out FILE`` keeps the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos.campaign import Campaign, attack, reference_of
from benchmarks.chaos.disk import can_mount
from benchmarks.chaos.plan import CASES
from benchmarks.chaos.report import faults_table, totals
from lockstep import __version__
from lockstep.core.machine import cpu_model


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="faults in all (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults; the same seed draws the same ones (0)")
    parser.add_argument("--each", type=int, default=8, help="faults of a run at most (8)")
    parser.add_argument("--cases", default=",".join(names()), help="which runs, with commas between them (all)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args(argv)
    for name in ("kills", "each"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: {getattr(arguments, name)} is below 1")
    known = names()
    wanted = [part.strip() for part in arguments.cases.split(",")]
    unknown = [part for part in wanted if part not in known]
    if unknown:
        parser.error(f"--cases: {unknown[0]!r} is no case; there are: {', '.join(known)}")
    arguments.cases = [CASES[known.index(part)] for part in wanted]
    return arguments


def names() -> list[str]:
    """The names of the cases as the command line takes them."""
    return [case.name.replace(", ", "-") for case in CASES]


def main(argv: Sequence[str] | None = None) -> int:
    """Attacks until there were enough faults; 0 if no promise broke."""
    arguments = read_arguments(argv)
    if not sys.platform.startswith("linux"):
        print("chaos: needs Linux, where processes are found through /proc", file=sys.stderr)
        return 2
    campaigns: list[Campaign] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        root = Path(name)
        with_disk = can_mount(root / "mounts")
        if not with_disk:
            print("file systems can't be mounted here: no disk is filled", flush=True)
        references = {case.name: reference_of(case, root / f"reference_{n}") for n, case in enumerate(arguments.cases)}
        number = 0
        while (done := sum(len(campaign.faults) for campaign in campaigns)) < arguments.kills:
            case = arguments.cases[number % len(arguments.cases)]
            place = root / f"campaign_{number}"
            place.mkdir()
            kills = min(arguments.each, arguments.kills - done)
            campaign = attack(case, arguments.seed + number, kills, place, references[case.name], with_disk)
            campaigns.append(campaign)
            what = "; ".join(campaign.problems) or "as if nothing had been"
            print(f"{case.name}, seed {campaign.seed}: {len(campaign.faults)} faults in {campaign.seconds} s: {what}")
            sys.stdout.flush()
            number += 1
    print(f"\n{faults_table(campaigns)}\n\n{totals(campaigns)}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(as_json(arguments, campaigns, with_disk), indent=1) + "\n")
    return int(any(campaign.problems for campaign in campaigns))


def as_json(arguments: argparse.Namespace, campaigns: Sequence[Campaign], with_disk: bool) -> dict[str, object]:
    """What is kept: when, where, and every fault."""
    return {
        "date": str(datetime.date.today()),
        "lockstep": __version__,
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores of {cpu_model()}",
        "kills": arguments.kills,
        "seed": arguments.seed,
        "disk_filled": with_disk,
        "campaigns": [dataclasses.asdict(campaign) for campaign in campaigns],
    }


if __name__ == "__main__":
    sys.exit(main())

"""Kills training runs at random and says whether any promise broke.

``python -m benchmarks.chaos --kills 500 --seed 1`` attacks run after run, of both engines in turn, until that many
faults have been done. Every run is resumed on a world size that is drawn anew, and at its end it is compared with an
undisturbed one: agent, rows, files, processes. It exits with 1 if anything differs, or if no fault aimed at a commit
struck one, of many. ``--out FILE`` keeps the result.
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
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from benchmarks.chaos.campaign import Campaign, attack, reference_of
from benchmarks.chaos.compared import Reference
from benchmarks.chaos.disk import can_mount
from benchmarks.chaos.plan import CASES
from benchmarks.chaos.report import aims, faults_table, in_words, missed, totals
from benchmarks.commit import short_commit
from lockstep.core.machine import cpu_model

MOST_FAILURES = 3
"""Of the driver itself, after which it gives up."""
LIBRARIES = ("lockstep-rl", "torch", "jax", "numpy", "gymnasium")


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="faults in all (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults; the same seed draws the same ones (0)")
    parser.add_argument("--each", type=int, default=8, help="faults of a run at most (8)")
    parser.add_argument("--jobs", type=int, default=1, help="runs that are attacked at the same time (1)")
    parser.add_argument("--cases", default=",".join(names()), help="which runs, with commas between them (all)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args(argv)
    for name in ("kills", "each", "jobs"):
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
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        root = Path(name)
        with_disk = can_mount(root / "mounts")
        if not with_disk:
            print("file systems can't be mounted here: no disk is filled", flush=True)
        references = {case.name: reference_of(case, root / f"reference_{n}") for n, case in enumerate(arguments.cases)}
        campaigns = attack_all(arguments, root, references, with_disk)
    counts = aims(campaigns)
    print(f"\n{faults_table(campaigns)}\n\n{totals(campaigns)}\n{in_words(counts)}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(as_json(arguments, campaigns, with_disk), indent=1) + "\n")
    if (problem := missed(counts)) is not None:
        print(f"chaos: {problem}", file=sys.stderr)
    return int(problem is not None or any(campaign.problems for campaign in campaigns))


def attack_all(
    arguments: argparse.Namespace, root: Path, references: Mapping[str, Reference], with_disk: bool
) -> list[Campaign]:
    """Attacks run after run, or several at a time, until there were enough faults; in the order of their seeds.

    Every second turn of the cases lies on the machine's own disk, which isn't filled, but where a commit takes longer.
    """
    campaigns: dict[int, Campaign] = {}
    under_way: dict[int, int] = {}
    guard = threading.Lock()

    def begin() -> tuple[int, int]:
        """Gives the next run's number and the faults that it may suffer, 0 if there are enough."""
        with guard:
            if sum(bool(c.problems) and not c.faults for c in campaigns.values()) >= MOST_FAILURES:
                return 0, 0
            wanted = arguments.kills - sum(len(c.faults) for c in campaigns.values()) - sum(under_way.values())
            number, kills = len(campaigns) + len(under_way), min(arguments.each, max(0, wanted))
            if kills:
                under_way[number] = kills
            return number, kills

    def work() -> None:
        while (next_one := begin())[1]:
            number, kills = next_one
            turn, of_case = divmod(number, len(arguments.cases))
            case = arguments.cases[of_case]
            place = root / f"campaign_{number}"
            place.mkdir()
            seed = arguments.seed + number
            try:
                campaign = attack(case, seed, kills, place, references[case.name], with_disk and turn % 2 == 0)
            except Exception as error:
                traceback.print_exc()
                campaign = Campaign(case.name, seed, problems=[f"the driver failed: {type(error).__name__}: {error}"])
            with guard:
                del under_way[number]
                campaigns[number] = campaign
            what = "; ".join(campaign.problems) or "as if nothing had been"
            said = f"{case.name}, seed {campaign.seed}: {len(campaign.faults)} faults in {campaign.seconds} s: {what}"
            print(said, flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for done in [pool.submit(work) for _ in range(arguments.jobs)]:
            done.result()
    return [campaigns[number] for number in sorted(campaigns)]


def as_json(arguments: argparse.Namespace, campaigns: Sequence[Campaign], with_disk: bool) -> dict[str, object]:
    """What is kept: when, where, and every fault."""
    return {
        "date": str(datetime.date.today()),
        "commit": short_commit(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "machine": f"{os.cpu_count()} cores of {cpu_model()}",
        "kills": arguments.kills,
        "seed": arguments.seed,
        "disk_filled": with_disk,
        "aims": aims(campaigns),
        "campaigns": [dataclasses.asdict(campaign) for campaign in campaigns],
    }


if __name__ == "__main__":
    sys.exit(main())

"""``lockstep record`` writes episodes of any policy into a file, from which ``lockstep clone`` learns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.commands.eval import actor_of
from lockstep.commands.parser import CommandParser, add_policy_options, at_least_one
from lockstep.policies.baselines import BASELINES
from lockstep.policies.recordings import check_place, record, write_recording
from lockstep.policies.results import facts_of, in_words


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep record RUN --out FILE``: writes observations and actions of whole episodes."""
    parser = CommandParser(prog="lockstep record", description="Record a policy's episodes.")
    parser.add_argument("run", help="name, run directory or checkpoint directory; with --policy also an environment id")
    add_policy_options(parser)
    parser.add_argument("--policy", choices=BASELINES, help="a baseline in place of the run's policy")
    parser.add_argument("--episodes", type=at_least_one, default=100, help="how many (default: 100)")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .npz or .safetensors")
    options = parser.parse_args(argv)
    check_place(options.out)
    actor = actor_of(options)
    name = options.policy or options.run
    recording = record(actor, name, options.episodes, options.seed, not options.stochastic)
    write_recording(options.out, recording)
    print(in_words(actor, facts_of(actor, recording.table, not options.stochastic)))
    print(f"{len(recording.actions):,} steps → {options.out}")
    return 0

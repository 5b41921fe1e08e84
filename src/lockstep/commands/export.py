"""``lockstep export`` writes a policy into files that other programs can run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.commands.parser import CommandParser, add_checkpoint, add_trust, policy_of
from lockstep.core.files import check_writable
from lockstep.policies.exported import OBSERVATIONS, export_policy
from lockstep.runs.finding import find_run

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
DOORS = {"onnx": "write_onnx", "torch": "write_program"}


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep export RUN``: writes each file asked for and checks it against the policy."""
    parser = CommandParser(
        prog="lockstep export", description="Write a policy for other programs: raw observations in, actions out."
    )
    parser.add_argument("run", help="name, run directory or checkpoint directory")
    parser.add_argument("--onnx", type=Path, metavar="FILE", help="an ONNX model, FILE.onnx; checked in ONNX Runtime")
    parser.add_argument(
        "--torch", type=Path, metavar="FILE", help="a torch.export program, FILE.pt2; needs no lockstep"
    )
    add_checkpoint(parser)
    add_trust(parser)
    options = parser.parse_args(argv)
    files = {kind: getattr(options, kind) for kind in SUFFIXES if getattr(options, kind) is not None}
    if not files:
        parser.error("which file? give --onnx FILE.onnx, --torch FILE.pt2, or both")
    for kind, path in files.items():
        if path.suffix != SUFFIXES[kind]:
            raise ValueError(f"--{kind} {path} must end in {SUFFIXES[kind]}")
        check_writable(path, f"--{kind}")
    policy = policy_of(options.run, options.checkpoint, options)
    name = find_run(options.run, options.runs_dir)[0].name
    for kind, path in files.items():
        greatest = export_policy(policy, path, DOORS[kind], name)
        print(
            f"{policy.environment['id']} after {policy.global_step:,} training steps → {path}: on {OBSERVATIONS:,} "
            f"random observations, differs from the policy by {greatest:.2g} at most"
        )
    return 0

"""``lockstep check`` says whether an environment is fit for training, and with which settings it would be trained."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.commands.parser import CommandParser, add_target, at_least_one
from lockstep.config.engines import engine_module
from lockstep.config.run import RunOptions
from lockstep.core.process import EXIT_FAILURE, enable_fault_handler
from lockstep.core.topology import Topology
from lockstep.envs.examine import examine
from lockstep.launch.jax_start import start_jax
from lockstep.launch.request import described_run, split_target

WORDS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep check ENV``: exit status 0, or 1 if there is a problem that a run would meet."""
    options, words = _parser().parse_known_args(list(argv))
    config = described_run("check", *split_target("check", words), starts_others=False)
    start_jax(config, RunOptions(), Topology())
    if config.env.backend == "tensor":
        engine = engine_module("torch")
        engine.check_device(config.device, 1)
        engine.set_up_device(config, Topology())
    enable_fault_handler()
    problems = 0
    for finding in examine(config.env, options.steps, config.seed, config.device):
        print(f"{WORDS[finding.level]}  {finding.text}", flush=True)
        problems += finding.level == "problem"
    print(f"{config.env.id}: {f'{problems} problem' + 's' * (problems > 1) if problems else 'fit for training'}")
    return EXIT_FAILURE if problems else 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="lockstep check",
        description="Examine an environment: Gymnasium's rules, finite numbers, repeatability, resuming, worker "
        "processes, speed, and the settings that it would be trained with.",
        allow_abbrev=False,
        epilog="Every option of lockstep train that describes the environment is accepted too, e.g. --env.frame-stack "
        "4, --env.kwargs '{\"g\": 9.8}', --seed 3.",
    )
    add_target(parser, "ENV_ID_OR_CONFIG_FILE", "the environment, or a file that names it")
    parser.add_argument("--steps", type=at_least_one, default=1000, help="random actions in each of two environments")
    return parser

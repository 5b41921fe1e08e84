"""Numbers on the command line of any command: what is none, and what is beyond what 64 bits hold."""

import importlib

import pytest

from lockstep.commands.parser import CommandParser, add_policy_options


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("verify", ["CartPole-v1", "--iterations", "x"], "argument --iterations: 'x' is no whole number"),
        ("verify", ["CartPole-v1", "--iterations", "0"], "argument --iterations: 0 is below 1"),
        ("bench", ["CartPole-v1", "--iters", "1.5"], "argument --iters: '1.5' is no whole number"),
        ("eval", ["run", "--episodes", str(2**63)], f"argument --episodes: {2**63} is beyond {2**63 - 1}"),
        ("eval", ["run", "--seed", "1" + "0" * 40], f"argument --seed: 1{'0' * 40} has more than 40 digits"),
        ("clone", ["x.npz", "--seed", "x"], "argument --seed: 'x' is no whole number"),
        ("clone", ["a.npz", "--out", "b", "--learning-rate", "fast"], "argument --learning-rate: 'fast' is no number"),
        ("doctor", ["--nproc", "two", "script.py"], "argument --nproc: 'two' is no whole number"),
    ],
)
def test_what_is_no_number_is_said(command, words, said):
    with pytest.raises(ValueError) as refusal:
        importlib.import_module(f"lockstep.commands.{command}").main(words)
    assert str(refusal.value) == f"{said} (lockstep {command} --help)"


@pytest.mark.parametrize("number", [0, 2**63, 10**40 - 1])
def test_a_runs_own_seed_can_be_named_again(number):
    parser = CommandParser()
    add_policy_options(parser)
    assert parser.parse_args(["--seed", str(number)]).seed == number

"""The bits of short runs are those that were written down: no change alters what a config and a seed give unnoticed."""

import json

import pytest
from command_line import train
from golden_cases import CASES, GOLDEN, surroundings
from variants import variants

GOLD = json.loads(GOLDEN.read_text())
HERE = surroundings()
ELSEWHERE = [f"{key} {HERE[key]} instead of {value}" for key, value in GOLD["holds_for"].items() if HERE[key] != value]
ALIKE = [
    [case for case in CASES if case.startswith(f"{engine} CartPole")] for engine in ("torch", "jax")
]  # fmt: skip

KEPT = [
    *(case for case in CASES if case.startswith("torch")),
    *("jax CartPole, 2 devices", "jax HalfCheetah normalised, 2 devices", "jax LSTM, 2 devices"),
]  # fmt: skip

holds_here = pytest.mark.skipif(bool(ELSEWHERE), reason=f"written down elsewhere: {'; '.join(ELSEWHERE)}")


@holds_here
@pytest.mark.parametrize("case", variants(CASES, KEPT))
def test_bits_are_those_that_were_written_down(case, tmp_path):
    summary = train(tmp_path, *CASES[case]).summary
    assert {key: summary[key] for key in ("params_sha256", "state_sha256")} == GOLD["bits"][case]


@holds_here
def test_another_seed_has_other_bits(tmp_path):
    case = "torch CartPole, 1 rank"
    summary = train(tmp_path, *CASES[case], "--seed", 8).summary
    assert summary["params_sha256"] != GOLD["bits"][case]["params_sha256"]
    assert summary["state_sha256"] != GOLD["bits"][case]["state_sha256"]


@pytest.mark.parametrize("cases", ALIKE, ids=["torch", "jax"])
def test_one_agent_is_written_down_for_every_world_size(cases):
    assert len(cases) == 3
    assert len({json.dumps(GOLD["bits"][case]) for case in cases}) == 1
    assert len({bits["params_sha256"] for bits in GOLD["bits"].values()}) == len(CASES) - 4


def test_every_case_is_written_down_and_nothing_else():
    assert set(GOLD["bits"]) == set(CASES)

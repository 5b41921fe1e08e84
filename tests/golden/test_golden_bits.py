"""The bits of short runs are those that were written down: no change alters what a config and a seed give unnoticed."""

import json

import pytest
from command_line import train
from golden_cases import CASES, GOLDEN, fitting, surroundings

pytestmark = pytest.mark.optimized

GOLD = json.loads(GOLDEN.read_text())
HERE = surroundings()
FITTING = fitting(GOLD["written"], HERE)
ALIKE = [
    [case for case in CASES if case.startswith(f"{engine} CartPole")] for engine in ("torch", "jax")
]  # fmt: skip

holds_here = pytest.mark.skipif(not FITTING, reason=f"no bits are written down for {HERE}")
EXACT = any(written["holds_for"] == HERE for written in FITTING)


@holds_here
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_that_were_written_down(case, tmp_path):
    known = [written["bits"][case] for written in FITTING if case in written["bits"]]
    if not known:
        pytest.skip(f"no bits of this case are written down for {HERE['processor']}")
    summary = train(tmp_path, *CASES[case]).summary
    bits = {key: summary[key] for key in ("params_sha256", "state_sha256")}
    if not EXACT and bits not in known:
        pytest.skip(f"no bits are written down for {HERE['processor']}")
    assert bits in known


@holds_here
def test_another_seed_has_other_bits(tmp_path):
    case = "torch CartPole, 1 rank"
    summary = train(tmp_path, *CASES[case], "--seed", 8).summary
    for written in FITTING:
        assert summary["params_sha256"] != written["bits"][case]["params_sha256"]
        assert summary["state_sha256"] != written["bits"][case]["state_sha256"]


def test_bits_of_this_processor_come_first_and_those_of_its_name_next():
    here = {"torch": "2.13", "processor": "EPYC (family 25, model 17)"}
    exact, other, old = ({**here, "processor": p} for p in (here["processor"], "EPYC (family 26, model 2)", "EPYC"))
    written = [{"holds_for": holds_for} for holds_for in (old, other, exact)]
    assert fitting(written, here) == written[2:]
    assert fitting(written[:2], here) == written[:1]
    assert fitting(written, {**here, "torch": "2.14"}) == []


@pytest.mark.parametrize("cases", ALIKE, ids=["torch", "jax"])
def test_one_agent_is_written_down_for_every_world_size(cases):
    assert len(cases) == 3
    for written in GOLD["written"]:
        assert len({json.dumps(written["bits"][case]) for case in cases}) == 1
        assert len({bits["params_sha256"] for bits in written["bits"].values()}) == len(written["bits"]) - 4


NOT_EVERYWHERE = {"torch GRPO, 2 ranks", "torch masks, 2 ranks"}
"""Cases whose bits were changed on purpose where not all processors of the file were at hand."""


def test_every_case_is_written_down_and_nothing_else():
    assert set().union(*(written["bits"] for written in GOLD["written"])) == set(CASES)
    for written in GOLD["written"]:
        assert set(CASES) - NOT_EVERYWHERE <= set(written["bits"]) <= set(CASES)

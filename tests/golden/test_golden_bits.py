"""The bits of short runs are those that were written down: no change alters what a config and a seed give unnoticed."""

import json

import pytest
from command_line import train
from golden_cases import CASES, GOLDEN, fitting, surroundings

pytestmark = pytest.mark.optimized

GOLD = json.loads(GOLDEN.read_text())
HERE = surroundings()
ALIKE = [
    [case for case in CASES if case.startswith(f"{engine} CartPole")] for engine in ("torch", "jax")
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_that_were_written_down(case, tmp_path):
    found = fitting(GOLD["written"], HERE, case)
    if not found:
        pytest.skip(f"no bits of this case are written down for {HERE}")
    summary, known = train(tmp_path, *CASES[case]).summary, [written["bits"][case] for written in found]
    bits = {key: summary[key] for key in ("params_sha256", "state_sha256")}
    exact = any(written["holds_for"]["processor"] == HERE["processor"] for written in found)
    if not exact and bits not in known:
        pytest.skip(f"no bits are written down for {HERE['processor']}")
    assert bits in known


def test_another_seed_has_other_bits(tmp_path):
    case = "torch CartPole, 1 rank"
    summary = train(tmp_path, *CASES[case], "--seed", 8).summary
    for written in GOLD["written"]:
        assert summary["params_sha256"] != written["bits"][case]["params_sha256"]
        assert summary["state_sha256"] != written["bits"][case]["state_sha256"]


def test_bits_of_this_processor_come_first_and_those_of_its_name_next():
    here = {"torch": "2.13", "processor": "EPYC (family 25, model 17)"}
    exact, other, old = ({**here, "processor": p} for p in (here["processor"], "EPYC (family 26, model 2)", "EPYC"))
    written = [{"holds_for": holds_for, "bits": {"torch": {}, "jax": {}}} for holds_for in (old, other, exact)]
    assert fitting(written, here, "torch") == written[2:]
    assert fitting(written[:2], here, "torch") == written[:1]
    assert fitting(written, {**here, "torch": "2.14"}, "torch") == []
    assert fitting(written, here, "torch images") == []


def test_kernels_of_products_decide_bits_of_engine_torch_alone():
    haswell, skylake = ({"processor": "EPYC", "openblas": name} for name in ("Haswell", "SkylakeX"))
    written = [{"holds_for": haswell, "bits": {"torch": {}, "jax": {}}}]
    assert fitting(written, skylake, "torch") == []
    assert fitting(written, skylake, "jax") == written


@pytest.mark.parametrize("cases", ALIKE, ids=["torch", "jax"])
def test_one_agent_is_written_down_for_every_world_size(cases):
    assert len(cases) == 3
    for written in GOLD["written"]:
        assert len({json.dumps(written["bits"][case]) for case in cases}) == 1
        assert len({bits["params_sha256"] for bits in written["bits"].values()}) == len(written["bits"]) - 4


NOT_EVERYWHERE = {"torch GRPO, 2 ranks", "torch masks, 2 ranks", "torch LSTM, 2 ranks"}
"""Cases whose bits were changed on purpose where not all processors of the file were at hand."""


def test_every_case_is_written_down_and_nothing_else():
    assert set().union(*(written["bits"] for written in GOLD["written"])) == set(CASES)
    for written in GOLD["written"]:
        assert set(CASES) - NOT_EVERYWHERE <= set(written["bits"]) <= set(CASES)

"""Plans beside what the checks on a GPU measured."""

import pytest

from benchmarks.gpu_checks import CHECKS
from benchmarks.plan_on_gpu import COMPARED, KEPT, MARK, MEASURED, PAGE, Row, commands, line, target_of
from lockstep.config.command_line import read_request
from lockstep.planning.report import amount

REPORT = """
- GPUs that PyTorch sees: NVIDIA H100 80GB HBM3

| check | result | figures |
| trains | passed | final return 500.0, 7,350 steps/s | 23 | … |
| graphs | FAILED | 6,698 against 1,434 steps/s: 4.67 × | 38 | … |
| exact | measured | 844,020 against 556,982 steps/s: 1.52 × | 54 | … |
| jax-exact | passed | 6,466,087 against 2,625,338 steps/s: 2.46 × | 16 | … |
"""


def test_commands_are_those_of_the_checks_and_without_a_speed_where_one_did_not_end_well():
    found = commands(REPORT)
    assert [row.measured for row in found] == [7350.0, None, 556982.0, 844020.0, 2625338.0, 6466087.0]
    assert found[0].words == "CartPole-v1 --device cuda"
    assert [row.words.endswith("--reduction fast") for row in found] == [False, False, False, True, False, True]
    assert [row.result for row in found] == ["passed", "FAILED", "measured", "measured", "passed", "passed"]
    without = REPORT.replace("| exact |", "| other |")
    assert [row.result for row in commands(without)][2:4] == ["not in the report"] * 2


def test_the_kept_table_is_of_the_kept_measurements():
    report, checks = MEASURED.read_text(), {check.name: check for check in CHECKS}
    found = commands(report)
    assert len(found) == len(COMPARED)
    for name, number in COMPARED:
        (row,) = [line for line in report.splitlines() if line.startswith(f"| {name} |")]
        assert checks[name].commands[number] in row
    kept = KEPT.read_text()
    for row in found:
        assert row.measured is not None
        assert read_request(row.words.split()).config.device == "cuda"
        (shown,) = [line for line in kept.splitlines() if line.startswith(f"| `{row.words}` |")]
        assert shown.split(" | ")[3] == amount(row.measured)
    shown = PAGE.read_text().partition(f"<!-- {MARK}: begin -->\n")[2].partition(f"<!-- {MARK}: end -->")[0]
    assert kept.endswith(shown)
    assert "| yes |" in shown


def test_a_row_says_whether_the_measurement_lies_in_the_range():
    rates = {"best": 40.0, "likely": 20.0, "worst": 10.0}
    assert line(Row("CartPole-v1", 16.0), rates) == ["`CartPole-v1`", "20", "10 – 40", "16", "+25%", "yes"]
    assert line(Row("CartPole-v1", 50.0), rates)[-2:] == ["-60%", "no"]
    assert line(Row("CartPole-v1", None, "FAILED"), rates)[1:] == ["20", "10 – 40", "none: FAILED", "–", "–"]


def test_a_gpu_that_plans_do_not_know():
    assert target_of(REPORT) == "h100:1"
    another = REPORT.replace("H100", "H200").replace("\n\n| check", "\n- machine: not the H100 of yesterday\n\n| check")
    assert target_of(another) == "h200:1"
    with pytest.raises(ValueError, match="measured on none of H100, H200, A100"):
        target_of(REPORT.replace("H100", "B200"))

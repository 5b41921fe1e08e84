"""The table of what XLA made of iterations: what it says of a program, and of the command that compiles it."""

from benchmarks.compiled import CASES, Compiled, report


def row(case, reduction="exact", **changes):
    found = {"all-gather": (1, 1000)}
    return Compiled(case, reduction, 256, 9155, "slices", collectives=found, in_step=found, **changes)


def said(*rows):
    return report("tpu", "v5e:16x16", list(rows), "TPU v5 lite", "abc1234")


def test_calls_of_the_host_are_in_the_table():
    head, ruler, line = said(row("cartpole", callbacks=2, doubles=3)).splitlines()[-3:]
    cells = dict(zip(head.split(" | "), line.split(" | "), strict=True))
    assert (cells["calls of the host"], cells["float64 in loops"]) == ("2", "3")
    assert ruler.count("|") == head.count("|") == line.count("|")


def test_the_command_is_of_the_cases_that_stand_there():
    three = said(*(row(case, reduction) for case in ("cartpole", "lstm", "pixels") for reduction in ("exact", "fast")))
    assert "`python -m benchmarks.compiled tpu v5e:16x16 --cases cartpole,lstm,pixels`" in three
    every = said(*(row(case, reduction) for case in CASES for reduction in ("exact", "fast")))
    assert "`python -m benchmarks.compiled tpu v5e:16x16`" in every
    assert "16x16 --cases cartpole --reductions fast`" in said(row("cartpole", "fast"))

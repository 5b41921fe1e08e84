"""The example of ``attach``: one agent and one set of lines, with a launcher and without."""

import re
from pathlib import Path

import pytest
from spawned_ranks import run_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "attach_ppo.py"
RANDOM_RETURN = 22.0


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_example_learns(world_size):
    writer, *others = run_script([str(EXAMPLE), "--total-steps", "12800"], world_size)
    lines = re.findall(r"^step (\d+) return ([\d.]+) kl", writer, re.MULTILINE)
    assert [int(step) for step, _ in lines] == [12800]
    assert float(lines[0][1]) > 2.5 * RANDOM_RETURN
    assert others == [""] * (world_size - 1)


def test_every_line_that_needs_lockstep_is_marked():
    """All code that mentions Lockstep says that it was added, so that a reader finds it."""
    code = EXAMPLE.read_text().rpartition('"""\n\nimport argparse')[2].splitlines()
    assert [line for line in code if "lockstep" in line and "# attach" not in line] == []
    assert len([line for line in code if "# attach" in line]) == 9

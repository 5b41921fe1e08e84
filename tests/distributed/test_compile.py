"""A compiled run: the same agent on one rank and on two."""

import pytest
from command_line import CARTPOLE, same

NET = ("--network.activation", "silu", "--network.hidden-sizes", 16)


@pytest.mark.long  # Inductor compiles for half a minute
def test_a_compiled_run_is_the_same_on_one_rank_and_on_two(trained):
    one, two = (trained(*CARTPOLE, *NET, "--compile", "--nproc", n) for n in (1, 2))
    same(one, two)
    assert one.summary["shards_on_a_rank"] == "loop"
    assert one.agent != trained(*CARTPOLE, *NET).agent  # the compiler adds in another order

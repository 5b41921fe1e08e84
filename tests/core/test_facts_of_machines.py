import pytest

from lockstep.core.errors import RankMismatchError
from lockstep.core.machine import check_facts_alike

FACTS = {"cpu": "one model", "numpy": "2.4.6"}


def test_the_rank_and_what_differs_are_named():
    with pytest.raises(RankMismatchError, match=r"rank 2 differs from rank 0 in numpy: 2\.0\.0 against 2\.4\.6; "):
        check_facts_alike([FACTS, FACTS, FACTS | {"numpy": "2.0.0"}])


def test_equal_facts_are_fine():
    check_facts_alike([FACTS, dict(FACTS)])

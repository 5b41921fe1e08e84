"""Ranks begin at the same place, or say so before they train."""

import pytest

from lockstep.core.errors import RankMismatchError
from lockstep.core.machine import check_facts_alike
from lockstep.runs.checkpoint import Checkpoint
from lockstep.training.session import beginning_of


def test_a_rank_that_sees_no_checkpoint_where_another_does_is_found():
    resumed, anew = beginning_of(Checkpoint({}, {}, {"global_step": 128})), beginning_of(None)
    check_facts_alike([{"beginning": resumed}, {"beginning": resumed}])
    with pytest.raises(RankMismatchError, match="rank 1 differs from rank 0 in beginning: anew against at step 128"):
        check_facts_alike([{"beginning": resumed}, {"beginning": anew}])

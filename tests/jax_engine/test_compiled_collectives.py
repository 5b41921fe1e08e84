"""The reader of compiled programs finds their collectives."""

import pytest
from compiled_collectives import Collective, by_kind, bytes_of, collectives, unordered

PROGRAM = """
HloModule jit_call, is_scheduled=true

%inner (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %arg = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%arg), index=1
  %gathered = f32[2,8]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  ROOT %out = (s32[], f32[8]{0}) tuple(%i, %x)
}

%condition (arg.1: (s32[], f32[8])) -> pred[] {
  %arg.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] compare(%a, %b), direction=LT
}

%quiet (arg.2: f32[8]) -> f32[8] {
  ROOT %arg.2 = f32[8]{0} parameter(0)
}

%loud (arg.3: f32[8]) -> f32[8] {
  %arg.3 = f32[8]{0} parameter(0)
  ROOT %summed = f32[8]{0} all-reduce(%arg.3), channel_id=2, to_apply=%quiet
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %loop = (s32[], f32[8]{0}) while(%t), condition=%condition, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  %both = (f64[4]{0}, s32[]) all-gather(%q, %r), channel_id=3, dimensions={0}
  ROOT %chosen = f32[8]{0} conditional(%which, %p, %p), branch_computations={%quiet, %loud}
}
"""


def test_loops_and_branches_of_a_program_are_counted():
    found = collectives(PROGRAM)
    expected = {
        Collective("all-gather", "f32", 64): 3,
        Collective("all-gather", "f64", 36): 1,
        Collective("all-reduce", "f32", 32): 1,
    }
    assert found == expected
    assert by_kind(found) == {"all-gather": 4, "all-reduce": 1}
    assert bytes_of("(bf16[2,3]{1,0}, u8[5])") == ("bf16", 17)


def test_a_collective_in_a_loop_of_unknown_length_is_an_error():
    with pytest.raises(AssertionError, match="unknown length"):
        collectives(PROGRAM.replace(', backend_config={"known_trip_count":{"n":"3"}}', ""))


def test_collectives_that_need_not_wait_for_one_another_are_found():
    """Nothing orders the loop, the gather and the branch of this program; a use of one by the next does."""
    assert unordered(PROGRAM) == [("loop", "both"), ("loop", "chosen"), ("both", "chosen")]
    ordered = PROGRAM.replace("all-gather(%q, %r)", "all-gather(%q, %loop)").replace("(%which, %p, %p)", "(%both, %p)")
    assert unordered(ordered) == []
    # Neither where an instruction comes from nor what is only scheduled after it orders anything.
    named = 'dimensions={0}, control-predecessors={%loop}, metadata={op_name="jit(call)/loop/all_gather"}'
    assert ("loop", "both") in unordered(PROGRAM.replace("dimensions={0}", named))

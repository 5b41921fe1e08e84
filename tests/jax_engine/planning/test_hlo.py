"""Compiled programs, read: loops as often as they run, slices as what they are, collectives with their bytes."""

import pytest

from lockstep.jax_engine.planning.hlo import Reader, collectives_of
from lockstep.jax_engine.planning.hlo_flops import ConvolutionShapes, convolution_flops, dot_flops, gemm_flops
from lockstep.training.costs import Collective

PROGRAM = """HloModule jit_f, is_scheduled=true

%fused (param_0: f32[100,8], param_1: s32[]) -> f32[1,8] {
  %param_0 = f32[100,8]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,8]{1,0} dynamic-slice(%param_0, %param_1, %zero), dynamic_slice_sizes={1,8}
}

%written (param_0: f32[100,8], param_1: f32[1,8], param_2: s32[]) -> f32[100,8] {
  %param_0 = f32[100,8]{1,0} parameter(0)
  %param_1 = f32[1,8]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %update = f32[100,8]{1,0} dynamic-update-slice(%param_0, %param_1, %param_2, %zero)
}

%body (p: (s32[], f32[100,8], f32[8,16])) -> (s32[], f32[100,8], f32[8,16]) {
  %p = (s32[], f32[100,8]{1,0}, f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[100,8]{1,0} get-tuple-element(%p), index=1
  %w = f32[8,16]{1,0} get-tuple-element(%p), index=2
  %row = f32[1,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused
  %product = f32[1,16]{1,0} dot(%row, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/gradients/while/body/dot_general"}
  %all = f32[4,16]{1,0} all-gather(%product), dimensions={0}, metadata={op_name="jit(f)/optimizer/all_gather"}
  %new = f32[100,8]{1,0} fusion(%x, %row, %i), kind=kLoop, calls=%written
  ROOT %out = (s32[], f32[100,8]{1,0}, f32[8,16]{1,0}) tuple(%i, %new, %w)
}

%condition (p: (s32[], f32[100,8], f32[8,16])) -> pred[] {
  %p = (s32[], f32[100,8]{1,0}, f32[8,16]{1,0}) parameter(0)
  %bound = s32[] constant(20)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (a: (s32[], f32[100,8], f32[8,16])) -> (s32[], f32[100,8], f32[8,16]) {
  %a = (s32[], f32[100,8]{1,0}, f32[8,16]{1,0}) parameter(0)
  ROOT %loop = (s32[], f32[100,8]{1,0}, f32[8,16]{1,0}) while(%a), condition=%condition, body=%body, \
metadata={op_name="jit(f)/rollout/while"}
}
"""
BY_SHARDS = PROGRAM.replace("%bound = s32[] constant(20)", "%bound = s32[] get-tuple-element(%p), index=0")


def ran(text=PROGRAM, shards=3):
    return list(Reader(text, shards).run())


def test_a_loop_runs_as_often_as_its_condition_says():
    (product,) = [x for x in ran() if x.kernel.kind == "matmul"]
    assert product.kernel.calls == 20
    assert product.kernel.flops == 2 * 16 * 8
    assert product.kernel.bytes == 4 * (8 + 128 + 16)


def test_a_loop_over_shards_runs_as_often_as_there_are_shards():
    (product,) = [x for x in ran(BY_SHARDS) if x.kernel.kind == "matmul"]
    assert product.kernel.calls == 3


def test_what_the_compiler_knows_of_a_loop_is_believed():
    text = PROGRAM.replace("body=%body,", 'body=%body, backend_config={"known_trip_count":{"n":"7"}},')
    assert {x.kernel.calls for x in ran(text)} == {7.0}


def test_slices_are_read_and_written_not_what_they_are_of():
    sizes = [x.kernel.bytes for x in ran() if x.collective is None and x.kernel.kind == "vector"]
    # a row of 8 floats read and written with the index; then the row, the index, and the row's place read and written
    assert sizes == [4 * 8 + 4 + 4 * 8, 4 * 8 + 4 + 2 * 4 * 8]


def test_parts_are_the_innermost_names():
    assert {x.part for x in ran()} == {"rollout", "gradients", "optimizer"}


def test_collectives_are_counted_with_the_bytes_of_their_results():
    assert collectives_of(ran()) == (Collective("all-gather", "gradients", 20.0, 4 * 64),)


@pytest.mark.parametrize(
    ("begun", "shape", "received"),
    [
        ("all-gather-start", "(f32[1,16]{1,0}, f32[4,16]{1,0})", 4 * 64),  # operand and result
        ("all-reduce-start", "(f32[1,16]{1,0}, f32[8]{0})", 4 * 24),  # two results
        ("all-reduce-start", "f32[1,16]{1,0}", 4 * 16),
    ],
)
def test_what_a_collective_that_is_waited_for_later_receives_are_its_results(begun, shape, received):
    text = PROGRAM.replace("f32[4,16]{1,0} all-gather(", f"{shape} {begun}(")
    (found,) = collectives_of(ran(text))
    assert (found.kind, found.bytes) == (begun.removesuffix("-start"), received)


def test_memory_on_the_chip_is_not_the_devices():
    on_chip = PROGRAM.replace("%row = f32[1,8]{1,0} fusion", "%row = f32[1,8]{1,0:T(1,128)S(1)} fusion")
    (product,) = [x for x in ran(on_chip) if x.kernel.kind == "matmul"]
    assert product.kernel.bytes == 4 * (128 + 16)


def test_products():
    assert dot_flops((2, 5, 7), (2, 5, 3), "lhs_contracting_dims={2}, rhs_contracting_dims={1}") == 2 * 2 * 5 * 7 * 3
    rest = ', custom_call_target="__cublas$gemm", backend_config={"lhs_contracting_dimensions":["0"]}'
    assert gemm_flops(ConvolutionShapes((3, 5), (3, 7), (5, 7)), rest) == 2 * 5 * 7 * 3
    assert gemm_flops(ConvolutionShapes((3, 5), (3, 7), (5, 7)), 'custom_call_target="TopK"') == 0.0


def test_a_convolution_doesnt_count_its_padding():
    # three places of a kernel of three on five numbers with one of padding on each side: 5 + 2 * 4
    shapes = ConvolutionShapes((1, 5, 2), (3, 2, 4), (1, 5, 4))
    rest = "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f"
    assert convolution_flops(shapes, rest) == 2 * 4 * 2 * (5 + 2 * 4)
    assert convolution_flops(shapes, "no labels") == 0.0


def test_a_tpus_product_of_matrices_is_a_convolution_without_places():
    shapes = ConvolutionShapes((2, 64), (8, 64), (2, 8))
    assert convolution_flops(shapes, "dim_labels=bf_oi->bf") == pytest.approx(2 * 2 * 8 * 64)


def test_products_of_heads_are_float32_where_others_are_bfloat16():
    def kinds(text, bf16):
        return {x.kernel.kind for x in Reader(text, 3, bf16).run()} - {"vector"}

    head = PROGRAM.replace("gradients/while/body/dot", "gradients/transpose(jvp(head))/dot")
    assert head != PROGRAM
    assert kinds(PROGRAM, True) == {"matmul_bf16"}
    assert kinds(head, True) == kinds(head, False) == kinds(PROGRAM, False) == {"matmul"}

"""Levels of compiling are what programs of JAX are compiled with."""

import pytest
from quick_compiler import LOOPS, OPTIMIZED, compile_as_said, has_older_loops

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.skipif(OPTIMIZED, reason="all is compiled as it is for users")


@pytest.mark.parametrize(
    ("level", "optimization", "loops"), [("optimized", 3, True), ("exact", 0, True), ("quick", 0, False)]
)
def test_a_level_is_that_of_each_program(level, optimization, loops, monkeypatch):
    from jax._src import compiler

    other = "quick" if level != "quick" else "exact"
    compile_as_said(other if has_older_loops() or level == "optimized" else "optimized")  # without them those are equal
    function = jax.jit(lambda x: x + 1)
    function(1.0)
    seen, options_of = [], compiler.get_compile_options

    def watched(*args, **named):
        seen.append(options_of(*args, **named))
        return seen[-1]

    monkeypatch.setattr(compiler, "get_compile_options", watched)
    compile_as_said(level)
    function(1.0)  # what was compiled at another level isn't kept
    (options,) = seen
    assert options.executable_build_options.debug_options.xla_backend_optimization_level == optimization
    assert dict(options.env_option_overrides).get(LOOPS, True) is (loops or not has_older_loops())

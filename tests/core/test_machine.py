"""What of the processor decides the last bits, read from the kernel's own description."""

import json
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep.core import machine
from lockstep.core.topology import available_cores

X86 = (
    "processor\t: 0\nmodel name\t: Some CPU @ 2GHz\nflags\t\t: fpu sse2 {extra} avx\n\nprocessor\t: 1\nflags\t: none\n"
)


@pytest.mark.parametrize(("extra", "expected"), [("", "avx"), ("avx2", "avx2"), ("avx2 avx512f", "avx512f")])
def test_the_widest_instructions_are_named(monkeypatch, tmp_path, extra, expected):
    (tmp_path / "cpuinfo").write_text(X86.format(extra=extra))
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert machine.instruction_set() == expected
    assert machine.cpu_model() == "Some CPU @ 2GHz"
    assert machine.cpu_features() == tuple(sorted(f"fpu sse2 {extra} avx".split()))


def test_processors_of_one_name_are_told_apart(monkeypatch, tmp_path):
    said = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: EPYC\nstepping\t: 1\n"
    (tmp_path / "cpuinfo").write_text(said)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert machine.processor() == "EPYC (family 25, model 17, stepping 1)"
    (tmp_path / "cpuinfo").write_text(said.replace("17", "18"))
    assert machine.processor() == "EPYC (family 25, model 18, stepping 1)"
    (tmp_path / "cpuinfo").write_text("model name\t: EPYC\n")
    assert machine.processor() == "EPYC"


def test_arm_names_them_otherwise(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text("Features : fp asimd sve\n")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert machine.instruction_set() == "sve"


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not machine.openblas_kernel(),
    reason="NumPy has no OpenBLAS for x86-64",
)
def test_the_kernels_of_numpys_products_are_named():
    code = "from lockstep.core.machine import openblas_kernel; print(openblas_kernel())"
    found = [
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"OPENBLAS_CORETYPE": name}, capture_output=True, text=True
        ).stdout.strip()
        for name in ("Nehalem", "Haswell")
    ]
    assert found == ["Nehalem", "Haswell"]


def test_no_kernel_is_named_without_numpys_own_openblas(monkeypatch, tmp_path):
    monkeypatch.setattr(np, "__file__", str(tmp_path / "numpy" / "__init__.py"))
    assert machine.openblas_kernel() == ""
    (tmp_path / "numpy.libs").mkdir()
    (tmp_path / "numpy.libs" / "libopenblas.so").write_text("no library")
    assert machine.openblas_kernel() == ""


def test_without_the_kernels_word_the_architecture_stands(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "nothing")
    assert machine.instruction_set() == platform.machine()
    assert machine.cpu_features() == ()


def test_numpy_computes_with_one_thread_from_there_on():
    """In a process of its own: how many NumPy has is settled when it is loaded."""
    code = """if True:
        import json
        import numpy, threadpoolctl
        from lockstep.core.machine import one_blas_thread
        def threads():
            return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
        before = threads()
        one_blas_thread()
        print(json.dumps([before, threads()]))
    """
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=variables | {"OPENBLAS_NUM_THREADS": "2"}
    )
    assert ended.returncode == 0, ended.stderr
    before, after = json.loads(ended.stdout)
    assert set(after) == {1}
    assert max(before) > 1 or available_cores() == 1


@pytest.mark.parametrize("before", ["", "import scipy"], ids=["imported later", "the package before"])
def test_scipy_has_one_thread_wherever_it_is_imported(before):
    pytest.importorskip("scipy")
    code = f"""if True:
        {before}
        import threadpoolctl
        from lockstep.core.machine import one_blas_thread
        one_blas_thread()
        import scipy.linalg
        pools = [p for p in threadpoolctl.threadpool_info() if "scipy.libs" in p["filepath"]]
        print(len(pools), {{p["num_threads"] for p in pools}})
    """
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=variables | {"OPENBLAS_NUM_THREADS": "2"}
    )
    count, threads = ended.stdout.split(maxsplit=1)
    assert int(count) > 0, ended.stderr
    assert threads == "{1}\n"


def test_pytorch_has_one_thread_where_an_environment_has_loaded_it(monkeypatch):
    asked = []
    monkeypatch.delitem(machine.sys.modules, "torch", raising=False)
    machine.one_torch_thread()
    assert "torch" not in machine.sys.modules
    monkeypatch.setitem(machine.sys.modules, "torch", SimpleNamespace(set_num_threads=asked.append))
    machine.one_torch_thread()
    assert asked == [1]


def test_versions_of_packages_that_environments_compute_with_are_a_fact(monkeypatch, tmp_path):
    for place, name in (
        ("first", "Box2D-2.3.10.dist-info"),
        ("first", "rich-14.0.dist-info"),
        ("first", "brax.dist"),
        ("second", "mujoco_mjx-3.17.0.dist-info"),
        ("second", "box2d-2.3.5.dist-info"),
    ):
        (tmp_path / place / name).mkdir(parents=True)
    monkeypatch.setattr(machine.sys, "path", [str(tmp_path / name) for name in ("first", "missing", "second")])
    machine.package_versions.cache_clear()
    try:
        assert machine.package_versions() == "box2d 2.3.10, mujoco_mjx 3.17.0"
    finally:
        machine.package_versions.cache_clear()


def test_variables_that_choose_kernels_are_a_fact(monkeypatch):
    for name in machine.KERNEL_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert machine.kernel_variables() == ""
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Nehalem")
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    assert machine.kernel_variables() == "MKL_CBWR=AUTO OPENBLAS_CORETYPE=Nehalem"


@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("", "0"), ("random", "0"), ("7", "7"), ("0", "0")])
def test_hashes_are_fixed_unless_their_seed_is_chosen(before, after):
    variables = {} if before is None else {machine.HASH_SEED: before}
    assert machine.fix_hashes(variables) == (before != after)
    assert variables == {machine.HASH_SEED: after}


HASHED = "from lockstep.core.machine import begin_with_fixed_hashes; begin_with_fixed_hashes(); import os, sys; "
PRINTED = "print(os.getpid(), hash('text'), sys.flags.hash_randomization, sys.argv[1:])"


@pytest.mark.parametrize(("chosen", "fixed"), [("", True), ("random", True), ("0", True), ("5", False)])
def test_a_program_begins_again_as_the_same_process_with_fixed_hashes(chosen, fixed):
    said = []
    for _ in range(2):
        words = [sys.executable, "-c", HASHED + PRINTED, "--one", "two words"]
        with subprocess.Popen(
            words, env={**os.environ, machine.HASH_SEED: chosen}, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            pid, rest = process.stdout.read().split(" ", 1)
        assert (process.returncode, int(pid)) == (0, process.pid)
        said.append(rest)
    assert said[0] == said[1]
    assert said[0].split(" ", 1)[1] == f"{0 if fixed else 1} ['--one', 'two words']\n"


@pytest.mark.parametrize(("option", "before"), [("-E", ""), ("-B", "sys.settrace(lambda *_: None); ")])
def test_isolated_and_debugged_programs_keep_their_hashes_and_go_on(option, before):
    """Python would ignore the variable, and begin again for ever; a debugger would lose the process."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; {before}{HASHED}{PRINTED}"
    variables = {name: value for name, value in os.environ.items() if name != machine.HASH_SEED}
    ended = subprocess.run(
        [sys.executable, option, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split()[2:] == ["1", "[]"]


def test_a_program_begins_again_once_even_if_something_takes_the_variable_away():
    code = f"import os; os.environ.pop({machine.HASH_SEED!r}, None); " + HASHED + PRINTED
    variables = {name: value for name, value in os.environ.items() if name != machine.HASH_SEED}
    ended = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.split()[3:]) == (0, ["[]"])

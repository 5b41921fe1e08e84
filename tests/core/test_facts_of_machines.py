import pytest

from lockstep.core import machine
from lockstep.core.errors import RankMismatchError
from lockstep.core.machine import JAX_PACKAGES, TORCH_PACKAGES, check_facts_alike, device_facts

FACTS = {"cpu": "one model", "numpy": "2.4.6"}


def test_the_rank_and_what_differs_are_named():
    with pytest.raises(RankMismatchError, match=r"rank 2 differs from rank 0 in numpy: 2\.0\.0 against 2\.4\.6; "):
        check_facts_alike([FACTS, FACTS, FACTS | {"numpy": "2.0.0"}])


@pytest.mark.parametrize(("first", "second"), [(FACTS, FACTS | {"lockstep": "2"}), (FACTS | {"lockstep": "2"}, FACTS)])
def test_a_fact_that_only_one_rank_knows_differs(first, second):
    ours, theirs = second.get("lockstep"), first.get("lockstep")
    with pytest.raises(RankMismatchError, match=rf"^rank 1 differs from rank 0 in lockstep: {ours} against {theirs}; "):
        check_facts_alike([first, second])


def test_equal_facts_are_fine():
    check_facts_alike([FACTS, dict(FACTS)])


def test_what_computes_on_an_accelerator_is_compared_with_its_version(tmp_path, monkeypatch):
    for name in (
        "nvidia_ml_py-13.0",
        "nvidia_cublas_cu13-13.1.0",
        "NVIDIA_cudnn_cu13-9.20.0",
        "libtpu-0.0.30",
        "numpy-2.4.6",
    ):
        (tmp_path / f"{name}.dist-info").mkdir()
    (tmp_path / "nvidia_nothing-1.0").mkdir()
    monkeypatch.setattr(machine.sys, "path", [str(tmp_path)])
    machine.package_versions.cache_clear()
    try:
        assert device_facts("cpu", "whatever", JAX_PACKAGES) == {}
        assert device_facts("cuda", "CUDA 13.0", JAX_PACKAGES) == {
            "platform version": "CUDA 13.0",
            "packages of devices": "libtpu 0.0.30, nvidia_cublas_cu13 13.1.0, nvidia_cudnn_cu13 9.20.0",
        }
        named = "nvidia_cublas_cu13 13.1.0, nvidia_cudnn_cu13 9.20.0"
        assert device_facts("cuda", "", TORCH_PACKAGES)["packages of devices"] == named
        assert machine.package_versions() == ""
    finally:
        machine.package_versions.cache_clear()

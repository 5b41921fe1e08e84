"""Copies of JAX arrays on the devices of one process and of two: equal ones pass, and one that differs is named."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from free_ports import free_port

from lockstep.core.errors import DesyncError
from lockstep.doctor import check_replicated

SOURCE = Path(__file__).parents[2] / "src"
SCRIPT = Path(__file__).with_name("replicated_trees.py")


def start(devices, variables):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "RANK", "WORLD_SIZE")}
    command = [sys.executable, str(SCRIPT), str(devices)]
    environment |= {"PYTHONPATH": str(SOURCE)} | variables
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def reports():
    """What both processes of two say, and the one process of one; there are four devices each time."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [start(2, common | {"RANK": str(rank)}) for rank in range(2)] + [start(4, {})]
    try:
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in outputs]


@pytest.mark.long
def test_every_process_concludes_the_same(reports):
    assert reports[0] == reports[1]


@pytest.mark.parametrize("processes", [1, 2])
def test_equal_copies_pass_and_are_counted(reports, processes):
    report = reports[2 - 2 * (processes == 2)]
    assert report["equal"] == 1 + 1 + (processes == 2)  # a number has as many copies as there are processes
    assert report["nan"] == 1
    assert report["parts"] == 1
    assert report["cut"] == 0
    assert report["empty"] == 0
    assert report["half"] == 2 + (processes == 2)
    assert report["functions"] == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_a_copy_that_differs_is_named(reports, processes):
    report = reports[2 - 2 * (processes == 2)]
    assert report["one device"].startswith(
        "not replicated: 1 of 2 leaves differ between their copies, first ['w'][0]: "
    )
    assert "against device 0" in report["one device"]
    assert report["parts differ"].startswith("not replicated: 1 of 1 leaves")
    assert report["half differs"].startswith("not replicated: 1 of 1 leaves")


@pytest.mark.parametrize("processes", [1, 2])
def test_slices_of_a_device_axis_are_copies(reports, processes):
    report = reports[2 - 2 * (processes == 2)]
    assert report["pmap"] == 2 + (processes == 2)
    assert report["pmap differs"].startswith("not replicated: 1 of 2 leaves differ between their copies, first ['w']: ")
    assert "slice 3 on device" in report["pmap differs"]
    assert "against slice 0 on device 0" in report["pmap differs"]
    assert report["pmap of several a device"] == 1
    assert "slice 1 of process 0" in report["slices differ on the host"]
    assert report["pmap without its axis"] == 0


def test_processes_with_other_numbers_or_trees_are_named(reports):
    assert "process 1 against process 0" in reports[0]["of processes"]
    assert "['y']" in reports[0]["structure"]
    assert (reports[2]["of processes"], reports[2]["structure"]) == (0, 0)


def test_it_is_public_and_raises_an_error_of_ours():
    assert check_replicated({"x": 1.0}) == 0
    assert issubclass(DesyncError, RuntimeError)


def test_its_argument_is_no_text():
    text: Any = "no"
    with pytest.raises(ValueError, match=r"^device_axis: 'no' must be True or False$"):
        check_replicated({"x": 1.0}, device_axis=text)


def test_leaves_without_bytes_are_refused_by_name():
    with pytest.raises(ValueError, match=r"\['w'\] is traced and has no bytes yet; call check_replicated outside"):
        jax.jit(lambda w: check_replicated({"w": w}))(jnp.ones(2))
    donated = jnp.ones(2) + 1
    donated.delete()
    with pytest.raises(ValueError, match=r"\['w'\] was deleted or donated to a jitted call"):
        check_replicated({"w": donated})

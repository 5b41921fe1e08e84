"""Two real processes with two devices each are one mesh of four, with the bits of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("two_processes.py")


def start(directory, devices, variables):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(directory / "cache")} | variables
    programs = directory / f"programs_{variables.get('RANK', 'alone')}"
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(programs), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, str(SCRIPT), str(directory), str(devices)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What both processes of two report, and the one process of one."""
    directory = tmp_path_factory.mktemp("processes")
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [start(directory, 2, common | {"RANK": str(rank)}) for rank in range(2)]
    processes.append(start(directory, 4, {}))
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], "\n".join(outputs)
    return [json.loads((directory / f"report_{name}.json").read_text()) for name in ("2_0", "2_1", "1_0")]


def test_devices_are_those_of_all_processes(reports):
    assert [report["devices"] for report in reports] == [[4, 2], [4, 2], [4, 4]]
    assert [report["order"] for report in reports] == [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]]


def test_processes_exchange_json(reports):
    expected = [{"rank": 0, "text": "ä"}, {"rank": 1, "text": "ää"}]
    assert [report["json"] for report in reports] == [expected, expected, expected[:1]]


def test_every_process_keeps_its_compiled_programs(reports):
    assert all(report["programs kept"] > 0 for report in reports[:2])


def test_what_is_done_again_is_not_compiled_again(reports):
    for report in reports[:2]:
        assert report["compiled"] == {"first": 1, "again": [0, 0], "longer": [0, 0, 0]}


def test_the_tree_has_the_bits_of_one_process(reports):
    first, second, alone = (report["reduced"] for report in reports)
    assert first["sum"] == second["sum"] == alone["sum"]
    assert len(alone["sum"]) == 500 * 8
    assert [r["own"] for r in (first, second, alone)] == [[4, 500], [4, 500], [8, 500]]
    assert [r["gathered"] for r in (first, second, alone)] == [[8, 500]] * 3
    assert "fetch_rows" in first["not whole"]
    assert alone["not whole"] is None


def test_arrays_are_made_of_what_each_process_has(reports):
    for report in reports[:2]:
        assert report["rows"] == [[8, 3], [0, 0, 0, 0, 1, 1, 1, 1], [8]]
        assert report["whole"] == [[0, 1, 2, 3, 4, 5], True, [2, 2]]
        assert report["copies"] == [[4, 3], [0, 1, 2]]
        assert report["keys"]
        assert report["fsdp"]


def test_errors_name_the_numbers(reports):
    for report in reports[:2]:
        assert "5 environments don't divide over 2 devices" in report["10 rows"]
        assert "3 devices don't divide over 2 processes" in report["3 devices"]
        assert "Requested 6 devices and 4 are present" in report["too many"]


def test_one_process_writes_a_checkpoint_that_all_read(reports):
    saved = [report["saved"] for report in reports[:2]]
    refused = [each.pop("refused") for each in saved]
    assert saved == [{"same": True, "sharded": True, "step": 3}] * 2
    assert "holds something else than a checkpoint" in refused[0]
    assert refused[0] == refused[1]


def test_a_runner_goes_on_from_what_all_processes_see(reports):
    """Else one would go on from there while another begins, and each would wait for ever for the other."""
    first, second = (report["resumed"] for report in reports[:2])
    assert first == second
    assert (first["shared"], first["updates"]) == (None, 1)
    line = "resume: the newest checkpoint that process 0 sees is step_8, and process 1's is {}; give a checkpoint_dir "
    assert first["own"] == line.format("none") + "that all processes see"
    assert first["another"].startswith(line.format("another step_8"))


def test_processes_that_differ_all_say_so(reports):
    for report in reports[:2]:
        assert "rank 1 differs from rank 0 in config: config 1 against config 0" in report["mismatch"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells of its sockets")
def test_processes_of_one_host_meet_on_loopback(reports):
    for report in reports[:2]:
        assert "4D00007F" in report["listening"]

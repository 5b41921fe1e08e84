"""What the ranks of one host meet by."""

import errno
import os
import stat

import pytest

from lockstep.core.life import LINE_BYTES
from lockstep.launch.serving.channel import FILE, PORT, STORE
from lockstep.launch.serving.meeting import Meeting

needs_memory = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


@needs_memory
def test_a_file_and_memory_need_no_port(tmp_path):
    made = Meeting.of(FILE, 3, tmp_path, shared=True)
    assert made.port is None
    assert made.environment.pop("LOCKSTEP_STORE").startswith(str(tmp_path))
    assert made.environment == {
        "LOCKSTEP_MEMORY": str(made.memory), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip
    assert made.memory is not None
    assert os.fstat(made.memory).st_size == 3 * LINE_BYTES
    assert stat.S_ISREG(os.fstat(made.memory).st_mode)
    assert not os.get_inheritable(made.memory)  # but by those to whom it is passed
    os.close(made.memory)


def test_scripts_have_a_port_and_no_memory(tmp_path):
    made = Meeting.of(STORE, 2, tmp_path, shared=False)
    assert made.port is not None
    assert made.port.getsockname() == ("127.0.0.1", made.number)
    assert "LOCKSTEP_MEMORY" not in made.environment
    assert made.environment["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    made.port.close()


@needs_memory
def test_a_sandbox_without_such_memory_goes_without(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    made = Meeting.of(PORT, 2, tmp_path, shared=True)
    assert made.memory is None
    assert "LOCKSTEP_MEMORY" not in made.environment
    made.leave_port()

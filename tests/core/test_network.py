import socket

import pytest

from lockstep.core import network
from lockstep.core.network import wait_for_listener, wait_for_name


@pytest.fixture
def looked_up(monkeypatch):
    """Names that were looked up, of which the first ``unknown`` look-ups find none."""
    found, answers = [], {"unknown": 0, "why": socket.EAI_NONAME}

    def getaddrinfo(host, *_, **__):
        found.append(host)
        if len(found) <= answers["unknown"]:
            raise socket.gaierror(answers["why"], "not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(network, "_RETRY_SECONDS", 0.01)
    return found, answers


def test_a_name_may_appear_late(looked_up):
    found, answers = looked_up
    answers["unknown"] = 3
    wait_for_name("node1")
    assert found == ["node1"] * 4


def test_a_name_that_leads_nowhere_is_one_line(looked_up):
    looked_up[1]["unknown"] = 1000
    with pytest.raises(ValueError, match=r"meet on node1, which is no host's name here; set MASTER_ADDR") as raised:
        wait_for_name("node1", seconds=0.05)
    assert "\n" not in str(raised.value)


def test_another_failure_of_the_look_up_is_left_to_who_connects(looked_up):
    found, answers = looked_up
    answers.update(unknown=1000, why=socket.EAI_FAIL)
    wait_for_name("node1")
    assert found == ["node1"]


def test_somebody_may_listen_late(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        waits = []
        monkeypatch.setattr(network.time, "sleep", lambda seconds: waits.append(seconds) or listener.listen())
        wait_for_listener(f"127.0.0.1:{port}", 60.0)
        assert len(waits) == 1


def test_nobody_listens():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            wait_for_listener(f"127.0.0.1:{silent.getsockname()[1]}", 0.0)

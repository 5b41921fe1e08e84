"""Those who listen to a run: what they get, and that a rank which waits for them is none that hangs."""

import json
import socket
import threading

import pytest
from high_descriptors import high_descriptors

from lockstep.core.life import life
from lockstep.training import audience
from lockstep.training.audience import OBSERVERS, Audience
from lockstep.training.stop import CALLBACK, RUNNING


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as found:
        found.bind(str(tmp_path / "callbacks"))
        found.listen()
        yield found


def lines_read(connection):
    content = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    return [json.loads(line) for line in content.splitlines()]


def test_an_answer_is_waited_for(listener):
    told = Audience(listener.getsockname(), speaks=True)
    connection = listener.accept()[0]
    connection.sendall(b'{"go_on": true, "metrics": {"a": 1.0}}\n')
    assert told.tell({"iteration": 1}) == audience.Answer(RUNNING, {"a": 1.0})
    connection.sendall(b'{"go_on": false, "metrics": {}}\n')
    assert told.tell({"iteration": 2}).code == CALLBACK
    told.close()
    assert lines_read(connection) == [{"iteration": 1}, {"iteration": 2}]


def test_whoever_left_holds_nobody_up(listener):
    told = Audience(listener.getsockname(), speaks=True)
    listener.accept()[0].close()
    assert told.tell({"iteration": 1}).code == RUNNING
    assert told.tell({"iteration": 2}).code == RUNNING


def test_a_rank_that_waits_for_slow_observers_shows_that_it_lives(listener, monkeypatch):
    monkeypatch.setattr(audience, "LOOK_SECONDS", 0.01)
    told = Audience(OBSERVERS + listener.getsockname(), speaks=True)
    connection = listener.accept()[0]
    record = {"iteration": 1, "long": "x" * (1 << 22)}  # more than a socket holds
    thread = threading.Thread(target=told.tell, args=(record,))
    before = life.sign().count
    thread.start()
    while life.sign().count < before + 3:
        thread.join(0.01)
        assert thread.is_alive()
    reader = threading.Thread(target=lambda: thread.join() or told.close())
    reader.start()
    assert lines_read(connection) == [record]
    reader.join()


def test_a_rank_may_have_opened_more_files_than_select_knows(listener):
    with high_descriptors():
        told = Audience(listener.getsockname(), speaks=True)
        connection = listener.accept()[0]
        connection.sendall(b'{"go_on": false, "metrics": {}}\n')
        assert told.tell({"iteration": 1}).code == CALLBACK
        told.close()
        assert lines_read(connection) == [{"iteration": 1}]
        connection.close()


def test_who_cannot_reach_the_listeners_says_so_unless_they_are_gone(tmp_path, capsys):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as gone:
        gone.bind(str(tmp_path / "gone"))
    assert not Audience(str(tmp_path / "gone"), speaks=True).listens
    assert capsys.readouterr().err == ""
    silent = Audience(str(tmp_path / "removed"), speaks=True)
    assert silent.tell({"iteration": 1}) == audience.Answer()
    assert "warning: callbacks aren't called any more" in capsys.readouterr().err

"""What a launcher and its server tell one another, also if the launcher has opened many files."""

import os
import socket
from pathlib import Path

import pytest
from command_line import wait_until
from high_descriptors import SELECT_KNOWS, high_descriptors

from lockstep.launch.serving.channel import Channel, readable
from lockstep.launch.spawn import RankServer


def test_values_come_through_descriptors_that_select_refuses():
    with high_descriptors():
        ours, theirs = (Channel(each) for each in socket.socketpair())
        assert min(ours.fileno(), theirs.fileno()) >= SELECT_KNOWS
        with pytest.raises(TimeoutError):
            ours.receive(0)
        theirs.send({"started": 1})
        assert ours.receive() == {"started": 1}
        theirs.close()
        for each in (ours, theirs):
            with pytest.raises(EOFError):
                each.receive()
        ours.close()


def test_what_can_be_read_is_told_apart_and_so_is_what_has_ended():
    channels = [Channel(each) for each in socket.socketpair()]
    reading, writing = os.pipe()
    watched = [channels[0], reading]
    assert readable(watched, 0) == []
    channels[1].send(1)
    assert readable(watched, None) == [channels[0]]
    os.close(writing)
    assert readable(watched, 0) == watched
    os.close(reading)
    for channel in channels:
        channel.close()


def test_a_launcher_that_has_opened_many_files_starts_ranks(tmp_path):
    """Its server inherits a channel with a high number."""
    words = ["-c", "from pathlib import Path; import sys; Path(sys.argv[1]).touch()", str(tmp_path / "here")]
    with high_descriptors(), RankServer() as server:
        ranks = server.start(1, Path(tmp_path), arguments=words)
        wait_until(lambda: ranks.exit_codes() == {0: 0}, "the rank goes on")
    assert (tmp_path / "here").exists()

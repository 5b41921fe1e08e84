import shutil
import socket
import subprocess
import sys

import pytest

from lockstep.core.host import network
from lockstep.core.host.network import interface_of, own_address, wait_for_listener, wait_for_name


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
    said: list[str] = []
    wait_for_name("node1", said.append)
    assert found == ["node1"] * 4
    assert said == ["MASTER_ADDR: node1 is no host's name here yet; waits up to 60 s for it"]


def test_a_name_that_leads_nowhere_is_one_line(looked_up):
    looked_up[1]["unknown"] = 1000
    with pytest.raises(ValueError, match=r"meet on node1, which is no host's name here; set MASTER_ADDR") as raised:
        wait_for_name("node1", print, seconds=0.05)
    assert "\n" not in str(raised.value)


def test_another_failure_of_the_look_up_is_left_to_who_connects(looked_up):
    found, answers = looked_up
    answers.update(unknown=1000, why=socket.EAI_FAIL)
    wait_for_name("node1", pytest.fail)
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


def test_a_knock_that_meets_itself_is_no_listener(monkeypatch):
    """The kernel may choose the very port that is knocked at for the other end, and connects both."""

    def met_itself(address, _):
        knock = socket.socket()
        knock.bind(address)
        knock.connect(address)
        return knock

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(network.socket, "create_connection", met_itself)
    with pytest.raises(ConnectionRefusedError):
        wait_for_listener(f"127.0.0.1:{port}", 0.0)


# --- interfaces -------------------------------------------------------------------------------------------------------

IF_INET6 = """\
fe800000000000000000fc00fffe0001 04 40 20 80     eth7
00000000000000000000000000000001 01 80 10 80       lo
20010db8000000000000000000000002 04 40 00 82     eth7
"""


@pytest.fixture
def version_6(monkeypatch, tmp_path):
    """What the kernel says of IPv6; of IPv4 it knows loopback alone."""
    monkeypatch.setattr(network.sys, "platform", "linux")
    monkeypatch.setattr(network, "IPV6", tmp_path / "if_inet6")
    monkeypatch.setattr(network, "_addresses_of_version_4", lambda: [("lo", "127.0.0.1")])
    return tmp_path / "if_inet6"


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("2001:db8::2", "eth7"),
        ("2001:0db8:0::2", "eth7"),
        ("fe80::fc00:fffe:1%eth7", "eth7"),
        ("::1", "lo"),
        ("127.0.0.1", "lo"),
        ("2001:db8::3", None),
        ("", None),
    ],
)
def test_the_interface_of_an_address(version_6, address, name):
    version_6.write_text(IF_INET6)
    assert interface_of(address) == name


def test_a_host_without_a_way_out_has_the_address_of_its_interface(version_6, monkeypatch):
    def nowhere(*_, **__):
        raise OSError("unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    assert own_address("node-0") is None  # a kernel without IPv6
    version_6.write_text(IF_INET6)
    assert own_address("node-0") == "2001:db8::2"


SECOND = """
from lockstep.core.host.network import interface_of
print(*(interface_of(address) for address in ("10.9.0.1", "10.9.0.2", "10.9.1.2", "10.9.0.3")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another kernel")
def test_the_interface_of_its_second_address():
    add = "ip addr add {} dev lo"
    lines = ["ip link set lo up", add.format("10.9.0.1/24"), add.format("10.9.0.2/24")]
    setting = " && ".join([*lines, add.format("10.9.1.2/24") + " label lo:1"])
    own = ["unshare", "--map-root-user", "--net", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*own, setting], capture_output=True).returncode:
        pytest.skip("no network of its own can be made here")
    done = subprocess.run(
        [*own, f'{setting} && exec "$0" -c "$1"', sys.executable, SECOND], capture_output=True, text=True
    )
    assert done.stdout == "lo lo lo None\n", done.stderr

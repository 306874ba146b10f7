"""Jobs that are restored on hosts with other addresses: each host is a network namespace."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu.errors import DUMPED_EXIT, RestoreFailed
from tests.emu.gpu_job import GPU
from tests.emu.test_checkpoint import FLOWGPU, ROOT, SECONDS, flowgpu, runtime_dir
from tests.unit.coordinator_job import wait_for

__all__ = ["runtime_dir"]

OLD, OLD_6 = "10.77.33.1", "fd00:77:33::1"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Networks:
    """Hosts that are made one after the other."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._count = 0

    def host(self, *addresses: str, interface: str = "lo") -> list[str]:
        """What a command runs under to be on a new host with these addresses."""
        name = f"flowgpu-{os.getpid()}-a{self._count}"
        self._count += 1
        ip("netns", "add", name)
        self._stack.callback(ip, "netns", "del", name)
        if interface != "lo":
            ip("-n", name, "link", "add", interface, "type", "veth", "peer", "name", "other")
            ip("-n", name, "link", "set", "other", "up")
        for link in {interface, "lo"}:
            ip("-n", name, "link", "set", link, "up")
        for address in addresses:
            how = ["nodad"] if ":" in address else []
            ip("-n", name, "addr", "add", address, "dev", interface, *how)
        return ["nsenter", f"--net=/run/netns/{name}"]


@pytest.fixture
def networks() -> Iterator[Networks]:
    if not shutil.which("ip"):
        pytest.skip("there is no program ip here")
    with contextlib.ExitStack() as stack:
        yield Networks(stack)


# Talks to itself at addresses of its host that it keeps: by connections that stay, by sockets that
# listen, new ones, datagrams, and programs that it starts. Says what it is told of them; once more
# when there is a second file.
TALKER = (
    GPU
    + """
import socket, zlib
A, B = sys.argv[2:4]
large = os.urandom(1 << 25)  # threads of FlowGPU write such pages, after CRIU
whole = zlib.crc32(large)
server = socket.create_server((A, 0))
both = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
six = socket.create_server((B, 0), family=socket.AF_INET6)
near, near6 = socket.create_connection(server.getsockname()), socket.create_connection(
    six.getsockname()[:2])
mixed = socket.create_connection((A, both.getsockname()[1]))
far, far6, far_mixed = (one.accept()[0] for one in (server, six, both))
datagrams = socket.socket(type=socket.SOCK_DGRAM)
datagrams.bind((A, 0))
connected = socket.socket(type=socket.SOCK_DGRAM)
connected.connect(datagrams.getsockname())
ports = [one.getsockname()[1] for one in (server, six, datagrams)]
CHILD = '''
import socket, sys
near = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print("child", near.getpeername()[0], near.getsockname()[0], flush=True)
'''
def through(near, far):
    far.sendall(b"abc")
    near.sendall(b"def")
    return near.recv(3), far.recv(3)
near.sendall(b"early")
def names(*sockets):
    return [one.getsockname()[0] for one in sockets], [
        one.getpeername()[0] for one in sockets if one not in (server, six, datagrams)]
def talk():
    assert zlib.crc32(large) == whole
    print("kept", [through(*pair) for pair in ((near, far), (near6, far6), (mixed, far_mixed))])
    print("names", names(server, six, datagrams, near, far, near6, far6, mixed, far_mixed))
    print("names", names(connected))
    for listener, host in ((server, A), (six, B)):
        again = socket.create_connection((host, listener.getsockname()[1]))
        met, place = listener.accept()
        print("again", place[0], through(again, met), names(again, met))
    with socket.socket(type=socket.SOCK_DGRAM) as own:
        own.bind((A, 0))
        own.sendto(b"one", datagrams.getsockname())
        own.sendmsg([b"two"], [], 0, datagrams.getsockname())
        connected.send(b"three")
        got = [datagrams.recvfrom(9), datagrams.recvmsg(9)[::3], datagrams.recvfrom(9)]
        print("datagrams", [(data, place[0]) for data, place in got])
    words = [sys.executable, "-c", CHILD, A, str(ports[0])]
    for environment in (None, {}):
        subprocess.run(words, env=environment)
        print("met", server.accept()[1][0])
    os.system(" ".join([sys.executable, "-c", "'" + CHILD + "'", A, str(ports[0])]))
    print("met", server.accept()[1][0])
    print("gpu", gpu(), flush=True)
sys.stdout.reconfigure(line_buffering=True)
print("early", far.recv(5))
talk()
for again in sys.argv[4:]:
    went()
    sys.argv[1] += "+"
    talk()
"""
)


class Job:
    """One, on one host after the other."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self._folder, self._rounds = folder, rounds
        self._go, self._out = folder / "go", folder / "out"
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, host: list[str], *options: str) -> None:
        words = [sys.executable, "-c", TALKER, self._go, OLD, OLD_6, *["x"] * self._rounds]
        self._start(host, "run", "--gpu", "emulated", "--name", "talker", *options, "--", *words)

    def restore(self, host: list[str], image: Path, *options: str) -> None:
        self._start(host, "restore", image, *options)

    def _start(self, host: list[str], *words: object) -> None:
        with open(self._out, "ab") as output:
            self._process = subprocess.Popen(
                [*host, *FLOWGPU, *map(str, words)], cwd=ROOT, stdout=output, stderr=output
            )

    @property
    def lines(self) -> list[str]:
        return self._out.read_text().splitlines()

    def dump(self, image: Path, nth: int) -> None:
        """When it is ready for the nth time."""
        process = self._process
        assert process is not None
        wait_for(
            lambda: self.lines.count("ready") == nth or process.poll() is not None,
            "ready",
            SECONDS,
        )
        assert process.poll() is None, self.lines
        done = flowgpu("pause-and-dump", "talker", "--output", image)
        assert done.returncode == 0, done.stderr
        assert process.wait(SECONDS) == DUMPED_EXIT
        self._go.with_name("go" + "+" * (nth - 1)).touch()

    def end(self) -> None:
        flowgpu("kill", "talker")
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(SECONDS)

    def rounds(self) -> list[list[str]]:
        """What it has said in each, without what commands have."""
        text = "\n".join(one for one in self.lines if one.split()[0] in WORDS)
        return [one.strip().splitlines() for one in text.split("ready")]


# A command that starts others without AF_NETLINK, as some sandboxes do.
NO_NETLINK = [
    sys.executable,
    "-c",
    """
import ctypes, os, struct, sys
code = [(0x20, 0, 0, 0), (0x15, 0, 3, 41), (0x20, 0, 0, 16), (0x15, 0, 1, 16)]  # socket(AF_NETLINK
code += [(0x06, 0, 0, 0x50061), (0x06, 0, 0, 0x7FFF0000)]  # EAFNOSUPPORT
held = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in code))
told = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", len(code), ctypes.addressof(held)))
assert ctypes.CDLL(None).syscall(317, 1, 0, told) == 0
os.execvp(sys.argv[1], sys.argv[1:])
""",
]
WORDS = ("early", "kept", "names", "again", "datagrams", "child", "met", "gpu", "ready")


@pytest.fixture
def job(tmp_path: Path, runtime_dir: Path) -> Iterator[Job]:
    made = Job(tmp_path, 2)
    yield made
    made.end()


@pytest.mark.parametrize(
    ("engine", "other"),
    [("native", []), ("replay", ["10.99.0.5/24", "fd00:99::5/64"])],
    ids=["none", "others"],
)
def test_a_job_whose_addresses_are_gone_talks_to_itself_as_before(
    other: list[str], engine: str, job: Job, networks: Networks, tmp_path: Path
) -> None:
    """On a host that has no addresses, or others, and on the first one again."""
    first = networks.host(f"{OLD}/24", f"{OLD_6}/64", interface="net0")
    job.run(first, "--engine", engine)
    job.dump(tmp_path / "image", 1)
    job.restore(networks.host(*other, interface="net0"), tmp_path / "image")
    job.dump(tmp_path / "second", 2)
    job.restore(first, tmp_path / "second")
    assert job.wait() == 0, job.lines
    early, *rounds = job.rounds()
    if not other:  # what connects to an address of loopback comes from the first of them
        rounds = [[line.replace("127.0.0.1", OLD) for line in lines] for lines in rounds]
    assert rounds == [early[1:]] * 2, job.lines
    assert f"child {OLD} {OLD}" in early


def test_an_address_that_is_asked_for_is_taken_or_named(
    job: Job, networks: Networks, tmp_path: Path
) -> None:
    job.run(networks.host(f"{OLD}/24", f"{OLD_6}/64", interface="net0"))
    job.dump(tmp_path / "image", 1)
    other = networks.host("10.99.0.5/24", "10.99.0.6/24", interface="net0")
    job.restore(other, tmp_path / "image", "--address", f"{OLD}=10.99.0.7")
    assert job.wait() == RestoreFailed.exit_code
    assert f"{OLD}=10.99.0.7: this machine has not that address" in job.lines[-2]
    job.restore(other, tmp_path / "image", "--address", f"{OLD}=10.99.0.6")
    job.dump(tmp_path / "second", 2)
    assert f"flowgpu: address {OLD} is now 10.99.0.6" in job.lines
    assert f"flowgpu: address {OLD_6} is now ::1" in job.lines


def test_where_addresses_are_not_told_a_job_that_keeps_its_own_is_restored_and_others_are_named(
    job: Job, networks: Networks, tmp_path: Path
) -> None:
    first = networks.host(f"{OLD}/24", f"{OLD_6}/64", interface="net0")
    job.run(first)
    job.dump(tmp_path / "image", 1)
    other = networks.host("10.99.0.5/24", "fd00:99::5/64", interface="net0")
    job.restore([*other, *NO_NETLINK], tmp_path / "image")
    assert job.wait() == RestoreFailed.exit_code
    assert "this machine does not tell which it has instead" in job.lines[-2]
    (tmp_path / "go+").touch()
    job.restore([*first, *NO_NETLINK], tmp_path / "image")
    assert job.wait() == 0, job.lines
    early, *rounds = job.rounds()
    assert rounds == [early[1:]] * 2, job.lines

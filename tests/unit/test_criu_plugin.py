"""What ties a process to a GPU is left out of a dump, and nothing else that CRIU refuses."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import select
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from criu_job import Job, restore

from flowgpu import launch
from flowgpu.errors import CriuFailed, CriuMissing
from flowgpu.host import processor
from flowgpu.host.criu import Criu

FUSE = os.makedev(10, 229)  # of a kind that CRIU does not know; poll() says POLLERR
# Says for ever what became of the descriptor that it has opened, and of its copy in a child.
HOLDER = """
import os, select, sys, time
device = os.open(sys.argv[1], os.O_RDWR)
other = os.dup(device)
if os.fork() == 0:
    time.sleep(600)
while True:
    poll = select.poll()
    poll.register(device, select.POLLIN)
    same = os.fstat(device).st_ino == os.fstat(other).st_ino
    link = os.readlink(f"/proc/self/fd/{device}").split(":")[0]
    print(link, [why for _, why in poll.poll(0)], same, flush=True)
    time.sleep(0.01)
"""
CONNECTED = """
import socket, sys, time
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[1])
while True:
    print(peer.getsockname(), flush=True)
    time.sleep(0.01)
"""


@pytest.fixture
def device() -> Iterator[Callable[[str], str]]:
    """Makes device files of these names in /dev."""
    made = []

    def make(name: str) -> str:
        path = f"/dev/{name}-test-{os.getpid()}"
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, FUSE)
            made.append(path)
            os.close(os.open(path, os.O_RDWR))
        except OSError as error:
            assert error.errno in (errno.EPERM, errno.EACCES, errno.ENXIO)
            pytest.skip(f"no device of CRIU's unknown: {error.strerror}")
        return path

    yield make
    for path in made:
        os.unlink(path)


def test_a_descriptor_of_the_driver_is_left_out(
    criu: Criu, device: Callable[[str], str], tmp_path: Path
) -> None:
    path = device("nvidia")
    with contextlib.closing(Job(HOLDER, path)) as job:
        assert job.line() == f"{path} [8] True"
        with pytest.raises(CriuFailed):
            criu.dump(job.pid, tmp_path / "without", leave_running=True, leave_stopped=False)
        criu.dump(
            job.pid,
            tmp_path / "with",
            leave_running=True,
            leave_stopped=False,
            plugins=criu.plugins(),
        )
        while job.line(0.0):
            pass
        assert job.line() == f"{path} [8] True"
        for _ in range(2):
            job.end_tree()
            while job.line(0.0):  # what it has said since
                pass
            restore(criu, job, tmp_path / "with", plugins=criu.plugins())
            job.line()  # It may have been dumped between its look and this line.
            assert job.line() == "socket [] True"
        job.end_tree()


# This program prints 1 while it may use AMX (ARCH_GET_XCOMP_PERM).
PERMISSION = """
import ctypes, time
found = ctypes.c_uint64()
while True:
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(found)) == 0
    print(found.value >> 18 & 1, flush=True)
    time.sleep(0.01)
"""


def test_restored_processes_may_use_amx_where_it_is_asked_for(criu: Criu, tmp_path: Path) -> None:
    there_is = processor.AMX in processor.features()
    with contextlib.closing(Job(PERMISSION)) as job:
        assert job.line() == "0"
        criu.dump(job.pid, tmp_path)
        job.end_tree()
        for amx in (False, True):
            while job.line(0.0):
                pass
            restore(criu, job, tmp_path, plugins=criu.plugins(), amx=amx)
            job.line()  # It may have been dumped between its look and this line.
            assert job.line() == str(int(amx and there_is))
            job.end_tree()


def test_other_devices_are_refused_as_ever(
    criu: Criu, device: Callable[[str], str], tmp_path: Path
) -> None:
    path = device("flowgpu-other-nvidia")
    with contextlib.closing(Job(HOLDER, path)) as job:
        assert job.line() == f"{path} [8] True"
        with pytest.raises(CriuFailed):
            criu.dump(job.pid, tmp_path / "images", plugins=criu.plugins())
        job.end_tree()


def test_other_connections_are_refused_as_ever(criu: Criu, tmp_path: Path) -> None:
    path = tmp_path / "outside"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        with contextlib.closing(Job(CONNECTED, os.fspath(path))) as job:
            assert job.line() is not None
            accepted, _ = listener.accept()
            with accepted, pytest.raises(CriuFailed):
                criu.dump(job.pid, tmp_path / "images", plugins=criu.plugins())


def test_another_crius_plugins_are_not_taken_for_known() -> None:
    with pytest.raises(CriuMissing, match=r"4\.3"):
        Criu(Path("criu"), (4, 3)).plugins()


# Its functions, as CRIU calls them. No device is here whose mapping CRIU would ask about.


class Description(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("interface", ctypes.c_uint),
        ("hook_count", ctypes.c_uint),
        ("hooks", ctypes.c_void_p * 9),
    )


def hook(number: int, *arguments: type) -> Callable[..., int]:
    library = ctypes.CDLL(os.fspath(launch.criu_plugins() / "flowgpu_left_out.so"))
    plugin = Description.in_dll(library, "CR_PLUGIN_DESC")
    assert (plugin.interface, plugin.hook_count) == (0x200, 9)
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(plugin.hooks[number])


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("/dev/nvidia0", True),
        ("/dev/nvidia-uvm", True),
        ("/dev/nvidiactl", True),
        ("/memfd:flowgpu-emu-device (deleted)", True),
        ("/dev/dri/nvidia0", False),
        ("/home/dev/nvidia0", False),
        ("/dev/zero (deleted)", False),
    ],
)
def test_a_mapping_of_the_driver_comes_back_as_zeros_under_a_name(name: str, ours: bool) -> None:
    pointer = ctypes.POINTER
    restore_mapping = hook(
        8,
        *(ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64),
        *(pointer(ctypes.c_uint64), pointer(ctypes.c_int)),
    )
    offset, fd = ctypes.c_uint64(7), ctypes.c_int(-1)
    found = restore_mapping(os.fsencode(name), 1 << 40, 1 << 30, offset, fd)
    if not ours:
        assert (found, offset.value, fd.value) == (-errno.ENOTSUP, 7, -1)
        return
    assert (found, offset.value) == (1, 0)
    try:
        assert os.readlink(f"/proc/self/fd/{fd.value}") == "/memfd:flowgpu-left-out (deleted)"
        with mmap.mmap(fd.value, 1 << 30, mmap.MAP_SHARED, mmap.PROT_READ) as pages:
            assert pages[-1] == pages[0] == 0
    finally:
        os.close(fd.value)


def test_mappings_are_told_by_the_file_and_its_kind(
    device: Callable[[str], str], tmp_path: Path
) -> None:
    dump_mapping = hook(7, ctypes.c_int, ctypes.c_void_p)
    plain = tmp_path / "nvidia0"
    plain.touch()
    for path, answer in [
        (device("nvidia"), 0),
        (device("flowgpu-other-nvidia"), -errno.ENOTSUP),
        (os.devnull, -errno.ENOTSUP),
        (plain, -errno.ENOTSUP),
    ]:
        fd = os.open(path, os.O_RDWR)
        try:
            assert dump_mapping(fd, None) == answer, path
        finally:
            os.close(fd)


def test_what_stands_for_a_descriptor_never_has_anything_to_read() -> None:
    stand_in = hook(3, ctypes.c_int)
    found = [stand_in(0), stand_in(0)]
    try:
        names = [socket.socket(fileno=os.dup(fd)) for fd in found]
        assert all(bytes(one.getsockname()).startswith(b"\0flowgpu-left-out-") for one in names)
        assert names[0].getsockname() != names[1].getsockname()
        poll = select.poll()
        for one in names:
            poll.register(one, select.POLLIN | select.POLLPRI)
        assert poll.poll(50) == []
        for one in names:
            one.close()
    finally:
        for fd in found:
            os.close(fd)

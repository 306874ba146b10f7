"""Memory that a program has registered with the driver and let go of since."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgpu.errors import Unsupported
from flowgpu.image.reader import Image
from tests.emu.gpu_job import GPU, said_across_a_restore, said_with_a_checkpoint_between
from tests.emu.test_checkpoint import flowgpu, runtime_dir

__all__ = ["runtime_dir"]

# The driver lets a registration stand when the program unmaps, closes or cuts its memory.
LET_GO = (
    GPU
    + """
SIZE, free = 4 * 4096, 0x3f0000000000
def registered(fd=-1):
    global free  # nobody else's memory comes where the program has let go of some
    at, free = ctypes.c_void_p(free), free + (1 << 20)
    flags = 0x100000 | (2 | 32 if fd < 0 else 1)  # at this place, private and anonymous or shared
    assert libc.mmap(at, ctypes.c_size_t(SIZE), 3, flags, fd, ctypes.c_long(0)) != -1
    ctypes.memset(at, 7, SIZE)
    ok(cu.cuMemHostRegister(at.value, SIZE, 0))
    return at.value
unmapped, part, closed, whole, told = (registered() for _ in range(5))
file = os.fdopen(os.memfd_create("shared"), "wb+")  # Linux pins no shared pages of a file on disk
file.truncate(SIZE)
cut = registered(file.fileno())
file.truncate(4096)
assert libc.munmap(ctypes.c_void_p(unmapped), SIZE) == 0
assert libc.munmap(ctypes.c_void_p(told), SIZE) == 0
assert libc.munmap(ctypes.c_void_p(part + 4096), 4096) == 0
assert libc.mprotect(ctypes.c_void_p(closed), SIZE, 0) == 0
def modes():
    lines = [line.split()[:2] for line in open("/proc/self/maps")]
    ends = [(*(int(word, 16) for word in place.split("-")), mode) for place, mode in lines]
    found = lambda at: [mode for start, end, mode in ends if start <= at < end]
    return [found(at) for at in (unmapped, part + 4096, closed, cut + 8192)]
def through(at):
    ok(cu.cuMemcpyHtoD(memory, at, 4096))
    data = bytearray(4096)
    ok(cu.cuMemcpyDtoH(data, memory, 4096))
    ok(cu.cuMemsetD8(memory, 5, 4096))
    return data == bytes([7]) * 4096
def given_up(*ranges):
    return [cu.cuMemHostUnregister(one)[0].name for one in ranges]
print("before", modes(), through(part), *given_up(told, told))
went()
print("after", modes(), through(part), through(cut))
print(*set(given_up(unmapped, part, closed, whole, cut)), *given_up(unmapped), gpu())
"""
)
MODES = "[[], [], ['---p'], ['rw-s']]"
BEFORE_LET_GO = [
    f"before {MODES} True CUDA_SUCCESS CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
    "ready",
]
AFTER_LET_GO = [
    f"after {MODES} True True",
    "CUDA_SUCCESS CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED True",
]


def test_a_registration_of_memory_that_is_gone_stands_after_a_restore(
    tmp_path: Path,
) -> None:
    said = said_across_a_restore("let-go", LET_GO, tmp_path, engine="auto")
    assert said == [*BEFORE_LET_GO, *AFTER_LET_GO]
    assert Image(tmp_path / "image").manifest.engine == "replay"
    again = flowgpu("restore", tmp_path / "image")
    assert again.stdout.splitlines() == AFTER_LET_GO, again.stderr


def test_a_registration_of_memory_that_is_gone_stands_in_a_job_left_running_and_its_copy(
    tmp_path: Path,
) -> None:
    done, said = said_with_a_checkpoint_between(
        "let-go-live", "auto", LET_GO, tmp_path, tmp_path / "shared", "--leave-running"
    )
    assert done.returncode == 0, done.stderr
    assert said == [*BEFORE_LET_GO, *AFTER_LET_GO]
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.stdout.splitlines() == AFTER_LET_GO, restored.stderr


def test_a_registration_of_memory_that_is_gone_stands_after_a_checkpoint_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWGPU_FAULT", "criu_dump:1")
    done, said = said_with_a_checkpoint_between(
        "let-go-failed", "auto", LET_GO, tmp_path, tmp_path / "shared"
    )
    assert done.returncode == 73, done.stderr
    assert said == [*BEFORE_LET_GO, *AFTER_LET_GO]


def test_the_native_engine_names_registered_memory_that_is_gone(tmp_path: Path) -> None:
    """The emulated driver does not register it again; whether a real one does is not known."""
    done, said = said_with_a_checkpoint_between(
        "let-go-native", "native", LET_GO, tmp_path, tmp_path / "shared"
    )
    assert done.returncode == Unsupported.exit_code
    assert "registered memory of the host that was unmapped, closed or cut" in done.stderr
    assert said == [*BEFORE_LET_GO, *AFTER_LET_GO]

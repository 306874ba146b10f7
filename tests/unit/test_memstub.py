"""The memory stub alone: the shape of the library, and what a process has of it.

What it costs: test_memstub_cost.py. With the intercept library: tests/emu/test_active_memory.py.
With the frameworks themselves: test_memstub_tensorflow.py, tests/gpu/test_active_memory.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from coordinator.active import look_at
from coordinator.live_set import LiveSet
from flowgpu import launch
from flowgpu.host.criu import Criu
from tests.patience import SECONDS
from tests.unit.criu_job import Job

ROOT = Path(__file__).resolve().parents[2]
EXPORTS = {
    "flowgpu_memstub_fd",
    "flowgpu_memstub_forget",
    "flowgpu_memstub_captures",
    "flowgpu_memstub_is_profiled",
    *(f"cuptiActivity{name}" for name in ("Enable", "Disable", "EnableContext", "DisableContext")),
    "cuptiFinalize",
    "dlsym",
    "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE",
    "_ZN3tsl12BFCAllocator11AllocateRawEmmRKNS_20AllocationAttributesE",
    "_ZN3tsl12BFCAllocator13DeallocateRawEPv",
}

PRELUDE = """
import ctypes, os, resource, sys
from coordinator.live_set import LiveSet
stub = ctypes.CDLL(sys.argv[1], use_errno=True)
class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int8), ("index", ctypes.c_int8)]
CPU, CUDA = 0, 1
def report(address, size, kind=CUDA, index=0):
    stub._ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE(
        ctypes.c_void_p(address), ctypes.c_int64(size), ctypes.c_size_t(0), ctypes.c_size_t(0),
        Device(kind, index))
def held():
    return [
        os.stat("/proc/self/fd/" + fd).st_ino for fd in os.listdir("/proc/self/fd")
        if os.path.lexists("/proc/self/fd/" + fd)
        and "flowgpu-live" in os.readlink("/proc/self/fd/" + fd)
    ]
def mapped():
    return sum("flowgpu-live" in line for line in open("/proc/self/maps"))
def live():
    found = LiveSet(os.dup(stub.flowgpu_memstub_fd()))
    try:
        return found.live_bytes()
    finally:
        found.close()
BLOCK = 0x200000000000
"""


def run(code: str) -> str:
    """What a process prints that has loaded the stub."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, str(launch.memory_stub())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_library_exports_the_interfaces_and_nothing_else() -> None:
    listing = tool("nm", "-D", "--defined-only", str(launch.memory_stub()))
    assert {line.split()[-1] for line in listing.splitlines()} == EXPORTS


def test_the_library_loads_into_any_process() -> None:
    """It is preloaded into every program of a job, with whatever C++ runtime that has."""
    dynamic = tool("readelf", "-d", str(launch.memory_stub()))
    assert set(re.findall(r"NEEDED.*\[(.*)\]", dynamic)) <= {"libc.so.6"}


def test_the_library_does_nothing_when_loaded() -> None:
    assert "_GLOBAL__sub_I_" not in tool("nm", str(launch.memory_stub()))
    assert run("print(held(), mapped())") == "[] 0\n"


def test_an_event_makes_the_set_and_host_memory_does_not() -> None:
    code = """
report(0x7f0000000000, 4096, CPU)
report(0x7f0000000000, -4096, CPU)
print(held(), mapped())
report(BLOCK, 512)
print(len(held()), mapped(), live(), stub.flowgpu_memstub_fd() >= 512)
"""
    assert run(code) == "[] 0\n1 2 512 True\n"


def test_a_device_that_the_set_has_no_sum_for_is_counted_with_the_unknown() -> None:
    assert run(
        "report(BLOCK, 512, CUDA, 100); report(BLOCK + 512, 8, CUDA, -1); print(live())"
    ) == ("520\n")


def test_a_forked_child_has_a_set_of_its_own_and_only_if_it_needs_one() -> None:
    code = """
report(BLOCK, 512)
mine = held()
for events in (0, 1):
    child = os.fork()
    if child == 0:
        none = (held(), mapped())
        if events:
            report(BLOCK, 64)
            print(none, len(held()), held() != mine, live(), flush=True)
        else:
            print(none, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
print(held() == mine, live())
"""
    assert run(code) == "([], 0)\n([], 0) 1 True 64\nTrue 512\n"


def test_a_set_that_the_system_refused_once_is_never_made() -> None:
    """What was missed cannot be made up for, and a set with a gap would lose memory."""
    code = """
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
ctypes.set_errno(77)
report(BLOCK, 512)
kept = ctypes.get_errno()
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
report(BLOCK + 512, 512)
print(kept, stub.flowgpu_memstub_fd(), held(), mapped())
"""
    assert run(code) == "77 -1 [] 0\n"


def live_set_of(pid: int) -> LiveSet:
    folder = Path(f"/proc/{pid}/fd")
    path = next(fd for fd in folder.iterdir() if "flowgpu-live" in os.readlink(fd))
    return LiveSet(os.open(path, os.O_RDWR))


def test_the_set_goes_on_in_a_restored_process(criu: Criu, tmp_path: Path) -> None:
    """Its descriptor and its mapping are one file again, with the bits and blocks of before."""
    code = (
        PRELUDE.replace("sys.argv[1]", repr(str(launch.memory_stub())))
        + """
import time
report(BLOCK, 4096)
for i in range(1 << 20):
    report(BLOCK + (i + 1) * 8192, 512)
    print(i, live(), flush=True)
    time.sleep(0.01)
"""
    )
    job = Job(code, setup=f"import sys; sys.path.insert(0, {str(ROOT)!r})\n")
    try:
        first = job.line()
        assert first
        last = int(first.split()[0])
        criu.dump(job.pid, tmp_path)
        while line := job.line(0.0):
            last = int(line.split()[0])
        job.kill()
        pipes = {f"pipe:[{job.inode}]": job.write_end}
        assert criu.restore(tmp_path, inherit_fds=pipes) == job.pid
        following = job.line()
        assert following == f"{last + 1} {4096 + (last + 2) * 512}"
        found = live_set_of(job.pid)
        rows = np.array([[0x200000000000, 1 << 21, 0x200000000000]], np.uint64)
        look = look_at(found, rows)
        found.close()
        assert look.known.tolist() == [True]
        assert [0x200000000000, 4096] in look.blocks.tolist()
    finally:
        job.close()


LOOKUPS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
int main(void) {
    // Names end where memory does: nobody may read on.
    char *page = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(page + 4096, 4096, PROT_NONE);
    const char *names[] = {
        "", "n", "nc", "ncc", "nccl", "ncclCommDestroyed", "nv", "nvm", "nvml", "nvmlFoo",
        "c", "cu", "cup", "cupt", "cuptiActivities", "cudaFoo", "getpid", "main"};
    void *self = dlopen(0, RTLD_LAZY), *math = dlopen("libm.so.6", RTLD_LAZY | RTLD_LOCAL);
    void *handles[] = {self, math, RTLD_DEFAULT, RTLD_NEXT};
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        char *name = page + 4096 - strlen(names[i]) - 1;
        strcpy(name, names[i]);
        for (int j = 0; j < 4; j++) {
            errno = 77;
            int found = dlsym(handles[j], name) != 0, error = errno;
            char *said = dlerror();
            printf("%s %d: %d %d %s\n", names[i], j, found, error, said ? said : "-");
        }
    }
    double (*cosine)(double) = (double (*)(double))dlsym(math, "cos");
    printf("%.3f %d\n", cosine(1), dlsym(RTLD_NEXT, "dlsym") == dlsym(self, "dlsym"));
    return 0;
}
"""


def test_other_lookups_are_answered_as_without_the_stub(tmp_path: Path) -> None:
    program = tmp_path / "lookups"
    subprocess.run(
        ["gcc", "-rdynamic", "-x", "c", "-", "-o", program, "-ldl"],
        input=LOOKUPS,
        text=True,
        check=True,
    )
    found = []
    for preloaded in ("", str(launch.memory_stub())):
        env = {**os.environ, "LD_PRELOAD": preloaded}
        done = subprocess.run([program], capture_output=True, text=True, env=env, check=True)
        found.append(done.stdout)
    assert found[0] == found[1] and len(found[0].splitlines()) == 73

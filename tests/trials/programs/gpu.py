"""Programs whose objects and processes on the GPU come and go all the time."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.driver_lib import (
    GRANULE,
    PTX,
    allow,
    download,
    fd_kind,
    launch_inc,
    properties,
)
from tests.trials.prelude import Gpu, Here, ok, program, say, until

ROUNDS = 6  # at least, of what goes on until the word is given
WORDS = 256


def inc() -> Any:
    """A kernel that adds one, in a module of its own."""
    return ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(PTX)), b"inc"))


def given(handle: Any) -> int:
    """A descriptor of memory, for others."""
    return int(ok(cu.cuMemExportToShareableHandle(handle, fd_kind(), 0)))


def taken(descriptor: int, at: int) -> None:
    """Map that memory here."""
    handle = ok(cu.cuMemImportFromShareableHandle(descriptor, fd_kind()))
    os.close(descriptor)
    mapped(handle, at)
    ok(cu.cuMemRelease(handle))


def mapped(handle: Any, at: int) -> None:
    ok(cu.cuMemMap(at, GRANULE, 0, handle, 0))
    ok(allow(at, GRANULE))


def reserved(count: int) -> int:
    return int(ok(cu.cuMemAddressReserve(count * GRANULE, 0, 0, 0)))


def filled(at: int, value: int) -> Any:
    """Memory of its own at that address; gives its handle."""
    handle = ok(cu.cuMemCreate(GRANULE, properties(), 0))
    mapped(handle, at)
    ok(cu.cuMemsetD32(at, value, GRANULE // 4))
    ok(cu.cuCtxSynchronize())
    return handle


def total(at: int) -> int:
    return int(download(at, GRANULE // 4).sum())


def owner(here: Here) -> None:
    """Makes memory, gives it away by the socket on standard input, and ends."""
    Gpu()
    at = reserved(1)
    handle = filled(at, 7)
    with socket.socket(fileno=0) as end:
        socket.send_fds(end, [b"memory"], [given(handle)])
        end.recv(1)


@program("memory by descriptor (`cuMemCreate`) of a process that has ended since")
def memory_of_an_ended_process(here: Here) -> None:
    gpu = Gpu()
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, subprocess.Popen(here.other(owner), stdin=theirs) as process:
            _, (descriptor,), *_ = socket.recv_fds(ours, 8, 1)
            at = reserved(1)
            taken(descriptor, at)
            ours.send(b".")
        say("owner", process.returncode, total(at), gpu.step())
    here.ready()
    ok(launch_inc(inc(), at, WORDS))
    say(total(at), gpu.step())


@program("descriptors of memory that nobody has opened yet, and whose owner has let go of one")
def descriptors_of_memory(here: Here) -> None:
    gpu = Gpu()
    at = reserved(4)
    kept, gone = filled(at, 5), filled(at + GRANULE, 9)
    descriptors = [given(kept), given(gone)]
    ok(cu.cuMemUnmap(at + GRANULE, GRANULE))
    ok(cu.cuMemRelease(gone))
    here.ready()
    for number, descriptor in enumerate(descriptors, 2):
        taken(descriptor, at + number * GRANULE)
    ok(launch_inc(inc(), at, WORDS))
    say([total(at + number * GRANULE) for number in (0, 2, 3)], gpu.step())


STATE: dict[str, Gpu] = {}  # of a process of the pool


def begin() -> None:
    STATE["gpu"] = Gpu()


def work(number: int) -> int:
    memory = int(ok(cu.cuMemAlloc(4 * WORDS)))
    ok(cu.cuMemsetD32(memory, number, WORDS))
    found = int(download(memory, WORDS).sum())
    ok(cu.cuMemFree(memory))
    return found


@program("a pool of processes (`multiprocessing`, spawned) that all use the GPU")
def pool_of_processes(here: Here) -> None:
    gpu, count, right = Gpu(), 0, True
    with multiprocessing.get_context("spawn").Pool(2, begin) as pool:
        while count < ROUNDS or not here.go.exists():
            right &= pool.map(work, range(4)) == [number * WORDS for number in range(4)]
            count += 1
            if count == ROUNDS // 2:
                say("ready")
    say(right, gpu.step())


def with_context(memory: int) -> None:
    context = ok(cu.cuCtxCreate(None, 0, 0))
    other = int(ok(cu.cuMemAlloc(4 * WORDS)))
    ok(cu.cuMemsetD32(other, 1, WORDS))
    ok(launch_inc(inc(), other, WORDS))
    ok(cu.cuMemcpyDtoD(memory, other, 4 * WORDS))
    ok(cu.cuCtxDestroy(context))


def with_library(memory: int) -> None:
    library = ok(cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
    kernel = ok(cu.cuKernelGetFunction(ok(cu.cuLibraryGetKernel(library, b"inc"))))
    stream = ok(cu.cuStreamCreate(1))
    ok(cu.cuMemsetD32Async(memory, 1, WORDS, stream))
    ok(launch_inc(kernel, memory, WORDS, stream))
    ok(cu.cuStreamSynchronize(stream))  # all of the context would break a capture
    ok(cu.cuStreamDestroy(stream))
    ok(cu.cuLibraryUnload(library))


def with_graph(memory: int) -> None:
    local = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    module = ok(cu.cuModuleLoadData(PTX))
    kernel = ok(cu.cuModuleGetFunction(module, b"inc"))
    stream = ok(cu.cuStreamCreate(1))
    ok(cu.cuMemsetD32Async(memory, 0, WORDS, stream))
    ok(cu.cuStreamBeginCapture(stream, local))
    ok(launch_inc(kernel, memory, WORDS, stream))
    graph = ok(cu.cuStreamEndCapture(stream))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphDestroy(graph))
    for _ in range(2):
        ok(cu.cuGraphLaunch(executable, stream))
    ok(cu.cuStreamSynchronize(stream))
    ok(cu.cuGraphExecDestroy(executable))
    ok(cu.cuStreamDestroy(stream))
    ok(cu.cuModuleUnload(module))


def with_pool(memory: int) -> None:
    stream = ok(cu.cuStreamCreate(1))
    pooled = int(ok(cu.cuMemAllocAsync(1 << 20, stream)))
    ok(cu.cuMemsetD32Async(pooled, 2, WORDS, stream))
    ok(cu.cuMemcpyDtoDAsync(memory, pooled, 4 * WORDS, stream))
    ok(cu.cuMemFreeAsync(pooled, stream))
    ok(cu.cuStreamSynchronize(stream))
    ok(cu.cuStreamDestroy(stream))


@program("threads that make and end contexts, libraries, graphs and memory of pools all the time")
def objects_that_come_and_go(here: Here) -> None:
    gpu = Gpu()
    bodies = (with_context, with_library, with_graph, with_pool)
    counts = [0] * len(bodies)
    right = [True] * len(bodies)

    def go_round(number: int, body: Callable[[int], None]) -> None:
        gpu.current()
        memory = int(ok(cu.cuMemAlloc(4 * WORDS)))
        while counts[number] < ROUNDS or not here.go.exists():
            body(memory)
            gpu.current()
            right[number] &= bool(np.all(download(memory, WORDS) == 2))
            counts[number] += 1

    threads = [threading.Thread(target=go_round, args=pair) for pair in enumerate(bodies)]
    for thread in threads:
        thread.start()
    until(lambda: all(counts) or not all(thread.is_alive() for thread in threads))
    say("ready")
    for thread in threads:
        thread.join()
    say([count >= ROUNDS for count in counts], right, gpu.step())

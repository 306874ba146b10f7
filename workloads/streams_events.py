"""Run an order-dependent integer computation over streams, events, async copies and callbacks."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
from _common import Report, digest, guarded, parse, verify
from _cuda import Gpu, blocks, check
from cuda.bindings import driver
from numpy.typing import NDArray

DEFAULT_STEPS = 40
ROUNDS = 4
SLOTS = 2

SOURCE = r"""
extern "C" __global__ void scale(unsigned* state, const unsigned* input, unsigned factor, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        state[i] = state[i] * factor + input[i];
}

extern "C" __global__ void rotate(unsigned* state, const unsigned* input, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        state[i] = ((state[i] << 7) | (state[i] >> 25)) ^ input[i];
}

extern "C" __global__ void add_token(unsigned* state, const unsigned* token, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        state[i] += *token;
}
"""

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def factor_of(step: int, turn: int) -> int:
    return 2 * (step * ROUNDS + turn) + 5


def next_token(token: int) -> int:
    return (token * 33 + 17) & 0xFFFFFFFF


def inputs_of(seed: int, step: int, count: int) -> NDArray[np.uint32]:
    rng = np.random.default_rng([seed, 5, step])
    return rng.integers(0, 1 << 32, (ROUNDS, count), np.uint32)


class Reference:
    """Does the same computation in numpy, one operation after the other."""

    def __init__(self, count: int) -> None:
        self.state = np.arange(count, dtype=np.uint32)
        self.token = 1

    def step(self, seed: int, step: int) -> None:
        inputs = inputs_of(seed, step, len(self.state))
        for turn in range(ROUNDS):
            self.state = self.state * np.uint32(factor_of(step, turn)) + inputs[turn]
            rotated = (self.state << np.uint32(7)) | (self.state >> np.uint32(25))
            self.token = next_token(self.token)
            self.state = (rotated ^ inputs[turn]) + np.uint32(self.token)


class HostMemory:
    """Page-locked host arrays: one from the driver, two of our own pages, registered."""

    def __init__(self, count: int) -> None:
        size = 4 * ROUNDS * count
        self.staging_address = int(check(driver.cuMemHostAlloc(size, 0)))
        raw = (ctypes.c_uint32 * (ROUNDS * count)).from_address(self.staging_address)
        self.staging: NDArray[np.uint32] = np.ctypeslib.as_array(raw).reshape(ROUNDS, count)
        self.staging[:] = 0
        self.output = self._registered(count)
        self.token = self._registered(1)

    @staticmethod
    def _registered(count: int) -> NDArray[np.uint32]:
        size = -(-4 * count // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        array = np.frombuffer(pages, np.uint32)
        check(driver.cuMemHostRegister(array.ctypes.data, array.nbytes, 0))
        array[:] = 0
        return array[:count]

    def release(self) -> None:
        check(driver.cuMemHostUnregister(self.output.ctypes.data))
        check(driver.cuMemHostUnregister(self.token.ctypes.data))
        self.staging = np.empty(0, np.uint32)
        check(driver.cuMemFreeHost(self.staging_address))


class Pipeline:
    """Three streams: copies in, first kernel, second kernel and everything after it."""

    def __init__(self, gpu: Gpu, count: int) -> None:
        self.count = count
        module = gpu.module(SOURCE)
        self.scale = module.kernel("scale", "PPIi")
        self.rotate = module.kernel("rotate", "PPi")
        self.add_token = module.kernel("add_token", "PPi")
        self.host = HostMemory(count)
        self.host.token[0] = 1
        self.state = gpu.upload(np.arange(count, dtype=np.uint32))
        self.token = gpu.alloc(4)
        self.inputs = [gpu.alloc(4 * count) for _ in range(SLOTS)]
        least, greatest = check(driver.cuCtxGetStreamPriorityRange())
        self.copies = self._stream(greatest)
        self.first = self._stream(least)
        self.second = self._stream(least)
        quiet = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.copied = [check(driver.cuEventCreate(quiet)) for _ in range(SLOTS)]
        self.scaled = [check(driver.cuEventCreate(quiet)) for _ in range(SLOTS)]
        self.free = [check(driver.cuEventCreate(quiet)) for _ in range(SLOTS)]
        self.begin, self.end = (check(driver.cuEventCreate(0)) for _ in range(2))
        self.calls: list[tuple[str, int]] = []
        self.kept: list[Any] = []
        self.turns = 0

    @staticmethod
    def _stream(priority: int) -> Any:
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = check(driver.cuStreamCreateWithPriority(flags, priority))
        found = check(driver.cuStreamGetPriority(stream))
        verify(found == priority, f"stream priority {found}, asked for {priority}")
        return stream

    def call(self, stream: Any, function: Callable[[], None]) -> None:
        """Queue a host function; it is kept alive until the step ends."""
        callback = HostFunction(lambda _: function())
        self.kept.append(callback)
        pointer = driver.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value)
        check(driver.cuLaunchHostFunc(stream, pointer, 0))

    def turn(self, step: int, turn: int) -> None:
        slot, n, grid = self.turns % SLOTS, self.count, blocks(self.count)
        source = self.host.staging[turn].ctypes.data
        check(driver.cuStreamWaitEvent(self.copies, self.free[slot], 0))
        check(driver.cuMemcpyHtoDAsync(self.inputs[slot], source, 4 * n, self.copies))
        check(driver.cuEventRecord(self.copied[slot], self.copies))

        check(driver.cuStreamWaitEvent(self.first, self.copied[slot], 0))
        # The state as the turn before left it: its last kernel ran on the other stream.
        check(driver.cuStreamWaitEvent(self.first, self.free[1 - slot], 0))
        factor = factor_of(step, turn)
        self.scale(grid, 256, self.state, self.inputs[slot], factor, n, stream=self.first)
        check(driver.cuEventRecord(self.scaled[slot], self.first))

        check(driver.cuStreamWaitEvent(self.second, self.scaled[slot], 0))
        self.rotate(grid, 256, self.state, self.inputs[slot], n, stream=self.second)

        def advance_token() -> None:
            self.host.token[0] = next_token(int(self.host.token[0]))
            self.calls.append(("token", turn))

        self.call(self.second, advance_token)
        token = self.host.token.ctypes.data
        check(driver.cuMemcpyHtoDAsync(self.token, token, 4, self.second))
        self.add_token(grid, 256, self.state, self.token, n, stream=self.second)
        check(driver.cuEventRecord(self.free[slot], self.second))
        self.turns += 1

    def step(self, seed: int, step: int) -> NDArray[np.uint32]:
        """Queue one step without waiting in between; return the state as it came back."""
        self.host.staging[:] = inputs_of(seed, step, self.count)
        self.calls.clear()
        check(driver.cuEventRecord(self.begin, self.copies))
        for turn in range(ROUNDS):
            self.turn(step, turn)
        output, size = self.host.output.ctypes.data, 4 * self.count
        check(driver.cuMemcpyDtoHAsync(output, self.state, size, self.second))
        self.call(self.second, lambda: self.calls.append(("end", step)))
        check(driver.cuEventRecord(self.end, self.second))
        check(driver.cuEventSynchronize(self.end))
        self.kept.clear()
        for stream in (self.copies, self.first, self.second):
            check(driver.cuStreamSynchronize(stream))
            check(driver.cuStreamQuery(stream))
        milliseconds = float(check(driver.cuEventElapsedTime(self.begin, self.end)))
        verify(0 <= milliseconds < 3_600_000, f"step {step}: it took {milliseconds} ms")
        expected = [("token", turn) for turn in range(ROUNDS)] + [("end", step)]
        verify(self.calls == expected, f"step {step}: host functions ran as {self.calls}")
        return self.host.output.copy()

    def release(self) -> None:
        for event in (*self.copied, *self.scaled, *self.free, self.begin, self.end):
            check(driver.cuEventDestroy(event))
        for stream in (self.copies, self.first, self.second):
            check(driver.cuStreamDestroy(stream))
        self.host.release()


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    gpu = Gpu(options.device)
    count = 1 << 22 if options.big else 1 << 13
    pipeline, reference = Pipeline(gpu, count), Reference(count)
    for step in range(options.steps):
        # The host memory that the step before wrote must be as it was, too.
        host = pipeline.host
        before = digest(host.staging, host.output, host.token, gpu.digest().encode())
        output = pipeline.step(options.seed, step)
        reference.step(options.seed, step)
        wrong = int((output != reference.state).sum())
        verify(wrong == 0, f"step {step}: {wrong} of {count} words are wrong")
        after = (output, pipeline.host.token, gpu.digest().encode())
        report.step(step, digest(before.encode(), *after))
    pipeline.release()
    gpu.close()
    report.done()


if __name__ == "__main__":
    guarded(main)

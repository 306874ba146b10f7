"""Four host threads launch on streams of their own and on their per-thread default streams."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from _common import Options, Report, VerifyError, digest, guarded, parse, verify
from _cuda import MIX_SOURCE, Gpu, Module, blocks, check, mix32
from cuda.bindings import driver
from numpy.typing import NDArray

DEFAULT_STEPS = 40
THREADS = 4
LAUNCHES = 4
PER_THREAD_STREAM = 2

SOURCE = (
    MIX_SOURCE
    + r"""
extern "C" __global__ void churn(unsigned* state, unsigned tag, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        state[i] = mix32(state[i] + tag);
}

extern "C" __global__ void collect(const unsigned* state, unsigned* total, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        atomicAdd(total, state[i]);
}
"""
)


class Worker:
    """One host thread with its stream, its buffer and the buffer's expected content."""

    def __init__(self, gpu: Gpu, module: Module, options: Options, number: int, total: int) -> None:
        self.gpu, self.number, self.total = gpu, number, total
        self.count = 1 << 20 if options.big else 2048
        self.churn = module.kernel("churn", "PIi")
        self.collect = module.kernel("collect", "PPi")
        rng = np.random.default_rng([options.seed, 10, number])
        self.expected: NDArray[np.uint32] = rng.integers(0, 1 << 32, self.count, np.uint32)
        self.state = gpu.upload(self.expected)
        self.stream: Any = None
        self.event: Any = None

    def prepare(self) -> None:
        self.gpu.make_current()
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.stream = check(driver.cuStreamCreate(flags))
        self.event = check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def step(self, step: int) -> None:
        """Launch on the own stream, go on on the per-thread one, wait for that one alone."""
        grid, n = blocks(self.count), self.count
        for launch in range(LAUNCHES):
            tag = step * 1000 + self.number * 10 + launch
            stream = self.stream if launch % 2 == 0 else PER_THREAD_STREAM
            other = PER_THREAD_STREAM if launch % 2 == 0 else self.stream
            self.churn(grid, 256, self.state, tag, n, stream=stream)
            check(driver.cuEventRecord(self.event, stream))
            check(driver.cuStreamWaitEvent(other, self.event, 0))
            self.expected = mix32(self.expected + np.uint32(tag))
        self.collect(grid, 256, self.state, self.total, n, stream=PER_THREAD_STREAM)
        found = np.empty(n, np.uint32)
        check(
            driver.cuMemcpyDtoHAsync(found.ctypes.data, self.state, found.nbytes, PER_THREAD_STREAM)
        )
        check(driver.cuStreamSynchronize(PER_THREAD_STREAM))
        verify(
            np.array_equal(found, self.expected),
            f"step {step}: thread {self.number} has a wrong state",
        )

    def release(self) -> None:
        check(driver.cuEventDestroy(self.event))
        check(driver.cuStreamDestroy(self.stream))


class Crew:
    """Runs the workers in threads, in step with the main thread."""

    def __init__(self, workers: list[Worker], steps: int) -> None:
        self.errors: list[Exception] = []
        self.barrier = threading.Barrier(len(workers) + 1)
        self.threads = [
            threading.Thread(target=self._run, args=(worker, steps), daemon=True)
            for worker in workers
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, worker: Worker, steps: int) -> None:
        try:
            worker.prepare()
            for step in range(steps):
                self.barrier.wait()
                worker.step(step)
                self.barrier.wait()
            worker.release()
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            self.errors.append(error)
            self.barrier.abort()

    def step(self) -> None:
        """Let every worker do one step; raise the first error of any."""
        try:
            self.barrier.wait()
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise (self.errors or [VerifyError("a thread ended early")])[0] from None

    def join(self) -> None:
        for thread in self.threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    gpu = Gpu(options.device)
    module = gpu.module(SOURCE)
    total = gpu.upload(np.zeros(1, np.uint32))
    workers = [Worker(gpu, module, options, number, total) for number in range(THREADS)]
    crew = Crew(workers, options.steps)
    expected_total = 0
    for step in range(options.steps):
        before = gpu.digest()
        crew.step()
        for worker in workers:
            expected_total += int(worker.expected.sum(dtype=np.uint64))
        found = gpu.read(total, np.uint32, 1)
        verify(
            int(found[0]) == expected_total & 0xFFFFFFFF,
            f"step {step}: the threads' common sum is {found[0]}",
        )
        report.step(step, digest(before.encode(), gpu.digest().encode()))
    crew.join()
    gpu.close()
    report.done()


if __name__ == "__main__":
    guarded(main)

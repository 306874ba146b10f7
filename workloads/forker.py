"""Fork children that never touch CUDA after CUDA is in use, as a DataLoader does."""

from __future__ import annotations

import os
import warnings
from typing import BinaryIO

import numpy as np
from _common import Report, digest, guarded, parse, verify
from _cuda import MIX_SOURCE, Gpu, blocks, mix32
from numpy.typing import NDArray

DEFAULT_STEPS = 40
CHILDREN = 2
BATCH = 4096
BIG_BATCH = 1 << 20

SOURCE = (
    MIX_SOURCE
    + r"""
extern "C" __global__ void absorb(unsigned* state, const unsigned* batch, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        state[i] = mix32(state[i] + batch[i]);
}
"""
)


def batch_of(seed: int, child: int, step: int, count: int) -> NDArray[np.uint32]:
    return np.random.default_rng([seed, 11, child, step]).integers(0, 1 << 32, count, np.uint32)


def serve(requests: BinaryIO, batches: BinaryIO, seed: int, child: int, count: int) -> None:
    """Answer each step number with that step's batch, until the parent closes its end.

    The child also carries a sum over all it made, so that its own memory counts.
    """
    carried = np.zeros(count, np.uint32)
    while request := requests.read(8):
        carried += batch_of(seed, child, int.from_bytes(request, "little"), count)
        batches.write(carried.tobytes())
        batches.flush()


class Child:
    """A forked process and the pipes to and from it."""

    def __init__(self, seed: int, number: int, count: int, siblings: list[Child]) -> None:
        self.count = count
        request_read, request_write = os.pipe()
        batch_read, batch_write = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of the driver's threads, with a number that no two runs share.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(request_write)
                os.close(batch_read)
                # Or an elder sibling would never see the end of its requests.
                for sibling in siblings:
                    os.close(sibling.requests.fileno())
                    os.close(sibling.batches.fileno())
                with open(request_read, "rb") as requests, open(batch_write, "wb") as batches:
                    serve(requests, batches, seed, number, count)
                status = 0
            finally:
                # Past every handler of the parent: they would touch CUDA.
                os._exit(status)
        os.close(request_read)
        os.close(batch_write)
        self.requests: BinaryIO = open(request_write, "wb")  # noqa: SIM115
        self.batches: BinaryIO = open(batch_read, "rb")  # noqa: SIM115

    def ask(self, step: int) -> None:
        self.requests.write(step.to_bytes(8, "little"))
        self.requests.flush()

    def take(self) -> NDArray[np.uint32]:
        data = self.batches.read(4 * self.count)
        verify(len(data) == 4 * self.count, f"child {self.pid} closed its pipe")
        return np.frombuffer(data, np.uint32)

    def finish(self) -> int:
        self.requests.close()
        _, status = os.waitpid(self.pid, 0)
        self.batches.close()
        return os.waitstatus_to_exitcode(status)


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    count = BIG_BATCH if options.big else BATCH
    gpu = Gpu(options.device)
    module = gpu.module(SOURCE)
    absorb = module.kernel("absorb", "PPi")
    expected = np.arange(count, dtype=np.uint32)
    state, batch = gpu.upload(expected), gpu.alloc(4 * count)
    children: list[Child] = []
    for number in range(CHILDREN):
        children.append(Child(options.seed, number, count, children))
    sums = [np.zeros(count, np.uint32) for _ in children]
    for child in children:
        child.ask(0)
    for step in range(options.steps):
        before = gpu.digest()
        for number, child in enumerate(children):
            data = child.take()
            # One request ahead, so that a checkpoint finds data under way in the pipes.
            child.ask(step + 1)
            sums[number] += batch_of(options.seed, number, step, count)
            verify(np.array_equal(data, sums[number]), f"step {step}: child {number} is wrong")
            gpu.write(batch, data)
            absorb(blocks(count), 256, state, batch, count)
            expected = mix32(expected + data)
        found = gpu.read(state, np.uint32, count)
        verify(np.array_equal(found, expected), f"step {step}: the state is wrong")
        report.step(step, digest(before.encode(), gpu.digest().encode()))
    for child in children:
        child.take()
    codes = [child.finish() for child in children]
    verify(codes == [0] * CHILDREN, f"the children ended with {codes}")
    gpu.close()
    report.done()


if __name__ == "__main__":
    guarded(main)

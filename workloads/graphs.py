"""Run an order-dependent integer computation as CUDA graphs, made by hand and captured."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from _common import Report, digest, guarded, parse, verify
from _cuda import Gpu, blocks, check
from cuda.bindings import driver
from numpy.typing import NDArray

DEFAULT_STEPS = 40
RENEWED = 8  # steps after which the captured graph is captured anew

SOURCE = r"""
extern "C" __global__ void mix(unsigned* state, const unsigned* input, const unsigned* salt,
                               unsigned factor, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        state[i] = state[i] * factor + (input[i] ^ salt[i]);
}

extern "C" __global__ void rotate(unsigned* state, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        state[i] = (state[i] << 7) | (state[i] >> 25);
}

extern "C" __global__ void fold(unsigned* state, const unsigned* before, unsigned addend, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        state[i] = (state[i] ^ before[count - 1 - i]) + addend;
}
"""


def factor_of(step: int) -> int:
    return (4 * step + 5) % (1 << 32)


def addend_of(step: int) -> int:
    return (step // RENEWED * 0x01000193 + 3) % (1 << 32)


def input_of(seed: int, step: int, count: int) -> NDArray[np.uint32]:
    return np.random.default_rng([seed, 11, step]).integers(0, 1 << 32, count, np.uint32)


def rotated(state: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return (state << np.uint32(7)) | (state >> np.uint32(25))


def stepped(state: NDArray[np.uint32], seed: int, step: int) -> NDArray[np.uint32]:
    """Do the same computation in numpy."""
    salted = input_of(seed, step, len(state)) ^ np.uint32(step)
    mixed = rotated(rotated(state * np.uint32(factor_of(step)) + salted))
    return (rotated(mixed) ^ mixed[::-1]) + np.uint32(addend_of(step))


class Graphs:
    """One graph made node by node, changed each step, and one captured from two streams."""

    def __init__(self, gpu: Gpu, count: int) -> None:
        self.context, self.count, self.size = gpu.context, count, 4 * count
        module = gpu.module(SOURCE)
        self.mix = module.kernel("mix", "PPPIi")
        self.rotate = module.kernel("rotate", "Pi")
        self.fold = module.kernel("fold", "PPIi")
        self.state = gpu.upload(np.arange(count, dtype=np.uint32))
        self.input, self.salt, self.before = (gpu.alloc(self.size) for _ in range(3))
        self.staging = int(check(driver.cuMemHostAlloc(self.size, 0)))
        raw = (ctypes.c_uint32 * count).from_address(self.staging)
        self.host: NDArray[np.uint32] = np.ctypeslib.as_array(raw)
        self.host[:] = 0
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.main, self.side = (check(driver.cuStreamCreate(flags)) for _ in range(2))
        quiet = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.forked, self.joined = (check(driver.cuEventCreate(quiet)) for _ in range(2))
        self._make()
        captured = self._capture(addend_of(0))
        self.captured = check(driver.cuGraphInstantiate(captured, 0))
        check(driver.cuGraphDestroy(captured))

    def _kernel(self, function: Any, values: tuple[int, ...], types: tuple[Any, ...]) -> Any:
        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = function
        params.gridDimX, params.gridDimY, params.gridDimZ = blocks(self.count), 1, 1
        params.blockDimX, params.blockDimY, params.blockDimZ = 256, 1, 1
        params.kernelParams = (values, types)
        return params

    def _mix(self, step: int) -> Any:
        pointer, word = ctypes.c_uint64, ctypes.c_uint32
        values = (self.state, self.input, self.salt, factor_of(step), self.count)
        return self._kernel(
            self.mix.function, values, (pointer, pointer, pointer, word, ctypes.c_int32)
        )

    def _salt(self, step: int) -> Any:
        params = driver.CUDA_MEMSET_NODE_PARAMS()
        params.dst, params.value = driver.CUdeviceptr(self.salt), step
        params.elementSize, params.width, params.height = 4, self.count, 1
        return params

    def _upload(self) -> Any:
        params = driver.CUDA_MEMCPY3D()
        params.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
        params.srcHost = self.staging
        params.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        params.dstDevice = driver.CUdeviceptr(self.input)
        params.WidthInBytes, params.Height, params.Depth = self.size, 1, 1
        return params

    def _make(self) -> None:
        """Input and salt come side by side, then the mix, then a child graph of two rotations."""
        child = check(driver.cuGraphCreate(0))
        types = (ctypes.c_uint64, ctypes.c_int32)
        turn = self._kernel(self.rotate.function, (self.state, self.count), types)
        first = check(driver.cuGraphAddKernelNode(child, None, 0, turn))
        check(driver.cuGraphAddKernelNode(child, [first], 1, turn))
        self.graph = check(driver.cuGraphCreate(0))
        copy = driver.cuGraphAddMemcpyNode(self.graph, None, 0, self._upload(), self.context)
        fill = driver.cuGraphAddMemsetNode(self.graph, None, 0, self._salt(0), self.context)
        before = [check(copy), check(fill)]
        self.fill_node = before[1]
        self.mix_node = check(driver.cuGraphAddKernelNode(self.graph, before, 2, self._mix(0)))
        check(driver.cuGraphAddChildGraphNode(self.graph, [self.mix_node], 1, child))
        check(driver.cuGraphDestroy(child))
        self.made = check(driver.cuGraphInstantiate(self.graph, 0))

    def _capture(self, addend: int) -> Any:
        """The state is kept on the side while it turns; both streams meet before the fold."""
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        grid = blocks(self.count)
        check(driver.cuStreamBeginCapture(self.main, mode))
        copy = driver.cuMemcpyDtoDAsync(self.before, self.state, self.size, self.main)
        check(copy)
        check(driver.cuEventRecord(self.forked, self.main))
        check(driver.cuStreamWaitEvent(self.side, self.forked, 0))
        self.rotate(grid, 256, self.state, self.count, stream=self.side)
        check(driver.cuEventRecord(self.joined, self.side))
        check(driver.cuStreamWaitEvent(self.main, self.joined, 0))
        self.fold(grid, 256, self.state, self.before, addend, self.count, stream=self.main)
        return check(driver.cuStreamEndCapture(self.main))

    def step(self, seed: int, step: int) -> None:
        self.host[:] = input_of(seed, step, self.count)
        check(driver.cuGraphExecKernelNodeSetParams(self.made, self.mix_node, self._mix(step)))
        fill = self._salt(step)
        check(driver.cuGraphExecMemsetNodeSetParams(self.made, self.fill_node, fill, self.context))
        if step % RENEWED == 0 and step > 0:
            renewed = self._capture(addend_of(step))
            check(driver.cuGraphExecUpdate(self.captured, renewed))
            check(driver.cuGraphDestroy(renewed))
        check(driver.cuGraphLaunch(self.made, self.main))
        check(driver.cuGraphLaunch(self.captured, self.main))
        check(driver.cuStreamSynchronize(self.main))

    def release(self) -> None:
        for executable in (self.made, self.captured):
            check(driver.cuGraphExecDestroy(executable))
        check(driver.cuGraphDestroy(self.graph))
        for event in (self.forked, self.joined):
            check(driver.cuEventDestroy(event))
        for stream in (self.main, self.side):
            check(driver.cuStreamDestroy(stream))
        self.host = np.empty(0, np.uint32)
        check(driver.cuMemFreeHost(self.staging))


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    gpu = Gpu(options.device)
    count = 1 << 22 if options.big else 1 << 13
    graphs, reference = Graphs(gpu, count), np.arange(count, dtype=np.uint32)
    for step in range(options.steps):
        before = digest(graphs.host, gpu.digest().encode())
        graphs.step(options.seed, step)
        reference = stepped(reference, options.seed, step)
        wrong = int((gpu.read(graphs.state, np.uint32, count) != reference).sum())
        verify(wrong == 0, f"step {step}: {wrong} of {count} words are wrong")
        report.step(step, digest(before.encode(), gpu.digest().encode()))
    graphs.release()
    gpu.close()
    report.done()


if __name__ == "__main__":
    guarded(main)

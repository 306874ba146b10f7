"""How fast the emulated GPU runs kernels: elements and threads a second of some of the usual kinds.

    python -m bench.interpreter [--out FILE.json]

Each kernel is compiled once and launched on inputs of a size at which its launch costs nothing
beside it (near 0.1 s each); the median of RUNS launches counts, each with a synchronisation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine
from tests.emu.intercept_lib import ROOT, bare_environment

RUNS = 5
SMALL = 1 << 10
"""Elements of a run that is only to be seen to work."""

SOURCE = r"""
extern "C" __global__ void saxpy(float* y, const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i] + y[i];
}
extern "C" __global__ void gelu(float* y, const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i];
    y[i] = 0.5f * v * (1.0f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
}
extern "C" __global__ void sum(float* y, const float* x, int n) {
    __shared__ float part[256];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    part[threadIdx.x] = i < n ? x[i] : 0.0f;
    for (int s = 128; s > 0; s >>= 1) {
        __syncthreads();
        if (threadIdx.x < s) part[threadIdx.x] += part[threadIdx.x + s];
    }
    if (threadIdx.x == 0) atomicAdd(y, part[0]);
}
extern "C" __global__ void softmax(float* y, const float* x, int n) {
    // A warp for each row of 128.
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row * 128 >= n) return;
    float v[4], top = -1e30f, total = 0.0f;
    for (int k = 0; k < 4; k++) top = fmaxf(top, v[k] = x[row * 128 + k * 32 + lane]);
    for (int m = 16; m > 0; m >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
    for (int k = 0; k < 4; k++) total += v[k] = expf(v[k] - top);
    for (int m = 16; m > 0; m >>= 1) total += __shfl_xor_sync(~0u, total, m);
    for (int k = 0; k < 4; k++) y[row * 128 + k * 32 + lane] = v[k] / total;
}
extern "C" __global__ void histogram(float* y, const float* x, int n) {
    __shared__ unsigned bins[256];
    bins[threadIdx.x] = 0;
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&bins[__float_as_uint(x[i]) >> 15 & 255], 1u);
    __syncthreads();
    atomicAdd((unsigned*)y + threadIdx.x, bins[threadIdx.x]);
}
extern "C" __global__ void transpose(float* y, const float* x, int n) {
    // Squares of 16 by 16, one after another.
    __shared__ float square[16][17];
    int at = blockIdx.x * 256, row = threadIdx.x / 16, column = threadIdx.x % 16;
    if (at + 256 > n) return;
    square[row][column] = x[at + threadIdx.x];
    __syncthreads();
    y[at + threadIdx.x] = square[column][row];
}
extern "C" __global__ void matmul(float* y, const float* x, int n) {
    // Products of 16 by 16 matrices with themselves.
    __shared__ float square[16][16];
    int at = blockIdx.x * 256, row = threadIdx.x / 16, column = threadIdx.x % 16;
    if (at + 256 > n) return;
    square[row][column] = x[at + threadIdx.x];
    __syncthreads();
    float total = 0.0f;
    for (int k = 0; k < 16; k++) total += square[row][k] * square[k][column];
    y[at + threadIdx.x] = total;
}
__device__ unsigned halves(const float* x) {
    unsigned two;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(x[1]), "f"(x[0]));
    return two;
}
extern "C" __global__ void tensor_matmul(float* y, const float* x, int n) {
    // A matrix of 16 by 16 a warp, each thread's part of which is eight numbers in a row, times two
    // of 16 by 8, in half precision.
    int at = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (at + 8 > n) return;
    unsigned a[4];
    for (int k = 0; k < 4; k++) a[k] = halves(x + at + 2 * k);
    for (int part = 0; part < 2; part++) {
        float c[4] = {};
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[2 * part]), "r"(a[2 * part + 1]));
        for (int k = 0; k < 4; k++) y[at + 4 * part + k] = c[k];
    }
}
"""


@dataclass(frozen=True)
class Kind:
    """A kernel, its elements, and how many of them each thread has."""

    name: str
    elements: int
    each: int = 1


KINDS = (
    Kind("saxpy", 1 << 22),
    Kind("gelu", 1 << 21),
    Kind("sum", 1 << 20),
    Kind("softmax", 1 << 20, 4),
    Kind("histogram", 1 << 21),
    Kind("transpose", 1 << 21),
    Kind("matmul", 1 << 18),
    Kind("tensor_matmul", 1 << 19, 8),
)


def measure(elements: int | None, runs: int) -> list[dict[str, Any]]:
    """Run every kind on the GPU that cuInit finds; `elements` for each instead of its own."""
    import numpy as np
    from cuda.bindings import driver as cu

    from tests.emu.cuda_source import compile_cuda
    from tests.emu.driver_lib import ok, start

    start()
    module = ok(cu.cuModuleLoadData(compile_cuda(SOURCE).encode() + b"\0"))
    rows = []
    for kind in KINDS:
        count = elements or kind.elements
        kernel = ok(cu.cuModuleGetFunction(module, kind.name.encode()))
        x = np.random.default_rng(1).standard_normal(count, np.float32)
        source, target = (int(ok(cu.cuMemAlloc(max(x.nbytes, 1024)))) for _ in range(2))
        ok(cu.cuMemcpyHtoD(source, x, x.nbytes))
        ok(cu.cuMemsetD8(target, 0, x.nbytes))
        values = (np.array([target], np.uint64), np.array([source], np.uint64))
        values += (np.array([count], np.int32),)  # type: ignore[assignment]
        pointers = np.array([value.ctypes.data for value in values], np.uint64)
        threads = count // kind.each
        seconds = []
        for _ in range(runs + 1):
            began = time.perf_counter()
            grid = -(-threads // 256)
            ok(cu.cuLaunchKernel(kernel, grid, 1, 1, 256, 1, 1, 0, 0, pointers.ctypes.data, 0))
            ok(cu.cuCtxSynchronize())
            seconds.append(time.perf_counter() - began)
        median = statistics.median(seconds[1:])  # the first one also loads
        rows.append(
            {
                "kernel": kind.name,
                "elements": count,
                "threads": threads,
                "seconds": [round(value, 6) for value in seconds[1:]],
                "elements_per_second": round(count / median),
                "threads_per_second": round(threads / median),
            }
        )
        ok(cu.cuMemFree(source))
        ok(cu.cuMemFree(target))
    return rows


def on_the_emulated_gpu(*words: str) -> list[dict[str, Any]]:
    """What `measure` gives in a process that finds the emulated GPU. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="flowgpu-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "bench.interpreter", "--here", *words],
            env={**bare_environment(Path(folder)), "FLOWGPU_EMU_WRITE_LOG": ""},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| kernel | elements | million elements/s | million threads/s |",
        "|---|---:|---:|---:|",
    ]
    for row in rows:
        rates = (row[f"{what}_per_second"] / 1e6 for what in ("elements", "threads"))
        cells = [f"`{row['kernel']}`", f"{row['elements']:,}", *(f"{rate:.2f}" for rate in rates)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true", help="see that it works, no more")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(SMALL, 1) if options.small else measure(None, RUNS)))
        return 0
    rows = on_the_emulated_gpu(*(["--small"] if options.small else []))
    print(table(rows))
    if options.out:
        command = f"python -m bench.interpreter --out {options.out}"
        document = machine.heading("interpreter", command) | {"rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

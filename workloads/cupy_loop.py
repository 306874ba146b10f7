"""Mix matrix products, a raw kernel and Fourier transforms in CuPy; numpy must agree."""

from __future__ import annotations

import os

# Read when CuPy and cuBLAS are loaded: no kernel files on disk, no timing-dependent workspaces.
os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
os.environ["CUDA_CACHE_DISABLE"] = "1"

import cupy
import numpy as np
from _common import Report, digest, guarded, parse, verify
from numpy.typing import NDArray

DEFAULT_STEPS = 100
SIDE = 512

SOURCE = r"""
extern "C" __global__ void churn(unsigned* words, unsigned step, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        words[i] = (words[i] ^ (words[i] >> 13)) * 2654435761u + step;
}
"""


def churn(words: NDArray[np.uint32], step: int) -> NDArray[np.uint32]:
    return (words ^ (words >> np.uint32(13))) * np.uint32(2654435761) + np.uint32(step)


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    rng = np.random.default_rng([options.seed, 14])
    orthogonal = np.linalg.qr(rng.normal(size=(SIDE, SIDE)))[0].astype(np.float32)
    start = rng.normal(size=(SIDE, SIDE)).astype(np.float32)
    with cupy.cuda.Device(options.device):
        kernel = cupy.RawKernel(SOURCE, "churn")
        turn, matrix = cupy.asarray(orthogonal), cupy.asarray(start)
        expected = np.arange(SIDE * SIDE, dtype=np.uint32)
        words = cupy.asarray(expected)
        for step in range(options.steps):
            product = turn @ matrix
            if step == 0:
                error = float(np.abs(cupy.asnumpy(product) - orthogonal @ start).max())
                verify(error < 1e-3, f"the first product is off by {error:.1e}")
            spectrum = cupy.fft.fft2(product)
            matrix = cupy.fft.ifft2(spectrum).real.astype(cupy.float32)
            error = float(cupy.abs(matrix - product).max())
            verify(error < 1e-3, f"step {step}: the transform and its inverse differ by {error}")
            kernel((words.size // 256,), (256,), (words, np.uint32(step), np.int32(words.size)))
            expected = churn(expected, step)
            found = cupy.asnumpy(words)
            verify(np.array_equal(found, expected), f"step {step}: the raw kernel's words differ")
            arrays = (matrix, product, spectrum, turn)
            state = digest(found, *(np.ascontiguousarray(cupy.asnumpy(a)) for a in arrays))
            report.step(step, state, loss=float(cupy.asnumpy(matrix).std(dtype=np.float64)))
    report.done()


if __name__ == "__main__":
    guarded(main)

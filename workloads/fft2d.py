"""Move a wave packet by 2-D Fourier transforms of our own; numpy.fft must agree."""

from __future__ import annotations

import numpy as np
from _common import Report, digest, guarded, parse, verify
from _cuda import Gpu
from numpy.typing import NDArray

DEFAULT_STEPS = 40
TIME_STEP = 0.05

SOURCE = r"""
// One block transforms one line of n points in shared memory by Stockham's radix-2 scheme, which
// sorts as it goes. twiddle[k] = exp(-2 pi i k / n); sign is +1 forward and -1 inverse.
extern "C" __global__ void transform_lines(float2* data, const float2* twiddle, int log2n,
                                           int point_stride, int line_stride, float sign,
                                           float scale)
{
    extern __shared__ float2 buffer[];
    int n = 1 << log2n, half = n >> 1, t = threadIdx.x;
    float2* from = buffer;
    float2* to = buffer + n;
    float2* line = data + (long long)blockIdx.x * line_stride;
    from[t] = line[t * point_stride];
    from[t + half] = line[(t + half) * point_stride];
    __syncthreads();
    for (int stage = 0; stage < log2n; ++stage) {
        int p = t >> stage, q = t & ((1 << stage) - 1);
        float2 w = twiddle[p << stage];
        w.y *= sign;
        float2 a = from[t], b = from[t + half];
        float2 d = make_float2(a.x - b.x, a.y - b.y);
        int at = q + (p << (stage + 1));
        to[at] = make_float2(a.x + b.x, a.y + b.y);
        to[at + (1 << stage)] = make_float2(d.x * w.x - d.y * w.y, d.x * w.y + d.y * w.x);
        __syncthreads();
        float2* other = from;
        from = to;
        to = other;
    }
    line[t * point_stride] = make_float2(from[t].x * scale, from[t].y * scale);
    line[(t + half) * point_stride] = make_float2(from[t + half].x * scale,
                                                  from[t + half].y * scale);
}

extern "C" __global__ void multiply(float2* data, const float2* factor)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float2 a = data[i], b = factor[i];
    data[i] = make_float2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x);
}
"""


def wave_packet(seed: int, n: int) -> NDArray[np.complex64]:
    """Return an (n, n) Gaussian packet with noise on it, of norm 1."""
    rng = np.random.default_rng([seed, 4])
    axis = (np.arange(n) - n / 2) / (n / 16)
    packet = np.exp(-(axis[:, None] ** 2) - axis[None, :] ** 2 + 2j * axis[None, :])
    packet = packet + 0.01 * (rng.normal(size=(n, n)) + 1j * rng.normal(size=(n, n)))
    result: NDArray[np.complex64] = (packet / np.linalg.norm(packet)).astype(np.complex64)
    return result


def propagator(n: int) -> NDArray[np.complex64]:
    """Return exp(-i k^2 dt / 2) on the grid of wave numbers, (n, n)."""
    k = np.fft.fftfreq(n, 1 / 16) * 2 * np.pi
    energy = (k[:, None] ** 2 + k[None, :] ** 2) / 2
    result: NDArray[np.complex64] = np.exp(-1j * energy * TIME_STEP).astype(np.complex64)
    return result


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    log2n = 10 if options.big else 8
    n = 1 << log2n
    gpu = Gpu(options.device)
    module = gpu.module(SOURCE)
    transform_lines = module.kernel("transform_lines", "PPiiiff")
    multiply = module.kernel("multiply", "PP")

    start, factor_host = wave_packet(options.seed, n), propagator(n)
    data, factor = gpu.upload(start), gpu.upload(factor_host)
    turns = np.exp(-2j * np.pi * np.arange(n // 2) / n).astype(np.complex64)
    twiddle = gpu.upload(turns)

    def transform(sign: float, scale: float) -> None:
        for point_stride, line_stride in ((1, n), (n, 1)):
            transform_lines(
                n,
                n // 2,
                data,
                twiddle,
                log2n,
                point_stride,
                line_stride,
                sign,
                scale,
                shared=2 * n * 8,
            )

    spectrum = np.fft.fft2(start.astype(np.complex128))
    transform(1.0, 1.0)
    found = gpu.read(data, np.complex64, (n, n))
    error = float(np.abs(found - spectrum).max() / np.abs(spectrum).max())
    verify(error < 1e-5, f"forward transform differs from numpy.fft by {error:.1e}")
    transform(-1.0, 1 / n)

    for step in range(options.steps):
        before = gpu.digest()
        transform(1.0, 1.0)
        multiply(n * n // 256, 256, data, factor)
        transform(-1.0, 1 / n)
        found = gpu.read(data, np.complex64, (n, n))
        norm = float(np.linalg.norm(found.astype(np.complex128)))
        verify(abs(norm - 1) < 1e-3, f"step {step}: the norm is {norm}, not 1")
        report.step(step, digest(before.encode(), gpu.digest().encode()), loss=norm)

    expected = np.fft.ifft2(spectrum * factor_host.astype(np.complex128) ** options.steps)
    found = gpu.read(data, np.complex64, (n, n))
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    verify(error < 1e-3, f"the final packet differs from numpy.fft by {error:.1e}")
    gpu.close()
    report.done()


if __name__ == "__main__":
    guarded(main)

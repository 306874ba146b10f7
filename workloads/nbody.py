"""Integrate an all-pairs gravity system with shared-memory tiles; its energy must hold."""

from __future__ import annotations

import numpy as np
from _common import Report, digest, guarded, parse, verify
from _cuda import Gpu, blocks
from numpy.typing import NDArray

DEFAULT_STEPS = 50
TILE = 64
SOFTENING = 0.05
TIME_STEP = 1e-3

SOURCE = r"""
// positions: x, y, z, mass. Plummer softening keeps close pairs finite.
extern "C" __global__ void accelerate(const float4* positions, float4* accelerations, int count,
                                      float softening)
{
    __shared__ float4 tile[TILE];
    int i = blockIdx.x * TILE + threadIdx.x;
    float4 me = positions[i];
    float ax = 0.0f, ay = 0.0f, az = 0.0f;
    for (int base = 0; base < count; base += TILE) {
        tile[threadIdx.x] = positions[base + threadIdx.x];
        __syncthreads();
        for (int j = 0; j < TILE; ++j) {
            float4 other = tile[j];
            float dx = other.x - me.x, dy = other.y - me.y, dz = other.z - me.z;
            float d2 = dx * dx + dy * dy + dz * dz + softening * softening;
            float inverse = rsqrtf(d2);
            float s = other.w * inverse * inverse * inverse;
            ax += s * dx;
            ay += s * dy;
            az += s * dz;
        }
        __syncthreads();
    }
    accelerations[i] = make_float4(ax, ay, az, 0.0f);
}

extern "C" __global__ void kick(float4* velocities, const float4* accelerations, float dt)
{
    int i = blockIdx.x * TILE + threadIdx.x;
    velocities[i].x += accelerations[i].x * dt;
    velocities[i].y += accelerations[i].y * dt;
    velocities[i].z += accelerations[i].z * dt;
}

extern "C" __global__ void drift(float4* positions, const float4* velocities, float dt)
{
    int i = blockIdx.x * TILE + threadIdx.x;
    positions[i].x += velocities[i].x * dt;
    positions[i].y += velocities[i].y * dt;
    positions[i].z += velocities[i].z * dt;
}

// One number a body, in double: kinetic energy and half of its pair energies.
extern "C" __global__ void energies(const float4* positions, const float4* velocities,
                                    double* result, int count, float softening)
{
    __shared__ float4 tile[TILE];
    int i = blockIdx.x * TILE + threadIdx.x;
    float4 me = positions[i], v = velocities[i];
    double pairs = 0.0;
    for (int base = 0; base < count; base += TILE) {
        tile[threadIdx.x] = positions[base + threadIdx.x];
        __syncthreads();
        for (int j = 0; j < TILE; ++j) {
            float4 other = tile[j];
            double dx = (double)other.x - me.x, dy = (double)other.y - me.y;
            double dz = (double)other.z - me.z;
            double d2 = dx * dx + dy * dy + dz * dz + (double)softening * softening;
            if (base + j != i)
                pairs += other.w / sqrt(d2);
        }
        __syncthreads();
    }
    double speed2 = (double)v.x * v.x + (double)v.y * v.y + (double)v.z * v.z;
    result[i] = 0.5 * me.w * speed2 - 0.5 * me.w * pairs;
}
"""


def initial(seed: int, count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return positions with mass (count, 4) and velocities (count, 4)."""
    rng = np.random.default_rng([seed, 3])
    positions = np.empty((count, 4), np.float32)
    positions[:, :3] = rng.normal(0, 1, (count, 3))
    positions[:, 3] = rng.uniform(0.5, 1.5, count) / count
    velocities = np.zeros((count, 4), np.float32)
    velocities[:, :3] = rng.normal(0, 0.3, (count, 3))
    return positions, velocities


def reference_accelerations(positions: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the accelerations of the first TILE bodies, (TILE, 3), in double."""
    points = positions[:, :3].astype(np.float64)
    difference = points[None, :, :] - points[:TILE, None, :]
    d2 = (difference**2).sum(2) + SOFTENING**2
    weights = positions[None, :, 3] / d2**1.5
    result: NDArray[np.float64] = (weights[:, :, None] * difference).sum(1)
    return result


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    count = 16384 if options.big else 512
    gpu = Gpu(options.device)
    module = gpu.module(SOURCE, TILE=TILE)
    accelerate = module.kernel("accelerate", "PPif")
    kick = module.kernel("kick", "PPf")
    drift = module.kernel("drift", "PPf")
    energies = module.kernel("energies", "PPPif")

    positions_host, velocities_host = initial(options.seed, count)
    positions, velocities = gpu.upload(positions_host), gpu.upload(velocities_host)
    accelerations = gpu.upload(np.zeros((count, 4), np.float32))
    energy = gpu.alloc(8 * count)
    grid = blocks(count, TILE)

    def total_energy() -> float:
        energies(grid, TILE, positions, velocities, energy, count, SOFTENING)
        return float(gpu.read(energy, np.float64, count).sum())

    accelerate(grid, TILE, positions, accelerations, count, SOFTENING)
    found = gpu.read(accelerations, np.float32, (count, 4))[:TILE, :3]
    expected = reference_accelerations(positions_host)
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    verify(error < 1e-4, f"first accelerations differ from numpy by {error:.1e}")

    start = total_energy()
    for step in range(options.steps):
        before = gpu.digest()
        kick(grid, TILE, velocities, accelerations, TIME_STEP / 2)
        drift(grid, TILE, positions, velocities, TIME_STEP)
        accelerate(grid, TILE, positions, accelerations, count, SOFTENING)
        kick(grid, TILE, velocities, accelerations, TIME_STEP / 2)
        now = total_energy()
        verify(
            abs(now - start) <= 1e-3 * abs(start),
            f"step {step}: energy went from {start} to {now}",
        )
        report.step(step, digest(before.encode(), gpu.digest().encode()), loss=now)
    gpu.close()
    report.done()


if __name__ == "__main__":
    guarded(main)

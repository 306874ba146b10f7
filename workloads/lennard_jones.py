"""Molecular dynamics: atoms with Lennard-Jones forces in a periodic box; their energy must hold."""

from __future__ import annotations

import numpy as np
from _common import Report, digest, guarded, parse, verify
from _cuda import Gpu, blocks
from numpy.typing import NDArray

DEFAULT_STEPS = 40
BLOCK = 64
CUTOFF, SKIN = 2.5, 0.3
DENSITY, TEMPERATURE, TIME_STEP = 0.8, 0.7, 0.002
# Steps between lists. An atom would need 10 times its mean speed to cross half the skin in them.
REBUILD = 5
NEIGHBOURS = 160  # room in an atom's list; about 75 are expected

SOURCE = r"""
__device__ float wrapped(float x, float box)
{
    return x - box * rintf(x / box);
}

// Each atom's neighbours within the cutoff and the skin, in the order of their numbers, so that
// sums over them have the same rounding in every run.
extern "C" __global__ void list_neighbours(const float4* positions, int* lists, int* counts,
                                           int count, float box, float reach)
{
    __shared__ float4 tile[BLOCK];
    int i = blockIdx.x * BLOCK + threadIdx.x;
    float4 me = positions[i];
    int found = 0;
    for (int base = 0; base < count; base += BLOCK) {
        tile[threadIdx.x] = positions[base + threadIdx.x];
        __syncthreads();
        for (int j = 0; j < BLOCK; ++j) {
            float dx = wrapped(tile[j].x - me.x, box), dy = wrapped(tile[j].y - me.y, box);
            float dz = wrapped(tile[j].z - me.z, box);
            if (base + j != i && dx * dx + dy * dy + dz * dz < reach * reach) {
                if (found < NEIGHBOURS)
                    lists[(long long)found * count + i] = base + j;
                ++found;
            }
        }
        __syncthreads();
    }
    counts[i] = found;
}

// forces: x, y, z, and half of the energies of the pairs, shifted to 0 at the cutoff.
extern "C" __global__ void forces_of(const float4* positions, const int* lists, const int* counts,
                                     float4* forces, int count, float box, float cutoff,
                                     float shift)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    float4 me = positions[i];
    float fx = 0.0f, fy = 0.0f, fz = 0.0f, energy = 0.0f;
    int found = counts[i];
    for (int k = 0; k < found; ++k) {
        float4 other = positions[lists[(long long)k * count + i]];
        float dx = wrapped(other.x - me.x, box), dy = wrapped(other.y - me.y, box);
        float dz = wrapped(other.z - me.z, box);
        float d2 = dx * dx + dy * dy + dz * dz;
        if (d2 < cutoff * cutoff) {
            float inverse = 1.0f / d2, six = inverse * inverse * inverse;
            float s = 24.0f * six * (1.0f - 2.0f * six) * inverse;
            fx += s * dx;
            fy += s * dy;
            fz += s * dz;
            energy += 0.5f * (4.0f * six * (six - 1.0f) - shift);
        }
    }
    forces[i] = make_float4(fx, fy, fz, energy);
}

extern "C" __global__ void kick(float4* velocities, const float4* forces, float dt)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    velocities[i].x += forces[i].x * dt;
    velocities[i].y += forces[i].y * dt;
    velocities[i].z += forces[i].z * dt;
}

extern "C" __global__ void drift(float4* positions, const float4* velocities, float dt, float box)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    float x = positions[i].x + velocities[i].x * dt, y = positions[i].y + velocities[i].y * dt;
    float z = positions[i].z + velocities[i].z * dt;
    positions[i] = make_float4(x - box * floorf(x / box), y - box * floorf(y / box),
                               z - box * floorf(z / box), 0.0f);
}
"""


def initial(seed: int, side: int, box: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return positions near a cubic lattice and velocities without drift, both (side^3, 4)."""
    rng = np.random.default_rng([seed, 21])
    axis = (np.arange(side) + 0.5) * (box / side)
    grid = np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), -1).reshape(-1, 3)
    count = len(grid)
    positions = np.zeros((count, 4), np.float32)
    positions[:, :3] = grid + rng.uniform(-0.03, 0.03, grid.shape)
    velocities = np.zeros((count, 4), np.float32)
    drawn = rng.normal(0, np.sqrt(TEMPERATURE), (count, 3))
    velocities[:, :3] = drawn - drawn.mean(0)
    return positions, velocities


def shift() -> float:
    """Return the pair energy at the cutoff."""
    return 4 * (CUTOFF**-12 - CUTOFF**-6)


def reference_forces(positions: NDArray[np.float32], box: float) -> NDArray[np.float64]:
    """Return force and half pair energies of the first BLOCK atoms, (BLOCK, 4), in double."""
    points = positions[:, :3].astype(np.float64)
    difference = points[None] - points[:BLOCK, None]
    difference -= box * np.rint(difference / box)
    d2 = (difference**2).sum(2)
    d2[d2 == 0] = np.inf
    near = d2 < CUTOFF**2
    six = d2**-3
    scale = np.where(near, 24 * six * (1 - 2 * six) / d2, 0)
    energy = np.where(near, 0.5 * (4 * six * (six - 1) - shift()), 0).sum(1)
    forces = (scale[:, :, None] * difference).sum(1)
    return np.concatenate([forces, energy[:, None]], 1)


class System:
    """All device state: positions, velocities, forces and the lists of neighbours."""

    def __init__(self, gpu: Gpu, seed: int, side: int) -> None:
        self.gpu, self.count = gpu, side**3
        self.box = float((self.count / DENSITY) ** (1 / 3))
        module = gpu.module(SOURCE, BLOCK=BLOCK, NEIGHBOURS=NEIGHBOURS)
        self.list_neighbours = module.kernel("list_neighbours", "PPPiff")
        self.forces_of = module.kernel("forces_of", "PPPPifff")
        self.kick = module.kernel("kick", "PPf")
        self.drift = module.kernel("drift", "PPff")
        self.start, velocities = initial(seed, side, self.box)
        self.positions, self.velocities = gpu.upload(self.start), gpu.upload(velocities)
        self.lists = gpu.alloc(4 * NEIGHBOURS * self.count)
        self.counts = gpu.alloc(4 * self.count)
        self.forces = gpu.alloc(16 * self.count)
        self.grid = blocks(self.count, BLOCK)

    def find_neighbours(self) -> None:
        count, reach = self.count, CUTOFF + SKIN
        lists = (self.positions, self.lists, self.counts)
        self.list_neighbours(self.grid, BLOCK, *lists, count, self.box, reach)
        most = int(self.gpu.read(self.counts, np.int32, count).max())
        verify(most <= NEIGHBOURS, f"an atom has {most} neighbours")

    def find_forces(self) -> None:
        lists = (self.positions, self.lists, self.counts, self.forces)
        self.forces_of(self.grid, BLOCK, *lists, self.count, self.box, CUTOFF, shift())

    def step(self, step: int) -> None:
        """Velocity Verlet."""
        self.kick(self.grid, BLOCK, self.velocities, self.forces, TIME_STEP / 2)
        self.drift(self.grid, BLOCK, self.positions, self.velocities, TIME_STEP, self.box)
        if step % REBUILD == 0:
            self.find_neighbours()
        self.find_forces()
        self.kick(self.grid, BLOCK, self.velocities, self.forces, TIME_STEP / 2)

    def energies(self) -> tuple[float, float]:
        """Return kinetic and potential energy."""
        shape = (self.count, 4)
        velocities = self.gpu.read(self.velocities, np.float32, shape).astype(np.float64)
        potential = self.gpu.read(self.forces, np.float32, shape)[:, 3].sum(dtype=np.float64)
        return 0.5 * float((velocities[:, :3] ** 2).sum()), float(potential)


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    gpu = Gpu(options.device)
    system = System(gpu, options.seed, 64 if options.big else 8)
    system.find_neighbours()
    system.find_forces()
    found = gpu.read(system.forces, np.float32, (system.count, 4))[:BLOCK]
    expected = reference_forces(system.start, system.box)
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    verify(error < 1e-4, f"the first forces differ from numpy by {error:.1e}")
    kinetic, potential = system.energies()
    start, scale = kinetic + potential, kinetic + abs(potential)
    for step in range(options.steps):
        before = gpu.digest()
        system.step(step)
        kinetic, potential = system.energies()
        verify(
            abs(kinetic + potential - start) <= 5e-3 * scale,
            f"step {step}: energy went from {start} to {kinetic + potential}",
        )
        report.step(step, digest(before.encode(), gpu.digest().encode()), loss=kinetic + potential)
    gpu.close()
    report.done()


if __name__ == "__main__":
    guarded(main)

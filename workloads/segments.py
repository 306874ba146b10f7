"""Map memory of its own, segment by segment, into a wide reservation, as expandable segments do."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from _common import Options, Report, digest, guarded, parse, verify
from _cuda import MIX_SOURCE, Gpu, blocks, check, pattern_of
from cuda.bindings import driver

DEFAULT_STEPS = 30
RESERVED = 1 << 40
GRANULE = 2 << 20
# A step changes one word in so many, which is enough to carry an error on; the host fills the rest.
STRIDE = 64
LANES = 64

SOURCE = (
    MIX_SOURCE
    + r"""
// Over any number of segments that adjoin, in one launch. What is read and what is added to are
// apart, so that the order of threads does not matter.
extern "C" __global__ void stir(unsigned* words, unsigned count, const unsigned* carried,
                                unsigned* carry, unsigned step)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count)
        return;
    unsigned* word = words + (unsigned long long)i * STRIDE;
    *word = mix32(*word + step + carried[i % LANES]);
    atomicAdd(&carry[i % LANES], *word);
}
"""
)


def properties(device: int) -> Any:
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device
    return wanted


@dataclass
class Segment:
    """Memory of one handle; `mappings` are addresses, none while it is parked."""

    handle: int
    size: int
    held: int = 1  # references that the program still has
    mappings: list[int] = field(default_factory=list)


class Segments:
    """The reservation, and what of it has memory."""

    def __init__(self, gpu: Gpu, options: Options) -> None:
        self.gpu, self.device = gpu, options.device
        self.rng = np.random.default_rng([options.seed, 11])
        self.slots = 256 if options.big else 16  # of a granule each, in the middle of the rest
        self.base = int(check(driver.cuMemAddressReserve(RESERVED, 0, 0, 0))) + RESERVED // 2
        self.stir = gpu.module(SOURCE, STRIDE=STRIDE, LANES=LANES).kernel("stir", "PIPPI")
        self.carry = gpu.alloc(2 * 4 * LANES)
        self.launches = 0
        self.live: dict[int, Segment] = {}  # by address
        self.parked: list[Segment] = []
        self.made = 0
        # Ring buffers have the same memory at two addresses, as this does.
        self.mirror = self.create(2 * GRANULE)
        for slot in (self.slots, self.slots + 2):
            self.map(self.mirror, self.base + slot * GRANULE)
        self.fill(self.mirror)
        while self.used() < self.slots * 3 // 4:
            self.grow()

    def used(self) -> int:
        return sum(segment.size for segment in self.live.values()) // GRANULE

    def create(self, size: int) -> Segment:
        handle = check(driver.cuMemCreate(size, properties(self.device), 0))
        return Segment(int(handle), size)

    def map(self, segment: Segment, address: int) -> None:
        check(driver.cuMemMap(address, segment.size, 0, segment.handle, 0))
        segment.mappings.append(address)
        self.allow(address, segment.size)

    def allow(self, address: int, size: int) -> None:
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(driver.cuMemSetAccess(address, size, [access], 1))

    def fill(self, segment: Segment) -> None:
        self.made += 1
        self.gpu.write(segment.mappings[0], pattern_of(self.made, segment.size))

    def hole(self, slots: int) -> int | None:
        """An address with so much unmapped space behind it."""
        taken = np.zeros(self.slots + 1, bool)
        taken[-1] = True
        for address, segment in self.live.items():
            first = (address - self.base) // GRANULE
            taken[first : first + segment.size // GRANULE] = True
        fits = [at for at in range(self.slots) if not taken[at : at + slots].any()]
        fits = [at for at in fits if at + slots <= self.slots]
        return self.base + int(self.rng.choice(fits)) * GRANULE if fits else None

    def grow(self) -> None:
        """Map a new segment, or one that was parked with what it held."""
        parked = self.parked and self.rng.random() < 0.5
        size = self.parked[0].size if parked else int(self.rng.integers(1, 4)) * GRANULE
        address = self.hole(size // GRANULE)
        if address is None:
            return
        segment = self.parked.pop(0) if parked else self.create(size)
        self.map(segment, address)
        self.live[address] = segment
        if not parked:
            self.fill(segment)
        if self.rng.random() < 0.5:  # the mapping alone keeps the memory from now on
            check(driver.cuMemRelease(segment.handle))
            segment.held -= 1

    def shrink(self) -> None:
        address = int(self.rng.choice(sorted(self.live)))
        segment = self.live.pop(address)
        if self.rng.random() < 0.4 and len(self.parked) < 2:
            if not segment.held:
                handle = int(check(driver.cuMemRetainAllocationHandle(address + 12345)))
                verify(handle == segment.handle, "the handle of a mapping is another one")
                segment.held += 1
            self.parked.append(segment)
        elif segment.held:
            check(driver.cuMemRelease(segment.handle))
            segment.held = 0
        check(driver.cuMemUnmap(address, segment.size))
        segment.mappings.remove(address)

    def runs(self) -> list[tuple[int, int]]:
        """(address, bytes) of segments that adjoin, taken together."""
        found: list[tuple[int, int]] = []
        for address in sorted(self.live):
            size = self.live[address].size
            if found and sum(found[-1]) == address:
                found[-1] = (found[-1][0], found[-1][1] + size)
            else:
                found.append((address, size))
        return found

    def check_answers(self) -> None:
        for address, segment in self.live.items():
            if not segment.held:
                continue
            said = check(driver.cuMemGetAllocationPropertiesFromHandle(segment.handle))
            asked = properties(self.device)
            verify(
                int(said.requestedHandleTypes) == int(asked.requestedHandleTypes)
                and int(said.location.id) == self.device,
                f"the properties of the segment at {address:#x} are not those asked for",
            )
        for before, after in pairwise(self.runs()):
            verify(sum(before) < after[0], f"segments overlap at {after[0]:#x}")

    def digest(self) -> str:
        """A digest of all memory, parked memory mapped for it."""
        one, other = (
            self.gpu.read(address, np.uint8, self.mirror.size) for address in self.mirror.mappings
        )
        verify(np.array_equal(one, other), "two mappings of the same memory differ")
        chunks = [self.gpu.read(self.carry, np.uint8, 2 * 4 * LANES), one]
        chunks += [self.gpu.read(address, np.uint8, size) for address, size in self.runs()]
        window = self.base + (self.slots + 4) * GRANULE
        for segment in self.parked:
            self.map(segment, window)
            chunks.append(self.gpu.read(window, np.uint8, segment.size))
            check(driver.cuMemUnmap(window, segment.size))
            segment.mappings.remove(window)
        return digest(*chunks)

    def step(self, number: int) -> None:
        for _ in range(max(1, self.slots // 16)):
            self.shrink()
            self.grow()
        if self.used() < self.slots // 2:
            self.grow()
        for address, size in [*self.runs(), (self.mirror.mappings[number % 2], self.mirror.size)]:
            count = size // 4 // STRIDE
            self.launches += 1
            one, other = self.carry, self.carry + 4 * LANES
            carries = (one, other) if self.launches % 2 else (other, one)
            self.stir(blocks(count), 256, address, count, *carries, number)

    def close(self) -> None:
        for address, size in [*self.runs(), *((at, 2 * GRANULE) for at in self.mirror.mappings)]:
            check(driver.cuMemUnmap(address, size))
        for segment in [*self.live.values(), *self.parked, self.mirror]:
            for _ in range(segment.held):
                check(driver.cuMemRelease(segment.handle))
        check(driver.cuMemAddressFree(self.base - RESERVED // 2, RESERVED))


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    gpu = Gpu(options.device)
    segments = Segments(gpu, options)
    for number in range(options.steps):
        before = segments.digest()
        segments.step(number)
        segments.check_answers()
        report.step(number, digest(np.frombuffer((before + segments.digest()).encode(), np.uint8)))
    segments.close()
    gpu.close()
    report.done()


if __name__ == "__main__":
    guarded(main)

"""The ghost's view of the blocks of one GPU: mapped one behind another in one reserved range.

Blocks are mapped as they come, while the task still runs. Those that the task frees before the
handover are unmapped, and what is left is described as segments; their order is that of the bytes
in the image.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coordinator.device import Driver, Gpu

U64 = npt.NDArray[np.uint64]


@dataclass
class Staged:
    """One mapped block."""

    key: int
    address: int
    size: int
    handle: int


class Shadow:
    """Device memory of the ghost's own, for a copy of what is in use on one GPU.

    Owns it until `release`. Raises DriverError where there is none.
    """

    def __init__(self, driver: Driver, gpu: Gpu, size: int) -> None:
        granularity = driver.granularity(gpu.ordinal)
        self._driver = driver
        self.size = -(-size // granularity) * granularity
        self._handle, fd = driver.create_block(gpu.ordinal, self.size)
        os.close(fd)
        try:
            self.address = driver.reserve(self.size)
            driver.map(self.address, self.size, self._handle)
            driver.allow(gpu.ordinal, self.address, self.size)
        except BaseException:
            driver.release(self._handle)
            raise

    def release(self) -> None:
        """Give the memory back to the device."""
        self._driver.unmap(self.address, self.size)
        self._driver.release(self._handle)


class Staging:
    """Mapped blocks of one GPU. Owns their handles and mappings until `clear`."""

    def __init__(self, driver: Driver, gpu: Gpu) -> None:
        self._driver = driver
        self._gpu = gpu
        self._lock = threading.Lock()
        self._blocks: list[Staged] = []
        self._base = 0
        self._end = 0
        self._limit = 0

    def add(self, blocks: list[tuple[int, int, int]]) -> None:
        """Map blocks of (key, size, handle) behind those that are there."""
        total = sum(size for _, size, _ in blocks)
        with self._lock:
            if self._end + total > self._limit:
                self._reserve(total)
            start = self._end
            for key, size, handle in blocks:
                self._driver.map(self._end, size, handle)
                self._blocks.append(Staged(key, self._end, size, handle))
                self._end += size
            self._driver.allow(self._gpu.ordinal, start, total)

    def first_address(self, size: int) -> int:
        """Where the first block lies, or will, of `size` bytes in all."""
        with self._lock:
            if self._base + size > self._limit:  # none is there
                self._reserve(size)
            return self._base

    def drop(self, keys: set[int]) -> None:
        """Unmap and release blocks that the task has freed."""
        with self._lock:
            for block in self._blocks:
                if block.key in keys:
                    self._release(block)
            self._blocks = [block for block in self._blocks if block.key not in keys]

    def keys(self) -> list[int]:
        """Keys of the blocks in the order of their bytes in the image."""
        return [block.key for block in self._blocks]

    def sizes(self) -> list[int]:
        """Bytes of the blocks, in the same order."""
        return [block.size for block in self._blocks]

    def segments(self, places: U64 | None = None) -> list[tuple[int, int]]:
        """Ranges of (address, bytes) that hold the blocks in order; neighbours are merged.

        `places`: only blocks that one of these addresses is in.
        """
        merged: list[tuple[int, int]] = []
        for block in self._blocks if places is None else self._holding(places):
            if merged and sum(merged[-1]) == block.address:
                merged[-1] = (merged[-1][0], merged[-1][1] + block.size)
            else:
                merged.append((block.address, block.size))
        return merged

    def _holding(self, places: U64) -> list[Staged]:
        places = np.sort(places)
        starts = np.array([block.address for block in self._blocks], np.uint64)
        ends = starts + np.array(self.sizes(), np.uint64)
        some = np.searchsorted(places, starts) < np.searchsorted(places, ends)
        return [block for block, holds in zip(self._blocks, some, strict=True) if holds]

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return sum(block.size for block in self._blocks)

    def clear(self) -> None:
        """Unmap and release everything."""
        with self._lock:
            while self._blocks:
                self._release(self._blocks[-1])
                self._blocks.pop()
            self._end = self._base

    def _release(self, block: Staged) -> None:
        self._driver.unmap(block.address, block.size)
        self._driver.release(block.handle)

    def _reserve(self, total: int) -> None:
        # A reservation costs nothing (E17). Blocks that come and go during the export add up to
        # more than the device has, so a new range may be needed; the segments then simply continue
        # there.
        size = max(2 * self._gpu.memory, total)
        granularity = self._driver.granularity(self._gpu.ordinal)
        size = -(-size // granularity) * granularity
        self._base = self._end = self._driver.reserve(size)
        self._limit = self._base + size

"""Which 32 KiB pieces of GPU memory a step changed, as the program itself sees it.

With `--chunk-digests DIR` a program writes DIR/step-N.npy after each step: one row of two 64-bit
numbers, address and digest, for each 32 KiB of its GPU memory that has a byte in use; the digest
is over the bytes in use and 0 where all are zero. bench compares the files of two steps.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import xxhash
from _common import verify
from numpy.typing import NDArray

CHUNK = 32 << 10
ZEROS = bytes(CHUNK)
# Copied at once; a range in use may be gigabytes long.
PIECE = 64 << 20


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chunk-digests", type=Path, metavar="DIR", help="see _chunks.py")


class Digests:
    """Writes the files; without a folder it does nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(exist_ok=True)
            self._copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoH_v2
            self._copy.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t]
            self._buffer = np.empty(PIECE, np.uint8)

    @property
    def wanted(self) -> bool:
        return self._folder is not None

    def write(self, step: int, ranges: Iterable[tuple[int, int]]) -> None:
        """`ranges`: address and bytes of what is in use, in any order, without overlaps."""
        if self._folder is None:
            return
        states: dict[int, xxhash.xxh3_64 | None] = {}
        for start, size in sorted(ranges):
            at = start
            while at < start + size:
                # Pieces end at chunks, so that only ends of ranges are parts of a chunk.
                end = min((at // CHUNK * CHUNK) + PIECE, start + size)
                self._add(states, at, self._read(at, end - at))
                at = end
        rows = np.array(
            [(at, state.intdigest() if state else 0) for at, state in sorted(states.items())],
            np.uint64,
        )
        part = self._folder / "part.npy"
        np.save(part, rows.reshape(-1, 2))
        part.rename(self._folder / f"step-{step}.npy")

    def _read(self, address: int, size: int) -> NDArray[np.uint8]:
        result = self._copy(self._buffer.ctypes.data, address, size)
        verify(result == 0, f"copying {size} bytes from {address:#x} gives error {result}")
        return self._buffer[:size]

    @staticmethod
    def _add(states: dict[int, xxhash.xxh3_64 | None], start: int, data: NDArray[np.uint8]) -> None:
        at = start
        while at < start + data.size:
            chunk = at // CHUNK * CHUNK
            end = min(chunk + CHUNK, start + data.size)
            part = data[at - start : end - start].tobytes()
            state = states.setdefault(chunk, None)
            if part != ZEROS[: len(part)]:
                if state is None:
                    state = states[chunk] = xxhash.xxh3_64()
                state.update((at - chunk).to_bytes(4, "little"))
                state.update(part)
            at = end

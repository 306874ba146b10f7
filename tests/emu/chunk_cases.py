"""Programs that check the kernels on chunks against xxhash and numpy, on the GPU that cuInit finds.

python -m tests.emu.chunk_cases CASE
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import xxhash
from cuda.bindings import driver as cu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowgpu.launch import library_dir
from tests.emu.chunk_kernels import CHUNK, DIGEST, Array, Kernels, allocate_chunks, upload
from tests.emu.driver_lib import download, ok, start

GUARD = 64  # bytes behind each result, which no kernel may change
UNTOUCHED = 0xA5
BITS = 8 * CHUNK


@dataclass
class Device:
    """Chunks of device memory, and the kernels with host arrays as arguments and results."""

    kernels: Kernels
    count: int
    memory: int
    base: int

    @classmethod
    def with_chunks(cls, count: int) -> Device:
        start()
        kernels = Kernels((library_dir() / "flowgpu_chunks.ptx").read_text())
        return cls(kernels, count, *allocate_chunks(count))

    def addresses(self, numbers: Iterable[int] | None = None) -> Array:
        chosen = range(self.count) if numbers is None else numbers
        return np.array([self.base + number * CHUNK for number in chosen], np.uint64)

    def write(self, data: Array) -> None:
        assert data.shape == (self.count, CHUNK) and data.dtype == np.uint8
        ok(cu.cuMemcpyHtoD(self.base, np.ascontiguousarray(data).ctypes.data, data.nbytes))

    def read(self) -> Array:
        return np.asarray(download(self.base, self.count * CHUNK, np.uint8)).reshape(-1, CHUNK)

    def digest(self, addresses: Array) -> tuple[Array, Array]:
        count = len(addresses)
        digests, zero = self._call("digest", (addresses,), (DIGEST * count, count))
        return digests.reshape(count, DIGEST), zero

    def compare(self, left: Array, right: Array) -> Array:
        return self._call("compare", (left, right), (len(left),))[0]

    def copy(self, sources: Array, destinations: Array) -> None:
        self._call("copy", (sources, destinations), ())

    def fill(self, destinations: Array, pattern: int) -> None:
        self._call("fill", (destinations,), (), pattern)

    def _call(
        self, name: str, arrays: tuple[Array, ...], sizes: tuple[int, ...], *more: int
    ) -> list[Array]:
        inputs = [upload(array) for array in arrays]
        outputs = [upload(np.full(size + GUARD, UNTOUCHED, np.uint8)) for size in sizes]
        getattr(self.kernels, name)(*inputs, len(arrays[0]), *outputs, *more)
        ok(cu.cuCtxSynchronize())
        results = []
        for address, size in zip(outputs, sizes, strict=True):
            result = download(address, size + GUARD, np.uint8)
            assert (result[size:] == UNTOUCHED).all(), "written past the end"
            results.append(result[:size])
        for address in inputs + outputs:
            ok(cu.cuMemFree(address))
        return results


def random_chunks(count: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (count, CHUNK), np.uint8)


def check_digests(device: Device, data: Array, numbers: Iterable[int] | None = None) -> None:
    """`data` holds the bytes of the device; `numbers` says which chunks are digested."""
    chosen = list(range(device.count) if numbers is None else numbers)
    digests, zero = device.digest(device.addresses(chosen))
    want = b"".join(xxhash.xxh3_128_digest(data[number].tobytes()) for number in chosen)
    np.testing.assert_array_equal(digests.ravel(), np.frombuffer(want, np.uint8))
    np.testing.assert_array_equal(zero, ~data[chosen].any(axis=1))


def with_bit(chunk: Array, bit: int) -> Array:
    changed = chunk.copy()
    changed[bit // 8] ^= 1 << (bit % 8)
    return changed


def some_bits() -> list[int]:
    """The first and last bits, one in each stripe place, and more anywhere."""
    places = [512 * stripe + 31 * stripe % 512 for stripe in range(0, CHUNK // 64, 17)]
    anywhere = np.random.default_rng(3).integers(0, BITS, 24).tolist()
    return [0, 7, BITS - 1, BITS - 8, BITS - 64 * 8, *places, *anywhere]


def counts(kernel: str, device: Device) -> list[int]:
    """One chunk, and around the bounds of thread blocks."""
    per_block = device.kernels.constants[f"FGK_{kernel}_CHUNKS"]
    return [1, 2, per_block - 1, per_block, per_block + 1, 2 * per_block, 2 * per_block + 3]


def digests_of_random_chunks_are_those_of_xxhash() -> None:
    device = Device.with_chunks(37)
    data = random_chunks(37)
    device.write(data)
    check_digests(device, data)


def digests_follow_the_addresses_in_any_order_and_more_than_once() -> None:
    device = Device.with_chunks(11)
    data = random_chunks(11)
    data[4] = 0
    device.write(data)
    check_digests(device, data, [10, 4, 4, 0, 3, 10, 9, 1, 4, 8, 7, 10, 10, 5, 0, 6, 2, 4, 4])


def any_count_of_chunks_is_digested_and_nothing_behind_them_written() -> None:
    device = Device.with_chunks(35)
    data = random_chunks(35)
    data[::5] = 0
    device.write(data)
    for count in counts("DIGEST", device):
        check_digests(device, data, range(count))


def one_bit_changes_the_digest_and_the_zero_flag() -> None:
    bits = some_bits()
    for plain in (np.zeros(CHUNK, np.uint8), random_chunks(1, seed=9)[0]):
        data = np.stack([plain, *(with_bit(plain, bit) for bit in bits)])
        device = Device.with_chunks(len(data))
        device.write(data)
        check_digests(device, data)
        digests, zero = device.digest(device.addresses())
        assert len({digest.tobytes() for digest in digests}) == len(set(bits)) + 1
        assert zero.tolist() == [not plain.any()] + [0] * len(bits)


def digests_of_patterns_are_those_of_xxhash() -> None:
    words = np.arange(CHUNK // 8, dtype=np.uint64)
    rows = [
        np.zeros(CHUNK, np.uint8),
        np.full(CHUNK, 0xFF, np.uint8),
        np.full(CHUNK, 0x80, np.uint8),
        np.arange(CHUNK, dtype=np.uint32).astype(np.uint8),
        np.full(CHUNK // 8, 0xFFFFFFFF, np.uint64).view(np.uint8),
        np.full(CHUNK // 8, 0xFFFFFFFF00000000, np.uint64).view(np.uint8),
        words.view(np.uint8),
        (words << np.uint64(32)).view(np.uint8),
        np.full(CHUNK // 4, 1, np.float32).view(np.uint8),
    ]
    device = Device.with_chunks(len(rows))
    device.write(np.stack(rows))
    check_digests(device, np.stack(rows))


def generated_chunks_have_the_digests_of_xxhash() -> None:
    device = Device.with_chunks(6)
    piece = st.tuples(st.integers(0, CHUNK - 1), st.binary(min_size=1, max_size=300))
    chunk = st.tuples(st.integers(0, 255), st.lists(piece, max_size=4))

    @settings(
        max_examples=60,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(chunk, min_size=1, max_size=6))
    def check(chunks: list[tuple[int, list[tuple[int, bytes]]]]) -> None:
        data = np.zeros((6, CHUNK), np.uint8)
        for row, (value, pieces) in zip(data, chunks, strict=False):
            row[:] = value
            for at, text in pieces:
                part = text[: CHUNK - at]
                row[at : at + len(part)] = np.frombuffer(part, np.uint8)
        device.write(data)
        check_digests(device, data, range(len(chunks)))

    check()


def chunks_are_compared_byte_for_byte() -> None:
    bits = some_bits()
    chunk = random_chunks(1)[0]
    device = Device.with_chunks(len(bits) + 2)
    device.write(np.stack([chunk, chunk, *(with_bit(chunk, bit) for bit in bits)]))
    first = device.addresses([0] * device.count)
    assert device.compare(first, device.addresses()).tolist() == [0, 0] + [1] * len(bits)
    assert device.compare(device.addresses(), first).tolist() == [0, 0] + [1] * len(bits)
    assert not device.compare(device.addresses(), device.addresses()).any()


def any_count_of_chunks_is_compared_and_nothing_behind_them_written() -> None:
    device = Device.with_chunks(40)
    data = random_chunks(40)
    data[1::2] = data[::2]
    data[7::6, 20000] ^= 4
    device.write(data)
    for count in counts("COMPARE", device):
        left, right = range(count), [number ^ 1 for number in range(count)]
        want = (data[list(left)] != data[right]).any(axis=1)
        found = device.compare(device.addresses(left), device.addresses(right))
        np.testing.assert_array_equal(found, want)


def copies_gather_scatter_and_expand_and_change_nothing_else() -> None:
    device = Device.with_chunks(60)
    data = random_chunks(60)
    for count in counts("COPY", device):
        device.write(data)
        rng = np.random.default_rng(count)
        destinations = rng.permutation(np.arange(30, 60))[:count]
        sources = rng.integers(0, 5, count)
        device.copy(device.addresses(sources), device.addresses(destinations))
        want = data.copy()
        want[destinations] = data[sources]
        np.testing.assert_array_equal(device.read(), want)


def fills_repeat_the_pattern_and_change_nothing_else() -> None:
    device = Device.with_chunks(41)
    data = random_chunks(41)
    for count, pattern in zip(
        counts("FILL", device),
        (0, 1, 1 << 63, 0xFFFFFFFFFFFFFFFF, 0x0123456789ABCDEF, 0xDEADBEEF, 0),
        strict=True,
    ):
        device.write(data)
        destinations = np.arange(41)[::2][:count]
        device.fill(device.addresses(destinations), pattern)
        want = data.copy()
        want[destinations] = np.full(CHUNK // 8, pattern, np.uint64).view(np.uint8)
        np.testing.assert_array_equal(device.read(), want)


CASES: dict[str, Callable[[], None]] = {
    body.__name__: body
    for body in (
        digests_of_random_chunks_are_those_of_xxhash,
        digests_follow_the_addresses_in_any_order_and_more_than_once,
        any_count_of_chunks_is_digested_and_nothing_behind_them_written,
        one_bit_changes_the_digest_and_the_zero_flag,
        digests_of_patterns_are_those_of_xxhash,
        generated_chunks_have_the_digests_of_xxhash,
        chunks_are_compared_byte_for_byte,
        any_count_of_chunks_is_compared_and_nothing_behind_them_written,
        copies_gather_scatter_and_expand_and_change_nothing_else,
        fills_repeat_the_pattern_and_change_nothing_else,
    )
}

if __name__ == "__main__":
    CASES[sys.argv[1]]()
    print("passed")

"""Measure what this machine can do at most: pinned copies to and from the GPU, tmpfs writes.

    python -m bench.rates --dir DIR

Prints one JSON object. GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from bench.device import check, context

MIB = 1 << 20
WRITE_BYTES = 4 * MIB


def copies(size: int, repeats: int, samples: int) -> dict[str, list[float]]:
    """GB/s of copies between pinned host memory and the GPU, nothing else going on."""
    device = int(check(driver.cuMemAlloc(size)))
    host = check(driver.cuMemHostAlloc(size, 0))
    stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def rate(copy: Callable[[], Any]) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            copy()
        check(driver.cuStreamSynchronize(stream))
        return repeats * size / 1e9 / (time.perf_counter() - began)

    def out() -> Any:
        return check(driver.cuMemcpyDtoHAsync(host, device, size, stream))

    def back() -> Any:
        return check(driver.cuMemcpyHtoDAsync(device, host, size, stream))

    rate(out)
    rate(back)
    found = {
        "d2h_gbs": [rate(out) for _ in range(samples)],
        "h2d_gbs": [rate(back) for _ in range(samples)],
    }
    check(driver.cuMemFreeHost(host))
    check(driver.cuMemFree(device))
    check(driver.cuStreamDestroy(stream))
    return found


def writes(folder: Path, size: int, threads: int) -> float:
    """GB/s of writing a new file of `size` bytes with so many threads, fresh pages included."""
    path = folder / "rates.data"
    data = memoryview(os.urandom(WRITE_BYTES))
    share = size // threads // WRITE_BYTES * WRITE_BYTES
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:

        def write(index: int) -> None:
            for at in range(index * share, (index + 1) * share, WRITE_BYTES):
                os.pwrite(fd, data, at)

        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, range(threads)))
        return threads * share / 1e9 / (time.perf_counter() - began)
    finally:
        os.close(fd)
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.rates")
    parser.add_argument("--dir", type=Path, required=True, help="folder on a tmpfs")
    parser.add_argument("--mib", type=int, default=1024, help="size of a copy")
    parser.add_argument("--write-mib", type=int, default=8192, help="size of the file")
    parser.add_argument("--repeats", type=int, default=8, help="copies in a sample")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--only-name", action="store_true", help="name the GPU, measure nothing")
    options = parser.parse_args()
    device = context()
    name = check(driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode()
    cores = len(os.sched_getaffinity(0))
    found = {
        "gpu": name,
        "gpu_memory_bytes": check(driver.cuDeviceTotalMem(device)),
        "cuda_driver_version": check(driver.cuDriverGetVersion()),
    }
    if options.only_name:
        print(json.dumps(found))
        return
    found |= {
        **copies(options.mib * MIB, options.repeats, options.samples),
        "tmpfs_write_gbs": {
            str(threads): writes(options.dir, options.write_mib * MIB, threads)
            for threads in sorted({1, cores})
        },
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

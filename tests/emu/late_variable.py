"""A job that asks where a library's variable is once its kernel has run: replay must refuse it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workloads"))

from _cuda import Gpu, Kernel, check, compile_ptx
from cuda.bindings import driver

SOURCE = """
__device__ unsigned total = 11;
extern "C" __global__ void add() { total += 5; }
"""


def main() -> None:
    Gpu(0)
    library = check(driver.cuLibraryLoadData(compile_ptx(SOURCE), [], [], 0, [], [], 0))
    kernel = check(driver.cuLibraryGetKernel(library, b"add"))
    add = Kernel(check(driver.cuKernelGetFunction(kernel)), "")
    add(1, 1)
    total, size = check(driver.cuLibraryGetGlobal(library, b"total"))
    value = bytearray(size)
    for step in range(40):
        add(1, 1)
        check(driver.cuMemcpyDtoH(value, total, size))
        print(f"step {step} {int.from_bytes(value, 'little')}", flush=True)
        hurry = os.environ["WORKLOAD_HURRY"]
        if not os.path.exists(hurry):
            time.sleep(0.5)
        while step == 35 and not os.path.exists(hurry):
            time.sleep(0.01)
    print("done", flush=True)


if __name__ == "__main__":
    main()

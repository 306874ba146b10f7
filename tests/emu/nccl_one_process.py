"""One process with all GPUs, as JAX has it: `nccl_one_process STEPS` sums over them each step."""

from __future__ import annotations

import ctypes
import os
import sys
import time

import numpy as np
import xxhash
from cuda.bindings import driver as cu

from tests.emu.nccl_lib import SUM, Device, Nccl, ok

WORDS = 20_000


def main(steps: int) -> None:
    ok(cu.cuInit(0))
    devices = [Device(number) for number in range(ok(cu.cuDeviceGetCount()))]
    nccl, comms = Nccl(), (ctypes.c_void_p * len(devices))()
    nccl.CommInitAll(comms, len(devices), None)
    streams, data = [], []
    for rank, device in enumerate(devices):
        device.use()
        streams.append(device.stream())
        data.append(device.put(np.arange(WORDS, dtype="u4") * (rank + 1)))
    hurry = os.environ.get("WORKLOAD_HURRY", "/")
    for step in range(steps):
        while step == steps - 8 and not os.path.exists(hurry):
            time.sleep(0.01)
        nccl.GroupStart()
        for rank, address in enumerate(data):
            args = address, address, ctypes.c_size_t(WORDS), 3, SUM
            nccl.AllReduce(*args, ctypes.c_void_p(comms[rank]), streams[rank])
        nccl.GroupEnd()
        digest = xxhash.xxh3_64()
        for rank, device in enumerate(devices):
            device.use()
            at = int(data[rank]) + 4 * (step % 1000)
            ok(cu.cuMemsetD32Async(at, step * 77 + rank, 100, streams[rank]))
            ok(cu.cuStreamSynchronize(streams[rank]))
            digest.update(device.get(data[rank], WORDS, "u4"))
        os.write(1, f"step {step} {digest.hexdigest()}\n".encode())
    for comm in comms:
        nccl.CommDestroy(ctypes.c_void_p(comm))
    os.write(1, b"done\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Entry of the ghost's process: the driver initialises itself while Python loads the rest.

    python -m coordinator.ghost_main --fd SOCKET [--contexts UUID,...]

Both take some tenths of a second, and a restore waits for them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import threading
from collections.abc import Sequence

from coordinator.descriptors import make_table


def initialise(contexts: Sequence[str]) -> None:
    """Initialise the driver and make contexts; what is wrong, its first user is told."""
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not contexts:
            return
        from uuid import UUID

        wanted = {UUID(text.partition("-")[2]) for text in contexts}
        for ordinal in range(count.value):
            device, own = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            driver.cuDeviceGet(ctypes.byref(device), ordinal)
            driver.cuDeviceGetUuid_v2(ctypes.byref(own), device)
            if UUID(bytes=bytes(own)) in wanted:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="coordinator.ghost_main")
    parser.add_argument("--fd", type=int, required=True, help="socket of the coordinator")
    parser.add_argument("--contexts", default="", help="UUIDs of GPUs that will be used for sure")
    arguments = parser.parse_args()
    uuids = arguments.contexts.split(",") if arguments.contexts else []
    make_table()
    threading.Thread(target=initialise, args=(uuids,), daemon=True).start()
    from coordinator.ghost_server import main

    main(arguments.fd)

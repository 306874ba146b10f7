"""Entry of the ghost's process: the driver initialises itself while Python loads the rest.

Both take some tenths of a second, and a restore waits for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading


def initialise() -> None:
    """Initialise the driver; what is wrong with it, its first user is told."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)


if __name__ == "__main__":
    threading.Thread(target=initialise, daemon=True).start()
    from coordinator.ghost import main

    main()

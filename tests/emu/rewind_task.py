"""A program whose driver is rewound, and which waits without it, for dumps in between.

    python -m tests.emu.rewind_task FOLDER

It makes one of everything on the device, strips its driver, writes `FOLDER/stripped.1`, waits for
`FOLDER/go.1`, begins anew, and so on; after the third life it ends with 7 as its exit code.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from tests.emu.checkpoint_task import wait_for
from tests.emu.driver_lib import GRANULE
from tests.emu.rewind_lib import WINDOW, Life, Rewinder, nothing_is_left, unmap


def main() -> None:
    folder = Path(sys.argv[1])
    driver = Rewinder()
    for _ in range(30):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    for life in range(1, 4):
        Life()
        driver.strip([(WINDOW, 64 * GRANULE)])
        nothing_is_left()
        (folder / f"stripped.{life}").touch()
        wait_for(folder / f"go.{life}")
        unmap(WINDOW, 64 * GRANULE)
    Life()
    (folder / "done").touch()
    sys.exit(7)


if __name__ == "__main__":
    main()

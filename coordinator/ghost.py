"""The ghost: a process that maps a job's device memory too, moves its bytes and works the engine.

Started by the coordinator as ``python -m coordinator.ghost_main`` with the chosen driver in
LD_LIBRARY_PATH and nothing preloaded. It answers JSON lines on a socket; those that change the
table of blocks run in order, the others each in a thread of its own:

=============  =================================  ================================================
do             fields                             answer
=============  =================================  ================================================
hello          -                                  version, engine, gpus [{ordinal, uuid, ...}],
                                                  warm (ordinals that `warm` was asked for)
open           ordinals                           - (contexts exist)
warm           ordinals                           - (contexts exist, with the chunk kernels)
room           -                                  free (bytes, least of the GPUs with blocks)
import         blocks [[key, size, device]], fds  ordinals, one a block
create         ordinal, blocks [[key, size]]      fds, one a block
drop           keys                               -
expect         as prepare-copy                    bytes (that a copy would store, about)
prepare-copy   plan, files {ordinal: [data,       - (arena pinned, files populated)
               table, index]}, links (folder or
               null), gpus (of the image),
               reductions, seconds, most (bytes
               to prepare for)
copy           plan, files, links, gpus,          gpus {ordinal: {keys, in the order of bytes,
               reductions, active (parts of       reductions, active, nonzero, distinct}}; links
               blocks, pack_parts) or null        that are not worth it are gone
copy-before    plan, active, links, reductions,   bytes (new in links; null: there is no room)
               keep (bytes of a GPU), seconds
shadow         most, keep (bytes of each GPU)     bytes (device memory for a copy of what is in
                                                  use; 0: there is too little)
held           seconds                            held (seconds that it took to copy what is in use
                                                  on the GPU, or null: memory must not change)
prepare-fill   plan, ordinals                     - (arena there, and pinned if there are any)
kernels        ordinals                           - (chunk kernels in their contexts, or no room)
fill           plan, files {ordinal: [table or    -
               null, index, [[data, digests,
               slots, frames or null]]]}, poison
progress       -                                  done, total
wait           stage out or done, seconds         bytes; passed_bytes, which GPUs took from each
                                                  other, and the passed_seconds of the slowest
cancel         -                                  - (no thread uses the GPU or a file any more)
forget         -                                  - (everything unmapped and released)
reset          -                                  - (as after `hello`, and so ready for a next
                                                  checkpoint; contexts, kernels and arena stay)
strip          pids, seconds                      -
threads        pids                               threads (of each, that which must run for
                                                  `rebuild`)
rebuild        pids, gpus {old uuid: new}         -
quit           -                                  -
=============  =================================  ================================================

The end of the socket ends the process: a ghost does not outlive its coordinator.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from coordinator import faults
from coordinator.device import Driver
from coordinator.engine import EngineError, NativeEngine
from coordinator.filling import FillJob
from coordinator.ghost_devices import Devices, Fields
from coordinator.ghost_dump import Dump
from coordinator.ghost_fill import Fill
from coordinator.mover import Mover
from flowgpu.wire import Fault

# A process takes it while the driver checkpoints or restores it: far more than was seen.
ENGINE_BYTES = 256 << 20

Handler = Callable[[Fields], Fields | None]


class GhostProgram:
    """The commands of a ghost on a driver and a mover.

    Those of `ordered` change the table of blocks, and run in the order in which they were asked.
    """

    def __init__(self, make_driver: Callable[[], Driver], make_mover: Callable[[str], Mover]):
        self.devices = devices = Devices(make_driver, make_mover)
        self._dump, fill = Dump(devices), Fill(devices)
        self.ordered: dict[str, Handler] = {
            "hello": devices.hello,
            "open": devices.open,
            "warm": devices.warm,
            "room": devices.room,
            "import": devices.import_,
            "create": devices.create,
            "drop": devices.drop,
            "copy-before": self._dump.copy_before,
            "expect": self._dump.expect,
            "prepare-copy": self._dump.prepare,
            "shadow": self._dump.shadow,
            "copy": self._dump.copy,
            "kernels": fill.load_kernels,
            "fill": fill.start,
            "reset": self.reset,
        }
        self.at_once: dict[str, Handler] = {
            "prepare-fill": fill.prepare,
            "held": self._dump.held,
            "progress": self.progress,
            "wait": self.wait,
            "cancel": self.cancel,
            "forget": devices.forget,
            "strip": self.strip,
            "threads": self.threads,
            "rebuild": self.rebuild,
        }

    def progress(self, fields: Fields) -> Fields:
        """Bytes moved and bytes to move."""
        with self.devices.using_jobs() as jobs:
            found = [job.progress() for job in jobs]
        return {"done": sum(one[0] for one in found), "total": sum(one[1] for one in found)}

    def wait(self, fields: Fields) -> Fields:
        """Wait until all bytes have left the GPU, or are where they belong."""
        deadline = time.monotonic() + fields["seconds"]
        moved = 0
        with self.devices.using_jobs() as jobs:
            for job in jobs:
                moved += job.wait(fields["stage"], max(deadline - time.monotonic(), 0.0))
        if fields["stage"] == "done":
            self._dump.release_shadows()
        fills = [job for job in jobs if isinstance(job, FillJob)]
        return {
            "bytes": moved,
            "passed_bytes": sum(job.passed_bytes for job in fills),
            "passed_seconds": max((job.passed_seconds for job in fills), default=0.0),
        }

    def cancel(self, fields: Fields) -> None:
        """End all copies."""
        self.devices.end_jobs()
        self._dump.release_shadows()

    def reset(self, fields: Fields) -> None:
        """End what is left of a checkpoint, so that another can begin."""
        self.cancel(fields)
        self.devices.forget(fields)
        self._dump.reset()

    def strip(self, fields: Fields) -> None:
        """Take CUDA out of processes."""
        pids, deadline = fields["pids"], time.monotonic() + fields["seconds"]
        self._engine(len(pids)).strip(pids, deadline)

    def threads(self, fields: Fields) -> Fields:
        """Which threads put CUDA back into processes."""
        return {"threads": self._engine(1).threads(fields["pids"])}

    def rebuild(self, fields: Fields) -> None:
        """Put CUDA back into processes."""
        pids = fields["pids"]
        self._engine(len(pids)).rebuild(pids, fields["gpus"], 0.0)

    def _engine(self, processes: int) -> NativeEngine:
        if self.devices.driver.checkpoints is None:
            version = self.devices.driver.version
            raise EngineError(f"driver {version} has no cuCheckpointProcess* (r570 and newer have)")
        return NativeEngine(
            self.devices.driver.checkpoints,
            lambda pid: faults.check(Fault.GHOST_CHECKPOINT),
            # Without a context there is no telling how much memory is left: there may be little.
            at_once=bool(self.devices.used()) and self.devices.free() >= processes * ENGINE_BYTES,
        )

"""The ghost: a process that maps a job's device memory too, moves its bytes and works the engine.

Started by the coordinator as ``python -m coordinator.ghost --fd N`` with the chosen driver in
LD_LIBRARY_PATH and nothing preloaded. It answers JSON lines on the socket N; those that change the
table of blocks run in order, the others each in a thread of its own:

=============  =================================  ================================================
do             fields                             answer
=============  =================================  ================================================
hello          -                                  version, engine, gpus [{ordinal, uuid, ...}]
open           ordinals                           - (contexts exist)
import         blocks [[key, size, device]], fds  ordinals, one a block
create         ordinal, blocks [[key, size]]      fds, one a block
drop           keys                               -
prepare-copy   plan, files {ordinal: [data,       - (arena pinned, files populated)
               table, index]}, reductions,
               seconds, most (bytes to
               prepare for)
copy           plan, files, reductions, active    gpus {ordinal: {keys, in the order of bytes,
               {key: [[offset, bytes]]} or null   reductions, active, nonzero, distinct}}
prepare-fill   plan                               - (arena there)
fill           plan, files {ordinal: [table or    -
               null, index, [[data, digests,
               slots]]]}, poison
progress       -                                  done, total
wait           stage out or done, seconds         bytes
cancel         -                                  - (no thread uses the GPU or a file any more)
forget         -                                  - (everything unmapped and released)
strip          pids, seconds                      -
rebuild        pids, gpus {old uuid: new}         -
quit           -                                  -
=============  =================================  ================================================

The end of the socket ends the process: a ghost does not outlive its coordinator.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from coordinator import chunks, faults
from coordinator.chunks import Kernels
from coordinator.device import Driver, Gpu
from coordinator.engine import EngineError, NativeEngine
from coordinator.filling import FillJob
from coordinator.mover import CopyJob, Mover, Plan
from coordinator.staging import Staging
from flowgpu.image.chunks import decode, encode, whole
from flowgpu.native import MoverError
from flowgpu.wire import Fault

READ_BYTES = 1 << 18
MAX_FDS = 253
# Below it, to make the pages of all of it takes less than to find out which.
ESTIMATE_BYTES = 1 << 30

Fields = dict[str, Any]
Handler = Callable[[Fields, list[int]], tuple[Fields, list[int]]]
EMPTY: tuple[Fields, list[int]] = ({}, [])


class GhostProgram:
    """The commands of a ghost on a driver and a mover."""

    def __init__(self, make_driver: Callable[[], Driver], make_mover: Callable[[str], Mover]):
        self._make_driver = make_driver
        self._make_mover = make_mover
        self._driver: Driver | None = None
        self._mover: Mover | None = None
        self._gpus: list[Gpu] = []
        self._staging: dict[int, Staging] = {}
        self._jobs: dict[int, CopyJob] = {}
        self._kernels: dict[int, Kernels] = {}
        self._job_users = 0
        self._jobs_free = threading.Condition()
        self._pinned: set[int] = set()
        self._plan: Plan | None = None
        self._arena_lock = threading.Lock()

    @property
    def driver(self) -> Driver:
        """The driver; `hello` must have come before."""
        if self._driver is None:
            raise RuntimeError("hello was not asked first")
        return self._driver

    @property
    def mover(self) -> Mover:
        """The mover; made at its first use."""
        if self._mover is None:
            self._mover = self._make_mover(self.driver.library)
        return self._mover

    def hello(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Initialise the driver."""
        self._driver = self._make_driver()
        self._gpus = self._driver.gpus()
        self._staging = {gpu.ordinal: Staging(self._driver, gpu) for gpu in self._gpus}
        answer = {
            "version": self._driver.version,
            "engine": self._driver.checkpoints is not None,
            "gpus": [vars(gpu) for gpu in self._gpus],
        }
        return answer, []

    def open(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Make contexts, several at a time."""
        ordinals = fields["ordinals"]
        with ThreadPoolExecutor(max_workers=max(len(ordinals), 1)) as pool:
            list(pool.map(self.driver.context, ordinals))
        return EMPTY

    def import_(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Import and map blocks; the coordinator keeps the descriptors that last."""
        ordinals: list[int] = []
        batches: dict[int, list[tuple[int, int, int]]] = {}
        for (key, size, device), fd in zip(fields["blocks"], fds, strict=True):
            faults.check(Fault.GHOST_IMPORT)
            # The task's number of the device is only a hint, but some context must be current.
            self.driver.use(device if device < len(self._gpus) else 0)
            handle, ordinal = self.driver.import_block(fd)
            ordinals.append(ordinal)
            batches.setdefault(ordinal, []).append((key, size, handle))
        for ordinal, batch in batches.items():
            self.driver.use(ordinal)
            self._staging[ordinal].add(batch)
        return {"ordinals": ordinals}, []

    def create(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Allocate and map exportable blocks and give their descriptors."""
        ordinal = fields["ordinal"]
        self.driver.use(ordinal)
        batch: list[tuple[int, int, int]] = []
        exported: list[int] = []
        for key, size in fields["blocks"]:
            handle, fd = self.driver.create_block(ordinal, size)
            batch.append((key, size, handle))
            exported.append(fd)
        self._staging[ordinal].add(batch)
        return {}, exported

    def drop(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Release blocks that the task has freed."""
        keys = set(fields["keys"])
        for ordinal in self._used():
            self.driver.use(ordinal)
            self._staging[ordinal].drop(keys)
        return EMPTY

    def prepare_copy(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Make the arena and the files of the copy out, while the task still runs."""
        self._arena(Plan(**fields["plan"]))
        jobs = [
            self._dump_job(ordinal, data, fields["reductions"], fields["most"])
            for ordinal, (data, _, _) in self._files(fields)
        ]
        for job in jobs:
            # Pages that are not there in time are made during the copy, at the price of the pause.
            with contextlib.suppress(TimeoutError):
                job.wait("prepared", fields["seconds"])
        return EMPTY

    def prepare_fill(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Make the arena for a fill."""
        self._arena(Plan(**fields["plan"]))
        return EMPTY

    def copy(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Start to copy every block to its GPU's file."""
        if faults.fires(Fault.GHOST_DEATH):
            os._exit(1)
        faults.check(Fault.GHOST_DUMP)
        files = dict(self._files(fields))
        self._arena(Plan(**fields["plan"]))
        for ordinal in set(self._jobs) - set(self._used()):
            # All of this GPU's blocks were freed since the file was prepared.
            self._jobs.pop(ordinal).close()
        return {"gpus": {str(o): self._copy_gpu(o, files[o], fields) for o in self._used()}}, []

    def _copy_gpu(self, ordinal: int, files: list[Any], fields: Fields) -> Fields:
        """Plan and start the copy of one GPU and write its chunk table."""
        data, table, index = files
        staging = self._staging[ordinal]
        job = self._jobs.get(ordinal) or self._dump_job(ordinal, data, fields["reductions"], 0)
        kernels = self._kernels.get(ordinal)
        reductions = [name for name in fields["reductions"] if kernels or name == "active"]
        keys = staging.keys()
        active = None
        if "active" in reductions and fields["active"] is not None:
            ranges = {at: fields["active"].get(str(key), []) for at, key in enumerate(keys)}
            active = chunks.active_chunks(staging.sizes(), ranges)
        plan = self._plan_dump(ordinal, reductions, active)
        job.start(plan.segments, plan.digests)
        extent = np.full(len(plan.kind), index, np.uint16)
        Path(table).write_bytes(encode(plan.kind, extent, plan.slot))
        return {"keys": keys, "reductions": reductions, **vars(plan.sizes)}

    def _plan_dump(
        self, ordinal: int, reductions: list[str], active: chunks.Bools | None
    ) -> chunks.DumpPlan:
        kernels = self._kernels.get(ordinal)
        where = chunks.addresses(self._staging[ordinal].segments())
        dedup = kernels is not None and "dedup" in reductions
        return chunks.plan_dump(
            where,
            np.ones(len(where), np.bool_) if active is None else active,
            kernels,
            self.mover.catalogue(len(where)) if dedup else None,
            zero="zero" in reductions,
        )

    def fill(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Start to fill created blocks from an image, checking every chunk's digest."""
        self._arena(Plan(**fields["plan"]))
        for ordinal, (table, index, extents) in self._files(fields):
            self._pin(ordinal)
            self._jobs[ordinal] = self._fill_job(ordinal, table, index, extents, fields["poison"])
        return EMPTY

    def _fill_job(
        self, ordinal: int, table: str | None, index: int, extents: list[Any], poison: bool
    ) -> CopyJob:
        where = chunks.addresses(self._staging[ordinal].segments())
        rows = whole(len(where), index)
        if table is not None:
            slots = [count for _, _, count in extents]
            rows = decode(Path(table).read_bytes(), len(where), slots, index)
        plan = chunks.plan_fill(where, rows)
        context = self.driver.context(ordinal)
        reads = []
        kernels = self._make_kernels(ordinal) if plan.needs_kernels(poison) else None
        for extent, segments in plan.reads.items():
            data, digests, _ = extents[extent]
            job = self.mover.restore_job(
                Path(data), Path(digests), context, self._need_plan(), kernels
            )
            reads.append((job, segments))
        return FillJob(plan, reads, kernels, poison)

    def progress(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Bytes moved and bytes to move."""
        with self._using_jobs() as jobs:
            found = [job.progress() for job in jobs]
        return {"done": sum(one[0] for one in found), "total": sum(one[1] for one in found)}, []

    def wait(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Wait until all bytes have left the GPU, or are where they belong."""
        deadline = time.monotonic() + fields["seconds"]
        moved = 0
        with self._using_jobs() as jobs:
            for job in jobs:
                moved += job.wait(fields["stage"], max(deadline - time.monotonic(), 0.0))
        return {"bytes": moved}, []

    @contextlib.contextmanager
    def _using_jobs(self) -> Iterator[list[CopyJob]]:
        """The jobs, none of which is closed meanwhile."""
        with self._jobs_free:
            self._job_users += 1
            jobs = list(self._jobs.values())
        try:
            yield jobs
        finally:
            with self._jobs_free:
                self._job_users -= 1
                self._jobs_free.notify_all()

    def cancel(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """End all copies."""
        with self._jobs_free:
            for job in self._jobs.values():
                job.cancel()
            # A job that is cancelled ends every wait for it.
            self._jobs_free.wait_for(lambda: self._job_users == 0)
            for job in self._jobs.values():
                job.close()
            self._jobs.clear()
        return EMPTY

    def forget(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Give the device memory up."""
        for ordinal in self._used():
            self.driver.use(ordinal)
            self._staging[ordinal].clear()
        return EMPTY

    def strip(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Take CUDA out of processes."""
        deadline = time.monotonic() + fields["seconds"]
        self._engine().strip(fields["pids"], deadline)
        return EMPTY

    def rebuild(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Put CUDA back into processes."""
        self._engine().rebuild(fields["pids"], fields["gpus"], 0.0)
        return EMPTY

    def _engine(self) -> NativeEngine:
        if self.driver.checkpoints is None:
            version = self.driver.version
            raise EngineError(f"driver {version} has no cuCheckpointProcess* (r570 and newer have)")
        return NativeEngine(
            self.driver.checkpoints, lambda pid: faults.check(Fault.GHOST_CHECKPOINT)
        )

    def _used(self) -> list[int]:
        return [ordinal for ordinal, staging in self._staging.items() if staging.size]

    def _files(self, fields: Fields) -> list[tuple[int, Any]]:
        return [(int(ordinal), value) for ordinal, value in fields["files"].items()]

    def _need_plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("no plan was given before the copy")
        return self._plan

    def _arena(self, plan: Plan) -> None:
        with self._arena_lock:
            if self._plan is None:
                self.mover.make_arena(plan)
                self._plan = plan

    def _pin(self, ordinal: int) -> int:
        context = self.driver.context(ordinal)
        # Pinned memory is pinned for every context of the process, so once is enough.
        if not self._pinned:
            self.mover.pin_arena(context)
            self._pinned.add(ordinal)
        return context

    def _dump_job(self, ordinal: int, path: str, reductions: list[str], most: int) -> CopyJob:
        context = self._pin(ordinal)
        kernels = None
        if {"zero", "dedup"} & set(reductions):
            try:
                kernels = self._make_kernels(ordinal)
            except MoverError as error:
                # No room on the GPU must not mean no checkpoint: everything active is stored.
                print(f"storing every chunk of GPU {ordinal}: {error}", file=sys.stderr)
        expected = min(self._staging[ordinal].size, most)
        if expected >= ESTIMATE_BYTES and kernels:
            # The memory is in use, so this is only a guess of what the pause will find.
            distinct = self._plan_dump(ordinal, reductions, None).sizes.distinct
            expected = min(expected, distinct)
        self._jobs[ordinal] = self.mover.dump_job(
            Path(path), context, expected, self._need_plan(), kernels
        )
        return self._jobs[ordinal]

    def _make_kernels(self, ordinal: int) -> Kernels:
        if ordinal not in self._kernels:
            self._kernels[ordinal] = self.mover.kernels(self.driver.context(ordinal))
        return self._kernels[ordinal]


class Server:
    """Reads commands from the socket, runs them, and answers."""

    # These change the table of blocks and must run in the order in which they were asked.
    AT_ONCE = ("prepare-fill", "progress", "wait", "cancel", "forget", "strip", "rebuild")
    ORDERED = ("hello", "open", "import", "create", "drop", "prepare-copy", "copy", "fill")

    def __init__(self, connection: socket.socket, program: GhostProgram) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self._ordered: queue.SimpleQueue[tuple[Fields, list[int]]] = queue.SimpleQueue()
        self._handlers: dict[str, Handler] = {
            name: getattr(program, name.replace("-", "_"))
            for name in (*self.ORDERED, *self.AT_ONCE)
            if name != "import"
        }
        self._handlers["import"] = program.import_

    def run(self) -> None:
        """Serve until `quit` or the end of the socket."""
        threading.Thread(target=self._run_ordered, daemon=True).start()
        buffer = b""
        fds: list[int] = []
        while True:
            data, received, _, _ = socket.recv_fds(self._connection, READ_BYTES, MAX_FDS)
            if not data:
                return
            fds += received
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                fields = json.loads(line)
                own = fds[: fields["fds"]]
                del fds[: fields["fds"]]
                if fields["do"] == "quit":
                    self._answer({"id": fields["id"]}, [])
                    return
                if fields["do"] in self.ORDERED:
                    self._ordered.put((fields, own))
                else:
                    threading.Thread(target=self._handle, args=(fields, own), daemon=True).start()

    def _run_ordered(self) -> None:
        while True:
            self._handle(*self._ordered.get())

    def _handle(self, fields: Fields, fds: list[int]) -> None:
        exported: list[int] = []
        try:
            answer, exported = self._handlers[fields["do"]](fields, fds)
            answer = {"id": fields["id"], **answer}
        except Exception as error:  # whatever it was, the coordinator is told and decides
            text = f"{fields['do']}: {str(error) or type(error).__name__}"
            kind = getattr(error, "status", type(error))
            answer = {
                "id": fields["id"],
                "error": text,
                "kind": kind.name if isinstance(kind, Enum) else kind.__name__,
            }
        finally:
            for fd in fds:
                os.close(fd)
        self._answer(answer, exported)
        for fd in exported:
            os.close(fd)

    def _answer(self, answer: Fields, fds: list[int]) -> None:
        line = json.dumps({**answer, "fds": len(fds)}).encode() + b"\n"
        with self._send_lock:
            sent = socket.send_fds(self._connection, [line], fds)
            self._connection.sendall(line[sent:])


def serve(fd: int, program: GhostProgram) -> None:
    """Run `program` on the inherited socket `fd`, then end the process."""
    # A block costs a descriptor while it travels, and thousands may travel at once.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        Server(socket.socket(fileno=fd), program).run()
    except BrokenPipeError:
        pass
    sys.stderr.flush()
    # The driver's own teardown at exit takes long and can wait for work that is not ours; the
    # kernel frees all.
    os._exit(0)


def main() -> None:
    """Entry of the process."""
    parser = argparse.ArgumentParser(prog="coordinator.ghost")
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()

    def make_driver() -> Driver:
        from coordinator.device import CudaDriver

        return CudaDriver()

    def make_mover(library: str) -> Mover:
        from coordinator.mover import NativeMover

        return NativeMover(library)

    serve(arguments.fd, GhostProgram(make_driver, make_mover))


if __name__ == "__main__":
    main()

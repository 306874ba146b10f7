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

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coordinator import before, chunks, dumping, faults
from coordinator.chunks import U8, U64, Bools, FillPlan, Kernels
from coordinator.descriptors import lift_limits
from coordinator.device import CudaDriver, Driver, DriverError, Gpu
from coordinator.dumping import DumpPlan, Known, Scan
from coordinator.engine import EngineError, NativeEngine
from coordinator.filling import FillJob, Meeting
from coordinator.mover import CopyJob, Mover, NativeMover, Plan
from coordinator.staging import Shadow, Staging
from flowgpu.errors import is_internal, words_of
from flowgpu.image import layout
from flowgpu.image.chunks import ChunkTable, decode, encode, whole
from flowgpu.image.linked import Linked
from flowgpu.image.space import is_full
from flowgpu.native import MoverError, Status
from flowgpu.wire import Fault

READ_BYTES = 1 << 18
MAX_FDS = 253
LOGGED_SECONDS = 0.01
# Below it, to make the pages of all of it takes less than to find out which.
ESTIMATE_BYTES = 1 << 30
# Of a process, while the driver checkpoints or restores it: far more than it was seen to need.
ENGINE_BYTES = 256 << 20

Memory = dict[int, tuple[U64, Bools]]
"""By ordinal: where each chunk is, and which are in use."""

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
        self._dumping: dict[int, Kernels | None] = {}  # with which kernels each job was made
        self._known: Known | None = None
        self._warm: set[int] = set()
        self._job_users = 0
        self._jobs_free = threading.Condition()
        self._pinned: set[int] = set()
        self._plan: Plan | None = None
        self._arena_lock = threading.Lock()
        self._shadows: dict[int, Shadow] = {}
        self._shadow_lock = threading.Lock()
        self._held: Future[float | None] = Future()

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
        """Initialise the driver, the first time."""
        if self._driver is None:
            self._driver = self._make_driver()
            self._gpus = self._driver.gpus()
            self._staging = {gpu.ordinal: Staging(self._driver, gpu) for gpu in self._gpus}
        answer = {
            "version": self._driver.version,
            "engine": self._driver.checkpoints is not None,
            "gpus": [vars(gpu) for gpu in self._gpus],
            "warm": sorted(self._warm),
        }
        return answer, []

    def open(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Make contexts, several at a time."""
        chunks.at_once(self.driver.context, fields["ordinals"])
        return EMPTY

    def warm(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Take all the device memory that a checkpoint will want, in advance."""
        self.open(fields, fds)
        for ordinal in fields["ordinals"]:
            self._kernels_for(ordinal, ["zero", "dedup"])
        self._warm |= set(fields["ordinals"])
        return EMPTY

    def room(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """How much device memory is left."""
        return {"free": self._free()}, []

    def _free(self) -> int:
        return min((self.driver.free(ordinal) for ordinal in self._used()), default=1 << 63)

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
        files = dict(self._files(fields))
        for ordinal in files:
            self._dumping[ordinal] = self._kernels_for(ordinal, fields["reductions"])
        began = time.monotonic()
        expected = self._expected(list(files), fields)
        guessed = time.monotonic()
        jobs = [self._dump_job(ordinal, files[ordinal], expected[ordinal]) for ordinal in files]
        self._known = self._make_known(fields, sum(expected.values()))
        for job in jobs:
            # Pages that are not there in time are made during the copy, at the price of the pause.
            with contextlib.suppress(TimeoutError):
                job.wait("prepared", fields["seconds"])
        # What the log of a slow preparation is asked first.
        print(
            f"prepared {sum(expected.values()) >> 20} of at most {fields['most'] >> 20} MiB: "
            f"{guessed - began:.3f} s to look, {time.monotonic() - guessed:.3f} s to make pages",
            file=sys.stderr,
        )
        return EMPTY

    def copy_before(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Copy what is in use and no link has yet, while the task still runs."""
        faults.check(Fault.GHOST_DUMP)
        self._arena(Plan(**fields["plan"]))
        used, folder = self._used(), Path(fields["links"])
        deadline = time.monotonic() + fields["seconds"]
        for ordinal in used:
            self._dumping[ordinal] = self._kernels_for(ordinal, fields["reductions"])
        scans = self._scan(self._memory(used, fields["active"]), fields["reductions"])
        seen, stored = self._make_known(fields), self._make_known(fields)
        total = 0
        for ordinal, memory in zip(used, scans, strict=True):
            if seen is None or stored is None or memory.digests is None or memory.kernels is None:
                return {"bytes": None}, []
            where = memory.where[memory.found][seen.fresh(memory.digests)]
            if not len(where):
                continue
            room = self.driver.free(ordinal) - fields["keep"]
            size = before.part_bytes(len(where) * chunks.CHUNK, room)
            if not size:
                return {"bytes": None}, []
            self.driver.use(ordinal)
            part = Shadow(self.driver, self._gpu(ordinal), size)
            try:
                total += before.store(
                    where,
                    part,
                    memory.kernels,
                    stored,
                    folder,
                    partial(self._make_dump_job, ordinal),
                    lambda: max(deadline - time.monotonic(), 0.0),
                )
            finally:
                self.driver.use(ordinal)
                part.release()
        if self._jobs:
            self._known = self._make_known(fields)
        return {"bytes": total}, []

    def _gpu(self, ordinal: int) -> Gpu:
        return next(gpu for gpu in self._gpus if gpu.ordinal == ordinal)

    def shadow(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Take memory for a copy of what is in use, on all GPUs or none."""
        used = self._used()
        sizes = {o: min(self._staging[o].size, fields["most"]) for o in used}
        room = all(
            self._dumping.get(o) and self.driver.free(o) >= size + fields["keep"]
            for o, size in sizes.items()
        )
        try:
            for ordinal, size in sizes.items() if room else ():
                self.driver.use(ordinal)
                self._shadows[ordinal] = Shadow(self.driver, self._gpu(ordinal), size)
        except DriverError as error:
            print(f"no memory for a copy on the GPU: {error}", file=sys.stderr)
            self._release_shadows()
        return {"bytes": sum(shadow.size for shadow in self._shadows.values())}, []

    def _release_shadows(self) -> None:
        with self._shadow_lock:
            while self._shadows:
                ordinal, shadow = self._shadows.popitem()
                self.driver.use(ordinal)
                shadow.release()

    def held(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Wait until all that is in use has been copied on the GPU, if it is to be."""
        return {"held": self._held.result(fields["seconds"])}, []

    def prepare_fill(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Make the arena for a fill, and what else takes time."""
        self._arena(Plan(**fields["plan"]))
        for ordinal in fields["ordinals"]:
            self._pin(ordinal)
        return EMPTY

    def kernels(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Load the chunk kernels where there is room; a fill may do without them."""
        for ordinal in fields["ordinals"]:
            with contextlib.suppress(MoverError):
                self._make_kernels(ordinal)
        return EMPTY

    def copy(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Start to copy every block to its GPU's file."""
        try:
            return self._copy(fields)
        finally:
            if not self._held.done():
                self._held.set_result(None)

    def _copy(self, fields: Fields) -> tuple[Fields, list[int]]:
        if faults.fires(Fault.GHOST_DEATH):
            os._exit(1)
        faults.check(Fault.GHOST_DUMP)
        files = dict(self._files(fields))
        self._arena(Plan(**fields["plan"]))
        used = self._used()
        for ordinal in set(self._jobs) - set(used):
            # All of this GPU's blocks were freed since the file was prepared.
            self._jobs.pop(ordinal).close()
        for ordinal in set(used) - set(self._jobs):
            self._dumping[ordinal] = self._kernels_for(ordinal, fields["reductions"])
            self._dump_job(ordinal, files[ordinal], 0)
        began = time.monotonic()
        memory = self._memory(used, fields["active"])
        self._held.set_result(self._hold(memory))
        scans = self._scan(memory, fields["reductions"])
        known, self._known = self._known or self._make_known(fields), None
        if fields["links"] and known is None:
            Linked(Path(fields["links"])).settle([], 1, 0)
        own = [files[ordinal][2] for ordinal in used]
        plans = dumping.plan_dump(scans, known, fields["gpus"], own)
        for ordinal, plan in zip(used, plans, strict=True):
            self._jobs[ordinal].start(plan.segments, plan.digests)
        segments = sum(len(plan.segments) for plan in plans)
        print(f"planned {segments} segments in {time.monotonic() - began:.3f} s", file=sys.stderr)
        answers = chunks.at_once(
            lambda ordinal, plan: self._answer_copy(ordinal, files[ordinal][1], plan, fields),
            used,
            plans,
        )
        return {"gpus": {str(o): answer for o, answer in zip(used, answers, strict=True)}}, []

    def _answer_copy(self, ordinal: int, table: str, plan: DumpPlan, fields: Fields) -> Fields:
        """Write the chunk table of a GPU and say what it stands for."""
        faults.check_write(Path(table), faults.TABLE_WRITE)
        Path(table).write_bytes(encode(plan.kind, plan.extent, plan.slot))
        reductions = fields["reductions"]
        if not self._dumping[ordinal]:
            reductions = [name for name in reductions if name == "active"]
        keys = self._staging[ordinal].keys()
        return {"keys": keys, "reductions": reductions, **vars(plan.sizes)}

    def _memory(self, ordinals: list[int], active: str | None) -> Memory:
        """Where the chunks of GPUs are, and which are in use; `active`: parts of blocks that are,
        None: all."""
        parts = None if active is None else chunks.unpack_parts(active)
        found: Memory = {}
        for ordinal in ordinals:
            staging = self._staging[ordinal]
            where = chunks.addresses(staging.segments())
            mask = np.ones(len(where), np.bool_)
            if parts is not None:
                mask = chunks.active_chunks(staging.keys(), staging.sizes(), parts)
            found[ordinal] = where, mask
        return found

    def _hold(self, memory: Memory) -> float | None:
        """Copy what is in use to the shadows, and say in `memory` that it is there. Gives seconds;
        None where one of them is too small, and then nothing is done."""
        counts = {ordinal: int(np.count_nonzero(mask)) for ordinal, (_, mask) in memory.items()}
        sizes = {ordinal: shadow.size for ordinal, shadow in self._shadows.items()}
        if any(count * chunks.CHUNK > sizes.get(o, -1) for o, count in counts.items()):
            return None
        began = time.monotonic()

        def one(ordinal: int) -> None:
            where, mask = memory[ordinal]
            start, kernels = self._shadows[ordinal].address, self._dumping[ordinal]
            if kernels is None:
                raise RuntimeError("a shadow without kernels")
            there = chunks.addresses([(start, counts[ordinal] * chunks.CHUNK)])
            kernels.copy(where[mask], there)
            where = where.copy()
            where[mask] = there
            memory[ordinal] = where, mask

        chunks.at_once(one, list(memory))
        return time.monotonic() - began

    def _scan(self, memory: Memory, reductions: list[str]) -> list[Scan]:
        """Look at the memory of several GPUs at once."""

        def one(ordinal: int) -> Scan:
            kernels = self._dumping[ordinal]
            return dumping.scan(*memory[ordinal], kernels, zero="zero" in reductions)

        return chunks.at_once(one, list(memory))

    def _make_known(self, fields: Fields, new: int | None = None) -> Known | None:
        """The catalogue of a dump, with what its image has linked.

        `new`: bytes that the dump will store, about. It may store more of one GPU, which memory is
        taken for; replicas on many GPUs need none.
        """
        if "dedup" not in fields["reductions"] or not any(self._dumping.values()):
            return None
        linked = Linked(Path(fields["links"])) if fields["links"] else None
        sizes = [staging.size for staging in self._staging.values()]
        here = sum(sizes) if new is None else min(max(new + new // 4, *sizes, 0), sum(sizes))
        expected = here // chunks.CHUNK + (len(linked.digests) if linked else 0)
        return Known(self.mover.catalogue(expected), linked)

    def expect(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Look how much a copy would store, about."""
        files = dict(self._files(fields))
        for ordinal in files:
            self._dumping[ordinal] = self._kernels_for(ordinal, fields["reductions"])
        return {"bytes": sum(self._expected(list(files), fields, least=0).values())}, []

    def _expected(
        self, ordinals: list[int], fields: Fields, least: int = ESTIMATE_BYTES
    ) -> dict[int, int]:
        """Bytes to prepare each GPU's file for; of GPUs with less than `least`, all they have."""
        sizes = {o: min(self._staging[o].size, fields["most"]) for o in ordinals}
        large = [o for o in ordinals if sizes[o] >= least and self._dumping[o]]
        known = self._make_known(fields) if large else None
        if known is not None:
            # The memory is in use, so this is only a guess of what the pause will find.
            scans = self._scan(self._memory(large, None), fields["reductions"])
            found = dumping.new_bytes(scans, known)
            sizes |= {o: min(sizes[o], new) for o, new in zip(large, found, strict=True)}
        return sizes

    def fill(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Start to fill created blocks from an image, checking every chunk's digest."""
        self._arena(Plan(**fields["plan"]))
        files = self._files(fields)
        ordinals = [ordinal for ordinal, _ in files]
        chunked = chunks.at_once(self._chunks_to_fill, files)
        plans = self._plan_fills(ordinals, chunked)
        meeting = Meeting(len(files))
        for (ordinal, (_, _, extents)), plan in zip(files, plans, strict=True):
            self._pin(ordinal)
            self._jobs[ordinal] = self._fill_job(ordinal, plan, extents, fields["poison"], meeting)
        return EMPTY

    def _chunks_to_fill(self, file: tuple[int, Any]) -> tuple[U64, ChunkTable]:
        ordinal, (table, index, extents) = file
        where = chunks.addresses(self._staging[ordinal].segments())
        if table is None:
            return where, whole(len(where), index)
        slots = [count for _, _, count, _ in extents]
        return where, decode(Path(table).read_bytes(), len(where), slots, index)

    def _plan_fills(
        self, ordinals: list[int], chunked: list[tuple[U64, ChunkTable]]
    ) -> list[FillPlan]:
        """Plans by which GPUs take from each other what several want, where they can."""
        # Without kernels, and so without room for them, a GPU reads for itself.
        with_kernels = [ordinal in self._kernels for ordinal in ordinals]
        reaches = [
            [both and with_kernels[row] and self._reaches(one, other)
             for other, both in zip(ordinals, with_kernels, strict=True)]
            for row, one in enumerate(ordinals)
        ]  # fmt: skip
        plans = chunks.plan_fills(chunked, chunks.islands(reaches))
        try:
            for ordinal, plan in zip(ordinals, plans, strict=True):
                self._let_reach(ordinal, plan.passed.sources)
        except DriverError as error:
            print(f"each GPU reads for itself: {error}", file=sys.stderr)
            return chunks.plan_fills(chunked, [[row] for row in range(len(ordinals))])
        return plans

    def _reaches(self, ordinal: int, other: int) -> bool:
        return bool(ordinal != other and self._gpus[ordinal].peers[other]["access"])

    def _let_reach(self, ordinal: int, sources: U64) -> None:
        """Let a GPU read memory of others, of which it wants chunks."""
        if not len(sources):
            return
        for staging in self._staging.values():
            for start, size in staging.segments():
                if np.any((sources >= start) & (sources < start + size)):
                    self.driver.allow(ordinal, start, size)

    def _fill_job(
        self, ordinal: int, plan: FillPlan, extents: list[Any], poison: bool, meeting: Meeting
    ) -> CopyJob:
        context = self.driver.context(ordinal)
        kernels = self._make_kernels(ordinal) if plan.needs_kernels(poison) else None

        def read(extent: int) -> CopyJob:
            data, digests, _, frames = extents[extent]
            return self.mover.restore_job(
                Path(data), Path(digests), context, self._need_plan(), kernels, frames
            )

        def digests_of(extent: int) -> U8:
            return np.memmap(extents[extent][1], np.uint8, "r").reshape(-1, layout.DIGEST_BYTES)

        return FillJob(plan, read, kernels, poison, meeting, digests_of)

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
        if fields["stage"] == "done":
            self._release_shadows()
        fills = [job for job in jobs if isinstance(job, FillJob)]
        return {
            "bytes": moved,
            "passed_bytes": sum(job.passed_bytes for job in fills),
            "passed_seconds": max((job.passed_seconds for job in fills), default=0.0),
        }, []

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
        self._release_shadows()
        return EMPTY

    def forget(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Give the device memory up."""
        for ordinal in self._used():
            self.driver.use(ordinal)
            self._staging[ordinal].clear()
        return EMPTY

    def reset(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """End what is left of a checkpoint, so that another can begin."""
        self.cancel(fields, fds)
        self.forget(fields, fds)
        self._dumping.clear()
        self._known = None
        self._held = Future()
        return EMPTY

    def strip(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Take CUDA out of processes."""
        pids, deadline = fields["pids"], time.monotonic() + fields["seconds"]
        self._engine(len(pids)).strip(pids, deadline)
        return EMPTY

    def threads(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Which threads put CUDA back into processes."""
        return {"threads": self._engine(1).threads(fields["pids"])}, []

    def rebuild(self, fields: Fields, fds: list[int]) -> tuple[Fields, list[int]]:
        """Put CUDA back into processes."""
        pids = fields["pids"]
        self._engine(len(pids)).rebuild(pids, fields["gpus"], 0.0)
        return EMPTY

    def _engine(self, processes: int) -> NativeEngine:
        if self.driver.checkpoints is None:
            version = self.driver.version
            raise EngineError(f"driver {version} has no cuCheckpointProcess* (r570 and newer have)")
        return NativeEngine(
            self.driver.checkpoints,
            lambda pid: faults.check(Fault.GHOST_CHECKPOINT),
            # Without a context there is no telling how much memory is left: there may be little.
            at_once=bool(self._used()) and self._free() >= processes * ENGINE_BYTES,
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
            before = self._plan
            if before is not None and self._jobs:
                return
            if before and before.arena >= plan.arena and before.piece == plan.piece:
                self._plan = replace(plan, arena=before.arena)
                return
            if faults.fires(Fault.GHOST_ARENA):
                raise MoverError(Status.SYSTEM, "no memory for the arena")
            self.mover.make_arena(plan)
            self._pinned.clear()
            self._plan = plan

    def _pin(self, ordinal: int) -> int:
        context = self.driver.context(ordinal)
        # Pinned memory is pinned for every context of the process, so once is enough.
        if not self._pinned:
            if faults.fires(Fault.GHOST_PIN):
                raise MoverError(Status.DRIVER, "cuMemHostRegister: CUDA_ERROR_UNKNOWN")
            self.mover.pin_arena(context)
            self._pinned.add(ordinal)
        return context

    def _kernels_for(self, ordinal: int, reductions: list[str]) -> Kernels | None:
        if not {"zero", "dedup"} & set(reductions):
            return None
        try:
            return self._make_kernels(ordinal)
        except MoverError as error:
            # No room on the GPU must not mean no checkpoint: everything active is stored.
            print(f"storing every chunk of GPU {ordinal}: {error}", file=sys.stderr)
            return None

    def _dump_job(self, ordinal: int, files: list[Any], expected: int) -> CopyJob:
        data, table, _ = files
        digests = Path(table).with_suffix(".digests")
        self._jobs[ordinal] = self._make_dump_job(ordinal, Path(data), expected, digests)
        return self._jobs[ordinal]

    def _make_dump_job(
        self, ordinal: int, path: Path, expected: int = 0, digests: Path | None = None
    ) -> CopyJob:
        context, kernels = self._pin(ordinal), self._dumping[ordinal]
        digests = digests or path.with_suffix(".digests")
        return self.mover.dump_job(path, digests, context, expected, self._need_plan(), kernels)

    def _make_kernels(self, ordinal: int) -> Kernels:
        if ordinal not in self._kernels:
            self._kernels[ordinal] = self.mover.kernels(self.driver.context(ordinal))
        return self._kernels[ordinal]


class Server:
    """Reads commands from the socket, runs them, and answers."""

    AT_ONCE = (
        *("prepare-fill", "progress", "wait", "held", "cancel", "forget"),
        *("strip", "threads", "rebuild"),
    )
    # These change the table of blocks and must run in the order in which they were asked.
    ORDERED = (
        *("hello", "open", "warm", "room", "import", "create", "drop"),
        *("copy-before", "expect", "prepare-copy", "shadow", "copy", "kernels", "fill", "reset"),
    )

    def __init__(self, connection: socket.socket, program: GhostProgram) -> None:
        self._connection = connection
        self._program = program
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
                    with contextlib.suppress(Exception):  # its end frees the rest
                        self._program.forget({}, [])
                    self._answer({"id": fields["id"]}, [])
                    began = time.monotonic()
                    with contextlib.suppress(Exception):
                        # Many threads unpin what one would hold up the next restore with.
                        self._program.cancel({}, [])
                    print(f"unpinned {time.monotonic() - began:.3f} s", file=sys.stderr)
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
        began = time.monotonic()
        try:
            answer, exported = self._handlers[fields["do"]](fields, fds)
            answer = {"id": fields["id"], **answer}
        except Exception as error:  # whatever it was, the coordinator is told and decides
            if is_internal(error):
                traceback.print_exc()
            text = f"{fields['do']}: {words_of(error)}"
            kind = Status.NO_SPACE if is_full(error) else getattr(error, "status", type(error))
            answer = {
                "id": fields["id"],
                "error": text,
                "kind": kind.name if isinstance(kind, Enum) else kind.__name__,
            }
        finally:
            for fd in fds:
                os.close(fd)
        if (seconds := time.monotonic() - began) > LOGGED_SECONDS:
            print(f"{fields['do']} {seconds:.3f} s", file=sys.stderr)
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
    lift_limits()  # blocks travel, thousands of them at once
    try:
        Server(socket.socket(fileno=fd), program).run()
    except BrokenPipeError:
        pass
    sys.stderr.flush()
    # The driver's own teardown at exit takes long and can wait for work that is not ours; the
    # kernel frees all.
    os._exit(0)


def main(fd: int) -> None:
    """Be a ghost on the socket `fd`, to the end of the process."""
    with contextlib.suppress(ImportError):  # who asks for the driver is told
        import cuda.bindings.driver  # noqa: F401 - before anybody waits for it

    serve(fd, GhostProgram(CudaDriver, NativeMover))

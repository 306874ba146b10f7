"""The ghost's dump: device memory to the files of an image, or to links of it before.

dumping.py says which chunks are stored. Where there is room, what is in use is copied to a shadow
on the GPU first, and the job goes on while that is stored.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np

from coordinator import before, chunks, dumping, faults
from coordinator import ghost_commands as commands
from coordinator.chunks import U64, Bools, Kernels
from coordinator.device import DriverError
from coordinator.dumping import DumpPlan, Known, Scan
from coordinator.ghost_commands import CopyBefore, DumpFiles, Planned, Reduced, Target
from coordinator.ghost_devices import Devices
from coordinator.move_plan import ESTIMATE_BYTES
from coordinator.mover import CopyJob
from coordinator.staging import Shadow
from flowgpu.image.chunks import encode
from flowgpu.image.linked import Linked
from flowgpu.wire import Fault

MORE, MORE_BYTES = 1.05, 256 << 20
"""A shadow has room for more than was expected to be in use: a factor, and bytes."""

Memory = dict[int, tuple[U64, Bools]]
"""By ordinal: where each chunk is, and which are in use."""


def _in_use(memory: Memory) -> dict[int, int]:
    """Bytes of each GPU."""
    return {o: int(np.count_nonzero(mask)) * chunks.CHUNK for o, (_, mask) in memory.items()}


class Dump:
    """The commands that copy blocks of `devices` out."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._kernels: dict[int, Kernels | None] = {}  # with which each job was made
        self._known: Known | None = None
        self._expected: dict[int, int] = {}  # bytes in use of each GPU when all stands still
        self._shadows: dict[int, Shadow] = {}
        self._shadow_lock = threading.Lock()
        self._held: Future[float | None] = Future()

    def prepare(self, command: commands.PrepareCopy) -> None:
        """Make the arena and the files of the copy out, while the task still runs."""
        target = command.target
        self._devices.make_arena(target.plan)
        files = target.files
        self._load_kernels(files, target.reductions)
        began = time.monotonic()
        memory = self._memory(list(files), command.active)
        now = _in_use(memory)
        stays = min(command.in_use / max(sum(now.values()), 1), 1.0)
        self._expected = {ordinal: int(size * stays) for ordinal, size in now.items()}
        stored = self._stored(memory, target, ESTIMATE_BYTES)
        share = min(stays, command.most / max(sum(stored.values()), 1))
        expected = {ordinal: int(size * share) for ordinal, size in stored.items()}
        guessed = time.monotonic()
        jobs = [self._dump_job(ordinal, files[ordinal], expected[ordinal]) for ordinal in files]
        self._known = self._make_known(target, sum(expected.values()))
        for job in jobs:
            # Pages that are not there in time are made during the copy, at the price of the pause.
            with contextlib.suppress(TimeoutError):
                job.wait("prepared", command.seconds)
        # What the log of a slow preparation is asked first.
        print(
            f"prepared {sum(expected.values()) >> 20} MiB, {command.in_use >> 20} MiB in use: "
            f"{guessed - began:.3f} s to look, {time.monotonic() - guessed:.3f} s to make pages",
            file=sys.stderr,
        )

    def copy_before(self, command: CopyBefore) -> commands.SizeIfRoom:
        """Copy what is in use and no link has yet, while the task still runs."""
        faults.check(Fault.GHOST_DUMP)
        self._devices.make_arena(command.plan)
        used, folder = self._devices.used(), Path(command.links)
        deadline = time.monotonic() + command.seconds
        self._load_kernels(used, command.reductions)
        scans = self._scan(self._memory(used, command.active), command.reductions)
        seen, stored = self._make_known(command), self._make_known(command)
        total = 0
        for ordinal, memory in zip(used, scans, strict=True):
            if seen is None or stored is None or memory.digests is None or memory.kernels is None:
                return commands.SizeIfRoom(None)
            where = memory.where[memory.found][seen.fresh(memory.digests)]
            if not len(where):
                continue
            room = self._devices.driver.free(ordinal) - command.keep
            size = before.part_bytes(len(where) * chunks.CHUNK, room)
            if not size:
                return commands.SizeIfRoom(None)
            self._devices.driver.use(ordinal)
            part = Shadow(self._devices.driver, self._devices.gpu(ordinal), size)
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
                self._devices.driver.use(ordinal)
                part.release()
        if self._devices.jobs:
            self._known = self._make_known(command)
        return commands.SizeIfRoom(total)

    def shadow(self, command: commands.Shadow) -> commands.Size:
        """Take memory for a copy of what is in use, on all GPUs or none."""
        sizes = {
            ordinal: min(staging.size, int(self._expected.get(ordinal, 0) * MORE) + MORE_BYTES)
            for ordinal, staging in self._devices.staging.items()
            if staging.size
        }
        room = all(
            self._kernels.get(o) and self._devices.driver.free(o) >= size + command.keep
            for o, size in sizes.items()
        )
        try:
            for ordinal, size in sizes.items() if room else ():
                self._devices.driver.use(ordinal)
                self._shadows[ordinal] = Shadow(
                    self._devices.driver, self._devices.gpu(ordinal), size
                )
        except DriverError as error:
            print(f"no memory for a copy on the GPU: {error}", file=sys.stderr)
            self.release_shadows()
        return commands.Size(sum(shadow.size for shadow in self._shadows.values()))

    def wait_held(self, command: commands.WaitHeld) -> commands.Held:
        """Wait until all that is in use has been copied on the GPU, if it is to be."""
        return commands.Held(self._held.result(command.seconds))

    def copy(self, command: commands.Copy) -> commands.Copies:
        """Start to copy every block to its GPU's file."""
        try:
            return self._copy(command.target, command.active)
        finally:
            if not self._held.done():
                self._held.set_result(None)

    def _copy(self, target: Target, active: str | None) -> commands.Copies:
        if faults.fires(Fault.GHOST_DEATH):
            os._exit(1)
        faults.check(Fault.GHOST_DUMP)
        files = target.files
        self._devices.make_arena(target.plan)
        used = self._devices.used()
        for ordinal in set(self._devices.jobs) - set(used):
            # All of this GPU's blocks were freed since the file was prepared.
            self._devices.jobs.pop(ordinal).close()
        late = set(used) - set(self._devices.jobs)
        self._load_kernels(late, target.reductions)
        for ordinal in late:
            self._dump_job(ordinal, files[ordinal], 0)
        began = time.monotonic()
        memory = self._memory(used, active)
        self._held.set_result(self._hold(memory))
        scans = self._scan(memory, target.reductions)
        known, self._known = self._known or self._make_known(target), None
        if target.links and known is None:
            Linked(Path(target.links)).settle([], 1, 0)
        own = [files[ordinal].index for ordinal in used]
        plans = dumping.plan_dump(scans, known, target.gpus, own)
        for ordinal, plan in zip(used, plans, strict=True):
            self._devices.jobs[ordinal].start(plan.segments, plan.digests)
        segments = sum(len(plan.segments) for plan in plans)
        print(f"planned {segments} segments in {time.monotonic() - began:.3f} s", file=sys.stderr)
        answers = chunks.at_once(
            lambda ordinal, plan: self._write_table(ordinal, plan, target),
            used,
            plans,
        )
        return commands.Copies(dict(zip(used, answers, strict=True)))

    def expect(self, command: commands.Expect) -> commands.Size:
        """Look how much a copy would store, about."""
        self._load_kernels(command.target.files, command.target.reductions)
        memory = self._memory(list(command.target.files), None)
        return commands.Size(sum(self._stored(memory, command.target, least=0).values()))

    def release_shadows(self) -> None:
        """Give back the memory of what `shadow` took."""
        with self._shadow_lock:
            while self._shadows:
                ordinal, shadow = self._shadows.popitem()
                self._devices.driver.use(ordinal)
                shadow.release()

    def reset(self) -> None:
        """Forget what was made for one image."""
        self._kernels.clear()
        self._expected.clear()
        self._known = None
        self._held = Future()

    def _load_kernels(self, ordinals: Iterable[int], reductions: Sequence[str]) -> None:
        for ordinal in ordinals:
            self._kernels[ordinal] = self._devices.kernels_for(ordinal, reductions)

    def _write_table(self, ordinal: int, plan: DumpPlan, target: Target) -> Planned:
        """Write the chunk table of a GPU and say what it stands for."""
        table = Path(target.files[ordinal].table)
        faults.check_write(table, faults.TABLE_WRITE)
        table.write_bytes(encode(plan.kind, plan.extent, plan.slot))
        kernels = self._kernels[ordinal]
        used = tuple(name for name in target.reductions if kernels or name == "active")
        keys = self._devices.staging[ordinal].keys()
        return Planned(tuple(keys), Reduced(used, **vars(plan.sizes)))

    def _memory(self, ordinals: list[int], active: str | None) -> Memory:
        """Where the chunks of GPUs are, and which are in use; `active`: parts of blocks that are,
        None: all."""
        parts = None if active is None else chunks.unpack_parts(active)
        found: Memory = {}
        for ordinal in ordinals:
            staging = self._devices.staging[ordinal]
            where = chunks.addresses(staging.segments())
            mask = np.ones(len(where), np.bool_)
            if parts is not None:
                mask = chunks.active_chunks(staging.keys(), staging.sizes(), parts)
            found[ordinal] = where, mask
        return found

    def _hold(self, memory: Memory) -> float | None:
        """Copy what is in use to the shadows, and say in `memory` that it is there. Gives seconds;
        None where one of them is too small, and then nothing is done."""
        sizes = _in_use(memory)
        room = {ordinal: shadow.size for ordinal, shadow in self._shadows.items()}
        if any(size > room.get(ordinal, -1) for ordinal, size in sizes.items()):
            return None
        began = time.monotonic()

        def one(ordinal: int) -> None:
            where, mask = memory[ordinal]
            start, kernels = self._shadows[ordinal].address, self._kernels[ordinal]
            if kernels is None:
                raise RuntimeError("a shadow without kernels")
            there = chunks.addresses([(start, sizes[ordinal])])
            kernels.copy(where[mask], there)
            where = where.copy()
            where[mask] = there
            memory[ordinal] = where, mask

        chunks.at_once(one, list(memory))
        return time.monotonic() - began

    def _scan(self, memory: Memory, reductions: Sequence[str]) -> list[Scan]:
        """Look at the memory of several GPUs at once."""

        def one(ordinal: int) -> Scan:
            kernels = self._kernels[ordinal]
            return dumping.scan(*memory[ordinal], kernels, zero="zero" in reductions)

        return chunks.at_once(one, list(memory))

    def _make_known(self, copy: Target | CopyBefore, new: int | None = None) -> Known | None:
        """The catalogue of a dump, with what its image has linked.

        `new`: bytes that the dump will store, about. It may store more of one GPU, which memory is
        taken for; replicas on many GPUs need none.
        """
        if "dedup" not in copy.reductions or not any(self._kernels.values()):
            return None
        linked = Linked(Path(copy.links)) if copy.links else None
        sizes = [staging.size for staging in self._devices.staging.values()]
        here = sum(sizes) if new is None else min(max(new + new // 4, *sizes, 0), sum(sizes))
        expected = here // chunks.CHUNK + (len(linked.digests) if linked else 0)
        return Known(self._devices.mover.catalogue(expected), linked)

    def _stored(self, memory: Memory, target: Target, least: int) -> dict[int, int]:
        """Bytes that a copy of each GPU would store now, about: all in use, where that is less than
        `least`."""
        sizes = _in_use(memory)
        large = {o: memory[o] for o in sizes if sizes[o] >= least and self._kernels[o]}
        known = self._make_known(target) if large else None
        if known is not None:
            # The memory is in use, so this is only a guess of what the pause will find.
            scans = self._scan(large, target.reductions)
            sizes |= zip(large, dumping.new_bytes(scans, known), strict=True)
        return sizes

    def _dump_job(self, ordinal: int, files: DumpFiles, expected: int) -> CopyJob:
        data, digests = Path(files.data), Path(files.table).with_suffix(".digests")
        self._devices.jobs[ordinal] = self._make_dump_job(ordinal, data, expected, digests)
        return self._devices.jobs[ordinal]

    def _make_dump_job(
        self, ordinal: int, path: Path, expected: int = 0, digests: Path | None = None
    ) -> CopyJob:
        context, kernels = self._devices.pin(ordinal), self._kernels[ordinal]
        digests = digests or path.with_suffix(".digests")
        return self._devices.mover.dump_job(
            path, digests, context, expected, self._devices.plan, kernels
        )

"""The ghost: a process that maps a job's device memory too, moves its bytes and works the engine.

Started by the coordinator as ``python -m coordinator.ghost_main`` with the chosen driver in
LD_LIBRARY_PATH and nothing preloaded. ghost_commands.py has what it can be asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from coordinator import faults
from coordinator import ghost_commands as commands
from coordinator.device import Driver
from coordinator.engine import EngineError, NativeEngine
from coordinator.filling import FillJob
from coordinator.ghost_commands import Answer, Command
from coordinator.ghost_devices import Devices
from coordinator.ghost_dump import Dump
from coordinator.ghost_fill import Fill
from coordinator.mover import Mover
from flowgpu.wire import Fault

# A process takes it while the driver checkpoints or restores it: far more than was seen.
ENGINE_BYTES = 256 << 20


class GhostProgram:
    """The commands of a ghost on a driver and a mover; `run` does what one says."""

    def __init__(self, make_driver: Callable[[], Driver], make_mover: Callable[[str], Mover]):
        self.devices = devices = Devices(make_driver, make_mover)
        self._dump, fill = Dump(devices), Fill(devices)
        self._handlers: dict[type[Command[Any]], Callable[[Any], Any]] = {
            commands.Hello: devices.hello,
            commands.Open: devices.open,
            commands.Warm: devices.warm,
            commands.Room: devices.room,
            commands.Import: devices.import_,
            commands.Create: devices.create,
            commands.Drop: devices.drop,
            commands.CopyBefore: self._dump.copy_before,
            commands.Expect: self._dump.expect,
            commands.PrepareCopy: self._dump.prepare,
            commands.Shadow: self._dump.shadow,
            commands.Copy: self._dump.copy,
            commands.Fill: fill.start,
            commands.Reach: fill.reach,
            commands.Reset: self.reset,
            commands.PrepareFill: fill.prepare,
            commands.WaitHeld: self._dump.wait_held,
            commands.Progress: self.progress,
            commands.Wait: self.wait,
            commands.Cancel: self.cancel,
            commands.Forget: devices.forget,
            commands.Strip: self.strip,
            commands.Threads: self.threads,
            commands.Rebuild: self.rebuild,
        }

    def run(self, command: Command[Answer]) -> Answer:
        """Do what a command says, and give the answer."""
        handler: Callable[[Command[Answer]], Answer] = self._handlers[type(command)]
        return handler(command)

    def progress(self, _: commands.Progress) -> commands.HowFar:
        """Bytes moved and bytes to move."""
        with self.devices.using_jobs() as jobs:
            found = [job.progress() for job in jobs]
        return commands.HowFar(sum(one[0] for one in found), sum(one[1] for one in found))

    def wait(self, command: commands.Wait) -> commands.Carried:
        """Wait until all bytes have left the GPU, or are where they belong."""
        deadline = time.monotonic() + command.seconds
        moved = 0
        with self.devices.using_jobs() as jobs:
            for job in jobs:
                moved += job.wait(command.stage, max(deadline - time.monotonic(), 0.0))
        if command.stage == "done":
            self._dump.release_shadows()
        fills = [job for job in jobs if isinstance(job, FillJob)]
        return commands.Carried(
            moved,
            passed_bytes=sum(job.passed_bytes for job in fills),
            passed_seconds=max((job.passed_seconds for job in fills), default=0.0),
        )

    def cancel(self, _: commands.Cancel) -> None:
        """End all copies."""
        self.devices.end_jobs()
        self._dump.release_shadows()

    def reset(self, _: commands.Reset) -> None:
        """End what is left of a checkpoint, so that another can begin."""
        self.cancel(commands.Cancel())
        self.devices.forget(commands.Forget())
        self._dump.reset()

    def strip(self, command: commands.Strip) -> None:
        """Take CUDA out of processes."""
        deadline = time.monotonic() + command.seconds
        self._engine(len(command.pids)).strip(command.pids, deadline)

    def threads(self, command: commands.Threads) -> commands.ServiceThreads:
        """Which threads put CUDA back into processes."""
        return commands.ServiceThreads(tuple(self._engine(1).threads(command.pids)))

    def rebuild(self, command: commands.Rebuild) -> None:
        """Put CUDA back into processes."""
        self._engine(len(command.pids)).rebuild(command.pids, command.gpus, 0.0)

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

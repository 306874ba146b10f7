"""The ghost's part of the engine `native` (control_state.py has the coordinator's).

It works the driver's own checkpoint API (r570+), which names processes by pid. Rules taken from its
users: lock all before checkpointing any and restore all before unlocking any, or processes that
wait for each other deadlock; a failed call is never repeated blindly, the state that the driver
reports decides; and a return code of success is believed only when that state agrees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import Protocol

from flowgpu.errors import words_of


def permutation(gpus: Mapping[str, str], machine: Iterable[str]) -> dict[str, str]:
    """A mapping of all GPUs of the machine that does what `gpus` says.

    The driver wants all GPUs that a process knows (docs/design/hardware-notes.md). A GPU that takes
    another's place without giving its own gets one that nobody has any more. All others stay.
    """
    left, free = gpus.values() - gpus.keys(), gpus.keys() - gpus.values()
    changed = {**gpus, **dict(zip(sorted(left), sorted(free), strict=True))}
    return {gpu: gpu for gpu in machine} | changed


class ProcessState(IntEnum):
    """CUprocessState of the driver API."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


SPOILT_BEFORE = (
    "the driver says this of a process of which an earlier checkpoint found no device "
    "memory; such a process cannot be checkpointed any more, only a job started anew can"
)


class EngineError(Exception):
    """The engine failed; the processes are as they were before the call."""


class EngineSpoilt(EngineError):
    """The driver ran out of device memory and checkpoints a process never again.

    The message begins with `process PID:`; the process runs on.
    """


class EngineLost(EngineError):
    """The engine failed and a process cannot be brought back."""


class CheckpointApi(Protocol):
    """The driver's checkpoint calls; each raises an exception with the driver's error name."""

    def lock(self, pid: int, timeout_ms: int) -> None: ...

    def checkpoint(self, pid: int) -> None: ...

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None: ...

    def unlock(self, pid: int) -> None: ...

    def restore_thread(self, pid: int) -> int: ...

    def state(self, pid: int) -> ProcessState: ...

    def machine_gpus(self) -> list[str]:
        """UUIDs of the GPUs that there are, also of those that this process does not see."""


class NativeEngine:
    """cuCheckpointProcess* of the driver."""

    def __init__(
        self,
        api: CheckpointApi,
        after_checkpoint: Callable[[int], None] | None = None,
        *,
        at_once: bool = True,
    ) -> None:
        """`at_once`: with several processes at a time, each of which takes some device memory."""
        self._api = api
        self._after_checkpoint = after_checkpoint or (lambda pid: None)
        self._at_once = at_once

    def threads(self, pids: Sequence[int]) -> list[int]:
        """The thread that has to run for `rebuild`, for each stopped process. Raises
        EngineError."""
        try:
            return [self._api.restore_thread(pid) for pid in pids]
        except Exception as error:
            raise EngineError(words_of(error)) from error

    def strip(self, pids: Sequence[int], deadline: float) -> None:
        """Make each process a CPU process; all or none. Raises EngineError, EngineLost."""
        for pid in pids:
            self._expect(pid, ProcessState.RUNNING)
        try:
            for pid in pids:
                left_ms = int((deadline - time.monotonic()) * 1000)
                if left_ms <= 0:
                    raise EngineError(f"no time left to lock process {pid}")
                self._api.lock(pid, left_ms)
                self._expect(pid, ProcessState.LOCKED)
            self._each(pids, self._checkpoint)
        except Exception as error:
            self._undo(pids, error)
            if isinstance(error, EngineError):
                raise
            raise EngineError(words_of(error)) from error

    def _each(self, pids: Sequence[int], action: Callable[[int], None]) -> None:
        """Raises what the first of those that failed did; when nothing is under way any more."""
        if len(pids) < 2 or not self._at_once:
            for pid in pids:
                action(pid)
            return
        with ThreadPoolExecutor(max_workers=len(pids)) as pool:
            futures = [pool.submit(action, pid) for pid in pids]
        for future in futures:
            future.result()

    def _checkpoint(self, pid: int) -> None:
        self._call_checkpoint(pid)
        self._expect(pid, ProcessState.CHECKPOINTED)
        self._after_checkpoint(pid)

    def _call_checkpoint(self, pid: int) -> None:
        """Explain what no state of the driver shows (docs/design/hardware-notes.md)."""
        try:
            self._api.checkpoint(pid)
        except Exception as error:
            if "CUDA_ERROR_OUT_OF_MEMORY" in str(error):
                raise EngineSpoilt(f"process {pid}: {error}") from error
            if "CUDA_ERROR_UNKNOWN" in str(error):
                raise EngineError(f"process {pid}: {error}; {SPOILT_BEFORE}") from error
            raise

    def rebuild(self, pids: Sequence[int], gpus: Mapping[str, str], deadline: float) -> None:
        """Give each process CUDA back, whatever `strip` left; `gpus` maps old to new UUIDs where
        they differ.

        Raises EngineLost.
        """
        del deadline  # the driver's restore takes no limit; the caller ends this process instead
        try:
            self._each(pids, lambda pid: self._restore(pid, gpus))
            for pid in pids:
                if self._api.state(pid) is ProcessState.LOCKED:
                    self._api.unlock(pid)
                self._expect(pid, ProcessState.RUNNING)
        except Exception as error:
            raise EngineLost(words_of(error)) from error

    def _restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        if self._api.state(pid) is ProcessState.CHECKPOINTED:
            try:
                self._api.restore(pid, gpus)
            except Exception as error:
                if not gpus or "CUDA_ERROR_INVALID_VALUE" not in str(error):
                    raise
                whole = permutation(gpus, self._api.machine_gpus())
                if whole == gpus:
                    raise
                self._api.restore(pid, whole)
            self._expect(pid, ProcessState.LOCKED)

    def _undo(self, pids: Sequence[int], cause: Exception) -> None:
        try:
            self.rebuild(list(reversed(pids)), {}, 0.0)
        except EngineLost as error:
            raise EngineLost(f"{cause}; and then: {error}") from cause

    def _expect(self, pid: int, wanted: ProcessState) -> None:
        found = self._api.state(pid)
        if found is not wanted:
            raise EngineError(f"process {pid} is {found.name} where {wanted.name} was expected")

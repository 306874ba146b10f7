"""The live set of a task (native/include/flowgpu/live.h), as the coordinator reads it.

What its contents say of the task's memory is for active.py. Here is only what is asked of a running
task, so numpy, which takes longer to load than all else in a coordinator, is not needed.
"""

from __future__ import annotations

import mmap
import os
import struct

from flowgpu import live, wire


class LiveSet:
    """The live set of one task, in the task's memfd. Owns `fd` from the call on.

    Raises WireError if that is no live set of this version.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._head: mmap.mmap | None = None
        try:
            if os.fstat(fd).st_size != live.BYTES:
                raise wire.WireError("the live set has another size")
            self._head = mmap.mmap(fd, live.LOG_AT, mmap.MAP_SHARED, mmap.PROT_READ)
            magic, version = struct.unpack_from("=IH", self._head)
            if (magic, version) != (live.MAGIC, live.VERSION):
                raise wire.WireError("the live set has another magic or version")
        except (OSError, ValueError):
            self.close()
            raise

    def close(self) -> None:
        """Let go of the set. A second call does nothing."""
        if self._head is not None:
            self._head.close()
            self._head = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def live_bytes(self) -> int | None:
        """Bytes of all live blocks, without asking the task. Costs some microseconds.

        None where they say nothing of the program: no allocator has had an event, the set has
        overflowed, or an event is to be made up for (live.h). TensorFlow's blocks in host memory
        are among them.
        """
        header = self.header()
        total = sum(header.device_bytes)
        return total if header.logged and not header.overflow and total >= 0 else None

    def overflow(self) -> bool:
        """True once the set could not take a block up, and so says nothing any more."""
        return self.header().overflow != 0

    def header(self) -> live.Header:
        """What the head of the set says now."""
        assert self._head is not None, "closed"
        return live.Header.unpack(self._head[: live.Header.SIZE])

    def read(self, start: int, end: int) -> bytes:
        """Bytes of the set, from `start` up to `end`."""
        # This does not read through the mapping, where a look at a page of a hole makes it memory
        # of the task.
        parts = []
        while start < end:
            part = os.pread(self._fd, end - start, start)
            if not part:
                raise wire.WireError("the live set is shorter than it was")
            parts.append(part)
            start += len(part)
        return b"".join(parts)

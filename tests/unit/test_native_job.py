"""What several waits for one job of the mover leave behind."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from coordinator.mover import NativeJob
from flowgpu.host import native
from tests.patience import SECONDS

SEGMENTS = np.array([[0, 3 * native.CHUNK_BYTES, 0]], np.uint64)


class Done:
    """A job that has ended."""

    def start(self, *_: object) -> None: ...

    def wait(self, *_: object) -> bool:
        return True

    def progress(self) -> native.Progress:
        return native.Progress()


def test_digests_are_written_once_and_before_any_wait_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = NativeJob(cast(Any, Done()), tmp_path / "gpu0.digests", native.Kind.DUMP)
    job.start(SEGMENTS, None)
    written = []
    plain = Path.write_bytes
    both = threading.Barrier(2)

    def slowly(path: Path, data: bytes) -> int:
        time.sleep(0.05)
        written.append(path)
        return plain(path, data)

    def wait(_: int) -> int:
        both.wait(SECONDS)
        job.wait("done", SECONDS)
        return (tmp_path / "gpu0.digests").stat().st_size

    monkeypatch.setattr(Path, "write_bytes", slowly)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wait, range(2))) == [3 * native.DIGEST_BYTES] * 2
    assert len(written) == 1

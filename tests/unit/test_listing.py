"""How the list of a task's CUDA objects comes into an image (coordinator/listing.py)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from coordinator.listing import listed


def write(fd: int, data: bytes) -> None:
    """As the task does, on a duplicate that it got with the request."""
    own = os.dup(fd)
    try:
        while data:
            data = data[os.write(own, data) :]
    finally:
        os.close(own)


def test_what_a_task_lists_is_in_the_file_for_its_owner_alone(tmp_path: Path) -> None:
    path, data = tmp_path / "record", b'{"kind":"stream"}\n' * 100_000
    with listed(path) as fds:
        write(fds[0], data)
    assert path.read_bytes() == data
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_task_that_lists_nothing_leaves_no_file(tmp_path: Path) -> None:
    with listed(tmp_path / "record"):
        pass
    with listed(None) as fds:
        assert fds == []
    assert not list(tmp_path.iterdir())


def test_a_task_that_keeps_its_descriptor_holds_nobody_up(tmp_path: Path) -> None:
    path, data = tmp_path / "record", b'{"kind":"stream"}\n' * 100
    with listed(path) as fds:
        kept = os.dup(fds[0])
        write(kept, data)
    os.close(kept)
    assert path.read_bytes() == data


def test_a_list_that_cannot_be_written_is_left_out_and_nobody_waits(tmp_path: Path) -> None:
    with (
        listed(tmp_path / "no folder" / "record") as fds,
        pytest.raises(BrokenPipeError),  # the task sends without a signal, and gives up
    ):
        write(fds[0], b"x" * (4 << 20))  # more than a socket holds
    assert not list(tmp_path.iterdir())

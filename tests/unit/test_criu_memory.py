"""What CRIU asks the kernel is kept where that is safe, and asked once."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from criu_job import Job, restore

from flowgpu.host import criu as criu_module
from flowgpu.host.criu import Criu


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tmpfs of this test's, and a /run that is none."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr(criu_module, "OWN_MEMORY", Path("/proc"))
        monkeypatch.setattr(criu_module, "SHARED_MEMORY", Path(folder))
        yield Path(folder) / f"flowgpu-criu-{os.geteuid()}"


def test_what_criu_asks_the_kernel_is_asked_once(criu: Criu, memory: Path, tmp_path: Path) -> None:
    assert criu_module.memory_folder() == memory
    (memory / "criu.kdat.tmp").touch()  # of one that was killed
    criu.remember()
    assert [path.name for path in memory.iterdir()] == ["criu.kdat"]
    asked = (memory / "criu.kdat").stat().st_mtime_ns
    criu.remember()
    with contextlib.closing(Job()) as job:
        criu.dump(job.pid, tmp_path / "images")
        job.kill()
        restore(criu, job, tmp_path / "images")
    assert "Loaded kdat cache from" in (tmp_path / "images" / "dump.log").read_text()
    assert (memory / "criu.kdat").stat().st_mtime_ns == asked


@pytest.mark.parametrize("what", ["others may read it", "a link", "a file"])
def test_answers_are_kept_in_no_folder_but_our_own(
    criu: Criu, memory: Path, tmp_path: Path, what: str
) -> None:
    if what == "a link":
        memory.symlink_to(tmp_path)
    elif what == "a file":
        memory.touch(0o700)
    else:
        memory.mkdir()
        memory.chmod(0o755)
    assert criu_module.memory_folder() is None
    criu.remember()
    assert not memory.is_dir() or not any(memory.iterdir())


def test_criu_keeps_its_answers_itself_where_it_can(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criu_module, "OWN_MEMORY", Path("/dev/shm"))
    assert criu_module.memory_folder() is None
    assert not memory.exists()

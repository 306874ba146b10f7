"""FIFOs and watched folders that a restore makes again."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from coordinator import places
from flowgpu.errors import FileMissing
from flowgpu.host import criu_images
from flowgpu.host.settings import FIFO, WATCHED_FOLDER
from flowgpu.image.manifest import Setting


def setting(kind: str, path: Path, mode: int) -> Setting:
    return Setting(kind, (mode, os.getuid(), os.getgid()), str(path), (1,))


def test_what_is_missing_is_made_with_its_folders_and_its_mode_and_can_be_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criu_images, "watched_paths", lambda images: set())
    fifo, folder = tmp_path / "session/0/fifo", tmp_path / "watched"
    settings = [setting(FIFO, fifo, 0o640), setting(WATCHED_FOLDER, folder, 0o750)]
    made = places.make(settings, tmp_path)
    assert stat.S_ISFIFO(fifo.stat().st_mode) and stat.S_IMODE(fifo.stat().st_mode) == 0o640
    assert folder.is_dir() and stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert places.make(settings, tmp_path) == []  # it is there
    places.remove(made)
    assert os.listdir(tmp_path) == []


def test_a_watched_folder_that_is_missing_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = tmp_path / "lost"
    monkeypatch.setattr(criu_images, "watched_paths", lambda images: {lost})
    with pytest.raises(FileMissing, match=str(lost)):
        places.make([setting(FIFO, tmp_path / "fifo", 0o600)], tmp_path)
    assert os.listdir(tmp_path) == []

"""Read the image files of CRIU with pycriu, which comes with the CRIU that `make setup` fetches."""

from __future__ import annotations

import importlib
import os
import quopri
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgpu.errors import CriuMissing, ImageDamaged

TOOLS = Path(__file__).resolve().parent.parent / ".tools" / "criu" / "python"
MAGIC_BYTES = 8  # two magic numbers, before the messages of a file


@dataclass(frozen=True)
class DumpStats:
    """Times and sizes of a dump as CRIU counted them."""

    freezing_s: float
    frozen_s: float
    memory_dump_s: float
    memory_write_s: float
    pages_scanned: int
    pages_written: int


@dataclass(frozen=True)
class RestoreStats:
    """Times of a restore as CRIU counted them."""

    forking_s: float
    restore_s: float
    pages_restored: int


@dataclass(frozen=True)
class RegularFile:
    """A file that a dumped process had open or mapped."""

    path: str
    size: int | None


def _images() -> Any:
    """pycriu's image module, from the installed package or from `.tools`."""
    try:
        return importlib.import_module("pycriu.images")
    except ImportError:
        sys.path.append(str(TOOLS))
    try:
        return importlib.import_module("pycriu.images")
    except ImportError as error:
        sys.path.remove(str(TOOLS))
        raise CriuMissing(reason=f"pycriu cannot be imported ({error})") from error


def require() -> None:
    """Raises CriuMissing when image files could not be read."""
    _images()


def load(path: Path) -> list[dict[str, Any]]:
    """Entries of one image file."""
    images = _images()
    try:
        with path.open("rb") as file:
            entries: list[dict[str, Any]] = images.load(file)["entries"]
    except OSError as error:
        raise ImageDamaged(path=path, reason=error.strerror) from error
    except Exception as error:  # pycriu raises what its parser happens to meet
        raise ImageDamaged(path=path, reason=f"not a CRIU image ({error!r})") from error
    return entries


def messages(path: Path, *kinds: str) -> list[Any]:
    """Messages of an image file as they are: for large files, where `load` is slow.

    `kinds` are their protobuf types in order, and the last is that of all that follow.
    """
    types = importlib.import_module(_images().__package__ + ".pb")
    found: list[Any] = []
    try:
        data = path.read_bytes()
        at = MAGIC_BYTES
        while at < len(data):
            end = at + 4 + int.from_bytes(data[at : at + 4], "little")
            kind = getattr(types, kinds[min(len(found), len(kinds) - 1)])
            found.append(kind.FromString(data[at + 4 : end]))
            at = end
    except OSError as error:
        raise ImageDamaged(path=path, reason=error.strerror) from error
    except Exception as error:  # protobuf's parser
        raise ImageDamaged(path=path, reason=f"not a CRIU image ({error!r})") from error
    if at != len(data) or not found:
        raise ImageDamaged(path=path, reason="it ends within a message")
    return found


def pids(images_dir: Path) -> list[int]:
    """Process ids in the image, the root first."""
    return [entry["pid"] for entry in load(images_dir / "pstree.img")]


def is_shell_job(images_dir: Path) -> bool:
    """True when the session leader of the dumped root is not in the image."""
    tree = load(images_dir / "pstree.img")
    return tree[0]["sid"] not in {entry["pid"] for entry in tree}


def regular_files(images_dir: Path) -> list[RegularFile]:
    """Files that must be there, with these sizes, when the image is restored."""
    found = []
    for entry in load(images_dir / "files.img"):
        if "reg" in entry:
            found.append(RegularFile(entry["reg"]["name"], entry["reg"].get("size")))
    return found


def socket_folders(images_dir: Path) -> set[Path]:
    """Folders in which Unix sockets of the image are bound: CRIU makes the sockets, not these."""
    found = set()
    for entry in load(images_dir / "files.img"):
        # pycriu gives names of sockets in quoted-printable.
        name = quopri.decodestring(entry.get("usk", {}).get("name", "")).rstrip(b"\0")
        if name.startswith(b"/"):  # others have no name, or an abstract one
            found.add(Path(os.fsdecode(name)).parent)
    return found


def dump_stats(images_dir: Path) -> DumpStats:
    """Statistics that CRIU leaves beside a dump."""
    stats = load(images_dir / "stats-dump")[0]["dump"]
    return DumpStats(
        freezing_s=stats["freezing_time"] / 1e6,
        frozen_s=stats["frozen_time"] / 1e6,
        memory_dump_s=stats["memdump_time"] / 1e6,
        memory_write_s=stats["memwrite_time"] / 1e6,
        pages_scanned=stats["pages_scanned"],
        pages_written=stats["pages_written"],
    )


def restore_stats(work_dir: Path) -> RestoreStats:
    """Statistics that CRIU leaves in the work folder of a restore."""
    stats = load(work_dir / "stats-restore")[0]["restore"]
    return RestoreStats(
        forking_s=stats["forking_time"] / 1e6,
        restore_s=stats["restore_time"] / 1e6,
        pages_restored=stats["pages_restored"],
    )

"""Names, sizes and digests of the image format, which docs/reference/image-format.md specifies."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path, PurePosixPath

import xxhash

FORMAT = "flowgpu-image"
VERSION = 2
PACKED_VERSION = 3
"""Images with packed files have this; others have VERSION, so that older readers take them."""

SHARED_VERSION = 4
"""Images that share pages with an earlier one have this."""

READABLE = (1, VERSION, PACKED_VERSION, SHARED_VERSION)
"""Versions that a reader takes."""

MANIFEST = "manifest.json"
CRIU_DIR = "criu"
OUTPUT_LOG = "output.log"
TIMELINE = "timeline.json"
"""When each step of the checkpoint began and ended (flowgpu/timeline.py)."""
PAGES_DATA = "pages.data"
"""Pages of CPU memory that the image before does not have."""

CHUNK_BYTES = 32768
"""Unit of GPU data, its digests and tables; in version 1 the last one of a file may be shorter."""

PART_BYTES = 16 << 20
"""Unit of the digest of any other file."""

FRAME_BYTES = 4 << 20
"""What each frame of a packed file holds, but the last; divides a part."""

PAGE_BYTES = 4096
"""Unit of CPU memory."""

DIGEST_BYTES = 16
ROW_BYTES = 16
"""Size of a row of a chunk table."""

MOST_CHUNKS = (1 << 32) - 1
"""Chunks of one GPU: 128 TiB, eight times a GPU's window. The count of a run always fits."""

MOST_EXTENTS = 1 << 16
MOST_MANIFEST_BYTES = 64 << 20
"""A block takes about 110. Reading takes up to 20 times as much memory (lists of empty lists)."""

MOST_PID = 1 << 22
"""PID_MAX_LIMIT of Linux."""

DIR_MODE = 0o700
FILE_MODE = 0o600


def open_regular(path: Path) -> int:
    """Descriptor of a regular file, never reached through a link in its place. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def private(path: str, flags: int) -> int:
    """Opener for files that nobody else is to read, whatever the umask."""
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def record(pid: int) -> str:
    """File that lists the CUDA objects which the engine replay makes again for a process."""
    return f"record{pid}.jsonl"


def gpu_data(index: int) -> str:
    """Extent with the chunks that a checkpoint stored of one GPU."""
    return f"gpu{index}.data"


def gpu_digests(index: int) -> str:
    """File with the digest of each slot of that extent."""
    return f"gpu{index}.digests"


def gpu_chunks(index: int) -> str:
    """File that says where each chunk of that GPU is."""
    return f"gpu{index}.chunks"


def memory_data(number: int) -> str:
    """File with what was in a file that is memory of the job."""
    return f"memory{number}.data"


def link_data(number: int) -> str:
    """Extent that earlier images have as well."""
    return f"link{number}.data"


def link_digests(number: int) -> str:
    """File with the digest of each slot of that extent."""
    return f"link{number}.digests"


def link_note(number: int) -> str:
    """File with what the manifest says of that extent when it is packed; gone before the seal."""
    return f"link{number}.packed"


def pages_link(number: int) -> str:
    """File of pages that earlier images have as well."""
    return f"pages-link{number}.data"


def page_table(file: str) -> str:
    """Table of pages in place of a file of pages that CRIU wrote."""
    return PurePosixPath(file).with_suffix(".map").name


def is_pages(path: str) -> bool:
    """True if a path of an image is that of a file of pages that CRIU wrote."""
    return re.fullmatch(rf"{CRIU_DIR}/pages-[0-9]+\.img", path) is not None


def is_pagemap(path: str) -> bool:
    """True if a path of an image is that of a list of the addresses of such pages."""
    return re.fullmatch(rf"{CRIU_DIR}/pagemap-[a-z0-9-]+\.img", path) is not None


def digests_of(extent: str) -> str:
    """The digests file of an extent's file."""
    return extent.removesuffix(".data") + ".digests"


def is_extent(path: str) -> bool:
    """True if a path of an image is that of an extent."""
    return re.fullmatch(r"(gpu|link)[0-9]+\.data", path) is not None


def packed(path: str) -> str:
    """The file that is there in place of `path` when it is packed."""
    return f"{path}.zst"


def partial_name(output_name: str, token: str) -> str:
    """Name of the folder, beside the output, in which an image grows."""
    return f"{output_name}.partial-{token}"


def chunk_count(size: int) -> int:
    """Chunks of `size` bytes of GPU data."""
    return -(-size // CHUNK_BYTES)


def digest(data: bytes | memoryview) -> bytes:
    """XXH3-128 in its canonical, big-endian form."""
    return xxhash.xxh3_128_digest(data)


def is_safe_path(path: str) -> bool:
    """True if a path of a manifest stays inside the image and is written in one way only."""
    pure = PurePosixPath(path)
    return (
        bool(path)
        and str(pure) == path
        and not pure.is_absolute()
        and ".." not in pure.parts
        and re.fullmatch(r"[\x20-\x7e]+", path) is not None
        and path != "."
    )

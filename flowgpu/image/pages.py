"""CPU memory in a series of images: pages that the image before has at the same address are shared.

    link(base, writer.path)                   # before the dump, so that nobody can remove them
    assembled = share(writer.path, choose)    # CRIU has written its files, and the job runs again
    assemble(image, entry, target, meter)     # for a restore: the file as CRIU wrote it

A file of pages is an array of pages, whether CRIU wrote it (`criu/pages-N.img`) or we did
(`pages.data`), so either can be linked. What is shared has been compared byte for byte.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flowgpu.errors import FlowError, ImageDamaged
from flowgpu.host import criu_images
from flowgpu.image import layout, page_tables
from flowgpu.image.digests import Meter, Unreadable, file_digests, workers
from flowgpu.image.manifest import Assembled
from flowgpu.image.reader import Image

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Choose = Callable[[Sequence[int], Sequence[int], int, int], list[int]]
PAGE = layout.PAGE_BYTES
PIECE = 512
"""Pages that are read at once: they stay in the cache."""

_BASE = ".base"
"""Folder in a partial image. It has the base's lists of addresses and its page tables, whose
sources are links."""


@dataclass
class _File:
    """A file of pages that CRIU has written, and where the base has each of its pages."""

    path: Path
    source: Array  # number of a link; -1: none has it
    page: Array  # its number there

    @property
    def size(self) -> int:
        return len(self.source) * PAGE


def link(base: Image, folder: Path) -> None:
    """Link what the pages of `base` are in to a partial image. Raises OSError, ImageDamaged."""
    tables = folder / _BASE
    tables.mkdir(layout.DIR_MODE)
    sources: list[str] = []
    for file in base.manifest.files:
        name = Path(file.path).name
        if layout.is_pagemap(file.path):
            os.link(base.path / file.path, tables / name)
        elif layout.is_pages(file.path) and file.bytes and file.bytes % PAGE == 0:
            pages = np.arange(file.bytes // PAGE)
            rows = page_tables.rows_of(np.full(len(pages), len(sources)), pages)
            (tables / name).write_bytes(rows.tobytes())
            sources.append(file.path)
    numbers = []
    for name in base.manifest.page_sources:
        numbers.append(len(sources))
        if base.entry(name).bytes:  # of others there are no rows
            sources.append(name)
    for entry in base.manifest.assembled:
        rows = base.page_table(entry).copy()
        rows["source"] = np.array(numbers, np.uint32)[rows["source"]]
        (tables / Path(entry.file).name).write_bytes(rows.tobytes())
    for number, name in enumerate(sources):
        os.link(base.path / name, folder / layout.pages_link(number))


def unlink(folder: Path) -> None:
    """Take back what `link` did."""
    shutil.rmtree(folder / _BASE, ignore_errors=True)
    for path in folder.glob("pages-link*.data"):
        path.unlink()


def share(folder: Path, choose: Choose) -> tuple[Assembled, ...]:
    """Replace CRIU's files of pages in a partial image by tables and the pages that are new.

    `choose` says which links are worth it (see linked.py). Where something does not fit, nothing is
    shared, and the files stay as they are.
    """
    if not (folder / _BASE).exists():
        return ()
    try:
        files, assembled = _share(folder, choose)
    except (OSError, FlowError, ValueError, OverflowError, Unreadable) as error:
        log.warning("no CPU memory is shared with the image before: %s", error)
        for name in (layout.PAGES_DATA, "pages-*.map"):
            for path in folder.glob(name):
                path.unlink()
        unlink(folder)
        return ()
    for file in files:
        file.path.unlink()
    return assembled


def _share(folder: Path, choose: Choose) -> tuple[list[_File], tuple[Assembled, ...]]:
    """Write pages and page tables. Gives the files that they replace, which are still there."""
    links: list[Path] = []
    while (path := folder / layout.pages_link(len(links))).exists():
        links.append(path)
    files = _files(folder)
    sizes = [path.stat().st_size // PAGE for path in links]
    with ExitStack() as stack, ThreadPoolExecutor(workers()) as pool:
        fds = [_open(path, stack) for path in links]
        for file in files:
            _compare(file, _open(file.path, stack), fds, pool)
    used = [
        sum(len(np.unique(file.page[file.source == number])) for file in files)
        for number in range(len(links))
    ]
    new = sum(int(np.count_nonzero(file.source < 0)) for file in files)
    kept = choose(used, sizes, 1, new)
    for file in files:
        file.source[~np.isin(file.source, kept)] = -1
    files = [file for file in files if (file.source >= 0).any()]
    assembled: tuple[Assembled, ...] = ()
    if files:
        digests = file_digests([(one.path, one.size) for one in files], Meter("pages", 0, None))
        names = [str(file.path.relative_to(folder)) for file in files]
        entries = map(Assembled, names, (file.size for file in files), digests)
        assembled = tuple(sorted(entries, key=lambda entry: entry.file))
        _write(folder, files, kept)
    for number, path in enumerate(links):
        if not files or number not in kept:
            path.unlink()
        else:
            path.rename(folder / layout.pages_link(kept.index(number)))
    shutil.rmtree(folder / _BASE)
    return files, assembled


def _files(folder: Path) -> list[_File]:
    """CRIU's files of pages, with where the base has what was at the same addresses."""
    found: dict[Path, _File] = {}
    for pagemap in sorted((folder / layout.CRIU_DIR).glob("pagemap-*.img")):
        name, runs = criu_images.page_runs(pagemap)
        path = pagemap.with_name(name)
        if not path.exists():  # packed by now
            continue
        size, rest = divmod(path.stat().st_size, PAGE)
        if path in found or rest:
            raise ValueError(f"{path.name} is not what {pagemap.name} says")
        if not size:
            continue
        addresses = _addresses(pagemap, runs, size)
        file = found[path] = _File(path, *np.full((2, size), -1))
        before = folder / _BASE / pagemap.name
        if not before.exists():
            continue
        name, runs = criu_images.page_runs(before)
        table = before.with_name(name)
        if not table.exists():
            continue
        source, page = page_tables.pages_of(np.fromfile(table, page_tables.ROW))
        if not len(source):
            continue
        old = _addresses(before, runs, len(source))
        place = np.minimum(np.searchsorted(old, addresses), len(old) - 1)
        there = old[place] == addresses
        file.source[there], file.page[there] = source[place[there]], page[place[there]]
    return list(found.values())


def _addresses(pagemap: Path, runs: Sequence[tuple[int, int]], pages: int) -> Array:
    """The number of each of so many pages in the address space."""
    # First, as a few bytes of a list can stand for more pages than fit in memory.
    if sum(count for _, count in runs) != pages:
        raise ValueError(f"{pagemap.name} does not stand for {pages} pages")
    starts, counts = np.array(runs, np.int64).reshape(-1, 2).T
    before = np.cumsum(counts) - counts
    addresses: Array = np.arange(pages) + np.repeat(starts - before, counts)
    if (np.diff(addresses) <= 0).any():
        raise ValueError(f"{pagemap.name} is out of order")
    return addresses


def _compare(file: _File, fd: int, links: Sequence[int], pool: ThreadPoolExecutor) -> None:
    """Forget the places of pages that hold something else there."""

    def differs(start: int, end: int) -> None:
        size = (end - start) * PAGE
        new = os.pread(fd, size, start * PAGE)
        old = os.pread(links[file.source[start]], size, int(file.page[start]) * PAGE)
        if len(new) != size or len(old) != size:
            raise ValueError(f"{file.path.name} or what it is compared with ends too early")
        if new != old:
            rows = (np.frombuffer(data, np.uint64).reshape(-1, PAGE // 8) for data in (new, old))
            file.source[start:end][np.not_equal(*rows).any(1)] = -1

    list(pool.map(lambda run: differs(*run), _runs(file.source, file.page)))


def _runs(source: Array, page: Array) -> list[tuple[int, int]]:
    """[start, end) of pages that are one behind another in one source; none longer than PIECE."""
    starts = np.flatnonzero(page_tables.begins(source, page))
    ends = np.append(starts[1:], len(source))
    there = source[starts] >= 0
    return [
        (at, min(at + PIECE, end))
        for start, end in zip(starts[there].tolist(), ends[there].tolist(), strict=True)
        for at in range(start, end, PIECE)
    ]


def _write(folder: Path, files: Sequence[_File], kept: Sequence[int]) -> None:
    """Write tables, and the pages that no link has."""
    count = 0
    with open(folder / layout.PAGES_DATA, "xb", buffering=0) as out, ExitStack() as stack:
        for file in files:
            new = np.flatnonzero(file.source < 0)
            page = file.page.copy()
            page[new] = count + np.arange(len(new))
            count += len(new)
            number = np.zeros(max(kept) + 2, np.int64)  # that of -1 is the last
            number[list(kept)] = 1 + np.arange(len(kept))
            rows = page_tables.rows_of(number[file.source], page)
            name = layout.page_table(str(file.path.relative_to(folder)))
            (folder / name).write_bytes(rows.tobytes())
            _append(out.fileno(), _open(file.path, stack), page_tables.rows_of(new * 0, new))


def _append(out: int, source: int, rows: Array) -> None:
    for row in rows:
        at, left = int(row["first"]) * PAGE, int(row["count"]) * PAGE
        while left:
            sent = os.sendfile(out, source, at, left)
            if not sent:
                raise ValueError("a file of pages ends too early")
            at, left = at + sent, left - sent


def _open(path: Path, stack: ExitStack) -> int:
    return stack.enter_context(open(layout.open_regular(path), "rb", buffering=0)).fileno()


def assemble(image: Image, entry: Assembled, target: Path, meter: Meter) -> None:
    """Write the file that a table stands for to `target`, which must not exist.

    Raises ImageDamaged and, where `target` cannot be written, OSError.
    """
    rows = image.page_table(entry)
    source, page = page_tables.pages_of(rows)
    with (
        ExitStack() as stack,
        open(target, "x+b") as out,
        ThreadPoolExecutor(workers()) as pool,
    ):
        out.truncate(entry.bytes)
        mapped = stack.enter_context(mmap.mmap(out.fileno(), entry.bytes))
        view = stack.enter_context(memoryview(mapped))
        fds = [_open(image.path / name, stack) for name in image.manifest.page_sources]

        def fill(start: int, end: int) -> int:
            at, size = start * PAGE, (end - start) * PAGE
            with view[at : at + size] as part:
                # A page that cannot be had would be a signal to the thread that writes to it.
                os.posix_fallocate(out.fileno(), at, size)
                return os.preadv(fds[source[start]], [part], int(page[start]) * PAGE)

        for done in pool.map(lambda run: fill(*run), _runs(source, page)):
            meter.reach(meter.done + done)
    found = file_digests([(target, entry.bytes)], Meter("unpack", entry.bytes, None))[0]
    if found != entry.digest:
        reason = f"{entry.file}, put together, does not have its digest"
        raise ImageDamaged(path=image.path, reason=reason)

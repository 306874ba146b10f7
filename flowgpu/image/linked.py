"""What a new image takes from the one before it: extents as hard links, so that neither image needs
the other and the file system counts who still has the bytes.

    linked = take(base, writer.path, job)               # before the pause: links all, reads digests
    link, slot = linked.place(numbers)                  # where the chunks are that digests found
    extents = linked.settle([(link, slot)], gpus, new)  # keeps what is worth it
    extent = extents[link]                              # as a chunk table wants it, or NOT_TAKEN

An extent that is not kept is no file of the new image: what was used of it is stored anew, and its
bytes are gone from the disk once the last older image is. `choose` says which ones are.

A packed extent is linked as it is. Its frames and digest, which only the manifest of the image
before has, wait in a note beside it until the writer seals (`take_notes`).
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flowgpu.errors import ImageDamaged, ImageVersion
from flowgpu.image import layout, pages
from flowgpu.image.manifest import FileEntry, Packed
from flowgpu.image.reader import Image

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
MOST_LINKS = 64
"""Linked extents of an image for each of its GPUs."""

MOST_DISK = 3
"""What an image's extents may take, as a multiple of the chunks that it needs of them."""

REWRITTEN = 16
"""One chunk is stored anew, only to let its old extent go, for so many that have to be stored."""

NOT_TAKEN = (1 << 16) - 1
"""Stands for no link and no extent."""

# What link(2) says where it cannot: another file system, one without links, too many, or not ours.
REFUSED = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


class Linked:
    """The linked extents of an image that is being written, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        names = map(layout.link_digests, count())
        found: list[Array] = []
        for name in names:
            if not (folder / name).exists():
                break
            data = np.fromfile(folder / name, np.uint8)
            found.append(data.reshape(-1, layout.DIGEST_BYTES))
        none = np.empty((0, layout.DIGEST_BYTES), np.uint8)
        self.digests: Array = np.concatenate([none, *found])
        """Digests of all slots of all links, one behind another, u8[n, 16]."""
        self._ends = np.cumsum([len(one) for one in found], dtype=np.uint64)
        self.usual: int | None = None
        """Bytes that the base stored beside what it linked itself, if it did."""

    @property
    def slots(self) -> list[int]:
        """How many slots each link has."""
        return [int(size) for size in np.diff(self._ends, prepend=np.uint64(0))]

    def place(self, numbers: Array) -> tuple[Array, Array]:
        """Link (u2) and slot (u8) of rows of `digests`; NOT_TAKEN and 0 for numbers behind them."""
        link = np.searchsorted(self._ends, numbers, side="right").astype(np.uint16)
        behind = link == len(self._ends)
        starts = np.concatenate((np.zeros(1, np.uint64), self._ends))
        slot = np.where(behind, 0, numbers - starts[link]).astype(np.uint64)
        link[behind] = NOT_TAKEN
        return link, slot

    def settle(self, wanted: Iterable[tuple[Array, Array]], gpus: int, new: int) -> Array:
        """Keep the links that are worth it, of which `wanted` (link, slot) would be used.

        `new` chunks are in no link. Gives the extent number of each link in an image of so many
        GPUs, or NOT_TAKEN: chunks that were found there are to be stored. Indexed with NOT_TAKEN,
        it gives NOT_TAKEN.
        """
        used = [np.zeros(slots, bool) for slots in self.slots]
        for link, slot in wanted:
            for number in np.unique(link[link != NOT_TAKEN]):
                used[number][slot[link == number]] = True
        counts = [int(np.count_nonzero(one)) for one in used]
        kept = choose(counts, self.slots, max(gpus, 1), new)
        numbers = np.full(NOT_TAKEN + 1, NOT_TAKEN, np.uint16)
        for old in range(len(used)):
            if old not in kept:
                self._move(old, None)
        for new, old in enumerate(kept):
            self._move(old, new)
            numbers[old] = gpus + new
        return numbers

    def _move(self, old: int, new: int | None) -> None:
        names = [layout.link_data, layout.link_digests]
        if not (self._folder / layout.link_data(old)).exists():
            names = [_packed_data, layout.link_digests, layout.link_note]
        for name in names:
            path = self._folder / name(old)
            if new is None:
                path.unlink()
            elif new != old:
                path.rename(self._folder / name(new))


def choose(used: Sequence[int], slots: Sequence[int], gpus: int, new: int) -> list[int]:
    """Which extents to keep, in order, given the slots that are used of each and those it has.

    What is not kept is stored anew, beside `new` chunks that are in none.
    """
    kept = sorted(filter(used.__getitem__, range(len(used))), key=lambda n: used[n] / slots[n])
    needed = new + sum(used)
    written, spare = new, new // REWRITTEN
    for number in list(kept):
        fits = 2 * used[number] < slots[number] and used[number] <= spare
        full = written + sum(slots[n] for n in kept) > MOST_DISK * needed
        if fits or full:
            kept.remove(number)
            written += used[number]
            spare -= used[number]
    largest = sorted(kept, key=lambda number: (-used[number], number))
    return sorted(largest[: MOST_LINKS * gpus])


def take(base: Path | None, folder: Path, job: str) -> Linked:
    """Link all extents and pages of the image `base` into the partial image `folder` of a job.

    `job` is its id. Gives no links, so that everything is stored, where there is no such image any
    more, it is damaged, or its file system does not link. What another job has written is not
    linked: digests tell chunks apart only as far as nobody makes them agree
    (docs/reference/image-format.md).
    """
    usual = None
    if base is not None:
        try:
            image = Image(base)
            if image.manifest.job.id == job:
                _link_all(image, folder)
                pages.link(image, folder)
                if image.manifest.linked_bytes:
                    usual = image.manifest.counts.gpu_bytes_stored
        except (ImageDamaged, ImageVersion, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (*REFUSED, errno.ENOENT):
                raise
            log.warning("nothing is shared with %s: %s", base, error)
            _remove_links(folder)
    linked = Linked(folder)
    linked.usual = usual
    return linked


def _link_all(image: Image, folder: Path) -> None:
    number = count()
    for index, extent in enumerate(image.extents):
        # An image of version 1 can end in a part of a chunk.
        if not extent.bytes or extent.bytes % layout.CHUNK_BYTES:
            continue
        new = next(number)
        frames = image.frames(index)
        data = layout.link_data(new) if frames is None else _packed_data(new)
        os.link(image.extent_data(index), folder / data)
        if frames is not None:
            digest = image.entry(layout.packed(extent.file)).digest
            note = {"bytes": extent.bytes, "digest": digest, "frames": frames}
            (folder / layout.link_note(new)).write_text(json.dumps(note))
        os.link(image.extent_digests(index), folder / layout.link_digests(new))
        # Wrong digests would make the new image wrong and still agree with themselves.
        image.check_digests(index)


def take_notes(folder: Path) -> list[tuple[Packed, FileEntry]]:
    """What the manifest is to say of each packed link of a partial image; its notes are removed.

    The digest is that of the image before, so that damage since then is found in both.
    """
    found = []
    for path in folder.glob("link*.packed"):
        note = json.loads(path.read_bytes())
        path.unlink()
        name = layout.packed(path.with_suffix(".data").name)
        packed = Packed(name, note["bytes"], "", tuple(note["frames"]))
        found.append((packed, FileEntry(name, sum(packed.frames), note["digest"])))
    return found


def _packed_data(number: int) -> str:
    return layout.packed(layout.link_data(number))


def _remove_links(folder: Path) -> None:
    for path in folder.glob("link*"):
        path.unlink()
    pages.unlink(folder)

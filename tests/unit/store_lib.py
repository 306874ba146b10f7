"""Images of made-up memory, written as a checkpoint writes them, for tests of the store."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest import mock

import criu_entries
import numpy as np
import zstandard

from flowgpu.host import criu_images
from flowgpu.image import compression, layout
from flowgpu.image.chunks import Kind, encode
from flowgpu.image.digests import chunk_digests
from flowgpu.image.linked import NOT_TAKEN, take
from flowgpu.image.manifest import Assembled, Block, Manifest, Packed, version_of
from flowgpu.image.reader import Image
from flowgpu.image.writer import ImageWriter

GOLDEN = Path(__file__).parents[1] / "golden" / "image-v2"
CHUNK = layout.CHUNK_BYTES
PAGE = layout.PAGE_BYTES
INACTIVE = -1
Memory = Sequence[Sequence[int]]
"""For each GPU its chunks: INACTIVE, 0 for zeros, or a number that stands for other bytes."""
Cpu = Sequence[Mapping[int, int]]
"""For each process its pages: number of the page, and a number that stands for its bytes."""


def chunk(number: int) -> bytes:
    return number.to_bytes(8, "little") * (CHUNK // 8)


def write(
    output: Path,
    memory: Memory,
    base: Path | None,
    job: str,
    step: Callable[[], None] = lambda: None,
    *,
    compress: bool = False,
    cpu: Cpu = ({},),
) -> None:
    """Write an image; `step` is called before each change to the disk that is made here.

    `compress` packs extents and files of pages, however small they are.
    """
    with ImageWriter(output, sync=False) as writer:
        step()
        linked = take(base, writer.path, job)
        numbers = {bytes(row): number for number, row in enumerate(linked.digests)}
        behind = len(linked.digests)
        found = []
        for chunks in memory:
            digests = [layout.digest(chunk(max(one, 0))) for one in chunks]
            known = [
                numbers.get(digest, behind) if one > 0 else behind
                for one, digest in zip(chunks, digests, strict=True)
            ]
            found.append(linked.place(np.array(known, np.uint64)))
        strange = {
            one
            for chunks, (link, _) in zip(memory, found, strict=True)
            for one, number in zip(chunks, link, strict=True)
            if one > 0 and number == NOT_TAKEN
        }
        extents = linked.settle(found, len(memory), len(strange))
        stored: dict[int, tuple[int, int]] = {}
        for index, chunks in enumerate(memory):
            link, slot = found[index]
            data, table = _gpu(index, chunks, extents[link], slot, stored)
            for path, content in (
                (writer.gpu_data(index), data),
                (writer.gpu_digests(index), chunk_digests(memoryview(data))),
                (writer.gpu_chunks(index), table),
            ):
                step()
                path.write_bytes(content)
        step()
        (writer.criu_dir / "inventory.img").write_bytes(job.encode())
        for number, pages in enumerate(cpu, 1):
            step()
            write_pages(writer.criu_dir, number, pages)
        writer.output_log.write_bytes(b"")
        packed: tuple[Packed, ...] = ()
        if compress:
            with mock.patch.object(compression, "WORTH_BYTES", 1):
                packed = compression.pack_image(writer.path, job)
        manifest = describe(writer, memory, job, packed, writer.share_pages())
        step()
        writer.commit(manifest)
        step()


def _gpu(
    index: int,
    chunks: Sequence[int],
    extents: np.ndarray,
    slots: np.ndarray,
    stored: dict[int, tuple[int, int]],
) -> tuple[bytes, bytes]:
    rows, data = [], []
    for number, extent, slot in zip(chunks, extents, slots, strict=True):
        if number <= 0:
            rows.append((Kind.ZERO if number == 0 else Kind.INACTIVE, 0, 0))
        elif extent != NOT_TAKEN:
            rows.append((Kind.SHARED, extent, slot))
        elif number in stored:
            rows.append((Kind.SHARED, *stored[number]))
        else:
            stored[number] = (index, len(data))
            rows.append((Kind.STORED, *stored[number]))
            data.append(chunk(number))
    columns = np.array(rows, np.uint64).reshape(-1, 3).T
    arrays = columns[0].astype(np.uint8), columns[1].astype(np.uint16), columns[2]
    return b"".join(data), encode(*arrays)


def write_pages(criu: Path, pid: int, pages: Mapping[int, int]) -> None:
    """CRIU's two files of a process, with runs of neighbours as CRIU has them."""
    messages = [criu_entries.make("pagemap_head", pages_id=pid)]
    for at in sorted(pages):
        last = messages[-1]
        if len(messages) > 1 and last.vaddr // PAGE + last.nr_pages == at:
            last.nr_pages += 1
        else:
            place = {"vaddr": at * PAGE, "compat_nr_pages": 0, "nr_pages": 1, "flags": 4}
            messages.append(criu_entries.make("pagemap_entry", **place))
    criu_entries.rewrite(criu / f"pagemap-{pid}.img", messages)
    content = b"".join(page(pages[at]) for at in sorted(pages))
    (criu / f"pages-{pid}.img").write_bytes(content)


def page(number: int) -> bytes:
    return number.to_bytes(8, "little") * (PAGE // 8)


def describe(
    writer: ImageWriter,
    memory: Memory,
    job: str,
    packed: Sequence[Packed] = (),
    assembled: tuple[Assembled, ...] = (),
) -> Manifest:
    golden = Image(GOLDEN).manifest
    extents = writer.extents()
    sizes = [len(chunks) * CHUNK for chunks in memory]
    gpus = []
    for index, size in enumerate(sizes):
        block = Block(0, id=1, address=1 << 40, bytes=size, offset=0, device=index)
        like = dataclasses.replace(golden.gpus[0], index=index, data_bytes=size)
        gpus.append(dataclasses.replace(like, blocks=(block,) if size else ()))
    own = sum(extent.bytes for extent in extents[: len(memory)])
    falling = dict.fromkeys(("gpu_bytes_reserved", "gpu_bytes_active"), sum(sizes))
    falling |= dict.fromkeys(("gpu_bytes_nonzero", "gpu_bytes_distinct"), sum(sizes))
    counts = dataclasses.replace(golden.counts, gpu_bytes_stored=own, **falling)
    files = writer.seal()
    packed = tuple(sorted((*packed, *writer.packed_links), key=lambda entry: entry.file))
    return dataclasses.replace(
        golden,
        version=version_of(packed, assembled),
        packed=packed,
        assembled=assembled,
        job=dataclasses.replace(golden.job, id=job, name=f"job {job}"),
        gpus=tuple(gpus),
        extents=extents,
        counts=counts,
        files=files,
    )


def read(image: Path) -> list[list[int]]:
    """The memory that an image has, by its files alone."""
    opened = Image(image)
    extents = [_extent(opened, number) for number in range(len(opened.extents))]
    memory = []
    for gpu in opened.manifest.gpus:
        table = opened.chunk_table(gpu.index)
        chunks = []
        for kind, extent, slot in zip(table.kind, table.extent, table.slot, strict=True):
            if kind >= Kind.STORED:
                data = extents[extent][int(slot) * CHUNK :][:CHUNK]
                assert data == data[:8] * (CHUNK // 8)
                chunks.append(int.from_bytes(data[:8], "little"))
            else:
                chunks.append(0 if kind == Kind.ZERO else INACTIVE)
        memory.append(chunks)
    return memory


def read_cpu(image: Path) -> list[dict[int, int]]:
    """The pages of each process, from what CRIU would get."""
    found = []
    with (
        tempfile.TemporaryDirectory() as place,
        compression.plain_criu(Image(image), [Path(place)], "job") as criu,
    ):
        for path in sorted(criu.glob("pagemap-*.img")):
            name, runs = criu_images.page_runs(path)
            data = (criu / name).read_bytes()
            rows = [data[at : at + PAGE] for at in range(0, len(data), PAGE)]
            assert all(row == row[:8] * (PAGE // 8) for row in rows)
            values = [int.from_bytes(row[:8], "little") for row in rows]
            at = [first + number for first, count in runs for number in range(count)]
            found.append(dict(zip(at, values, strict=True)))
    return found


def _extent(image: Image, number: int) -> bytes:
    data = image.extent_data(number).read_bytes()
    if image.frames(number) is None:
        return data
    return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()

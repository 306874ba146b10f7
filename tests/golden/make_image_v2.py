"""Make the golden image of format version 2: `python tests/golden/make_image_v2.py [FOLDER]`.

The image in image-v2/ was made once by this program and must go on opening; it is not made anew
when the writer changes. Everything in it is fixed, so that a second run gives the same bytes. The
image in image-v1/ was made in the same way when version 1 was the newest.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flowgpu.image import layout
from flowgpu.image.chunks import Kind, encode
from flowgpu.image.digests import chunk_digests
from flowgpu.image.manifest import Block, Counts, Gpu, Host, Job, Library, Manifest, Task
from flowgpu.image.writer import ImageWriter

CHUNK = layout.CHUNK_BYTES
BLOCK_BYTES = (5 * CHUNK, 3 * CHUNK)
WINDOW = 0x200000000000
N, Z, S, D = Kind.INACTIVE, Kind.ZERO, Kind.STORED, Kind.SHARED


def chunk_rows(gpu: int, gpus: int) -> list[tuple[int, int, int]]:
    """Kind, extent and slot of the eight chunks of a GPU.

    The last GPU shares with the first one, and with what an earlier image had.
    """
    link = gpus
    first = [(S, 0, 0), (S, 0, 1), (D, 0, 0), (D, 0, 1), (Z, 0, 0), (N, 0, 0), (N, 0, 0)]
    other = [(S, gpu, 0), (D, 0, 1), (D, link, 1), (D, link, 1), (D, link, 0), (D, gpu, 0)]
    return [*first, (S, 0, 2)] if gpu == 0 else [*other, (N, 0, 0), (Z, 0, 0)]


def noise(name: str, size: int) -> bytes:
    """Bytes that look random and are always the same."""
    return hashlib.shake_128(name.encode()).digest(size)


def slots(name: str, count: int) -> bytes:
    """Chunks that differ, of little entropy so that the image packs well."""
    return b"".join(noise(f"{name} {i}", 64) * (CHUNK // 64) for i in range(count))


def manifest(writer: ImageWriter, gpus: int) -> Manifest:
    """The manifest of a writer whose files are all there."""
    files = writer.seal()
    first, second = BLOCK_BYTES
    blocks = (
        Block(0, id=1, address=WINDOW, bytes=first, offset=0, device=0),
        Block(0, id=4, address=WINDOW + (2 << 20), bytes=second, offset=first, device=0),
    )
    stored = sum(extent.bytes for extent in writer.extents()[:gpus])
    return Manifest(
        created="2026-01-02T03:04:05Z",
        flowgpu="0.2.0",
        criu="4.2.1",
        engine="native",
        gpu="emulated",
        job=Job(id="0123456789ab", name="golden", command=("python3", "train.py"), cwd="/job"),
        host=Host(name="golden", kernel="6.18.0", machine="x86_64"),
        root_pid=100,
        pids=(100, 101),
        pipes={"stdout": "pipe:[4711]", "stderr": "pipe:[4712]"},
        tasks=(Task(pid=100, allocations=3, allocation_bytes=30000),),
        gpus=tuple(
            Gpu(
                index=index,
                name="FlowGPU emulated GPU",
                uuid=f"GPU-00000000-0000-0000-0000-00000000000{index}",
                memory_bytes=1 << 30,
                compute_capability="9.0",
                driver="13000",
                data_bytes=first + second,
                blocks=blocks,
            )
            for index in range(gpus)
        ),
        extents=writer.extents(),
        reductions=("active", "zero", "dedup"),
        ghost="warm",
        libraries=(Library(path="lib/intercept/libcuda.so.1", digest=32 * "0"),),
        counts=Counts(
            gpu_bytes_reserved=gpus * (first + second),
            gpu_bytes_active=gpus * 6 * CHUNK,
            gpu_bytes_nonzero=gpus * 5 * CHUNK,
            gpu_bytes_distinct=gpus * 3 * CHUNK,
            gpu_bytes_stored=stored,
            cpu_bytes=3000,
            image_bytes=writer.image_bytes(),
            allocations=3,
        ),
        phases={"prepare": 0.5, "gate": 0.001, "copy": 0.25, "commit": 0.125},
        pause_seconds=0.5,
        total_seconds=1.0,
        files=files,
    )


def write_gpu_files(writer: ImageWriter, gpus: int) -> None:
    """Extents, digests and tables."""
    for index in range(gpus):
        rows = chunk_rows(index, gpus)
        data = slots(f"gpu{index}", sum(kind == S for kind, _, _ in rows))
        writer.gpu_data(index).write_bytes(data)
        writer.gpu_digests(index).write_bytes(chunk_digests(memoryview(data)))
        kind, extent, slot = zip(*rows, strict=True)
        arrays = np.array(kind, np.uint8), np.array(extent, np.uint16), np.array(slot, np.uint64)
        writer.gpu_chunks(index).write_bytes(encode(*arrays))
    if gpus > 1:
        data = slots("link0", 3)
        writer.link_data(0).write_bytes(data)
        writer.link_digests(0).write_bytes(chunk_digests(memoryview(data)))


def make(output: Path, gpus: int = 2) -> None:
    """Write the image to `output`."""
    with ImageWriter(output) as writer:
        write_gpu_files(writer, gpus)
        (writer.criu_dir / "pages-1.img").write_bytes(noise("pages", 3000))
        (writer.criu_dir / "inventory.img").write_bytes(noise("inventory", 40))
        (writer.criu_dir / "empty.img").write_bytes(b"")
        writer.output_log.write_bytes(b"step 1 loss 0.5\n")
        writer.commit(manifest(writer, gpus))


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "image-v2")
    print(f"format {layout.FORMAT} version {layout.VERSION}")

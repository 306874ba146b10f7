"""Make the golden image of format version 1: `python tests/golden/make_image_v1.py [FOLDER]`.

The image in image-v1/ was made once by this program and must go on opening; it is not made anew
when the writer changes. Everything in it is fixed, so that a second run gives the same bytes.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flowgpu.image import layout
from flowgpu.image.digests import chunk_digests
from flowgpu.image.manifest import Block, Counts, Gpu, Host, Job, Library, Manifest, Task
from flowgpu.image.writer import ImageWriter

BLOCK_BYTES = (
    20480,
    16384,
)  # the two blocks meet inside the first chunk; the second chunk is short
WINDOW = 0x200000000000


def noise(name: str, size: int) -> bytes:
    """Bytes that look random and are always the same."""
    return hashlib.shake_128(name.encode()).digest(size)


def manifest(writer: ImageWriter, gpus: int) -> Manifest:
    """The manifest of a writer whose files are all there."""
    files = writer.seal()
    first, second = BLOCK_BYTES
    data_bytes = first + second
    blocks = (
        Block(0, id=1, address=WINDOW, bytes=first, offset=0, device=0),
        Block(0, id=4, address=WINDOW + (2 << 20), bytes=second, offset=first, device=0),
    )
    return Manifest(
        created="2026-01-02T03:04:05Z",
        flowgpu="0.1.0",
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
                data_bytes=data_bytes,
                blocks=blocks,
            )
            for index in range(gpus)
        ),
        libraries=(Library(path="lib/intercept/libcuda.so.1", digest=32 * "0"),),
        counts=Counts(
            gpu_bytes_reserved=gpus * data_bytes,
            gpu_bytes_active=30000,
            gpu_bytes_stored=gpus * data_bytes,
            cpu_bytes=3000,
            image_bytes=writer.image_bytes(),
            allocations=3,
        ),
        phases={"prepare": 0.5, "gate": 0.001, "copy": 0.25, "commit": 0.125},
        pause_seconds=0.5,
        total_seconds=1.0,
        files=files,
    )


def make(output: Path, gpus: int = 1) -> None:
    """Write the image to `output`."""
    with ImageWriter(output) as writer:
        for index in range(gpus):
            data = noise(f"gpu{index}", sum(BLOCK_BYTES))
            writer.gpu_data(index).write_bytes(data)
            writer.gpu_digests(index).write_bytes(chunk_digests(memoryview(data)))
        (writer.criu_dir / "pages-1.img").write_bytes(noise("pages", 3000))
        (writer.criu_dir / "inventory.img").write_bytes(noise("inventory", 40))
        (writer.criu_dir / "empty.img").write_bytes(b"")
        writer.output_log.write_bytes(b"step 1 loss 0.5\n")
        writer.commit(manifest(writer, gpus))


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "image-v1")
    print(f"format {layout.FORMAT} version {layout.VERSION}")

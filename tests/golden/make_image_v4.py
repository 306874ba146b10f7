"""Make the golden image of format version 4: `python tests/golden/make_image_v4.py [FOLDER]`.

It is that of version 2 (make_image_v2.py) with a page table in place of CRIU's file of pages. It
was made once and must go on opening. A second run gives the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

import make_image_v2 as base

from flowgpu.image import layout, page_tables
from flowgpu.image.digests import Meter, file_digests
from flowgpu.image.manifest import Assembled, Manifest
from flowgpu.image.writer import ImageWriter

PAGE = layout.PAGE_BYTES
ROWS = [(1, 3, 0), (0, 1, 0), (2, 1, 1), (1, 1, 3), (0, 1, 1)]
SOURCES = (2, 4, 2)  # pages of each


def source(number: int) -> bytes:
    return base.noise(f"pages{number}", SOURCES[number] * PAGE)


def pages() -> bytes:
    """What the table stands for."""
    return b"".join(
        source(number)[first * PAGE : (first + count) * PAGE] for number, count, first in ROWS
    )


def make(output: Path) -> None:
    """Write the image to `output`."""
    with ImageWriter(output) as writer:
        base.write_gpu_files(writer, 2)
        plain = writer.criu_dir / "pages-1.img"
        plain.write_bytes(pages())
        size = plain.stat().st_size
        digest = file_digests([(plain, size)], Meter("", size, None))[0]
        plain.unlink()
        table = np.array(ROWS, page_tables.ROW).tobytes()
        (writer.path / layout.page_table("criu/pages-1.img")).write_bytes(table)
        for number in range(len(SOURCES)):
            name = layout.pages_link(number - 1) if number else layout.PAGES_DATA
            (writer.path / name).write_bytes(source(number))
        (writer.criu_dir / "inventory.img").write_bytes(base.noise("inventory", 40))
        writer.output_log.write_bytes(b"step 1 loss 0.5\n")
        fields = vars(base.manifest(writer, 2)) | {
            "version": layout.SHARED_VERSION,
            "assembled": (Assembled("criu/pages-1.img", size, digest),),
        }
        writer.commit(Manifest(**fields))


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "image-v4")
    print(f"format {layout.FORMAT} version {layout.SHARED_VERSION}")

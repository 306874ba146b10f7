"""Make the golden image of format version 3: `python tests/golden/make_image_v3.py [FOLDER]`.

It is that of version 2 (make_image_v2.py) with packed extents and a packed file of two frames more.
It was made once and must go on opening. A second run gives the same bytes with the same libzstd.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import make_image_v2 as base

from flowgpu.image import compression, layout
from flowgpu.image.manifest import Manifest
from flowgpu.image.writer import ImageWriter

PACKED_BYTES = layout.FRAME_BYTES + 3 * 4096


def pages() -> bytes:
    """What was packed: little entropy, so that the image stays small."""
    return base.noise("packed", 4096) * (PACKED_BYTES // 4096)


def make(output: Path) -> None:
    """Write the image to `output`."""
    compression.WORTH_BYTES = 1
    with ImageWriter(output) as writer:
        base.write_gpu_files(writer, 2)
        (writer.criu_dir / "pages-1.img").write_bytes(base.noise("pages", 3000))
        (writer.criu_dir / "pages-2.img").write_bytes(pages())
        (writer.criu_dir / "inventory.img").write_bytes(base.noise("inventory", 40))
        writer.output_log.write_bytes(b"step 1 loss 0.5\n")
        packed = compression.pack_image(writer.path, "golden")
        fields = vars(base.manifest(writer, 2))
        writer.commit(Manifest(**fields | {"version": layout.PACKED_VERSION, "packed": packed}))


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "image-v3")
    print(f"format {layout.FORMAT} version {layout.PACKED_VERSION}")

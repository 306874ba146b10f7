"""Files of an image as zstd frames of FRAME_BYTES each, so that threads share them.

    packed = pack_image(folder, job)                     # when all is written, before the seal
    with plain_criu(image, (place,), job) as criu_dir:   # CRIU reads plain files only

Packed extents are read by the mover (native/ghost/frames.h).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgpu.errors import ImageDamaged, NoCompression, NotEnoughDisk
from flowgpu.image import layout, pages, space
from flowgpu.image.digests import Meter, ProgressFunction, file_digests, workers
from flowgpu.image.manifest import Packed
from flowgpu.image.reader import Image

if TYPE_CHECKING:
    import zstandard

LEVEL = 1
WORTH_BYTES = 1 << 20
"""A smaller file is left as it is."""

SAMPLES = 32
SAMPLE_BYTES = 64 << 10
PAYS = 0.9
"""A file is packed when samples of it, and then it itself, have at most this share of its bytes."""

_thread = threading.local()


class BadFrame(Exception):
    """A frame, or all of them together, is not what was packed; the text names it."""


def need_library() -> None:
    """Raise NoCompression unless files can be packed and unpacked here."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        raise NoCompression(name="zstandard") from None


def pack_image(
    folder: Path, job: str, progress: ProgressFunction | None = None
) -> tuple[Packed, ...]:
    """Pack CRIU's files of pages and extents of GPUs in a partial image, those where it pays.

    Raises NoCompression, NotEnoughDisk, and what `progress` raises.
    """
    need_library()
    pages = (folder / layout.CRIU_DIR).glob("pages-*.img")
    paths = filter(pays, (*pages, *folder.glob("gpu*.data")))
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
    # Each is there twice for a time.
    space.need(folder, max(sizes.values(), default=0), job)
    meter = Meter("pack", sum(sizes.values()), progress)
    return tuple(
        filter(None, (pack(folder, name, meter) for name in sorted(sizes, key=layout.packed)))
    )


@contextlib.contextmanager
def plain_criu(
    image: Image, places: Sequence[Path], job: str, progress: ProgressFunction | None = None
) -> Iterator[Path]:
    """The folder of CRIU's images of `image` with every file as CRIU wrote it.

    Where there are packed or assembled ones it is a new folder, of links to the others, in the
    first of `places` that has the space; it is removed at the end. Raises NoCompression,
    NotEnoughDisk, ImageDamaged.
    """
    packed = [entry for entry in image.manifest.packed if not layout.is_extent(entry.plain)]
    assembled = image.manifest.assembled
    if not packed and not assembled:
        yield image.criu_dir
        return
    if packed:
        need_library()
    total = sum(entry.bytes for entry in packed) + sum(entry.bytes for entry in assembled)
    prefix = f"flowgpu-unpacked-{image.manifest.job.id}-"
    for place in places:
        # What a crash has left of the same job; it has no other restore at the same time.
        for left in place.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
    place = next((place for place in places if space.free(place) >= total), places[0])
    space.need(place, total, job)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    try:
        meter = Meter("unpack", total, progress)
        hidden = {Path(entry.file).name for entry in packed}
        for path in image.criu_dir.iterdir():
            if path.name not in hidden:
                (folder / path.name).symlink_to(path.absolute())
        try:
            for entry in packed:
                unpack(image.path, entry, folder / Path(entry.plain).name, meter)
            for whole in assembled:
                pages.assemble(image, whole, folder / Path(whole.file).name, meter)
        except BadFrame as error:
            raise ImageDamaged(path=image.path, reason=str(error)) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise NotEnoughDisk(path=place, free="too little", job=job, needed="more") from error
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pays(path: Path) -> bool:
    """True if samples from all over a file shrink by enough."""
    size = path.stat().st_size
    if size < WORTH_BYTES:
        return False
    step = max(size // SAMPLES, SAMPLE_BYTES)
    before = after = 0
    with open(layout.open_regular(path), "rb") as file:
        for at in range(0, size, step):
            data = os.pread(file.fileno(), SAMPLE_BYTES, at)
            before += len(data)
            after += len(_compressor().compress(data))
    return after <= before * PAYS


def pack(folder: Path, name: str, meter: Meter) -> Packed | None:
    """Replace a file of a partial image by its packed form; None where that is too large."""
    source = folder / name
    size = source.stat().st_size
    packed = folder / layout.packed(name)
    with open(layout.open_regular(source), "rb") as file, open(packed, "xb") as out:
        frames = [out.write(frame) for frame in _frames(file.fileno(), size, meter)]
    if sum(frames) > size * PAYS:
        packed.unlink()
        return None
    digest = ""
    if not layout.is_extent(name):
        digest = file_digests([(source, size)], Meter("pack", size, None))[0]
    source.unlink()
    return Packed(file=layout.packed(name), bytes=size, digest=digest, frames=tuple(frames))


def unpack(folder: Path, entry: Packed, target: Path, meter: Meter) -> None:
    """Write the file that was packed to `target`, which must not exist. Raises BadFrame, OSError.

    The packed file is that of an image in `folder` which is open, so has the bytes of its frames.
    """
    ends = _ends(entry)
    # Threads write to the pages of a mapping: writes to one file in memory wait for each other.
    with (
        open(target, "x+b") as out,
        _sized(out.fileno(), entry.bytes) as mapped,
        memoryview(mapped) as view,
        open(layout.open_regular(folder / entry.file), "rb") as file,
        ThreadPoolExecutor(workers()) as pool,
    ):

        def work(number: int) -> int:
            at = number * layout.FRAME_BYTES
            with view[at : at + layout.FRAME_BYTES] as part:
                # A page that cannot be had would be a signal to the thread that writes to it.
                os.posix_fallocate(out.fileno(), at, len(part))
                start = ends[number] - entry.frames[number]
                try:
                    data = os.pread(file.fileno(), entry.frames[number], start)
                    _expand(data, part)
                except (OSError, *_errors()) as error:
                    raise BadFrame(f"frame {number} of {entry.file}: {error}") from None
                return len(part)

        futures = [pool.submit(work, number) for number in range(len(ends))]
        try:
            for future in futures:
                meter.reach(meter.done + future.result())
        finally:
            pool.shutdown(cancel_futures=True)
    found = file_digests([(target, entry.bytes)], Meter("unpack", entry.bytes, None))[0]
    if found != entry.digest:
        raise BadFrame(f"{entry.file} does not have the digest of what was packed")


def _frames(fd: int, size: int, meter: Meter) -> Iterator[bytes]:
    """The frames of a file, in order; as many at a time as threads can use."""

    def work(at: int) -> bytes:
        if not hasattr(_thread, "buffer"):
            _thread.buffer = bytearray(layout.FRAME_BYTES)
        with memoryview(_thread.buffer)[: min(layout.FRAME_BYTES, size - at)] as data:
            done = 0
            while done < len(data):
                got = os.preadv(fd, [data[done:]], at + done)
                if not got:
                    raise OSError(f"it ends at byte {os.fstat(fd).st_size}")
                done += got
            return _compressor().compress(data)

    before = meter.done
    starts = iter(range(0, size, layout.FRAME_BYTES))
    waiting: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(workers()) as pool:
        waiting.extend(pool.submit(work, at) for at in islice(starts, 2 * workers()))
        for end in count(layout.FRAME_BYTES, layout.FRAME_BYTES):
            if not waiting:
                return
            frame = waiting.popleft().result()
            waiting.extend(pool.submit(work, at) for at in islice(starts, 1))
            yield frame
            meter.reach(before + min(end, size))


def _sized(fd: int, size: int) -> mmap.mmap:
    os.truncate(fd, size)
    return mmap.mmap(fd, size)


def _ends(entry: Packed) -> list[int]:
    end, ends = 0, []
    for size in entry.frames:
        end += size
        ends.append(end)
    return ends


def _expand(data: bytes, target: memoryview) -> None:
    """Expand one frame, which must fill `target` and end with it."""
    if not hasattr(_thread, "decompressor"):
        import zstandard

        _thread.decompressor = zstandard.ZstdDecompressor()
    reader = _thread.decompressor.stream_reader(data)
    done = 0
    while done < len(target):
        got = reader.readinto(target[done:])
        if not got:
            raise ValueError(f"it holds {done} bytes, not {len(target)}")
        done += got
    # Reads the frame's checksum, too.
    if reader.read(1):
        raise ValueError(f"it holds more than {len(target)} bytes")


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_thread, "compressor"):
        import zstandard

        _thread.compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    found: zstandard.ZstdCompressor = _thread.compressor
    return found


def _errors() -> tuple[Any, ...]:
    import zstandard

    return (zstandard.ZstdError, ValueError)

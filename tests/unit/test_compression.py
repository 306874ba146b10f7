"""Packed files of images: frames of their own, found by name when they are damaged."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from mover_lib import mounted_tmpfs

from flowgpu.errors import CheckpointTimeout, ImageDamaged, NoCompression, NotEnoughDisk
from flowgpu.image import compression, inspect, layout, space
from flowgpu.image.compression import pack_image, plain_criu
from flowgpu.image.linked import take
from flowgpu.image.manifest import Manifest, Packed
from flowgpu.image.reader import Image
from flowgpu.image.writer import ImageWriter
from tests.unit.coordinator_job import Jobs, Running
from tests.unit.test_image import GOLDEN, maker, rewrite

FRAME = layout.FRAME_BYTES
PAGES = "criu/pages-1.img"


def plain(size: int, seed: int = 1) -> bytes:
    """Bytes of which half are random: they pack to about half."""
    generator = random.Random(seed)
    rows = (generator.randbytes(32) + bytes(32) for _ in range(-(-size // 64)))
    return b"".join(rows)[:size]


def write_image(path: Path, contents: dict[str, bytes]) -> Image:
    """An image with these files of pages, packed."""
    with ImageWriter(path) as writer:
        maker.write_gpu_files(writer, 2)
        for name, data in contents.items():
            (writer.criu_dir / name).write_bytes(data)
        (writer.criu_dir / "inventory.img").write_bytes(b"inventory")
        writer.output_log.write_bytes(b"")
        packed = pack_image(writer.path, "train")
        version = layout.PACKED_VERSION if packed else layout.VERSION
        fields = vars(maker.manifest(writer, 2)) | {"packed": packed, "version": version}
        writer.commit(Manifest(**fields))
    return Image(path)


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """Three frames, of which the last is short, a file that is noise, and a small one."""
    contents = {
        "pages-1.img": plain(2 * FRAME + 12345),
        "pages-2.img": random.Random(2).randbytes(2 << 20),
        "pages-3.img": bytes(4096),
    }
    return write_image(tmp_path / "image", contents)


def test_only_what_shrinks_is_packed(image: Image) -> None:
    manifest = image.manifest
    assert manifest.version == 3
    assert [entry.file for entry in manifest.packed] == [f"{PAGES}.zst"]
    names = {path.name for path in image.criu_dir.iterdir()}
    assert names == {"pages-1.img.zst", "pages-2.img", "pages-3.img", "inventory.img"}
    entry = manifest.packed[0]
    assert (entry.bytes, len(entry.frames)) == (2 * FRAME + 12345, 3)
    assert sum(entry.frames) < 0.7 * entry.bytes
    assert image.verify() > 0
    found = inspect.summary(image.path)["packed"]
    assert found == [{"file": entry.file, "bytes": sum(entry.frames), "plain_bytes": entry.bytes}]


def test_any_zstd_reads_a_packed_file(image: Image) -> None:
    data = (image.path / f"{PAGES}.zst").read_bytes()
    reader = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
    assert reader.read() == plain(2 * FRAME + 12345)


def test_criu_gets_a_folder_of_plain_files(image: Image, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    events: list[Any] = []
    with plain_criu(image, [place], "train", events.append) as folder:
        assert folder.parent == place and folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "pages-1.img").read_bytes() == plain(2 * FRAME + 12345)
        assert (folder / "inventory.img").read_bytes() == b"inventory"
        assert {path.name for path in folder.iterdir()} == {
            *("pages-1.img", "pages-2.img", "pages-3.img", "inventory.img")
        }
    assert not any(place.iterdir())
    assert events[-1]["done"] == events[-1]["total"] == 2 * FRAME + 12345


def test_an_image_without_packed_files_is_used_as_it_is(tmp_path: Path) -> None:
    image = write_image(tmp_path / "image", {"pages-1.img": random.Random(3).randbytes(2 << 20)})
    assert image.manifest.version == 2
    assert b"packed" not in (image.path / "manifest.json").read_bytes()
    with plain_criu(image, [], "train") as folder:
        assert folder == image.criu_dir


def test_a_file_whose_samples_shrink_and_which_does_not_stays_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "pays", lambda path: path.name == "pages-1.img")
    image = write_image(tmp_path / "image", {"pages-1.img": random.Random(3).randbytes(2 << 20)})
    assert not image.manifest.packed
    assert {path.name for path in image.criu_dir.iterdir()} == {"pages-1.img", "inventory.img"}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("where", ["magic", "header", "middle", "checksum"])
def test_a_flipped_bit_is_found_and_the_frame_named(
    image: Image, tmp_path: Path, number: int, where: str
) -> None:
    entry = image.manifest.packed[0]
    start, size = sum(entry.frames[:number]), entry.frames[number]
    offset = {"magic": 0, "header": 6, "middle": size // 2, "checksum": size - 1}[where]
    flip(image.path / entry.file, start + offset)
    again = Image(image.path)
    with pytest.raises(ImageDamaged, match=r"pages-1\.img\.zst does not have its digest"):
        again.verify("cpu")
    with pytest.raises(ImageDamaged, match=rf"frame {number} of criu/pages-1\.img\.zst"):
        enter(again, tmp_path)
    assert not list(tmp_path.glob("flowgpu-unpacked-*"))


def enter(image: Image, place: Path) -> None:
    with plain_criu(image, [place], "train"):
        raise AssertionError("it was unpacked")


def test_a_file_cut_short_is_found_at_once(image: Image) -> None:
    path = image.path / f"{PAGES}.zst"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ImageDamaged, match=r"pages-1\.img\.zst has"):
        Image(image.path)


def test_frames_of_another_file_are_found(image: Image, tmp_path: Path) -> None:
    """The other file has as many frames of the same sizes, each whole, with other bytes."""
    other = write_image(tmp_path / "other", {"pages-1.img": plain(2 * FRAME + 12345, seed=9)})
    path = other.path / f"{PAGES}.zst"
    entry = image.manifest.packed[0]
    taken = other.manifest.packed[0]
    mixed = Packed(entry.file, entry.bytes, entry.digest, taken.frames)
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "criu").mkdir()
    (tmp_path / "mixed" / entry.file).write_bytes(path.read_bytes())
    with pytest.raises(compression.BadFrame, match=r"pages-1\.img\.zst does not have the digest"):
        compression.unpack(
            tmp_path / "mixed", mixed, tmp_path / "out", compression.Meter("", 0, None)
        )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda entry: entry["frames"].append(1), "frames"),
        (lambda entry: entry["frames"].__setitem__(0, entry["frames"][0] + 1), "bytes"),
        (lambda entry: entry["frames"].__setitem__(0, 0), "frame's size"),
        (lambda entry: entry.update(bytes=0), "nothing"),
        (lambda entry: entry.update(file="criu/inventory.img"), "as a packed file"),
        (lambda entry: entry.update(file="output.log.zst"), "as a packed file"),
        (lambda entry: entry.update(file="criu/../criu/pages-1.img.zst"), "bytes"),
    ],
)
def test_a_manifest_whose_packed_files_do_not_fit_is_damaged(
    image: Image, change: Callable[[Any], None], says: str
) -> None:
    rewrite(image.path, lambda fields: change(fields["packed"][0]))
    with pytest.raises(ImageDamaged, match=says):
        Image(image.path)


def test_a_packed_file_is_not_there_twice(image: Image) -> None:
    def change(fields: Any) -> None:
        fields["files"].append({"path": PAGES, "bytes": 0, "digest": 32 * "0"})

    rewrite(image.path, change)
    with pytest.raises(ImageDamaged, match="beside"):
        Image(image.path)


def test_the_first_place_with_room_is_taken(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / "small", tmp_path / "large"]
    for place in places:
        place.mkdir()
    room = {places[0]: 1, places[1]: 1 << 40}
    monkeypatch.setattr(space, "free", lambda folder: room[folder])
    left = places[1] / f"flowgpu-unpacked-{image.manifest.job.id}-crash"
    left.mkdir()
    with plain_criu(image, places, "train") as folder:
        assert folder.parent == places[1]
        assert not left.exists()
    room[places[1]] = 2
    with pytest.raises(NotEnoughDisk), plain_criu(image, places, "train"):
        raise AssertionError("there is no room")


def test_a_place_that_fills_up_meanwhile_is_no_damage(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "free", lambda folder: 1 << 40)
    with mounted_tmpfs(tmp_path / "tmpfs", "5m") as place:
        with pytest.raises(NotEnoughDisk):
            enter(image, place)
        assert not any(place.iterdir())


def test_packing_refuses_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "free", lambda folder: 1 << 20)
    with pytest.raises(NotEnoughDisk):
        write_image(tmp_path / "image", {"pages-1.img": plain(2 << 20)})
    assert not list(tmp_path.iterdir())


def test_without_the_library_it_is_refused_by_name(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(NoCompression, match="zstandard"):
        enter(image, tmp_path)
    with pytest.raises(NoCompression, match="zstandard"):
        write_image(tmp_path / "other", {"pages-1.img": plain(2 << 20)})
    assert image.verify() > 0


@pytest.fixture
def packed_extents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    """An image whose extents are packed although they are small."""
    monkeypatch.setattr(compression, "WORTH_BYTES", 1)
    return write_image(tmp_path / "image", {"pages-1.img": bytes(2 << 20)})


def test_extents_are_packed_too_but_for_those_of_earlier_images(packed_extents: Image) -> None:
    image = packed_extents
    names = [entry.file for entry in image.manifest.packed]
    assert names == ["criu/pages-1.img.zst", "gpu0.data.zst", "gpu1.data.zst"]
    assert [(e.file, e.slots) for e in image.extents] == [
        *[("gpu0.data", 3), ("gpu1.data", 1), ("link0.data", 3)]
    ]
    assert image.frames(2) is None
    assert image.extent_data(2).name == "link0.data"
    plain = Image(GOLDEN / "image-v2")
    for number in (0, 1):
        assert len(image.frames(number) or ()) == 1
        data = zstandard.decompress(image.extent_data(number).read_bytes())
        assert data == plain.extent_data(number).read_bytes()
        assert (
            image.extent_digests(number).read_bytes() == plain.extent_digests(number).read_bytes()
        )
        assert image.chunk_table(number).chunk_count == 8


def test_a_flipped_bit_of_a_packed_extent_is_for_the_mover_or_verify(packed_extents: Image) -> None:
    flip(packed_extents.path / "gpu0.data.zst", 20)
    image = Image(packed_extents.path)
    image.verify("cpu")
    with pytest.raises(ImageDamaged, match=r"gpu0\.data\.zst does not have its digest"):
        image.verify()


def test_where_links_are_refused_no_note_of_a_packed_extent_stays(
    packed_extents: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "next"
    folder.mkdir()
    job = packed_extents.manifest.job.id
    assert take(packed_extents.path, folder, job).slots == [3, 1, 3]
    assert (folder / "link0.packed").exists() and not (folder / "link2.packed").exists()
    shutil.rmtree(folder)
    folder.mkdir()
    links = iter(range(3))
    link = os.link

    def third_fails(source: Any, target: Any) -> None:
        if next(links) == 2:
            raise OSError(errno.EXDEV, "other file system")
        link(source, target)

    monkeypatch.setattr(os, "link", third_fails)
    assert take(packed_extents.path, folder, job).slots == []
    assert not os.listdir(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda entry: entry.update(bytes=entry["bytes"] + 1), "bytes of"),
        (lambda entry: entry.update(file="gpu2.data.zst"), "as a packed file"),
        (lambda entry: entry.update(file="link1.data.zst"), "as a packed file"),
        (lambda entry: entry.update(file="link0.data.zst"), "bytes of 98304"),
    ],
)
def test_a_packed_extent_fits_its_gpu(
    packed_extents: Image, change: Callable[[Any], None], says: str
) -> None:
    rewrite(packed_extents.path, lambda fields: change(fields["packed"][2]))
    with pytest.raises(ImageDamaged, match=says):
        Image(packed_extents.path)


# With the real coordinator and CRIU

PROGRAM = """
import os, random, sys, time
generator = random.Random(5)
data = b"".join(generator.randbytes(32) + bytes(32) for _ in range(24 << 14))
print("ready", flush=True)
number = 0
while True:
    number += 1
    right = data == b"".join([data[:1 << 20], data[1 << 20:]])
    print(f"step {number}" if right and sum(data[:6400]) == SUM else "torn", flush=True)
    time.sleep(0.01)
"""


def started(jobs: Jobs, **options: Any) -> Running:
    generator = random.Random(5)
    first = b"".join(generator.randbytes(32) for _ in range(100))
    job = jobs.run([sys.executable, "-c", PROGRAM.replace("SUM", str(sum(first)))], **options)
    job.wait_line("step 3")
    return job


def is_counting(lines: list[str]) -> bool:
    return lines == ["ready", *(f"step {n + 1}" for n in range(len(lines) - 1))]


@pytest.mark.parametrize("leave_running", [False, True])
def test_a_job_comes_back_from_packed_pages(
    jobs: Jobs, tmp_path: Path, leave_running: bool
) -> None:
    job = started(jobs)
    result = job.dump(tmp_path / "image", compress=True, leave_running=leave_running)
    assert result["phases"]["pack"] > 0
    assert result["cpu_bytes"] > 24 << 20
    assert result["image_bytes"] < 0.8 * result["cpu_bytes"]
    if leave_running:
        job.wait_steps(3)
        job.ask("kill")
    job.end()
    image = Image(tmp_path / "image")
    assert image.manifest.packed and image.verify() > 0
    before = (image.path / "output.log").read_text().splitlines()
    again = jobs.restore(image.path)
    again.wait_steps(10)
    assert is_counting(before + again.lines)
    assert again.ask("wait-restored")["phases"]["unpack"] > 0
    assert not list(jobs.registry.base.rglob("flowgpu-unpacked-*"))
    # What was restored from packed pages can be dumped plain.
    again.dump(tmp_path / "second")
    assert Image(tmp_path / "second").manifest.version == 2
    third = jobs.restore(tmp_path / "second")
    third.wait_steps(3)
    assert is_counting(before + again.lines + third.lines)


def test_damaged_packed_pages_are_not_restored(jobs: Jobs, tmp_path: Path) -> None:
    job = started(jobs)
    job.dump(tmp_path / "image", compress=True)
    job.end()
    image = Image(tmp_path / "image")
    entry = max(image.manifest.packed, key=lambda entry: entry.bytes)
    flip(image.path / entry.file, entry.frames[0] + 1000)
    failed = jobs.restore(image.path)
    with pytest.raises(ImageDamaged, match=rf"frame 1 of {entry.file}"):
        failed.ask("wait-restored")


def test_a_coordinator_without_the_library_refuses_and_the_job_goes_on(
    jobs: Jobs, tmp_path: Path
) -> None:
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "zstandard.py").write_text("raise ImportError\n")
    job = started(jobs, coordinator_env={"PYTHONPATH": str(tmp_path / "shadow")})
    with pytest.raises(NoCompression, match="zstandard"):
        job.dump(tmp_path / "image", compress=True)
    job.wait_steps(3)
    assert is_counting(job.lines) and not (tmp_path / "image").exists()
    job.dump(tmp_path / "image")


SLOW = """
import time
class ZstdError(Exception):
    pass
class ZstdCompressor:
    def __init__(self, **options):
        pass
    def compress(self, data):
        if len(data) > 1 << 20:
            time.sleep(SECONDS)
        return bytes(data[: len(data) // 2])
"""


def test_packing_that_takes_too_long_is_given_up(jobs: Jobs, tmp_path: Path) -> None:
    seconds = 5
    (tmp_path / "shadow").mkdir()
    slow = SLOW.replace("SECONDS", str(seconds))
    (tmp_path / "shadow" / "zstandard.py").write_text(slow)
    job = started(jobs, coordinator_env={"PYTHONPATH": str(tmp_path / "shadow")})
    with pytest.raises(CheckpointTimeout):
        job.dump(tmp_path / "image", compress=True, timeout=seconds)
    job.wait_steps(3)
    assert is_counting(job.lines) and not list(tmp_path.glob("image*"))

"""Images: what is written opens, and what is not exactly what was written is refused by name."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import xxhash
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowgpu.errors import ImageDamaged, ImageVersion, NotEnoughDisk, OutputNotEmpty
from flowgpu.image import inspect, layout, space
from flowgpu.image.chunks import Kind
from flowgpu.image.compression import plain_criu
from flowgpu.image.digests import Meter, file_digests
from flowgpu.image.manifest import FileEntry, Manifest, OpenFile, check
from flowgpu.image.reader import Image, verify
from flowgpu.image.writer import ImageWriter, check_output

GOLDEN = Path(__file__).parents[1] / "golden"


def files_of(image: str) -> list[str]:
    folder = GOLDEN / image
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


FILES = files_of("image-v2")
CHUNK = layout.CHUNK_BYTES


def load_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_image_v2", GOLDEN / "make_image_v2.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


maker = load_maker()


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "image-v2", tmp_path / "image"))


@pytest.fixture
def old_image(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "image-v1", tmp_path / "old"))


def refused(image: Path, files: str = "all") -> str:
    with pytest.raises(ImageDamaged) as caught:
        verify(image, files)  # type: ignore[arg-type]
    assert str(image) in str(caught.value)
    return str(caught.value)


def rewrite(image: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest as a program would that knows the rule of its digest."""
    fields = json.loads((image / "manifest.json").read_text())
    del fields["format"], fields["manifest_digest"]
    change(fields)
    lines = [f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in fields.items()]
    body = ('{"format": "flowgpu-image",\n' + "".join(lines)).encode()
    last = f'"manifest_digest": "{xxhash.xxh3_128_hexdigest(body)}"}}\n'
    (image / "manifest.json").write_bytes(body + last.encode())


def test_the_golden_image_of_version_1_opens() -> None:
    image = Image(GOLDEN / "image-v1")
    names = [name for name in files_of("image-v1") if name != layout.MANIFEST]
    sizes = sum((image.path / name).stat().st_size for name in names)
    assert image.verify() == sizes == image.manifest.counts.image_bytes
    assert image.manifest.version == 1
    assert image.manifest.job.command == ("python3", "train.py")
    assert image.manifest.gpus[0].blocks[1].address == 0x200000200000
    data = image.extent_data(0).read_bytes()
    first, second = data[:32768], data[32768:]
    digests = xxhash.xxh3_128_digest(first) + xxhash.xxh3_128_digest(second)
    assert image.extent_digests(0).read_bytes() == digests
    table = image.chunk_table(0)
    assert (table.chunk_count, table.count(Kind.STORED)) == (2, 2)
    assert image.manifest.reductions == ()


def test_the_golden_image_of_version_2_opens() -> None:
    image = Image(GOLDEN / "image-v2")
    sizes = sum((image.path / name).stat().st_size for name in FILES if name != layout.MANIFEST)
    assert image.verify() == sizes == image.manifest.counts.image_bytes
    assert [extent.file for extent in image.extents] == ["gpu0.data", "gpu1.data", "link0.data"]
    for index in (0, 1):
        table = image.chunk_table(index)
        rows = zip(table.kind, table.extent, table.slot, strict=True)
        assert [tuple(map(int, row)) for row in rows] == maker.chunk_rows(index, 2)
    assert image.chunk_table(0).stored_segments.tolist() == [
        [0, 2 * CHUNK, 0],
        [7 * CHUNK, CHUNK, 2 * CHUNK],
    ]


def test_the_golden_image_of_version_2_is_what_its_program_makes(tmp_path: Path) -> None:
    maker.make(tmp_path / "again")
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (
            GOLDEN / "image-v2" / name
        ).read_bytes(), name


def test_the_golden_image_of_version_3_opens(tmp_path: Path) -> None:
    image = Image(GOLDEN / "image-v3")
    assert image.manifest.version == 3
    names = [name for name in files_of("image-v3") if name != layout.MANIFEST]
    sizes = sum((image.path / name).stat().st_size for name in names)
    assert image.verify() == sizes == image.manifest.counts.image_bytes
    data = hashlib.shake_128(b"packed").digest(4096) * (1024 + 3)
    with plain_criu(image, [tmp_path], "golden") as folder:
        assert (folder / "pages-2.img").read_bytes() == data
    plain = Image(GOLDEN / "image-v2")
    for number in (0, 1):
        tables = [(each.path / f"gpu{number}.chunks").read_bytes() for each in (image, plain)]
        assert tables[0] == tables[1] and image.chunk_table(number).chunk_count == 8
        packed = image.extent_data(number).read_bytes()
        assert zstandard.decompress(packed) == plain.extent_data(number).read_bytes()


def test_the_golden_image_of_version_4_opens(tmp_path: Path) -> None:
    image = Image(GOLDEN / "image-v4")
    assert image.manifest.version == 4
    names = [name for name in files_of("image-v4") if name != layout.MANIFEST]
    sizes = sum((image.path / name).stat().st_size for name in names)
    assert image.verify() == sizes == image.manifest.counts.image_bytes
    own, first, second = (
        hashlib.shake_128(b"pages%d" % number).digest(size << 12)
        for number, size in enumerate((2, 4, 2))
    )
    expected = first[: 3 << 12] + own[: 1 << 12] + second[1 << 12 :]
    expected += first[3 << 12 :] + own[1 << 12 :]
    with plain_criu(image, [tmp_path], "golden") as folder:
        assert (folder / "pages-1.img").read_bytes() == expected


def test_an_image_of_version_1_is_not_written_again(tmp_path: Path) -> None:
    old = Image(GOLDEN / "image-v1").manifest
    with pytest.raises(ValueError, match="does not fit"), ImageWriter(tmp_path / "out") as writer:
        writer.commit(old)


@pytest.mark.parametrize("name", ["image-v2", "image-v3", "image-v4"])
def test_choices_that_were_not_made_are_not_written(name: str) -> None:
    manifest = Image(GOLDEN / name).manifest
    assert (manifest.engine_reason, manifest.job.engine) == ("", "auto")
    assert manifest.to_bytes() == (GOLDEN / name / layout.MANIFEST).read_bytes()
    job = dataclasses.replace(manifest.job, engine="replay", ghost="warm")
    chosen = dataclasses.replace(
        manifest,
        engine="replay",
        engine_reason="asked for",
        job=job,
        open_files=(OpenFile("/var/log/\udcff", 5), OpenFile("/a b", 0)),
    )
    assert Manifest.from_bytes(chosen.to_bytes(), Path("image")) == chosen


@pytest.mark.parametrize("field", ["extents", "reductions", "ghost"])
def test_an_image_of_version_1_with_a_field_of_version_2_is_refused(
    old_image: Path, field: str
) -> None:
    rewrite(old_image, lambda fields: fields.update({field: []}))
    with pytest.raises(ImageVersion, match=field):
        Image(old_image)
    rewrite(old_image, lambda fields: fields.pop(field))
    rewrite(old_image, lambda fields: fields["counts"].update(gpu_bytes_distinct=1))
    with pytest.raises(ImageVersion, match=r"counts\.gpu_bytes_distinct"):
        Image(old_image)


@pytest.mark.parametrize("name", files_of("image-v1"))
def test_each_file_of_an_image_of_version_1_is_checked(old_image: Path, name: str) -> None:
    data = (old_image / name).read_bytes()
    changed = bytes([data[0] ^ 1]) + data[1:] if data else b"x"
    (old_image / name).write_bytes(changed)
    assert name in refused(old_image)


@pytest.mark.parametrize("gpus", [0, 1, 3])
def test_a_written_image_opens_and_is_private(tmp_path: Path, gpus: int) -> None:
    maker.make(tmp_path / "out", gpus)
    assert verify(tmp_path / "out") > 0
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "out" / "manifest.json").stat().st_mode & 0o777 == 0o600


def test_the_manifest_survives_its_file(image: Path) -> None:
    manifest = Image(image).manifest
    assert Manifest.from_bytes(manifest.to_bytes(), image) == manifest
    assert manifest.to_bytes() == (image / "manifest.json").read_bytes()


@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_flipped_byte_anywhere_is_refused_by_name(image: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in FILES if (image / name).stat().st_size]))
    path = image / name
    before = path.read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    mask = data.draw(st.integers(1, 255))
    path.write_bytes(before[:at] + bytes([before[at] ^ mask]) + before[at + 1 :])
    try:
        message = refused(image)
        assert name in message
        if name.endswith(".data"):
            assert f"chunk {at // layout.CHUNK_BYTES} of {name}" in message
        elif name == "manifest.json":
            with pytest.raises(ImageDamaged):
                Image(image)
        else:
            assert name in refused(image, "cpu")
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("name", FILES)
def test_a_cut_longer_or_missing_file_is_refused_by_name(image: Path, name: str) -> None:
    path = image / name
    before = path.read_bytes()
    changes = [before + b"\0"] + ([before[:-1], b""] if before else [])
    for data in changes:
        path.write_bytes(data)
        assert name in refused(image, "cpu")
    path.unlink()
    assert name in refused(image, "cpu")


@pytest.mark.parametrize("name", FILES)
def test_a_link_or_device_in_the_place_of_a_file_is_refused(
    image: Path, name: str, tmp_path: Path
) -> None:
    path = image / name
    shutil.move(path, tmp_path / "aside")
    path.symlink_to(tmp_path / "aside")
    assert name in refused(image)
    path.unlink()
    os.mkfifo(path)
    assert name in refused(image)


def test_a_folder_that_is_a_link_is_refused(image: Path, tmp_path: Path) -> None:
    shutil.move(image / "criu", tmp_path / "aside")
    (image / "criu").symlink_to(tmp_path / "aside")
    assert "criu" in refused(image)


@pytest.mark.parametrize("name", ["extra", "criu/pages-2.img", "gpu2.data", "link1.data"])
def test_a_file_that_is_not_listed_is_refused(image: Path, name: str) -> None:
    (image / name).write_bytes(b"")
    assert f"{name} is not part of it" in refused(image)


def test_a_folder_that_is_no_image_is_refused(tmp_path: Path) -> None:
    assert "manifest.json" in refused(tmp_path)
    assert "manifest.json" in refused(tmp_path / "absent")
    (tmp_path / "manifest.json").write_bytes(b"{}")
    assert "manifest.json" in refused(tmp_path)


def test_cpu_verification_leaves_gpu_data_to_the_mover(image: Path) -> None:
    (image / "gpu0.data").write_bytes(bytes(3 * CHUNK))
    listed = sum((image / n).stat().st_size for n in FILES if not n.endswith((".data", ".json")))
    assert verify(image, "cpu") == listed
    refused(image)


@pytest.mark.parametrize("version", [0, 5, "1", None, 1.5, True, []])
def test_another_version_is_refused_by_number(image: Path, version: object) -> None:
    rewrite(image, lambda fields: fields.update(version=version))
    with pytest.raises(ImageVersion) as caught:
        Image(image)
    assert f"format version {version}" in str(caught.value)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (lambda fields: fields, "manifest.later"),
        (lambda fields: fields["gpus"][0], "manifest.gpus[0].later"),
        (lambda fields: fields["gpus"][0]["blocks"][1], "manifest.gpus[0].blocks[1].later"),
    ],
)
def test_an_unknown_field_is_a_later_version(
    image: Path, where: Callable[[dict[str, Any]], dict[str, Any]], name: str
) -> None:
    rewrite(image, lambda fields: where(fields).update(later=1))
    with pytest.raises(ImageVersion, match=r"unknown field") as caught:
        Image(image)
    assert name in str(caught.value)


def _set(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        target: Any = fields
        for part in parents:
            target = target[part]
        target[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("engine", "magic"),
        ("engine_reason", 1),
        ("open_files", [{"path": "log", "bytes": 1}]),
        ("open_files", [{"path": "/log", "bytes": -1}]),
        ("open_files", [{"path": "/log", "bytes": 1}, {"path": "/log", "bytes": 2}]),
        ("affinities", [{"cpus": ["0"], "threads": [1]}]),
        ("affinities", [{"cpus": [0]}]),
        ("settings", [{"kind": "policy", "values": [1], "text": "", "threads": []}]),
        ("settings", [{"kind": "policy", "values": [], "text": "", "threads": [1]}]),
        ("settings", [{"kind": "policy", "values": [1], "text": "", "threads": [1 << 23]}]),
        ("settings", [{"kind": "policy", "values": [-1], "text": "", "threads": [1]}]),
        ("not_kept", [1]),
        ("inherited", [{"process": 7, "bytes": 4096}]),
        ("inherited", [{"process": 100, "bytes": 4097}]),
        ("inherited", [{"process": 100, "bytes": 0}]),
        ("inherited", [{"process": 100, "bytes": 4096}] * 2),
        ("job.engine", "none"),
        ("job.ghost", "late"),
        ("gpu", "amd"),
        ("root_pid", 7),
        ("pids", [1, "2"]),
        ("pids", {"1": 2}),
        ("job", []),
        ("job.name", 5),
        ("pause_seconds", "1"),
        ("pause_seconds", True),
        ("root_pid", 100.0),
        ("root_pid", True),
        ("counts.image_bytes", -1),
        ("counts.image_bytes", 1 << 64),
        ("gpus.0.index", 1),
        ("gpus.0.data_bytes", 8 * 32768 + 1),
        ("gpus.0.blocks.0.task", 1),
        ("gpus.0.blocks.0.device", None),
        ("gpus.0.blocks.0.bytes", 0),
        ("gpus.0.blocks.1.offset", 0),
        ("gpus.0.blocks.1.offset", 5 * 32768 + 1),
        ("gpus.0.blocks.1.address", 0x200000000000 + 5 * 32768 - 1),
        ("gpus.0.blocks.1.bytes", 1 << 40),
        ("gpus.0.blocks", []),
        ("files.0.path", "../escape"),
        ("files.0.path", "/etc/passwd"),
        ("files.0.path", "criu/../output.log"),
        ("files.0.path", "./criu/empty.img"),
        ("files.0.path", "criu//empty.img"),
        ("files.0.path", ""),
        ("files.0.path", "."),
        ("files.0.path", "criu/em\npty.img"),
        ("files.0.path", "manifest.json"),
        ("files.0.path", "gpu0.data"),
        ("files.0.path", "output.log"),
        ("files.3.bytes", 81),  # gpu0.chunks
        ("files.3.bytes", 160),
        ("files.4.bytes", 64),  # gpu0.digests
        ("files.7.bytes", 32),  # link0.digests
        ("files.7.path", "link1.digests"),
        ("files.7.path", "link0.data"),
        ("extents", []),
        ("extents.0.file", "gpu1.data"),
        ("extents.1.file", "link0.data"),
        ("extents.2.file", "link1.data"),
        ("extents.2.file", "../other/link0.data"),
        ("extents.2.file", "output.log"),
        ("extents.0.bytes", 3 * 32768 - 1),
        ("extents.0.bytes", 1 << 60),
        ("reductions", ["zero", "active"]),
        ("reductions", ["zero", "zero"]),
        ("reductions", ["magic"]),
        ("reductions", "zero"),
        ("ghost", "hot"),
        ("counts.gpu_bytes_active", 1 << 40),
        ("counts.gpu_bytes_distinct", 11 * 32768),
        ("counts.gpu_bytes_stored", 0),
    ],
)
def test_a_manifest_that_does_not_fit_itself_is_refused(
    image: Path, path: str, value: object
) -> None:
    rewrite(image, _set(path, value))
    assert "manifest.json" in refused(image)


def test_a_missing_double_or_infinite_field_is_refused(image: Path) -> None:
    whole = (image / "manifest.json").read_text()
    rewrite(image, lambda fields: fields.pop("criu"))
    assert "criu is missing" in refused(image)
    for extra in ('"criu": "4",', '"pause_seconds": Infinity,', "[" * 100000):
        body = whole[: whole.index('"criu"')] + extra + "\n" + whole[whole.index('"criu"') :]
        body = body[: body.index('"manifest_digest"')]
        digest = xxhash.xxh3_128_hexdigest(body.encode())
        text = f'{body}"manifest_digest": "{digest}"}}\n'
        (image / "manifest.json").write_text(text)
        assert "manifest.json" in refused(image)


@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(junk=st.binary(max_size=300))
def test_junk_with_the_right_digest_is_refused(image: Path, junk: bytes) -> None:
    body = b'{"format": "flowgpu-image",\n' + junk
    last = f'"manifest_digest": "{xxhash.xxh3_128_hexdigest(body)}"}}\n'
    with pytest.raises((ImageDamaged, ImageVersion)):
        Manifest.from_bytes(body + last.encode(), image)


def test_an_error_inside_removes_the_partial_image(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ImageWriter(tmp_path / "out") as writer:
        (writer.criu_dir / "a.img").write_bytes(b"x")
        assert writer.path.parent == tmp_path
        assert writer.path.name.startswith("out.partial-")
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_an_empty_output_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    maker.make(tmp_path / "out")
    verify(tmp_path / "out")


@pytest.mark.parametrize("what", ["file", "full", "link", "broken link"])
def test_an_output_that_holds_something_is_left_alone(tmp_path: Path, what: str) -> None:
    output = tmp_path / "out"
    if what == "file":
        output.write_bytes(b"")
    elif what == "full":
        output.mkdir()
        (output / "keep").write_bytes(b"keep")
    else:
        output.symlink_to(tmp_path if what == "link" else tmp_path / "absent")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OutputNotEmpty):
        check_output(output)
    with pytest.raises(OutputNotEmpty):
        ImageWriter(output)
    assert sorted(os.listdir(tmp_path)) == before


def test_an_output_that_fills_up_meanwhile_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(OutputNotEmpty), ImageWriter(output) as writer:
        maker.write_gpu_files(writer, 1)
        manifest = maker.manifest(writer, 1)
        output.mkdir()
        (output / "keep").write_bytes(b"keep")
        writer.commit(manifest)
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(output) == ["keep"]


def test_a_manifest_that_does_not_fit_is_not_committed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not fit"), ImageWriter(tmp_path / "out") as writer:
        writer.commit(dataclasses.replace(maker.manifest(writer, 0), engine="magic"))
    assert os.listdir(tmp_path) == []


def test_sync_follows_the_file_system_and_reaches_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def fsync(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))

    monkeypatch.setattr(os, "fsync", fsync)
    maker.make(tmp_path / "out")
    names = {Path(name).name for name in FILES} | {"criu", tmp_path.name}
    assert names <= set(synced)
    order = [name for name in synced if name in ("pages-1.img", "gpu0.data", "manifest.json")]
    assert order[-1] == "manifest.json"

    synced.clear()
    mount = tmp_path / "mount"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(mount)], check=True)
    try:
        assert space.is_memory(mount)
        maker.make(mount / "out")
        assert synced == []
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_too_little_space_is_named(tmp_path: Path) -> None:
    space.need(tmp_path, 1, "train")
    with pytest.raises(NotEnoughDisk) as caught:
        space.need(tmp_path, 1 << 60, "train")
    assert "'train'" in str(caught.value) and "PiB" in str(caught.value)


def test_the_digest_of_a_file_is_that_of_its_parts(tmp_path: Path) -> None:
    part = layout.PART_BYTES
    sizes = [0, 1, part - 1, part, part + 1, 3 * part + 7]
    files = []
    for size in sizes:
        data = os.urandom(size)
        (tmp_path / str(size)).write_bytes(data)
        parts = [data[at : at + part] for at in range(0, size, part)]
        joined = b"".join(xxhash.xxh3_128_digest(one) for one in parts)
        files.append((tmp_path / str(size), size, xxhash.xxh3_128_hexdigest(joined)))
    reports: list[Any] = []
    meter = Meter("test", sum(sizes), reports.append)
    found = file_digests([(path, size) for path, size, _ in files], meter)
    assert found == [digest for _, _, digest in files]
    assert reports[-1]["done"] == reports[-1]["total"] == sum(sizes)


def test_the_summary_is_json_and_names_the_numbers(image: Path) -> None:
    found = json.loads(json.dumps(inspect.summary(image)))
    assert found["gpu_bytes_stored"] == 4 * CHUNK
    assert found["reductions"] == ["active", "zero", "dedup"]
    assert found["ghost"] == "warm"
    assert [extent["file"] for extent in found["extents"]][-1] == "link0.data"
    assert found["extents"][2] == {"file": "link0.data", "bytes": 3 * CHUNK, "linked": True}
    assert found["gpus"][0]["blocks"] == 2
    assert found["gpu_bytes_replicated"] == CHUNK
    where = ("inactive", "zero", "stored", "same_gpu", "other_gpu", "linked")
    parts = [[gpu[f"{name}_bytes"] // CHUNK for name in where] for gpu in found["gpus"]]
    assert parts[0] == [2, 1, 3, 2, 0, 0]
    assert parts[1][2:] == [1, 1, 1, 3]
    assert [sum(one) * CHUNK for one in parts] == [gpu["data_bytes"] for gpu in found["gpus"]]
    assert found["job"]["name"] == "golden"
    assert (found["engine"], found["engine_reason"]) == ("native", None)
    assert found["phases"]["copy_seconds"] == 0.25
    assert found["files"] == len(FILES)


def test_check_accepts_an_image_without_gpu_files() -> None:
    manifest = Image(GOLDEN / "image-v2").manifest
    counts = dataclasses.replace(manifest.counts, gpu_bytes_stored=0)
    bare = dataclasses.replace(
        manifest, gpus=(), tasks=(), gpu="none", engine="none", extents=(), counts=counts,
        files=(FileEntry("criu/inventory.img", 1, "0" * 32),),
    )  # fmt: skip
    check(bare)

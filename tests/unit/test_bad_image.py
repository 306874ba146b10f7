"""Images that anyone may have made: with right digests and wrong in every other way."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowgpu.cli import main
from flowgpu.errors import ImageDamaged, ImageVersion
from flowgpu.host import criu_images, criu_sockets
from flowgpu.image import chunks, inspect, layout, page_tables
from flowgpu.image.manifest import Manifest
from flowgpu.image.reader import Image, verify
from flowgpu.image.writer import ImageWriter

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
VERSIONS = ["image-v1", "image-v2", "image-v3", "image-v4"]
LONGEST_MESSAGE = 1000
LONGEST_SECONDS = 5.0
LARGEST_BYTES = 1 << 30
"""What reading any of the images here may take beyond what was there."""


def fuzz(examples: int) -> settings:
    """Settings that draw the same examples each time; `limited` is what none may take."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def fields_of(version: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((GOLDEN / version / layout.MANIFEST).read_text())
    del fields["format"], fields["manifest_digest"]
    return fields


def sealed(body: bytes) -> bytes:
    body = b'{"format": "flowgpu-image",\n' + body
    return body + f'"manifest_digest": "{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def written(fields: dict[str, Any]) -> bytes:
    return sealed(
        "".join(f"{json.dumps(k)}: {json.dumps(v)},\n" for k, v in fields.items()).encode()
    )


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*at, key))


MANIFESTS = {version: fields_of(version) for version in VERSIONS}
PLACES = {version: list(places(fields)) for version, fields in MANIFESTS.items()}


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """More than LARGEST_BYTES at once is a MemoryError; no more of a processor than for so long."""
    began = time.process_time()
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + LARGEST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        assert time.process_time() - began < LONGEST_SECONDS


def is_refused_or_read(data: bytes, image: Path) -> Manifest | None:
    """The manifest, if it is one; its refusal fits a terminal."""
    try:
        with limited():
            return Manifest.from_bytes(data, image)
    except (ImageDamaged, ImageVersion) as error:
        assert len(str(error)) < LONGEST_MESSAGE
        return None


texts = st.text(max_size=20) | st.sampled_from(
    ["", "..", "../x", "/etc/passwd", "criu/../../x", "a\0b", "\ud800", "\x1b[2J", "x" * 70000]
)
numbers = st.integers(-2, 2) | st.sampled_from(
    [2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400, 1e308, 0.5, -0.0]
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


@fuzz(1000)
@given(data=st.data())
def test_a_manifest_changed_anywhere_is_read_or_refused_by_name(data: st.DataObject) -> None:
    version = data.draw(st.sampled_from(VERSIONS))
    fields = copy.deepcopy(MANIFESTS[version])
    for *parents, last in data.draw(st.lists(st.sampled_from(PLACES[version]), max_size=3)):
        target: Any = fields
        with contextlib.suppress(LookupError, TypeError):  # another change took that place away
            for part in parents:
                target = target[part]
            what = data.draw(st.sampled_from(["set", "remove", "twice", "unknown"]))
            if what == "set":
                target[last] = data.draw(values)
            elif what == "remove":
                del target[last]
            elif what == "twice" and isinstance(target, list):
                target.append(target[last])
            else:
                target[data.draw(texts)] = data.draw(values)
    found = is_refused_or_read(written(fields), Path("image"))
    if found is not None:
        assert {task.pid for task in found.tasks} <= set(found.pids)
        assert all(layout.is_safe_path(entry.path) for entry in found.files)
        # What is written again is what was read.
        if found.version > 1:
            assert Manifest.from_bytes(found.to_bytes(), Path("image")) == found


@pytest.mark.parametrize(
    "junk",
    [
        b"[" * 1_000_000,
        b'"a":' + b'{"a":' * 200_000,
        b'"version": 2, "version": 2,',
        b'"version": ' + b"9" * 5000 + b",",
        b'"version": "' + b"v" * 1_000_000 + b'",',
        b'"version": 2, "x": "\\ud800",',
        b'"version": 2, "x": "\xff",',
        b'"version": 2, "job": null,',
        b'"version": 2, "job": [],',
        b'"version": NaN,',
    ],
    ids=range(10),
)
def test_what_a_parser_may_stumble_over_is_refused(junk: bytes) -> None:
    assert is_refused_or_read(sealed(junk), Path("image")) is None


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (("pause_seconds",), 10**400, "pause_seconds is not float"),
        (("phases", "copy"), -1, "phases.copy is not float"),
        (("job", "cwd"), "/a\0b", "job.cwd is not str"),
        (("tasks", 0, "pid"), 1, "a task that is no process of the job"),
        (("pids",), [100, 0], "process id"),
        (("root_pid",), 1 << 40, "root pid"),
        (("pipes",), {}, "pipes"),
        (("pipes", "stdout"), "file:[1]", "pipe "),
        (("gpus", 0, "blocks", 0, "device"), 1 << 32, "device"),
        (("gpus", 0, "blocks", 1, "address"), (1 << 64) - 1, "a block at"),
    ],
)
def test_what_a_restore_would_act_on_is_checked(
    at: tuple[Any, ...], value: object, reason: str
) -> None:
    fields = copy.deepcopy(MANIFESTS["image-v2"])
    target: Any = fields
    for part in at[:-1]:
        target = target[part]
    target[at[-1]] = value
    with pytest.raises(ImageDamaged, match=reason):
        Manifest.from_bytes(written(fields), Path("image"))


FILES = [
    (version, str(path.relative_to(GOLDEN / version)))
    for version in VERSIONS
    for path in sorted((GOLDEN / version).rglob("*"))
    if path.is_file()
]


@pytest.mark.parametrize(("version", "name"), FILES, ids=["/".join(file) for file in FILES])
def test_a_byte_changed_anywhere_in_any_version_is_refused_by_name(
    version: str, name: str, tmp_path: Path
) -> None:
    image = Path(shutil.copytree(GOLDEN / version, tmp_path / "image"))
    data = (image / name).read_bytes()
    tail = [data + b"\0"] + ([data[:-1], b""] if data else [])
    step = max(len(data) // 16, 1)
    flipped = [
        data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(0, len(data), step)
    ]
    for changed in tail + flipped:
        (image / name).write_bytes(changed)
        with pytest.raises(ImageDamaged, match=name.replace(".", r"\.")):
            verify(image)
    (image / name).unlink()
    for make in (lambda path: path.symlink_to("/etc/passwd"), os.mkfifo, os.mkdir, none):
        make(image / name)
        with pytest.raises(ImageDamaged, match=name.replace(".", r"\.")):
            verify(image)
        if not (image / name).is_dir() or (image / name).is_symlink():
            (image / name).unlink(missing_ok=True)
        else:
            (image / name).rmdir()


def none(path: Path) -> None:
    """Nothing in the file's place."""


rows = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(0, 4) | st.just(65535),
        st.sampled_from([0, 1, 2, 4, 8, 2**31, 2**32 - 1]),
        st.sampled_from([0, 1, 2, 2**31, 2**63, 2**64 - 1]),
    ),
    max_size=6,
)


@fuzz(500)
@given(rows=rows, tail=st.binary(max_size=3), count=st.sampled_from([0, 8, 2**32 - 1]))
def test_a_chunk_table_is_read_or_refused(
    rows: list[tuple[int, ...]], tail: bytes, count: int
) -> None:
    data = np.array(rows, chunks.ROW).tobytes() + tail
    with contextlib.suppress(ValueError), limited():
        table = chunks.decode(data, count, [2, 2, 4], 0)
        assert int(table.rows["count"].sum(dtype=np.uint64)) == count
        shared = table.rows[table.rows["kind"] == chunks.Kind.SHARED]
        assert all(row["first"] + row["count"] <= 4 for row in shared)


@fuzz(500)
@given(rows=rows, tail=st.binary(max_size=3), pages=st.sampled_from([1, 8, 2**52]))
def test_a_page_table_is_read_or_refused(
    rows: list[tuple[int, ...]], tail: bytes, pages: int
) -> None:
    data = np.array([row[1:] for row in rows], page_tables.ROW).tobytes() + tail
    with contextlib.suppress(ValueError), limited():
        source, page = page_tables.pages_of(page_tables.decode(data, pages, [4, 8]))
        assert len(source) == pages and (page < np.array([4, 8])[source]).all()


varints = st.sampled_from(
    [b"\0", b"\1", b"\x80" * 9 + b"\1", b"\x80" * 11 + b"\1", b"\xff" * 300_000]
)
messages = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 7), varints, st.binary(max_size=20)).map(
        lambda field: bytes([min(field[0], 15) << 3 | field[1]]) + field[2] + field[3]
    ),
    max_size=4,
).map(b"".join)
READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("pstree.img", criu_images.pids),
    ("pstree.img", criu_images.is_shell_job),
    ("files.img", criu_images.regular_files),
    ("remap-fpath.img", criu_images.regular_files),
    ("mm-1.img", criu_images.mapped_for_writing),
    ("files.img", criu_sockets.socket_paths),
    ("stats-dump", criu_images.dump_stats),
    ("pagemap-1.img", lambda folder: criu_images.page_runs(folder / "pagemap-1.img")),
]


@fuzz(600)
@given(
    reader=st.sampled_from(READERS),
    bodies=st.lists(messages | st.binary(max_size=60), max_size=3),
    cut=st.integers(0, 6),
    size=st.sampled_from([0, 1, 2**32 - 1]),
)
def test_image_files_of_criu_are_read_or_refused(
    reader: tuple[str, Callable[[Path], object]],
    bodies: list[bytes],
    cut: int,
    size: int,
    tmp_path: Path,
) -> None:
    name, read = reader
    sizes = [len(body) + (size if number == cut else 0) for number, body in enumerate(bodies)]
    data = b"".join(
        (length & 0xFFFFFFFF).to_bytes(4, "little") + body
        for length, body in zip(sizes, bodies, strict=True)
    )
    (tmp_path / name).write_bytes(bytes(8) + data[: len(data) - cut if cut < 3 else None])
    with contextlib.suppress(ImageDamaged), limited():
        read(tmp_path)


def test_a_number_without_end_in_an_image_file_of_criu_takes_no_time(tmp_path: Path) -> None:
    body = b"\x08" + b"\xff" * (8 << 20)
    (tmp_path / "pstree.img").write_bytes(bytes(8) + len(body).to_bytes(4, "little") + body)
    with limited(), pytest.raises(ImageDamaged, match="not a CRIU image"):
        criu_images.pids(tmp_path)


def test_inspect_shows_what_a_terminal_would_obey_as_escapes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    image = Path(shutil.copytree(GOLDEN / "image-v2", tmp_path / "image"))
    fields = copy.deepcopy(MANIFESTS["image-v2"])
    fields["job"]["command"] = ["a\x1b[2J", "\udcff"]
    (image / layout.MANIFEST).write_bytes(written(fields))
    assert inspect.summary(image)["job"]["command"] == ["a\x1b[2J", "\udcff"]
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(image)])
    assert not ended.value.code
    assert r"a\x1b[2J \udcff" in capfd.readouterr().out


def test_a_manifest_without_end_takes_no_memory(tmp_path: Path) -> None:
    image = Path(shutil.copytree(GOLDEN / "image-v2", tmp_path / "image"))
    os.truncate(image / layout.MANIFEST, 1 << 40)
    with limited(), pytest.raises(ImageDamaged, match="more than 67108864 bytes"):
        Image(image)
    (image / layout.MANIFEST).unlink()
    os.mknod(image / layout.MANIFEST, 0o20600, os.makedev(1, 5))  # /dev/zero
    with limited(), pytest.raises(ImageDamaged, match="not a regular file"):
        Image(image)


def test_a_manifest_that_nobody_would_read_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest.load(GOLDEN / "image-v2")
    monkeypatch.setattr(layout, "MOST_MANIFEST_BYTES", len(manifest.to_bytes()) - 1)
    with pytest.raises(ValueError, match="does not fit"), ImageWriter(tmp_path / "out") as writer:
        writer.commit(manifest)
    assert os.listdir(tmp_path) == []

"""CPU memory in a series of images: equal pages are shared, and each image is whole by itself."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_lib import PAGE, Cpu, read_cpu, write, write_pages
from test_image import rewrite

from flowgpu.errors import ImageDamaged, ImageVersion, NotEnoughDisk
from flowgpu.image import inspect, layout, pages, space
from flowgpu.image.compression import plain_criu
from flowgpu.image.digests import Meter, file_digests
from flowgpu.image.linked import take
from flowgpu.image.page_tables import ROW, decode, pages_of, rows_of
from flowgpu.image.reader import Image
from flowgpu.image.store import Store

MANY = 2000  # pages: more than are read at once


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.path.mkdir()
    return store


def add(store: Store, cpu: Cpu, **options: Any) -> Path:
    output = store.next_image()
    write(output, [[1]], store.newest("a"), "a", cpu=cpu, **options)
    return output


def memory(count: int = MANY, gap: int = 700) -> dict[int, int]:
    """Pages in two runs, all different."""
    return {at + (gap if at > count // 2 else 0): at + 1 for at in range(count)}


def own_pages(image: Path) -> int:
    return (image / "pages.data").stat().st_size // PAGE


def test_only_pages_that_changed_are_written(store: Store) -> None:
    cpu = [memory(), {5: 5}]
    first = add(store, cpu)
    assert Image(first).manifest.version == 2
    for at in (0, 1, 600, 1999 + 700):
        cpu[0][at] += 100_000
    cpu[0][100_000] = 7
    del cpu[0][800]
    second = add(store, cpu)
    assert Image(second).manifest.version == 4
    assert own_pages(second) == 5
    links = [second / layout.pages_link(number) for number in range(2)]
    assert [path.samefile(first / "criu" / f"pages-{n}.img") for n, path in enumerate(links, 1)]
    assert not list(second.glob("criu/pages-*")) and not (second / ".base").exists()
    third = add(store, cpu)
    assert own_pages(third) == 0 and len(list(third.glob("pages-link*"))) == 3
    assert [read_cpu(image) for image in (second, third)] == [cpu, cpu]
    assert set(store.verify().values()) == {None}
    summary = inspect.summary(third)
    assert summary["cpu_bytes_linked"] == sum(p.stat().st_size for p in third.glob("pages-link*"))


def test_images_are_whole_whichever_others_are_gone(store: Store, tmp_path: Path) -> None:
    cpu = [memory(50)]
    images = []
    wanted = []
    for turn in range(5):
        cpu[0][turn] = 1000 + turn
        images.append(add(store, cpu))
        wanted.append([dict(cpu[0])])
    shutil.copytree(images[2], tmp_path / "away")
    for number in (1, 0, 4, 2):
        store.remove(images[number].name)
        assert set(store.verify().values()) <= {None}
    assert read_cpu(images[3]) == wanted[3]
    Image(tmp_path / "away").verify()
    assert read_cpu(tmp_path / "away") == wanted[2]


def test_processes_come_and_go(store: Store) -> None:
    cpu: list[dict[int, int]] = [memory(20), {1: 1, 2: 2}, {}]
    add(store, cpu)
    later = [cpu[0], {}, {1: 1}, {3: 3}]
    image = add(store, later)
    assert read_cpu(image) == later
    # What has nothing in common with the base stays as CRIU wrote it.
    assert {path.name for path in image.glob("criu/pages-*")} == {
        f"pages-{n}.img" for n in (2, 3, 4)
    }
    assert own_pages(image) == 0
    again = add(store, later)
    assert read_cpu(again) == later and own_pages(again) == 0
    assert {path.name for path in again.glob("criu/pages-*")} == {"pages-2.img"}


def test_a_page_at_another_address_is_not_looked_for(store: Store) -> None:
    add(store, [{1: 1, 2: 2}])
    image = add(store, [{1: 2, 2: 2, 3: 1}])
    assert own_pages(image) == 2 and read_cpu(image) == [{1: 2, 2: 2, 3: 1}]


def test_what_changes_again_and_again_is_about_all_that_is_written(store: Store) -> None:
    cpu = [memory(400)]
    add(store, cpu)
    for turn in range(1, 12):
        for at in range(60):
            cpu[0][at] = 1000 * turn + at
        image = add(store, cpu)
        assert own_pages(image) <= 60 * 17 // 16
        held = sum(path.stat().st_size for path in image.glob("pages*.data")) // PAGE
        assert held <= 3 * 400
    assert read_cpu(image) == cpu and set(store.verify().values()) == {None}


def test_packed_pages_are_not_shared(store: Store) -> None:
    cpu = [memory(20)]
    add(store, cpu, compress=True)
    second = add(store, cpu)
    assert not list(second.glob("pages*")) and read_cpu(second) == cpu
    third = add(store, cpu, compress=True)
    assert not list(third.glob("pages*")) and read_cpu(third) == cpu
    assert Image(third).manifest.version == 3


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["pages.data", "pages-link0.data", "pages-1.map"])
@pytest.mark.parametrize("where", [0, 0.5, 1])
def test_a_flipped_bit_is_found(store: Store, file: str, where: float) -> None:
    cpu = [memory(20)]
    add(store, cpu)
    cpu[0][3] = cpu[0][5] = 99
    image = add(store, cpu)
    path = image / file
    flip(path, int(where * (path.stat().st_size - 1)))
    opened = Image(image)
    for files in ("cpu", "all"):
        with pytest.raises(ImageDamaged, match=rf"{file} does not have its digest"):
            opened.verify(files)
    with pytest.raises(ImageDamaged):
        read_cpu(image)


@pytest.mark.parametrize("at", [3, 9])
def test_damage_to_the_base_is_not_taken_over(store: Store, at: int) -> None:
    """Pages are compared with its bytes, so a damaged one is written anew."""
    cpu = [memory(20)]
    base = add(store, cpu)
    flip(base / "criu" / "pages-1.img", at * PAGE + 17)
    image = add(store, cpu)
    assert own_pages(image) == 1 and read_cpu(image) == cpu
    Image(image).verify()
    with pytest.raises(ImageDamaged):
        Image(base).verify()


def test_a_table_of_another_order_is_found_by_the_digest_of_the_whole(store: Store) -> None:
    """Also where every file has its digest."""
    cpu = [memory(20)]
    add(store, cpu)
    cpu[0][3], cpu[0][9] = 98, 99
    image = add(store, cpu)
    table = image / "pages-1.map"
    rows = np.fromfile(table, ROW)
    own = np.flatnonzero(rows["source"] == 0)
    assert len(own) == 2
    rows["first"][own] = rows["first"][own][::-1]
    table.write_bytes(rows.tobytes())

    def change(fields: Any) -> None:
        (entry,) = (entry for entry in fields["files"] if entry["path"] == table.name)
        entry["digest"] = file_digests([(table, entry["bytes"])], Meter("", 0, None))[0]

    rewrite(image, change)
    Image(image).verify()
    with pytest.raises(ImageDamaged, match="put together"):
        read_cpu(image)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda fields: fields["assembled"][0].update(bytes=PAGE + 1), "bytes"),
        (lambda fields: fields["assembled"][0].update(bytes=0), "bytes"),
        (lambda fields: fields["assembled"][0].update(file="criu/inventory.img"), "shared pages"),
        (lambda fields: fields["assembled"][0].update(file="criu/pages-x.img"), "shared pages"),
        (lambda fields: fields["assembled"].append(fields["assembled"][0]), "out of order"),
        (lambda fields: fields["assembled"].clear(), "shared pages"),
        (lambda fields: fields.update(version=3), "unknown field"),
        (lambda fields: fields["files"].append(entry("pages-link5.data", PAGE)), "shared pages"),
        (lambda fields: fields["files"].append(entry("criu/pages-1.img", PAGE)), "a table for it"),
        (lambda fields: fields["assembled"][0].update(bytes=PAGE * 5), "are of 20 pages"),
    ],
)
def test_a_manifest_whose_pages_do_not_fit_is_damaged(
    store: Store, change: Callable[[Any], None], says: str
) -> None:
    add(store, [memory(20)])
    image = add(store, [memory(20)])
    rewrite(image, change)
    with pytest.raises((ImageDamaged, ImageVersion), match=says):
        Image(image).verify("cpu")


def entry(path: str, size: int) -> dict[str, Any]:
    return {"path": path, "bytes": size, "digest": 32 * "0"}


def row(source: int, count: int, first: int) -> bytes:
    return np.array([(source, count, first)], ROW).tobytes()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (row(0, 5, 0)[:-1], "no whole rows"),
        (row(0, 4, 0), "are of 4 pages"),
        (row(0, 5, 0) + row(1, 0, 0), "row 1 is empty"),
        (row(2, 5, 0), "names no source"),
        (row(0, 5, 6), "ends behind"),
        (row(0, 5, (1 << 64) - 2), "ends behind"),
        (row(0, 2, 0) + row(0, 3, 2), "should be one"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decode(data, 5, [10, 10])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), min_size=1))
def test_a_table_says_where_each_page_is(places: list[tuple[int, int]]) -> None:
    source, first = np.array(places).T
    rows = decode(rows_of(source, first).tobytes(), len(places), [6, 6, 6])
    assert list(zip(*(part.tolist() for part in pages_of(rows)), strict=True)) == places


def fails(*_: object) -> int:
    raise OSError(errno.ENOSPC, "full")


@pytest.mark.parametrize("what", ["disk", "order", "size", "base"])
def test_where_something_does_not_fit_pages_stay_as_criu_wrote_them(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    base = add(store, [memory(20)])
    partial = tmp_path / "partial"
    (partial / "criu").mkdir(parents=True)
    take(base, partial, "a")
    later = memory(20) | {3: 1}
    write_pages(partial / "criu", 1, later)
    before = (partial / "criu" / "pages-1.img").read_bytes()
    if what == "disk":
        monkeypatch.setattr(os, "sendfile", fails)
    elif what == "order":
        # Its two runs, in the wrong order.
        pagemap = partial / "criu" / "pagemap-1.img"
        data = pagemap.read_bytes()
        sizes = [8]
        while sum(sizes) < len(data):
            sizes.append(4 + int.from_bytes(data[sum(sizes) :][:4], "little"))
        ends = np.cumsum(sizes)
        first, second = data[ends[1] : ends[2]], data[ends[2] :]
        pagemap.write_bytes(data[: ends[1]] + second + first)
    elif what == "size":
        (partial / "criu" / "pages-1.img").write_bytes(before + bytes(1))
        before += bytes(1)
    else:
        os.truncate(partial / "pages-link0.data", 5 * PAGE)
    assert pages.share(partial, lambda used, sizes, gpus, new: list(range(len(used)))) == ()
    assert (partial / "criu" / "pages-1.img").read_bytes() == before
    assert not list(partial.glob("pages*")) and not (partial / ".base").exists()


def test_an_image_that_cannot_be_put_together_for_lack_of_space_says_so(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, [memory(20)])
    image = Image(add(store, [memory(20)]))
    monkeypatch.setattr(os, "posix_fallocate", fails)
    with pytest.raises(NotEnoughDisk), plain_criu(image, [tmp_path], "train"):
        raise AssertionError("there is no room")
    assert not list(tmp_path.glob("flowgpu-unpacked-*"))
    monkeypatch.setattr(space, "free", lambda folder: PAGE)
    with pytest.raises(NotEnoughDisk), plain_criu(image, [tmp_path], "train"):
        raise AssertionError("there is no room")

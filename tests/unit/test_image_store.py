"""The store: images share what did not change, and none of them can tell."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_lib import CHUNK, INACTIVE, Memory, read, write

from flowgpu.errors import ImageDamaged, StoreBusy, StoreUnusable
from flowgpu.image import layout, linked
from flowgpu.image.linked import (
    MOST_DISK,
    MOST_LINKS,
    NOT_TAKEN,
    REWRITTEN,
    Linked,
    choose,
    take,
)
from flowgpu.image.reader import Image
from flowgpu.image.store import Store
from flowgpu.image.writer import ImageWriter

ROOT = Path(__file__).parents[2]


def add(store: Store, memory: Memory, job: str = "a", compress: bool = False) -> Path:
    store.path.mkdir(exist_ok=True)
    output = store.next_image()
    write(output, memory, store.newest(job), job, compress=compress)
    return output


def stored(image: Path) -> int:
    return Image(image).manifest.counts.gpu_bytes_stored // CHUNK


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_what_did_not_change_is_stored_once(store: Store) -> None:
    memory = [[*range(1, 9)], [9, 0, INACTIVE, 1]]
    first = add(store, memory)
    assert stored(first) == 9
    memory[0][3] = 20
    second = add(store, memory)
    third = add(store, memory)
    assert (stored(second), stored(third)) == (1, 0)
    assert [read(image) for image in (second, third)] == [memory, memory]
    for image in (second, third):
        links = [path.stat().st_ino for path in image.glob("link*.data")]
        assert (first / "gpu0.data").stat().st_ino in links


@pytest.mark.parametrize("first", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("second", [False, True], ids=["plain", "packed"])
def test_packed_and_plain_images_share(store: Store, first: bool, second: bool) -> None:
    memory = [[*range(1, 9)], [9, 0, INACTIVE, 1]]
    base = add(store, memory, compress=first)
    memory[0][3] = 20
    image = add(store, memory, compress=second)
    assert stored(image) == 1 and read(image) == memory
    names = {"link0.data", "link1.data"}
    assert {path.name.removesuffix(".zst") for path in image.glob("link*.data*")} == names
    data = Image(base).extent_data(0)
    assert (image / data.name.replace("gpu", "link")).samefile(data)
    assert (data.suffix == ".zst") == first
    assert not list(image.glob("*.packed"))
    assert store.verify() == {base.name: None, image.name: None}
    store.remove(base.name)
    last = add(store, memory)
    assert stored(last) == 0 and read(last) == memory
    store.remove(image.name)
    Image(last).verify()
    assert read(last) == memory


def test_a_packed_extent_of_which_nothing_is_used_is_let_go(store: Store) -> None:
    """Here the first of three, so that the others get other numbers."""
    memory = [[1], [2, 3]]
    add(store, memory, compress=True)
    memory = [[4], [2, 3]]
    add(store, memory, compress=True)
    memory = [[4], [2, 5]]
    image = add(store, memory)
    assert read(image) == memory and stored(image) == 1
    assert {path.name for path in image.glob("link*")} == {
        *("link0.data.zst", "link0.digests", "link1.data.zst", "link1.digests")
    }
    assert all(error is None for error in store.verify().values())


def test_a_packed_extent_of_many_frames_is_shared(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = [list(range(1, 301))]
    base = add(store, memory, compress=True)
    memory[0][150] = 1000
    image = add(store, memory)
    frames = [Image(base).frames(0), Image(image).frames(1)]
    assert frames[0] == frames[1] and len(frames[0] or ()) == 3
    assert stored(image) == 1 and read(image) == memory


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_flipped_byte_of_a_shared_packed_extent_is_told_for_each_image(
    store: Store, when: str
) -> None:
    """Also when the second image was made of the damaged one: it has the digest of the whole."""
    memory = [[1, 2, 3, 4]]
    images = [add(store, memory, compress=True)]
    if when == "after":
        images.append(add(store, memory))
    path = images[0] / "gpu0.data.zst"
    for at in (0, path.stat().st_size // 2, path.stat().st_size - 1):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        if len(images) == 1:
            images.append(add(store, memory))
        found = store.verify()
        assert "gpu0.data.zst does not have its digest" in str(found[images[0].name])
        assert "link0.data.zst does not have its digest" in str(found[images[1].name])
        data[at] ^= 1
        path.write_bytes(data)
    assert all(error is None for error in store.verify().values())


def test_removing_an_image_leaves_the_others_whole_and_frees_their_bytes_last(
    store: Store,
) -> None:
    memory = [list(range(1, 9))]
    images = [add(store, memory) for _ in range(3)]
    data = 8 * CHUNK
    for image in images[:2]:
        assert store.usage(image.name).own < data
        store.remove(image.name)
        assert all(error is None for error in store.verify().values())
    assert store.usage(images[2].name).own > data
    assert read(images[2]) == memory


def test_an_image_that_is_copied_away_is_whole(store: Store, tmp_path: Path) -> None:
    memory = [[1, 2, 3, 4]]
    add(store, memory)
    memory[0][0] = 5
    shutil.copytree(add(store, memory), tmp_path / "away")
    shutil.rmtree(store.path)
    Image(tmp_path / "away").verify()
    assert read(tmp_path / "away") == memory


def test_an_extent_goes_when_it_costs_little_to_store_what_is_used_of_it(store: Store) -> None:
    memory = [list(range(1, 41))]
    first = add(store, memory)
    memory[0][:37] = range(41, 78)
    second = add(store, memory)
    # Three of forty are used, and two may be stored anew for 37 that have to be.
    assert stored(second) == 37 and (second / "link0.data").samefile(first / "gpu0.data")
    memory[0][:38] = range(81, 119)
    third = add(store, memory)
    assert stored(third) == 40 and len(Image(third).extents) == 1
    assert read(third) == memory


def test_what_changes_again_and_again_is_all_that_is_written(store: Store) -> None:
    """Also where it is more than half of an extent, so that each one is soon mostly unused."""
    memory = [list(range(1, 101))]
    add(store, memory)
    for turn in range(1, 12):
        memory[0][:60] = range(1000 * turn, 1000 * turn + 60)
        image = add(store, memory)
        assert stored(image) == 60 and read(image) == memory
        assert sum(extent.slots for extent in Image(image).extents) == 160


def test_an_image_never_takes_three_times_what_it_needs(store: Store) -> None:
    """Each image leaves another piece of the one before: the worst for whoever keeps extents."""
    memory = [list(range(1, 101))]
    add(store, memory)
    written = 0
    for turn in range(1, 40):
        kept = slice(turn % 10 * 10, turn % 10 * 10 + 10)
        before = memory[0][kept]
        memory[0] = list(range(1000 * turn, 1000 * turn + 100))
        memory[0][kept] = before
        image = add(store, memory)
        written += stored(image)
        assert sum(extent.slots for extent in Image(image).extents) <= MOST_DISK * 100
        assert read(image) == memory
    assert written <= 1.1 * 39 * 90
    assert all(error is None for error in store.verify().values())


def test_many_small_extents_become_fewer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linked, "MOST_LINKS", 8)
    memory = [list(range(1, 40))]
    add(store, memory)
    for turn in range(16):
        memory[0][turn] = 100 + turn
        image = add(store, memory)
        assert len(Image(image).extents) <= 1 + 8
        assert read(image) == memory
    assert all(error is None for error in store.verify().values())


def test_which_extents_are_kept() -> None:
    assert choose([], [], 1, 0) == []
    assert choose([0, 1, 5, 4], [0, 2, 10, 9], 1, 0) == [1, 2, 3]
    assert choose([0, 1, 5, 3], [3, 2, 10, 9], 1, 48) == [1, 2]
    # What is at least half used stays, however little it would cost.
    assert choose([5, 4], [10, 9], 1, 1000) == [0]
    # The least used go while all take more than three times what is needed.
    assert choose([5, 10, 10], [100, 50, 20], 1, 0) == [1, 2]
    assert choose([5, 10, 10], [100, 50, 20], 1, 60) == [0, 1, 2]
    slots = [10 + number for number in range(MOST_LINKS + 4)]
    assert choose(slots, slots, 1, 0) == list(range(4, MOST_LINKS + 4))
    assert choose(slots, slots, 2, 0) == list(range(MOST_LINKS + 4))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=20), st.integers(0, 99))
def test_what_is_kept_takes_little_and_costs_little(rows: list[tuple[int, int]], new: int) -> None:
    used = [min(row) for row in rows]
    slots = [max(row) for row in rows]
    kept = choose(used, slots, 1, new)
    assert all(used[number] for number in kept)
    again = sum(used) - sum(used[number] for number in kept)
    held = new + again + sum(slots[number] for number in kept)
    assert held <= MOST_DISK * (new + sum(used))
    before = new + sum(slots[number] for number in range(len(rows)) if used[number])
    assert again <= new // REWRITTEN or before > MOST_DISK * (new + sum(used))


@given(st.lists(st.integers(0, 5), max_size=5), st.lists(st.integers(0, 40), max_size=20))
def test_numbers_of_digests_are_places(sizes: list[int], numbers: list[int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for link, size in enumerate(sizes):
            (folder / layout.link_digests(link)).write_bytes(bytes(16 * size))
        found = Linked(folder)
    places = [(link, slot) for link, size in enumerate(sizes) for slot in range(size)]
    places += [(NOT_TAKEN, 0)] * 50
    assert found.slots == sizes and len(found.digests) == sum(sizes)
    link, slot = found.place(np.array(numbers, np.uint64))
    assert list(zip(link.tolist(), slot.tolist(), strict=True)) == [places[n] for n in numbers]


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_where_links_are_refused_everything_is_stored(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    memory = [[1, 2, 3]]
    add(store, memory)
    done: list[str] = []
    link = os.link

    def second_fails(source: Any, target: Any, **options: Any) -> None:
        if done:
            raise OSError(code, os.strerror(code))
        done.append(str(target))
        link(source, target, **options)

    monkeypatch.setattr(os, "link", second_fails)
    image = add(store, memory)
    assert done and stored(image) == 3 and len(Image(image).extents) == 1
    assert read(image) == memory


def test_another_error_of_a_link_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    add(store, [[1, 2, 3]])
    failed = mock.Mock(side_effect=OSError(errno.EIO, "broken"))
    monkeypatch.setattr(os, "link", failed)
    with pytest.raises(OSError, match="broken"):
        add(store, [[1, 2, 3]])
    assert len(store.names()) == 1 and store.clean() == []


def test_nothing_is_shared_across_file_systems(store: Store, tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(mount)], check=True)
    try:
        base = add(Store(mount / "other"), [[1, 2, 3]])
        store.path.mkdir()
        write(store.next_image(), [[1, 2, 3]], base, "a")
        (name,) = store.names()
        assert stored(store.path / name) == 3
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize(
    "how", ["gone", "damaged manifest", "damaged digests", "version 1", "another job"]
)
def test_a_base_that_cannot_be_used_is_not_used(store: Store, tmp_path: Path, how: str) -> None:
    base = add(store, [[1, 2, 3]], "b" if how == "another job" else "a")
    if how == "gone":
        shutil.rmtree(base)
    elif how == "version 1":
        base = ROOT / "tests" / "golden" / "image-v1"
    elif how != "another job":
        path = base / ("manifest.json" if how == "damaged manifest" else "gpu0.digests")
        data = bytearray(path.read_bytes())
        data[20] ^= 1
        path.write_bytes(data)
    folder = tmp_path / "partial"
    folder.mkdir()
    assert take(base, folder, "a").slots == []
    assert os.listdir(folder) == []


def test_what_a_period_changes_is_known_from_the_second_one_on(
    store: Store, tmp_path: Path
) -> None:
    memory = [[1, 2, 3, 4]]
    images = [add(store, memory)]
    memory[0][0] = 5
    images.append(add(store, memory))
    for number, usual in enumerate((None, CHUNK)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert take(images[number], folder, "a").usual == usual


def test_a_base_may_be_removed_while_the_next_image_is_written(store: Store) -> None:
    base = add(store, [[1, 2, 3]])
    steps = iter(range(100))

    def step() -> None:
        if next(steps) == 1:  # after take()
            store.remove(base.name)

    output = store.next_image()
    write(output, [[1, 2, 3]], base, "a", step)
    assert store.names() == [output.name] and stored(output) == 0
    assert store.verify() == {output.name: None}


def test_a_flipped_byte_of_a_shared_extent_is_told_for_each_image(store: Store) -> None:
    memory = [[1, 2, 3, 4]]
    images = [add(store, memory) for _ in range(2)]
    alone = add(store, memory, "b")
    data = bytearray((images[0] / "gpu0.data").read_bytes())
    data[2 * CHUNK] ^= 1
    (images[0] / "gpu0.data").write_bytes(data)
    found = store.verify()
    assert "chunk 2 of gpu0.data" in str(found[images[0].name])
    assert "chunk 2 of link0.data" in str(found[images[1].name])
    assert found[alone.name] is None
    with pytest.raises(ImageDamaged):
        Image(images[1]).verify()


@pytest.mark.parametrize("compress", [False, True])
def test_what_images_share_is_read_once(store: Store, compress: bool) -> None:
    memory = [[1, 2, 3, 4]]
    cpu = [{at: at for at in range(1, 100)}]
    write(store.next_image(), memory, None, "a", compress=compress, cpu=cpu)
    for _ in range(2):
        write(store.next_image(), memory, store.newest("a"), "a", cpu=cpu)
    images = [store.path / name for name in store.names()]
    known: set[Any] = set()
    first, *others = [Image(image).verify("all", None, known) for image in images]
    extent = Image(images[0]).extent_data(0).stat().st_size
    pages = sum(path.stat().st_size for path in images[0].glob("criu/pages-*"))
    # The second image has the pages anew where those of the first are packed.
    assert others[1] < first - extent - pages
    events: list[Any] = []
    store.verify(events.append)
    assert sorted({event["total"] for event in events}) == sorted({first, *others})


def test_names_are_in_the_order_of_writing_whatever_the_clock_says(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowgpu.image import store as module

    clock = mock.Mock()
    monkeypatch.setattr(module, "datetime", clock)
    expected = []
    for time in ("20300101T000000Z", "20200101T000000Z", "20250101T000000Z"):
        clock.now.return_value.strftime.return_value = time
        expected.append(add(store, [[1]]).name)
    assert store.names() == expected
    (store.path / "1000000-20200101T000000Z").mkdir()
    assert store.names()[-1].startswith("1000000-")
    assert store.next_image().name.startswith("1000001-")


def test_a_number_is_not_used_again_while_a_partial_image_has_it(store: Store) -> None:
    store.path.mkdir()
    with ImageWriter(store.next_image()):
        assert store.next_image().name.startswith("000002-")


def test_only_images_of_the_job_are_shared_with_and_counted(store: Store) -> None:
    first, other, last = (add(store, [[1, 2]], job) for job in ("a", "b", "a"))
    assert stored(other) == 2 and stored(last) == 0
    assert store.newest("b") == other and store.newest("c") is None
    assert store.keep("a", 2) == [] and store.keep("b", 1) == []
    assert store.keep("a", 1) == [first.name]
    assert store.names() == [other.name, last.name]


def test_strange_names_are_left_alone(store: Store) -> None:
    add(store, [[1]])
    strange = ["mine", "000002", "000001-20261121T144500Z.bak", "x.partial-0123"]
    strange.append("000001-20261121T144500Z.cut-20261121T150000Z")
    for name in strange:
        (store.path / name).mkdir()
    assert len(store.names()) == 1 and store.clean() == []
    for name in (*strange, "../store", "."):
        with pytest.raises(FileNotFoundError):
            store.remove(name)
    assert set(strange) <= set(os.listdir(store.path))


def test_one_process_adds_at_a_time(store: Store) -> None:
    told = pytest.raises(StoreBusy, match=f"process {os.getpid()} for job 'train'")
    with store.adding("job 'train'"), told, Store(store.path).adding("job 'other'"):
        pass
    with store.adding("x"):
        pass
    with pytest.raises(StoreBusy, match="for y\\."), store.adding("y"), store.adding("z"):
        pass


WRITER = """
import sys, time
from pathlib import Path
from flowgpu.image.store import Store
from flowgpu.image.writer import ImageWriter
with ImageWriter(Store(Path(sys.argv[1])).next_image()) as writer:
    writer.gpu_data(0).write_bytes(b"x")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_partial_image_is_removed_only_when_its_writer_is_gone(store: Store) -> None:
    store.path.mkdir()
    command = [sys.executable, "-c", WRITER, str(store.path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        assert store.clean() == [] and len(os.listdir(store.path)) == 1
        process.send_signal(signal.SIGKILL)
    assert len(store.clean()) == 1
    assert os.listdir(store.path) == []


def test_an_image_that_is_set_aside_is_none_of_the_store_and_keeps_its_number(store: Store) -> None:
    first, second = (add(store, [[number]]) for number in (1, 2))
    aside = store.set_aside(second.name)
    assert aside.is_dir() and not second.exists()
    assert store.names() == [first.name]
    assert store.damaged() == [f"{second.name}.damaged"]
    assert store.newest("a") == first
    assert store.next_image().name.startswith("000003-")
    assert store.keep("a", 1) == store.clean() == []  # it stays


def test_a_store_whose_job_has_ended_says_so_and_has_its_images(store: Store) -> None:
    image = add(store, [[1]])
    assert not store.has_ended()
    store.end()
    assert store.has_ended()
    assert store.names() == [image.name]
    assert store.clean() == []


def test_a_folder_in_the_place_of_the_one_that_was_locked_is_found(store: Store) -> None:
    with store.adding("x"):
        store.check_held()
        store.path.rename(store.path.with_name("away"))
        with pytest.raises(StoreUnusable, match="No such file"):
            store.check_held()
        with Store(store.path).adding("y"), pytest.raises(StoreUnusable, match="another folder"):
            store.check_held()


def test_a_folder_that_cannot_be_made_or_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreUnusable, match="file"), Store(path).adding("x"):
            pass
    with pytest.raises(StoreUnusable):
        Store(tmp_path / "file").names()

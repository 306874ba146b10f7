"""Images of one job in a row: real coordinator, CRIU and store, fake task and ghost.

The task counts in the first chunk of each block. What its other chunks hold never changes.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowgpu.errors import CheckpointFailed, CoordinatorGone, NotEnoughDisk
from flowgpu.image.reader import Image
from flowgpu.image.store import Store
from flowgpu.start import kill_coordinator
from tests.unit.coordinator_job import Jobs, Running, wait_for
from tests.unit.test_coordinator_checkpoint import DUMP_FAULTS, is_counting

CHUNK_BYTES = 32 << 10
FILLED = 63  # chunks of a block that do not change
OWN = {"FAKE_TASK_FILL": "own"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.path.mkdir()
    return store


def add(job: Running, store: Store, **fields: Any) -> dict[str, Any]:
    """Take the next image as `flowgpu checkpoint` does; its report, bytes as chunks."""
    base = store.newest(job.spec.id)
    fields |= {"base": str(base)} if base else {}
    result = job.dump(store.next_image(), leave_running=True, **fields)
    return {
        key: value // CHUNK_BYTES if key.startswith("gpu_bytes_") else value
        for key, value in result.items()
    }


def steps(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines]


def restores(jobs: Jobs, image: Path, **options: Any) -> None:
    """The job goes on from where its log in the image ends."""
    again = jobs.restore(image, **options)
    again.wait_steps(5)
    log = (image / "output.log").read_text().splitlines()
    assert is_counting(log + again.lines), again.log
    again.kill()


def test_an_image_stores_what_has_changed_since_the_one_before(jobs: Jobs, store: Store) -> None:
    job = jobs.task(3, task_env=OWN)
    results = [add(job, store) for _ in range(4)]
    assert [result["gpu_bytes_stored"] for result in results] == [3 * FILLED + 1, 1, 1, 1]
    assert [result["gpu_bytes_distinct"] for result in results] == [3 * FILLED + 1] * 4
    # The chunk with the count is let go with its extent, as nothing else is in it.
    assert [result["gpu_bytes_linked"] for result in results] == [0, *[3 * FILLED + 1] * 3]
    job.wait_steps()
    job.kill()
    assert is_counting(job.lines)
    images = [Path(result["image"]) for result in results]
    assert store.verify() == {image.name: None for image in images}
    first = (images[0] / "gpu0.data").stat()
    assert first.st_nlink == 4
    assert all((image / "link0.data").samefile(images[0] / "gpu0.data") for image in images[1:])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_each_image_restores_whichever_others_are_gone(
    jobs: Jobs, store: Store, order: tuple[int, ...]
) -> None:
    job = jobs.task(2, task_env=OWN)
    images = [Path(add(job, store)["image"]) for _ in order]
    job.kill()
    for gone, left in itertools.pairwise(order):
        store.remove(images[gone].name)
        assert all(error is None for error in store.verify().values())
        restores(jobs, images[left])
    store.remove(images[order[-1]].name)
    assert store.names() == []


def test_an_image_of_many_extents_restores(jobs: Jobs, store: Store) -> None:
    """Each image stores another chunk that stays, and the count, which does not."""
    job = jobs.task(2, task_env={"FAKE_TASK_FILL": "turn"})
    results = [add(job, store) for _ in range(9)]
    job.kill()
    assert [result["gpu_bytes_stored"] for result in results] == [2 * FILLED + 1, *[2] * 8]
    *others, last = store.names()
    assert len(Image(store.path / last).extents) == 9
    for name in others:
        store.remove(name)
    assert store.verify() == {last: None}
    restores(jobs, store.path / last)


def test_a_restored_job_goes_on_with_its_series(jobs: Jobs, store: Store) -> None:
    job = jobs.task(2, task_env=OWN)
    first = Path(add(job, store)["image"])
    job.kill()
    again = jobs.restore(first)
    again.ask("wait-restored")
    again.wait_steps(3)
    assert add(again, store)["gpu_bytes_stored"] == 1
    again.kill()
    store.remove(first.name)
    restores(jobs, store.path / store.names()[0])


def test_what_gpus_have_in_common_is_stored_once(jobs: Jobs, store: Store) -> None:
    gpus = {"FAKE_GPUS": "2"}
    job = jobs.task(4, task_env={**gpus, "FAKE_TASK_FILL": "same"}, ghost_env=gpus)
    results = [add(job, store) for _ in range(3)]
    assert [result["gpu_bytes_stored"] for result in results] == [2 * FILLED + 1, 1, 1]
    assert [result["gpu_bytes_distinct"] for result in results] == [2 * FILLED + 1] * 3
    job.kill()
    names = store.names()
    assert [extent.slots for extent in Image(store.path / names[0]).extents] == [64, 63]
    for name in names[:2]:
        store.remove(name)
    assert store.verify() == {names[2]: None}
    restores(jobs, store.path / names[2], ghost_env=gpus)


def test_what_is_lost_between_gpus_is_read_from_the_image(jobs: Jobs, store: Store) -> None:
    gpus = {"FAKE_GPUS": "2"}
    job = jobs.task(4, task_env={**gpus, "FAKE_TASK_FILL": "same"}, ghost_env=gpus)
    add(job, store)
    job.kill()
    image = store.path / store.names()[0]
    again = jobs.restore(image, ghost_env={**gpus, "FAKE_LOSSY": "1"})
    again.wait_steps()
    # All that is in its memory is in the image before, but for what the step has changed.
    assert add(again, store)["gpu_bytes_stored"] == 1
    assert "did not come whole from another GPU" in again.log
    again.kill()


@pytest.mark.parametrize(
    ("environment", "passed"), [({}, True), ({"FAKE_UNREACHED": "1"}, False)], ids=["", "apart"]
)
def test_a_gpu_is_filled_while_others_still_get_their_blocks(
    jobs: Jobs, store: Store, environment: dict[str, str], passed: bool
) -> None:
    gpus = {"FAKE_GPUS": "2"}
    job = jobs.task(4, task_env={**gpus, "FAKE_TASK_FILL": "same"}, ghost_env=gpus)
    stored = add(job, store)["gpu_bytes_stored"]
    job.kill()
    image, filled = store.path / store.names()[0], store.path.parent / "filled"
    environment = {**gpus, "FAKE_FIRST_FILLED": str(filled), **environment}
    again = jobs.restore(image, ghost_env=environment)
    report = again.ask("wait-restored")
    again.wait_steps()
    assert add(again, store)["gpu_bytes_stored"] == 1  # all but the count is as it was
    again.kill()
    read = report["gpu_bytes_read"] // CHUNK_BYTES
    assert (read == stored, report["gpu_bytes_passed"] > 0) == (passed, passed)
    assert ("each GPU reads for itself" in again.log) is not passed


def test_a_ghost_in_the_place_of_the_job_shares_as_well(jobs: Jobs, store: Store) -> None:
    job = jobs.task(2, task_env={**OWN, "FAKE_TASK_FREE": str(4 << 20)})
    results = [add(job, store) for _ in range(3)]
    assert [result["gpu_bytes_stored"] for result in results] == [2 * FILLED + 1, 1, 1]
    assert {Image(store.path / name).manifest.ghost for name in store.names()} == {"late"}
    assert all(error is None for error in store.verify().values())


def test_without_kernels_nothing_is_linked(jobs: Jobs, store: Store) -> None:
    job = jobs.task(2, task_env=OWN, ghost_env={"FAKE_NO_KERNELS": "1"})
    results = [add(job, store) for _ in range(2)]
    assert [result["gpu_bytes_stored"] for result in results] == [128, 128]
    assert not list(store.path.glob("*/link*"))
    assert all(error is None for error in store.verify().values())


def test_without_sharing_nothing_is_linked(jobs: Jobs, store: Store) -> None:
    job = jobs.task(2, task_env=OWN)
    add(job, store)
    assert add(job, store, without=["dedup"])["gpu_bytes_stored"] == 128
    # What has many slots of one digest in it is not shared with as far as these go.
    assert add(job, store)["gpu_bytes_stored"] == 1
    assert all(error is None for error in store.verify().values())


def test_an_image_of_another_job_is_no_base(jobs: Jobs, store: Store, tmp_path: Path) -> None:
    other = jobs.task(2, task_env=OWN)
    add(other, store)
    job = jobs.task(2, task_env=OWN)
    base = str(store.path / store.names()[0])
    result = job.dump(tmp_path / "image", base=base)
    assert result["gpu_bytes_stored"] == (2 * FILLED + 1) * CHUNK_BYTES
    assert result["gpu_bytes_linked"] == 0


def test_a_job_without_gpu_is_written_again_and_again(jobs: Jobs, store: Store) -> None:
    job = jobs.run(["/bin/sh", "-c", "echo begun; while sleep 0.01; do :; done"])
    job.wait_line("begun")
    for _ in range(2):
        add(job, store)
    assert all(error is None for error in store.verify().values()) and len(store.names()) == 2


def while_writing(store: Store, job: Running, action: Callable[[], None]) -> None:
    """Take a second image, and act while it is written."""
    failures: list[Exception] = []

    def take() -> None:
        try:
            add(job, store)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    wait_for(lambda: list(store.path.glob("*.partial-*/gpu0.chunks")), "the second image")
    action()
    thread.join()
    if failures:
        raise failures[0]


def test_a_base_may_be_removed_while_the_next_image_is_written(jobs: Jobs, store: Store) -> None:
    job = jobs.task(2, task_env=OWN, ghost_env={"FAKE_COPY_SECONDS": "1"})
    add(job, store)
    (base,) = store.names()
    while_writing(store, job, lambda: store.remove(base))
    job.kill()
    (second,) = store.names()
    assert second != base and store.verify() == {second: None}
    assert Image(store.path / second).manifest.counts.gpu_bytes_stored == CHUNK_BYTES
    restores(jobs, store.path / second)


def test_a_coordinator_that_dies_between_link_and_commit_harms_no_image(
    jobs: Jobs, store: Store
) -> None:
    job = jobs.task(2, task_env=OWN, ghost_env={"FAKE_COPY_SECONDS": "1"})
    add(job, store)
    (base,) = store.names()
    pid = job.record.root_pid
    try:
        with pytest.raises(CoordinatorGone):
            while_writing(store, job, lambda: kill_coordinator(job.directory))
        job.process.wait()
    finally:
        os.kill(pid, signal.SIGKILL)  # nobody else would
    (partial,) = (path.name for path in store.path.glob("*.partial-*"))
    wait_for(lambda: store.clean() == [partial], "the partial image to be nobody's")
    assert store.verify() == {base: None}
    assert (store.path / base / "gpu0.data").stat().st_nlink == 1


def test_every_fault_leaves_the_series_as_it_was(jobs: Jobs, store: Store, tmp_path: Path) -> None:
    """One job, restored from the first image, lives through all faults."""
    plain = jobs.task(3, task_env=OWN)
    add(plain, store)
    job_id = plain.spec.id
    plain.kill()
    setting = tmp_path / "fault"
    setting.touch()
    job = jobs.restore(
        store.path / store.names()[0], coordinator_env={"FLOWGPU_FAULT": f"@{setting}"}
    )
    job.ask("wait-restored")
    assert job.spec.id == job_id
    for fault in DUMP_FAULTS:
        job.wait_steps(3)
        before = {file: file.stat().st_nlink for file in store.path.rglob("*.data")}
        setting.write_text(f"{fault}:{1 + random.Random(str(fault)).randrange(3)}")
        try:
            result = add(job, store)
        except (CheckpointFailed, NotEnoughDisk):
            after = {file: file.stat().st_nlink for file in store.path.rglob("*.data")}
            assert after == before, fault
            assert not list(store.path.glob("*.partial*")), fault
            job.wait_steps()
            setting.write_text("")
            result = add(job, store)
        setting.write_text("")
        assert result["gpu_bytes_stored"] == 1, fault
        assert all(error is None for error in store.verify().values()), fault
    found = steps(job.lines)
    assert found == list(range(found[0], found[-1] + 1))

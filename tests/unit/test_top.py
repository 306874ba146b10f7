"""`flowgpu top`: what is seen of jobs and stores, and what its keys do. Nothing draws here."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_coordinator import FakeCoordinator
from store_lib import write
from test_cli import flowgpu

from flowgpu import saving, timeline
from flowgpu.errors import NoTerminal, PackageMissing
from flowgpu.image.store import Store
from flowgpu.jobs import (
    CHECKPOINTING,
    DUMPED,
    EXITED,
    RESTORING,
    RUNNING,
    STARTING,
    SUSPENDED,
    Job,
    Registry,
    start_time,
)
from flowgpu.metrics import counting
from flowgpu.render import size
from flowgpu.timeline import COORDINATOR, JOB, PAUSED, Recorder
from flowgpu.top import asking, details, looks
from flowgpu.top.asking import Status, Statuses
from flowgpu.top.looks import Seen, Watch
from tests.patience import SECONDS

NOW = 1.7e9
GIB = 1 << 30
TASK = {"pid": 7, "allocations": 3, "block_bytes": 2 * GIB, "foreign_bytes": GIB}
REPORT = {
    "engine": "replay",
    "pause_seconds": 0.3,
    **dict.fromkeys([f"gpu_bytes_{s}" for s in ("reserved", "active", "nonzero")], 8),
    **dict.fromkeys([f"gpu_bytes_{s}" for s in ("distinct", "stored", "linked")], 8),
    "cpu_bytes": 4,
    "image_bytes": 12,
}


@pytest.fixture
def registry(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("FLOWGPU_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setattr(asking, "WAIT_SECONDS", SECONDS)  # however busy the machine is
    return Registry()


def make(registry: Registry, name: str, state: str = RUNNING, **changes: Any) -> Job:
    """A job that this process seems to coordinate, and to be the root of."""
    job = registry.create(command=["train.py"], cwd="/", gpu="emulated", name=name)
    pid, start = os.getpid(), start_time(os.getpid())
    there = {"coordinator_pid": pid, "coordinator_start": start}
    root = {"root_pid": pid, "root_start": start}
    return registry.dir(job.id).update(**{"state": state} | there | root | changes)


def answer(doing: str = "", step: tuple[str, int, int] | None = None) -> list[dict[str, Any]]:
    told = {"job": "x", "root_pid": 7, "doing": doing, "step": step, "tasks": [TASK]}
    return [{"event": "result", **told}]


def serve(registry: Registry, job: Job, *words: Any) -> FakeCoordinator:
    return FakeCoordinator(registry.dir(job.id).control_socket, {"status": answer(*words)})


def seen(**changes: Any) -> Seen:
    """A job of which nothing is known but its record."""
    record = Job("0" * 12, "train", ["train.py"], "/", "emulated", state=RUNNING)
    pid = os.getpid()
    record.coordinator_pid, record.coordinator_start = pid, start_time(pid)
    fields = {f.name for f in dataclasses.fields(Job)}
    record = dataclasses.replace(record, **{k: v for k, v in changes.items() if k in fields})
    rest = {k: v for k, v in changes.items() if k not in fields}
    return Seen(
        **{
            "record": record,
            "status": None,
            "processes": 1,
            "counts": looks.Counts(),
            "saving": None,
        }
        | rest
    )


# What is seen


def test_a_running_job_shows_its_memory_its_processes_and_its_newest_image(
    registry: Registry, tmp_path: Path
) -> None:
    job = make(registry, "train")
    with counting(registry.dir(job.id).counts) as counts:
        counts.dumped(REPORT)
    saving.note(registry.dir(job.id), tmp_path, 40.0)
    watch = Watch(registry, [])
    with serve(registry, job):
        (found,) = watch.jobs(ended=False)
    assert (found.state, found.memory) == ("running", (3 * GIB, "GPU"))
    assert found.processes >= 1 and found.counts.last_pause == 0.3
    assert found.saving is not None and found.saving.store == tmp_path
    now = found.counts.last_success
    texts = {column.title: column.text(found, now + 12) for column in looks.COLUMNS}
    assert texts["MEMORY"] == "3.00 GiB GPU"
    assert texts["PROCS"] == f"1/{found.processes}"
    assert (texts["IMAGE"], texts["PAUSE"]) == ("12 s", "0.30 s")
    assert texts["NEXT"].endswith(" s")


@pytest.mark.parametrize(
    ("state", "doing", "step", "shown"),
    [
        (CHECKPOINTING, "a checkpoint", ("copy", 45, 100), "dump copy 45%"),
        (CHECKPOINTING, "a checkpoint", ("gate", 0, 0), "dump gate"),
        (CHECKPOINTING, "a suspension", ("copy", 200, 100), "suspend copy 100%"),
        (SUSPENDED, "a resume", ("copy", 0, 100), "resume copy 0%"),
        (RESTORING, "its start", ("verify", 5, 10), "restore verify 50%"),
        (CHECKPOINTING, "a checkpoint", None, "checkpointing"),
        (RUNNING, "", ("mapback", 0, 0), "running"),  # as a restore ends
        (RUNNING, "", None, "running"),
    ],
)
def test_the_state_is_the_step_of_what_is_done(
    registry: Registry, state: str, doing: str, step: Any, shown: str
) -> None:
    job = make(registry, "train", state)
    watch = Watch(registry, [])
    with serve(registry, job, doing, step):
        (found,) = watch.jobs(ended=False)
    assert found.state == shown
    column = next(column for column in looks.COLUMNS if column.title == "STATE")
    assert len(shown) <= column.width


def test_a_suspended_job_shows_what_it_has_of_the_hosts_memory() -> None:
    job = seen(state=SUSPENDED, host_bytes=GIB, status=Status(()))
    assert job.memory == (GIB, "host")


def test_ended_and_lost_jobs_are_told_apart() -> None:
    assert seen(state=EXITED, exit_code=3).state == "exited (3)"
    assert seen(coordinator_pid=0).state == "lost"
    assert seen(trouble="output was lost").state == "running !"


def test_ended_jobs_are_shown_where_they_are_asked_for(registry: Registry) -> None:
    make(registry, "over", EXITED, exit_code=0)
    make(registry, "away", DUMPED)
    make(registry, "lost", coordinator_pid=0)
    watch = Watch(registry, [])
    assert [job.record.name for job in watch.jobs(ended=False)] == ["lost"]
    assert [job.record.name for job in watch.jobs(ended=True)] == ["over", "away", "lost"]


def test_a_job_whose_folder_is_gone_is_not_there_any_more(registry: Registry) -> None:
    job = make(registry, "train")
    watch = Watch(registry, [])
    with serve(registry, job):
        assert watch.jobs(ended=False)
        shutil.rmtree(registry.dir(job.id).path)
        assert watch.jobs(ended=False) == []
    assert watch.operation(job.id) is None
    shutil.rmtree(registry.base)
    assert watch.jobs(ended=True) == []


def test_an_end_of_the_command_that_saves_a_job_takes_its_next_image_away(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = registry.dir(make(registry, "train").id)
    assert saving.read(directory) is None
    saving.note(directory, tmp_path, None)
    assert saving.read(directory) == saving.Saving(tmp_path, None)
    saving.note(directory, tmp_path, 5.0)
    found = saving.read(directory)
    assert found is not None and found.next is not None
    assert time.time() < found.next < time.time() + 6
    monkeypatch.setattr(saving, "is_process", lambda *_: False)
    assert saving.read(directory) == saving.Saving(tmp_path, None)
    directory.saving.write_text("[]")
    assert saving.read(directory) is None


# Asking


def test_a_coordinator_that_does_not_answer_is_asked_once(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "WAIT_SECONDS", 0.05)
    job = make(registry, "stuck")
    path = registry.dir(job.id).control_socket
    statuses = Statuses()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        for _ in range(3):
            assert statuses.look({job.id: path}) == {}
        connection, _ = listener.accept()
        listener.settimeout(0.05)
        with pytest.raises(TimeoutError):
            listener.accept()
        with connection:
            connection.sendall(b'{"event": "result", "doing": "", "tasks": []}\n')
            assert statuses.look({job.id: path}) == {job.id: Status(())}
    statuses.close()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"nothing\n",
        b"[]\n",
        b'{"event": "error", "error": "OtherUser"}\n',
        b'{"event": "result", "doing": "", "tasks": [{"pid": 1}]}\n',
    ],
)
def test_what_is_no_status_is_none(registry: Registry, said: bytes) -> None:
    job = make(registry, "odd")
    path = registry.dir(job.id).control_socket
    statuses = Statuses()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        asked = asyncio.run(_while(lambda: statuses.look({job.id: path}), listener, said))
    assert asked == {}
    statuses.close()


async def _while(look: Callable[[], Any], listener: socket.socket, said: bytes) -> Any:
    looking = asyncio.create_task(asyncio.to_thread(look))
    connection, _ = await asyncio.to_thread(listener.accept)
    with connection:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        return await looking


def test_a_coordinator_that_starts_a_job_is_not_asked(registry: Registry) -> None:
    job = make(registry, "begins", STARTING)
    with serve(registry, job) as fake:
        (found,) = Watch(registry, []).jobs(ended=False)
    assert found.status is None and fake.requests == []


# Columns


@pytest.mark.parametrize("room", [40, 78, 100, 200])
def test_columns_take_no_more_letters_than_there_are(room: int) -> None:
    job = seen(name="a-job-with-a-name-that-is-long")
    chosen = looks.columns([job], room)
    titles = [column.title for column, _ in chosen]
    taken = sum(width + looks.GAP for _, width in chosen)
    assert titles[:2] == ["NAME", "STATE"]
    least = sum(c.width + looks.GAP for c in looks.COLUMNS if c.wanted([job]))
    assert taken <= max(room, least)
    assert least <= 78  # what a terminal of 80 has beside its scroll bar
    assert ("COMMAND" in titles) == (room == 200)


def test_a_job_of_several_nodes_shows_which_one_this_is() -> None:
    titles = [column.title for column, _ in looks.columns([seen(node=1, nodes=2)], 100)]
    assert "NODE" in titles
    column = next(column for column in looks.COLUMNS if column.title == "NODE")
    assert column.text(seen(node=1, nodes=2), NOW) == "1/2"


# Stores


def test_stores_are_those_that_are_named_and_those_of_jobs(
    registry: Registry, tmp_path: Path
) -> None:
    job = make(registry, "train")
    own, folder = tmp_path / "own", tmp_path / "named"
    for store in (own, folder / "a", folder / "b"):
        write(store / "000001-20261121T144500Z", [[1, 2]], None, job.id)
    (folder / "empty").mkdir()
    damaged = folder / "b" / "000002-20261121T144501Z"
    shutil.copytree(folder / "b" / "000001-20261121T144500Z", damaged)
    (damaged / "manifest.json").write_text("{")
    saving.note(registry.dir(job.id), own, None)
    found = {store.path: store for store in Watch(registry, [folder]).stores()}
    assert list(found) == [folder / "a", folder / "b", own]
    facts = found[folder / "b"].facts
    assert facts is not None and (facts.whole, facts.damaged) == (1, 1)
    assert [bool(image.error) for image in found[folder / "b"].images] == [False, True]
    (image,) = found[own].images
    assert (image.id, image.job) == (job.id, f"job {job.id}")
    text = str(details.of_store(found[folder / "b"], NOW))
    assert "1 whole, 1 damaged" in text and "000002" in text


def test_a_store_that_is_gone_says_so(registry: Registry, tmp_path: Path) -> None:
    store = tmp_path / "store"
    watch = Watch(registry, [store])
    (found,) = watch.stores()
    assert found.error == "No such file or directory" and found.facts is None
    write(store / "000001-20261121T144500Z", [[1]], None, "0" * 12)
    (found,) = watch.stores()
    assert not found.error and len(found.images) == 1
    Store(store).remove("000001-20261121T144500Z")
    (found,) = watch.stores()
    assert found.images == ()


# Details


def noted(registry: Registry, job: Job, error: str = "") -> None:
    recorder = Recorder(100.0)
    recorder.add(COORDINATOR, "prepare", 100.0, 101.0)
    recorder.add(COORDINATOR, "capture", 101.0, 103.0)
    recorder.add(JOB, PAUSED, 102.0, 103.0)
    report = {} if error else {"pause_seconds": 1.0}
    timeline.note(registry.dir(job.id).timeline, "checkpoint", recorder, report, error)


def test_the_details_of_a_job_have_its_steps_as_bars(registry: Registry) -> None:
    job = make(registry, "train")
    noted(registry, job)
    watch = Watch(registry, [])
    with serve(registry, job, "a checkpoint", ("copy", GIB, 4 * GIB)):
        (found,) = watch.jobs(ended=False)
    text = details.of_job(found, watch.operation(job.id), [], time.time()).plain
    assert "newest checkpoint: 3.00 s" in text and "paused 1.00 s" in text
    lines = [line for line in text.splitlines() if " s " in line and "░" in line]
    prepare, capture = lines
    assert "prepare" in prepare and "█" not in prepare and prepare.count("░") == details.BAR // 2
    assert capture.count("█") == capture.count("░") == details.BAR // 2
    assert "copy        1.00 GiB of 4.00 GiB" in text
    assert f"{7:>10} {size(3 * GIB):>12}" in text


def test_the_details_of_a_job_have_its_newest_error_and_its_trouble(registry: Registry) -> None:
    job = make(registry, "train", trouble="output was lost")
    noted(registry, job, "The checkpoint of job 'train' failed\nin phase STRIP")
    watch = Watch(registry, [])
    (found,) = watch.jobs(ended=False)
    text = details.of_job(found, watch.operation(job.id), [], time.time()).plain
    assert "failed\\nin phase STRIP" in text and "output was lost" in text


# The screens


def on_screens(watch: Watch, do: Callable[[Any, Any], Awaitable[None]]) -> None:
    """Do something with the program and who presses its keys, on a terminal of 80 by 24."""
    pytest.importorskip("textual", reason="the Python package textual is not installed")
    from flowgpu.top.app import Top

    async def run() -> None:
        top = Top(watch, 0.2)
        async with top.run_test(size=(80, 24)) as pilot:
            await do(top, pilot)

    asyncio.run(run())


async def until(pilot: Any, condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        await pilot.pause(0.01)


def names(top: Any) -> list[str]:
    """What the first column of the table of jobs shows."""
    table = top.screen_stack[0].query_one("#jobs")
    return [table.get_row_at(row)[0].plain.strip() for row in range(table.row_count)]


def words(top: Any) -> str:
    """What the details show; empty while they are not there."""
    return " ".join(str(one.content) for one in top.screen.query("#details"))


def test_jobs_come_and_go_under_the_cursor(registry: Registry) -> None:
    one, two = make(registry, "one"), make(registry, "two")

    async def do(top: Any, pilot: Any) -> None:
        table = top.query_one("#jobs")
        await until(pilot, lambda: names(top) == ["one", "two"], "two jobs")
        await pilot.press("down")
        assert table.chosen == two.id
        make(registry, "three")
        registry.dir(one.id).update(state=EXITED)
        await until(pilot, lambda: names(top) == ["two", "three"], "the third job")
        assert table.chosen == two.id
        await pilot.press("a")
        await until(pilot, lambda: names(top) == ["one", "two", "three"], "the ended one")
        assert table.chosen == two.id
        shutil.rmtree(registry.base)
        await until(pilot, lambda: names(top) == [], "none")
        await pilot.press("enter", "o", "r")
        make(registry, "four")
        await until(pilot, lambda: names(top) == ["four"], "the fourth job")

    on_screens(Watch(registry, []), do)


def test_keys_sort_the_jobs(registry: Registry) -> None:
    for name in ("b", "c", "a"):
        make(registry, name)

    async def do(top: Any, pilot: Any) -> None:
        await until(pilot, lambda: len(names(top)) == 3, "three jobs")
        assert names(top) == ["b", "c", "a"]
        await pilot.press("o")
        assert names(top) == ["a", "b", "c"]
        await pilot.press("r")
        assert names(top) == ["c", "b", "a"]
        for _ in range(len(looks.columns([seen()], 78))):
            await pilot.press("o")
        assert names(top) == ["a", "c", "b"]  # the begin, turned round

    on_screens(Watch(registry, []), do)


def test_a_job_that_ends_while_its_details_are_shown_is_said_to_be_gone(
    registry: Registry, tmp_path: Path
) -> None:
    job = make(registry, "train")
    write(tmp_path / "000001-20261121T144500Z", [[1, 2]], None, job.id)
    saving.note(registry.dir(job.id), tmp_path, 40.0)

    async def do(top: Any, pilot: Any) -> None:
        await until(pilot, lambda: names(top) == ["train"], "the job")
        await until(pilot, lambda: top.query_one("#stores").row_count, "its store")
        await pilot.press("enter")
        await until(pilot, lambda: "000001-20261121T144500Z" in words(top), "its image")
        assert job.id in words(top) and str(tmp_path) in words(top)
        shutil.rmtree(registry.dir(job.id).path)
        await until(pilot, lambda: "not there any more" in words(top), "its end")
        await pilot.press("escape")
        await until(pilot, lambda: len(top.screen_stack) == 1, "the tables")

    on_screens(Watch(registry, []), do)


def test_a_store_shows_its_images(registry: Registry, tmp_path: Path) -> None:
    write(tmp_path / "000001-20261121T144500Z", [[1, 2]], None, "0" * 12)

    async def do(top: Any, pilot: Any) -> None:
        stores = top.query_one("#stores")
        await until(pilot, lambda: stores.row_count, "the store")
        await pilot.press("tab", "enter")
        await until(pilot, lambda: words(top), "its details")
        assert "1 whole, 0 damaged" in words(top) and "000001-20261121T144500Z" in words(top)

    on_screens(Watch(registry, [tmp_path]), do)


def test_a_runtime_folder_that_cannot_be_read_is_told_and_looked_at_again(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(registry, "train")
    watch = Watch(registry, [])
    looked = watch.jobs

    def refused(**_: Any) -> list[Seen]:
        raise PermissionError(13, "Permission denied")

    async def do(top: Any, pilot: Any) -> None:
        await until(pilot, lambda: names(top) == ["train"], "the job")
        error = top.query_one("#error")
        assert not error.display
        monkeypatch.setattr(watch, "jobs", refused)
        await until(pilot, lambda: error.display, "the error")
        assert "Permission denied" in str(error.content)
        monkeypatch.setattr(watch, "jobs", looked)
        await until(pilot, lambda: not error.display, "the job again")

    on_screens(watch, do)


def test_a_signal_ends_it_with_the_terminal_as_it_was(registry: Registry) -> None:
    async def do(top: Any, pilot: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await until(pilot, lambda: top.return_code is not None, "the end")
        assert top.return_code == 128 + signal.SIGTERM

    on_screens(Watch(registry, []), do)


def test_q_ends_it(registry: Registry) -> None:
    async def do(top: Any, pilot: Any) -> None:
        await pilot.press("q")
        await until(pilot, lambda: top.return_code is not None, "the end")
        assert top.return_code == 0

    on_screens(Watch(registry, []), do)


# The command


def test_without_a_terminal_it_says_so(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert flowgpu("top") == NoTerminal.exit_code
    assert "draws on a terminal, and its standard input is none" in capfd.readouterr().err


def test_without_textual_it_says_what_to_install(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.delitem(sys.modules, "flowgpu.top.app", raising=False)
    for name in [name for name in sys.modules if name.startswith("textual.")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert flowgpu("top") == PackageMissing.exit_code
    said = capfd.readouterr().err
    assert "needs the Python package textual" in said and "pip install 'flowgpu[top]'" in said

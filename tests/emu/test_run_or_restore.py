"""`flowgpu run --store --resume`: the same command line starts a job, or goes on with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowgpu import errors
from flowgpu.host.proctree import children
from flowgpu.image import layout
from flowgpu.image.reader import Image
from flowgpu.image.store import Store
from flowgpu.jobs import LIVE_STATES, RUNNING, Registry
from flowgpu.start import kill_coordinator, kill_lost
from tests.emu.test_checkpoint import (
    FLOWGPU,
    ROOT,
    SECONDS,
    STEPS,
    command,
    emulated_machine,
    flowgpu,
)
from tests.gpu.shared import gpu
from tests.unit.coordinator_job import wait_for
from tests.unit.mover_lib import mounted_tmpfs
from workloads._common import LAST_STEPS

WORDS = command("digits_mlp")
NAME = "train"
AT_SIGNALS = ("--on-signal", "USR1=dump", "--on-signal", "TERM=dump")
HURRY = "WORKLOAD_HURRY"


@pytest.fixture(
    scope="module", params=["emulated", pytest.param("nvidia", marks=pytest.mark.gpu)], autouse=True
)
def lane(request: pytest.FixtureRequest) -> Iterator[str]:
    with emulated_machine():
        if request.param == "emulated":
            yield request.param
            return
        with gpu():
            yield request.param


@pytest.fixture(scope="module")
def expected(lane: str) -> list[str]:
    """Lines of a run that nobody disturbed."""
    done = flowgpu("run", "--gpu", lane, "--", *command("digits_mlp", **{"step-delay": 0}))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class Line:
    """One command line, started again and again, whose output goes on in the same file."""

    def __init__(self, lane: str, folder: Path, *options: object) -> None:
        self.folder, self.out, self.hurrying = folder, folder / "out", folder / "hurry"
        self.store = Store(folder / "store" / NAME)
        self.store.path.parent.mkdir(parents=True, exist_ok=True)
        self.words = [
            *("run", "--gpu", lane, "--name", NAME, "--store", str(self.store.path.parent)),
            *("--resume", *map(str, options), "--", *WORDS),
        ]
        self.runs: list[subprocess.Popen[bytes]] = []

    def start(self, *more: str, words: list[str] | None = None) -> subprocess.Popen[bytes]:
        """The command line, with options more before all."""
        words = words or self.words
        with open(self.out, "ab") as out, open(self.err(len(self.runs)), "wb") as err:
            process = subprocess.Popen(
                [*FLOWGPU, words[0], *more, *words[1:]],
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env={**os.environ, HURRY: str(self.hurrying)},
            )
        self.runs.append(process)
        return process

    def err(self, number: int = -1) -> Path:
        return self.folder / f"err{number if number >= 0 else len(self.runs) + number}"

    @property
    def said(self) -> str:
        """Messages of the last start."""
        return self.err().read_text()

    @property
    def lines(self) -> list[str]:
        return self.out.read_text().splitlines()

    def wait(self, check: Callable[[], Any], what: str) -> None:
        run = self.runs[-1]
        wait_for(lambda: check() or run.poll() is not None, what, SECONDS)
        assert run.poll() is None, self.said

    def wait_more(self, count: int) -> None:
        """For the job of the last start, and so many lines more, or all until it is hurried."""
        wanted = min(len(self.lines) + count, STEPS - LAST_STEPS + 1)
        # A busy machine may have had all lines from the start before.
        self.wait(self._has_job, "a job")
        self.wait(lambda: len(self.lines) >= wanted, f"{wanted} lines")

    def _has_job(self) -> bool:
        own = children(self.runs[-1].pid)
        found = [job for job in Registry().all() if job.name == NAME and job.state == RUNNING]
        return any(job.keeper_pid in own for job in found)

    def wait_images(self, count: int) -> None:
        self.wait(lambda: len(self.store.names()) >= count, f"{count} images")

    def end(self, signum: int | None = None) -> int:
        """The exit code; without a signal, of a job that hurries."""
        if signum is None:
            self.hurrying.touch()
        else:
            self.runs[-1].send_signal(signum)
        return self.runs[-1].wait(SECONDS)

    def kill(self, *, tree: bool = True) -> None:
        """All at once, as a machine that goes down; without the job's own processes if not tree."""
        self.runs[-1].kill()
        record = Registry().find(NAME)
        directory = Registry().dir(record.id)
        if not tree:  # else it ends by itself as soon as it says something
            os.kill(record.root_pid, signal.SIGSTOP)
        kill_coordinator(directory)
        if tree:
            kill_lost(directory, signal.SIGKILL)
        self.runs[-1].wait()

    def clear(self) -> None:
        for run in self.runs:
            run.kill()
            run.wait()
        for job in Registry().all():
            if job.name == NAME and job.state in LIVE_STATES:
                kill_coordinator(Registry().dir(job.id))
                kill_lost(Registry().dir(job.id), signal.SIGKILL)


@pytest.fixture
def line(lane: str, tmp_path: Path) -> Iterator[Callable[..., Line]]:
    made: list[Line] = []

    def make(*options: object, folder: Path = tmp_path) -> Line:
        made.append(Line(lane, folder, *options))
        return made[-1]

    yield make
    for one in made:
        one.clear()


def test_the_same_line_starts_dumps_at_signals_goes_on_and_has_ended(
    line: Callable[..., Line], expected: list[str]
) -> None:
    job = line(*AT_SIGNALS, "--dumped-exit", 85)
    job.start()
    job.wait_more(3)
    assert Registry().find(NAME).as_json()["store"] == str(job.store.path)
    assert job.end(signal.SIGUSR1) == 85, job.said
    assert "no image to go on from" in job.err(0).read_text()
    assert "the same command goes on from it" in job.said
    job.start()
    job.wait_more(3)
    assert Registry().find(NAME).store == str(job.store.path)
    assert job.end(signal.SIGTERM) == 85, job.said
    assert len(job.store.names()) == 2
    job.start()
    assert job.end() == 0, job.said
    assert job.lines == expected
    # An orchestrator may start it once more.
    job.start()
    assert job.end() == 0
    assert "has ended well before" in job.said
    assert job.lines == expected
    refused = flowgpu(*(word for word in job.words if word != "--resume"))
    assert refused.returncode == errors.StoreHasJob.exit_code
    assert "it has ended well" in refused.stderr


def test_a_signal_that_comes_before_the_job_runs_is_carried_out(
    line: Callable[..., Line], expected: list[str]
) -> None:
    job = line(*AT_SIGNALS)
    run = job.start()
    # It says so right before it starts.
    job.wait(lambda: job.said, "the start")
    assert job.end(signal.SIGUSR1) == errors.DUMPED_EXIT, job.said
    assert run.returncode == errors.DUMPED_EXIT
    job.start()
    assert job.end() == 0, job.said
    assert job.lines == expected


def test_a_signal_that_was_blocked_until_the_command_listens_keeps_the_job_from_beginning(
    line: Callable[..., Line], expected: list[str]
) -> None:
    job = line(*AT_SIGNALS)

    def told_early() -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            run = job.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        run.send_signal(signal.SIGUSR1)
        assert run.wait(SECONDS) == errors.DUMPED_EXIT, job.said
        assert "was told to go before it began" in job.said

    told_early()
    assert job.store.names() == job.lines == []
    job.start()
    job.wait_more(2)
    assert job.end(signal.SIGUSR1) == errors.DUMPED_EXIT, job.said
    names, lines = job.store.names(), job.lines
    told_early()
    assert (job.store.names(), job.lines) == (names, lines)
    job.start()
    assert job.end() == 0, job.said
    assert job.lines == expected


def test_signals_that_come_together_dump_once(
    line: Callable[..., Line], expected: list[str]
) -> None:
    job = line(*AT_SIGNALS)
    run = job.start()
    job.wait_more(2)
    for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        run.send_signal(signum)
    assert run.wait(SECONDS) == errors.DUMPED_EXIT, job.said
    assert len(job.store.names()) == 1
    job.start()
    assert job.end() == 0, job.said
    assert job.lines == expected


@pytest.mark.parametrize("tree", [True, False], ids=["all", "all-but-the-job"])
def test_what_was_killed_goes_on_from_the_last_periodic_image(
    line: Callable[..., Line], expected: list[str], tree: bool
) -> None:
    job = line("--every", 0.5, *AT_SIGNALS)
    job.start()
    job.wait_images(2)
    job.wait_more(1)
    job.kill(tree=tree)
    newest = Image(job.store.path / job.store.names()[-1])
    before = newest.output_log.read_text().splitlines()
    said = job.lines
    job.start()
    assert job.end() == 0, job.said
    assert f"goes on from {newest.path}" in job.said
    assert ("ended what was left of train" in job.said) == (not tree)
    # Lines that it had said after the image come again, and are the same.
    assert said == expected[: len(said)]
    assert before == expected[: len(before)]
    assert before + job.lines[len(said) :] == expected


def test_a_job_whose_command_alone_was_killed_is_not_started_twice(
    line: Callable[..., Line], expected: list[str]
) -> None:
    job = line("--every", 0.5)
    first = job.start()
    job.wait_images(1)
    first.kill()
    first.wait()
    job.start()
    assert job.runs[-1].wait(SECONDS) == errors.JobExists.exit_code, job.said
    assert flowgpu("kill", NAME).returncode == 0
    job.start()
    assert job.end() == 0, job.said
    assert job.lines[-1] == expected[-1]


def test_a_job_that_ended_badly_goes_on_from_its_newest_image(
    line: Callable[..., Line], expected: list[str]
) -> None:
    job = line("--every", 0.5)
    job.start()
    job.wait_images(1)
    assert job.end(signal.SIGTERM) == 128 + signal.SIGTERM, job.said  # it is the job's
    assert not job.store.has_ended()
    job.start()
    assert job.end() == 0, job.said
    assert job.lines[-1] == expected[-1]


def test_an_image_that_was_never_completed_is_removed_and_the_one_before_taken(
    line: Callable[..., Line], expected: list[str]
) -> None:
    job = line("--every", 0.2)
    job.start()
    job.wait_images(1)
    job.wait(lambda: list(job.store.path.glob("*.partial-*")), "an image being written")
    job.kill()
    newest = job.store.names()[-1]
    left = list(job.store.path.glob("*.partial-*"))
    job.start()
    assert job.end() == 0, job.said
    assert all(f"removed {path.name}, which was never completed" in job.said for path in left)
    assert f"goes on from {job.store.path / newest}" in job.said
    assert job.lines[-1] == expected[-1]


def test_periodic_images_are_kept_to_the_newest(line: Callable[..., Line]) -> None:
    job = line("--every", 0.3, "--keep", 1, *AT_SIGNALS)
    job.start()
    job.wait(lambda: int((job.store.names() or ["0"])[-1].split("-")[0]) >= 3, "three images")
    assert job.end(signal.SIGUSR1) == errors.DUMPED_EXIT, job.said
    assert len(job.store.names()) == 1
    assert Registry().find(NAME).image == str(job.store.path / job.store.names()[0])


# What damages an image.


def cut_manifest(image: Path) -> None:
    with open(image / "manifest.json", "r+b") as file:
        file.truncate(100)


def flip(path: Path, *places: int) -> None:
    """A file of its own, as others may share it."""
    data = bytearray(path.read_bytes())
    for at in places or [len(data) // 2]:
        data[at] ^= 1
    path.unlink()
    path.write_bytes(data)


def flip_gpu(image: Path) -> None:
    """All chunks: what the job has not written since the image before is in links, beside others
    that are not in use."""
    for path in (*image.glob("gpu*.data"), *image.glob("link*.data")):
        if size := path.stat().st_size:
            flip(path, *range(0, size, layout.CHUNK_BYTES))


def flip_cpu(image: Path) -> None:
    flip(max(image.glob("criu/core-*.img"), key=lambda path: path.stat().st_size))


def lose_file(image: Path) -> None:
    next(image.glob("criu/mm-*.img")).unlink()


DAMAGES = [cut_manifest, flip_gpu, flip_cpu, lose_file]


@pytest.fixture(scope="module")
def three(lane: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """A job that was killed after three images."""
    made = Line(lane, tmp_path_factory.mktemp("three"), "--every", 0.5, "--keep", 9)
    made.start()
    made.wait_images(3)
    made.kill()
    for name in made.store.names()[3:]:
        made.store.remove(name)
    made.hurrying.touch()  # what is restored goes to its end
    yield made
    made.clear()


def copied(three: Line, job: Line) -> list[str]:
    """Put the store of `three` in the place of the job's; names of its images."""
    shutil.rmtree(job.store.path, ignore_errors=True)
    subprocess.run(["cp", "-a", str(three.store.path), str(job.store.path)], check=True)
    return job.store.names()


def goes_on(job: Line, image: str, expected: list[str]) -> None:
    """The last start has restored this image and gone to the end."""
    assert job.runs[-1].wait(SECONDS) == 0, job.said
    assert f"goes on from {job.store.path / image}" in job.said
    before = Image(job.store.path / image).output_log.read_text().splitlines()
    assert before + job.lines == expected


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_restore_falls_back_to_the_newest_good_image(
    damage: Callable[[Path], None], line: Callable[..., Line], three: Line, expected: list[str]
) -> None:
    job = line()
    first, second, third = copied(three, job)
    damage(job.store.path / third)
    job.start()
    goes_on(job, second, expected)
    aside = job.store.path / f"{third}.damaged"
    assert f"The image {job.store.path / third} is damaged" in job.said
    assert f"it is set aside as {aside}" in job.said
    assert aside.is_dir()
    assert job.store.names() == [first, second]


def test_of_two_damaged_images_both_are_named_and_passed_over(
    line: Callable[..., Line], three: Line, expected: list[str]
) -> None:
    job = line()
    first, second, third = copied(three, job)
    flip_cpu(job.store.path / second)
    flip_gpu(job.store.path / third)
    job.start()
    goes_on(job, first, expected)
    assert all(f"{job.store.path / name} is damaged" in job.said for name in (second, third))


def test_without_a_good_image_nothing_starts_unless_asked_for(
    line: Callable[..., Line], three: Line, expected: list[str]
) -> None:
    job = line()
    names = copied(three, job)
    for name in names:
        cut_manifest(job.store.path / name)
    jobs = len(Registry().all())
    for _ in range(2):  # the second finds them set aside
        job.start()
        assert job.end() == errors.NoGoodImage.exit_code, job.said
        assert all(f"{name}.damaged" in job.said for name in names)
    assert job.lines == []
    assert len(Registry().all()) == jobs
    job.start("--fresh-if-damaged")
    assert job.end() == 0, job.said
    assert job.lines == expected


def test_a_line_begins_from_an_image_of_another_place(
    line: Callable[..., Line], three: Line, lane: str, expected: list[str], tmp_path: Path
) -> None:
    image = three.store.path / three.store.names()[0]
    said = (image / layout.OUTPUT_LOG).read_text().splitlines()
    job = line()
    job.start("--from", str(image))
    assert job.end() == 0, job.said
    assert f"goes on from {image}" in job.said
    assert said + job.lines == expected
    # An image of its own is newer.
    job = line(folder=tmp_path / "own")
    newest = copied(three, job)[-1]
    job.start("--from", str(image))
    goes_on(job, newest, expected)
    # An orchestrator writes nothing where no image is named.
    job = line(folder=tmp_path / "new")
    job.start("--from", "")
    assert job.end() == 0, job.said
    assert job.lines == expected


def test_an_image_to_begin_from_needs_no_store_but_the_same_command(
    three: Line, lane: str, expected: list[str], tmp_path: Path
) -> None:
    image = three.store.path / three.store.names()[0]
    said = (image / layout.OUTPUT_LOG).read_text().splitlines()
    words = ("run", "--gpu", lane, "--from", image, "--")
    done = flowgpu(*words, *WORDS)
    assert done.returncode == 0, done.stderr
    assert said + done.stdout.splitlines() == expected
    other = flowgpu(*words, "true")
    assert (other.returncode, other.stdout) == (2, "")
    assert f"{image} is of another command: " in other.stderr
    shutil.copytree(image, damaged := tmp_path / "damaged")
    cut_manifest(damaged)
    refused = flowgpu("run", "--gpu", lane, "--from", damaged, "--", *WORDS)
    assert (refused.returncode, refused.stdout) == (errors.ImageDamaged.exit_code, "")


LEFT = 256 << 10


def fill_up(job: Line, fill: Path) -> bool:
    """Leave no more than that of the store's disk; True once it is so, and no image is under way
    whose room may be free again."""

    def free() -> int:
        return os.statvfs(fill.parent).f_bavail * 4096

    before = os.listdir(job.store.path)
    if free() > LEFT:
        with open(fill, "ab") as file, contextlib.suppress(OSError):  # an image may have taken it
            os.posix_fallocate(file.fileno(), file.tell(), max(free() - LEFT, 1))
    partial = [name for name in before if ".partial-" in name]
    return not partial and os.listdir(job.store.path) == before and free() <= LEFT


def test_a_full_store_is_named_and_the_job_goes_on(
    line: Callable[..., Line], expected: list[str], tmp_path: Path
) -> None:
    job = line("--every", 0.3, *AT_SIGNALS)
    job.store.path.parent.rmdir()
    with mounted_tmpfs(job.store.path.parent, "512m") as store:
        run = job.start()
        job.wait_images(1)
        fill = store / "fill"
        job.wait(lambda: fill_up(job, fill), "a full disk")
        job.wait(lambda: "no image this time" in job.said, "a periodic image that fails")
        kept = [name for name in job.store.names() if (job.store.path / name).exists()]
        run.send_signal(signal.SIGUSR1)
        job.wait(lambda: "SIGUSR1: train was not dumped, and goes on" in job.said, "the message")
        assert str(job.store.path) in job.said
        assert job.store.names() == kept != []
        job.wait_more(1)
        fill.unlink()
        assert job.end(signal.SIGTERM) == errors.DUMPED_EXIT, job.said
        job.start()
        assert job.end() == 0, job.said
        assert job.lines == expected


def test_a_store_that_is_gone_is_named_and_nothing_starts_from_the_beginning(
    line: Callable[..., Line], expected: list[str]
) -> None:
    job = line(*AT_SIGNALS)
    folder = job.store.path.parent
    run = job.start()
    job.wait_more(2)
    away = folder.rename(folder.with_name("away"))
    run.send_signal(signal.SIGUSR1)
    job.wait(lambda: "SIGUSR1: train was not dumped, and goes on" in job.said, "the message")
    assert f"The store {job.store.path} cannot be used" in job.said
    # A folder that is made in its place is none of the job's.
    job.store.path.mkdir(parents=True)
    (job.store.path / ".lock").touch()
    run.send_signal(signal.SIGUSR1)
    job.wait(lambda: "another folder has taken its place" in job.said, "the message")
    assert job.store.names() == []
    shutil.rmtree(folder)
    away.rename(folder)
    job.wait_more(1)
    assert job.end(signal.SIGUSR1) == errors.DUMPED_EXIT, job.said
    folder.rename(away)
    job.start()
    assert job.end() == errors.StoreUnusable.exit_code
    assert "there is no such folder" in job.said
    away.rename(folder)
    job.start()
    assert job.end() == 0, job.said
    assert job.lines == expected


def test_two_of_one_line_at_a_time_are_one_job(
    line: Callable[..., Line], expected: list[str]
) -> None:
    job = line()
    first = job.start()
    job.wait_more(1)
    job.start()
    assert job.runs[-1].wait(SECONDS) == errors.StoreBusy.exit_code
    assert f"process {first.pid} for job 'train'" in job.said
    job.hurrying.touch()
    assert first.wait(SECONDS) == 0
    assert job.lines == expected


def test_images_of_another_command_are_not_gone_on_with(
    line: Callable[..., Line], three: Line
) -> None:
    job = line()
    names = copied(three, job)
    other = [*job.words, "--seed", "5"]
    job.start(words=other)
    assert job.end() == errors.StoreHasJob.exit_code
    assert "they are of another command" in job.said
    job.start(words=[word for word in job.words if word != "--resume"])
    assert job.end() == errors.StoreHasJob.exit_code
    assert "--resume was not given" in job.said
    assert job.store.names() == names


def test_a_job_that_cannot_be_dumped_goes_on_to_its_end(line: Callable[..., Line]) -> None:
    """It is named once, however often it is tried."""
    job = line("--every", 0.1, *AT_SIGNALS)
    program = f"""
import os, socket, sys, time
outside = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
while not os.path.exists(os.environ[{HURRY!r}]):
    time.sleep(0.01)
"""
    words = job.words[: job.words.index("--") + 1]
    with socket.create_server(("127.0.0.1", 0)) as server:
        job.start(words=[*words, sys.executable, "-c", program, str(server.getsockname()[1])])
        job.wait(lambda: "no image this time" in job.said, "the message")
        job.runs[-1].send_signal(signal.SIGUSR1)
        job.wait(lambda: "SIGUSR1: train was not dumped, and goes on" in job.said, "the message")
        assert job.end() == 0, job.said
    assert job.lines == ["ready"]
    assert job.said.count("no image this time") == 1


def test_options_for_images_need_a_store_and_a_name(tmp_path: Path) -> None:
    for words in (["--resume"], ["--every", "5"], ["--on-signal", "USR1=dump"], ["--keep", "2"]):
        done = flowgpu("run", *words, "--", "true")
        assert done.returncode == 2, words
        assert "needs --store" in done.stderr
    done = flowgpu("run", "--store", tmp_path, "--", "true")
    assert done.returncode == 2 and "--store needs --name" in done.stderr
    for said in ("USR1", "USR1=stop", "NO=dump", "KILL=dump"):
        done = flowgpu("run", "--store", tmp_path, "--name", "x", "--on-signal", said, "--", "true")
        assert done.returncode == 2, said

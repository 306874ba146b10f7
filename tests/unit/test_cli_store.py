"""Repeated checkpoints from the command line, of a job whose coordinator plays a script."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_coordinator import Event, FakeCoordinator
from store_lib import read, write

from flowgpu import jobs, saving
from flowgpu.cli import main
from flowgpu.cli import store as verbs
from flowgpu.errors import (
    Busy,
    CheckpointFailed,
    JobEnded,
    NothingMeasured,
    StoreBusy,
    Unsupported,
)
from flowgpu.frequency import best, fixed
from flowgpu.image.reader import Image
from flowgpu.image.store import Store
from flowgpu.jobs import Job, Registry

COST = {"stall": 0.09, "drain": 2.0, "total": 3.0, "gpus": 2}
Capture = pytest.CaptureFixture[str]


def flowgpu(*args: str | Path | float) -> int:
    """Run the command line here and give its exit code."""
    with pytest.raises(SystemExit) as raised:
        main([str(arg) for arg in args])
    return int(raised.value.code or 0)


class Training:
    """A job that trains, and the coordinator that writes its images."""

    def __init__(self, registry: Registry) -> None:
        made = registry.create(command=["train"], cwd="/", gpu="emulated", name="train")
        self.directory = registry.dir(made.id)
        self.job: Job = self.directory.update(
            state=jobs.RUNNING, coordinator_pid=0, coordinator_start=0
        )
        self.memory = [[1, 2, 3, 4]]
        self.errors: dict[int, Exception] = {}
        self.ends_after = 100
        self.fake = FakeCoordinator(self.directory.control_socket, {"pause-and-dump": self.answer})

    @property
    def requests(self) -> list[Event]:
        return self.fake.requests

    def answer(self, request: Event) -> Iterable[Event]:
        turn = len(self.requests)
        if turn == self.ends_after:
            self.directory.update(state=jobs.EXITED)
        if turn in self.errors:
            error: Any = self.errors[turn]
            return [{"event": "error", **error.as_dict()}]
        base = Path(request["base"]) if "base" in request else None
        write(
            Path(request["output"]),
            self.memory,
            base,
            self.job.id,
            compress=request["compress"],
        )
        self.memory[0][0] += 10
        now = self.directory.read()
        self.directory.update(costs=[*now.costs, COST])
        counts = vars(Image(Path(request["output"])).manifest.counts)
        result = {"job": "train", "image": request["output"], "pause_seconds": 0.035, **counts}
        return [{"event": "result", **result}]


@pytest.fixture
def training(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setenv("FLOWGPU_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setattr(jobs, "is_process", lambda *_: True)
    monkeypatch.setattr(verbs, "LOOK_SECONDS", 0.01)
    made = Training(Registry())
    yield made
    made.fake.__exit__()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def checkpoint(folder: Path, *args: str | float) -> int:
    return flowgpu("checkpoint", "train", "--store", folder, "--every", 0.05, *args)


def test_images_follow_one_another_and_share(
    training: Training, folder: Path, capfd: Capture
) -> None:
    assert checkpoint(folder, "--count", 3, "--timeout", 7) == 0
    names = Store(folder).names()
    outputs = [str(folder / name) for name in names]
    assert [request["output"] for request in training.requests] == outputs
    assert [request.get("base") for request in training.requests] == [None, *outputs[:2]]
    assert all(request["leave_running"] for request in training.requests)
    assert all(request["timeout"] == 7 for request in training.requests)
    assert [read(folder / name)[0][0] for name in names] == [1, 11, 21]
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith(names[0]) and "128 KiB stored of 128 KiB active" in lines[0]
    assert "32.0 KiB stored of 128 KiB active" in lines[1] and "paused 35 ms" in lines[1]
    assert Store(folder).verify() == dict.fromkeys(names)


def test_each_image_is_asked_for_as_the_options_say(training: Training, folder: Path) -> None:
    options = ["--compress", "--without", "zero", "--without", "dedup", "--wait-minimum", 0]
    options += ["--engine", "replay"]
    assert checkpoint(folder, "--count", 2, *options) == 0
    for request in training.requests:
        assert request["compress"] and request["without"] == ["zero", "dedup"]
        assert request["wait_minimum"] == 0 and request["engine"] == "replay"
    assert checkpoint(folder, "--count", 1) == 0
    last = training.requests[-1]
    assert not last["compress"] and not last["without"] and last["engine"] == "auto"
    assert last["wait_minimum"] == 0.5 and "timeout" not in last


def test_only_the_newest_are_kept(training: Training, folder: Path, capfd: Capture) -> None:
    assert checkpoint(folder, "--count", 4, "--keep", 2, "--json") == 0
    results = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    names = [Path(result["image"]).name for result in results]
    assert [result["removed"] for result in results] == [[], [], names[:1], names[1:2]]
    assert Store(folder).names() == names[2:]
    assert [read(folder / name)[0][0] for name in names[2:]] == [21, 31]


def test_the_command_ends_with_the_job(training: Training, folder: Path, capfd: Capture) -> None:
    training.ends_after = 2
    assert checkpoint(folder) == 0
    assert len(Store(folder).names()) == 2
    assert "train has ended" in capfd.readouterr().err


def test_a_job_that_ends_during_its_checkpoint_is_no_error(
    training: Training, folder: Path, capfd: Capture
) -> None:
    training.errors[2] = JobEnded("train", "checkpoint", "GATE")
    assert checkpoint(folder) == 0
    assert len(Store(folder).names()) == 1
    assert "train has ended" in capfd.readouterr().err


def test_a_failure_that_may_pass_does_not_end_the_command(
    training: Training, folder: Path, capfd: Capture
) -> None:
    training.errors = {
        1: Busy("train", "a checkpoint"),
        3: CheckpointFailed("checkpoint", "train", "GATE", "x"),
    }
    assert checkpoint(folder, "--count", 2) == 0
    assert len(training.requests) == 4
    assert capfd.readouterr().err.count("no image this time") == 2
    assert training.requests[3]["base"] == training.requests[1]["output"]


def test_a_failure_that_stays_ends_it(training: Training, folder: Path) -> None:
    training.errors[2] = Unsupported("CUDA IPC")
    assert checkpoint(folder) == Unsupported.exit_code
    assert len(training.requests) == 2


def test_what_a_crash_left_is_removed_first(
    training: Training, folder: Path, capfd: Capture
) -> None:
    left = folder / "000007-20261121T144500Z.partial-01234567"
    left.mkdir(parents=True)
    assert checkpoint(folder, "--count", 1) == 0
    assert not left.exists()
    assert f"removed {left.name}, which was never completed" in capfd.readouterr().err


def test_a_store_in_use_is_refused(training: Training, folder: Path, capfd: Capture) -> None:
    with Store(folder).adding("job 'other'"):
        assert checkpoint(folder) == StoreBusy.exit_code
    assert "for job 'other'" in capfd.readouterr().err
    assert training.requests == []


@pytest.mark.parametrize("options", [["--every", 0], ["--keep", 0], ["--count", 0]])
def test_nonsense_is_refused(
    training: Training, folder: Path, options: list[str | float], capfd: Capture
) -> None:
    assert checkpoint(folder, *options) == 2
    assert options[0] in capfd.readouterr().err
    assert not folder.exists()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which goes on where somebody sleeps or writes to it."""
    found = [100.0]

    def sleep(seconds: float) -> None:
        found[0] += seconds

    monkeypatch.setattr(verbs.time, "monotonic", lambda: found[0])
    monkeypatch.setattr(verbs.time, "sleep", sleep)
    return found


def test_who_saves_a_job_notes_where_to_and_when_next(
    training: Training, folder: Path, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving.time, "time", lambda: now[0])
    turns = verbs._turns(Registry(), training.job, Store(folder), fixed(10.0)(training.directory))
    next(turns)
    assert saving.read(training.directory) == saving.Saving(folder, 100.0)
    now[0] += 1.0
    next(turns)
    assert saving.read(training.directory) == saving.Saving(folder, 110.0)


def test_turns_that_took_too_long_are_left_out(
    training: Training, folder: Path, now: list[float]
) -> None:
    began = []
    turns = verbs._turns(Registry(), training.job, Store(folder), fixed(10.0)(training.directory))
    for took in (1.0, 25.0, 10.0, 0.0):
        next(turns)
        began.append(round(now[0]))
        now[0] += took
    assert began == [100, 110, 140, 150]


def test_one_image_is_written_where_the_user_says(
    training: Training, tmp_path: Path, capfd: Capture
) -> None:
    image = tmp_path / "image"
    assert flowgpu("checkpoint", "train", "--output", image, "--mode", "cow", "--json") == 0
    (request,) = training.requests
    assert request["output"] == str(image)
    assert request["leave_running"] and request["mode"] == "cow" and "base" not in request
    assert json.loads(capfd.readouterr().out)["image"] == str(image)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "either --output or --store"),
        (["--output", "one", "--store", "more"], "either --output or --store"),
        (["--output", "one", "--every", 1, "--keep", 2], "--every and --keep need --store"),
        (["--store", "more"], "--store needs --every"),
        (["--store", "more", "--every", "auto"], "need each other"),
        (["--store", "more", "--every", 1, "--failures-per-hour", 1], "need each other"),
        (
            ["--store", "more", "--every", "often"],
            "'often' is neither a number of seconds nor 'auto'",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    training: Training, options: list[str | float], said: str, capfd: Capture
) -> None:
    assert flowgpu("checkpoint", "train", *options) == 2
    assert said in capfd.readouterr().err
    assert training.requests == []


def test_auto_begins_them_as_often_as_loses_the_least(
    training: Training, folder: Path, now: list[float]
) -> None:
    began = []
    turns = verbs._turns(Registry(), training.job, Store(folder), best(1.0)(training.directory))
    for took in (1.0, 2.0, 30.0, 0.0):
        next(turns)
        began.append(round(now[0]))
        now[0] += took
        if len(began) == 2:
            training.directory.update(costs=[COST])
    # Until one has succeeded nothing is known. Two GPUs that fail hourly want one each 18 s.
    assert began == [100, 160, 178, 208]


def test_auto_is_a_period_like_others(training: Training, folder: Path) -> None:
    words = ["--store", folder, "--every", "auto", "--failures-per-hour", 1e6, "--count", 1]
    assert flowgpu("checkpoint", "train", *words) == 0
    assert len(Store(folder).names()) == 1


def test_advice_shows_what_each_interval_loses(training: Training, capfd: Capture) -> None:
    training.directory.update(costs=[COST] * 3, restored={"restore_seconds": 1.5})
    assert flowgpu("advise", "train", "--failures-per-hour", 1, "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["gpus"], found["checkpoints"], found["restore"]) == (2, 3, 1.5)
    lost = [row["stopped"] + row["failures"] for row in found["curve"]]
    best = min(range(len(lost)), key=lost.__getitem__)
    assert found["curve"][best]["interval_seconds"] == found["best_seconds"]
    assert flowgpu("advise", "train", "--failures-per-hour", 1) == 0
    text = capfd.readouterr().out
    assert "stops train for 90 ms" in text and "A restore took 1.50 s" in text
    (line,) = [line for line in text.splitlines() if line.endswith(" best")]
    assert line.startswith("18.00 s") and "#" in line


def test_advice_without_a_checkpoint_says_what_to_do(training: Training, capfd: Capture) -> None:
    assert flowgpu("advise", "train", "--failures-per-hour", 1) == NothingMeasured.exit_code
    assert "flowgpu checkpoint JOB --output DIR" in capfd.readouterr().err


@pytest.fixture
def filled(training: Training, folder: Path, capfd: Capture) -> Callable[..., Any]:
    checkpoint(folder, "--count", 3)
    capfd.readouterr()

    def run(verb: str, *args: str) -> tuple[int, str]:
        code = flowgpu("store", verb, folder, *args)
        return code, capfd.readouterr().out

    return run


def test_images_are_listed_with_what_their_removal_frees(
    filled: Callable[..., Any], folder: Path
) -> None:
    code, text = filled("ls", "--json")
    rows = json.loads(text)
    assert code == 0
    assert [row["name"] for row in rows] == Store(folder).names()
    assert all(row["bytes"] > 128 << 10 for row in rows)
    # The second's own chunk changed again in the third, which so has no use for it.
    assert rows[0]["own_bytes"] < 32 << 10
    assert all(32 << 10 < row["own_bytes"] < 64 << 10 for row in rows[1:])
    _, text = filled("ls")
    assert len(text.splitlines()) == 4 and rows[0]["job"] in text


def test_a_damaged_image_is_listed_as_that(filled: Callable[..., Any], folder: Path) -> None:
    name = Store(folder).names()[0]
    (folder / name / "manifest.json").write_bytes(b"")
    _, text = filled("ls", "--json")
    rows = json.loads(text)
    assert "damaged" in rows[0]["error"] and rows[1]["error"] is None


def test_images_are_removed_by_name(filled: Callable[..., Any], folder: Path) -> None:
    first, second, third = Store(folder).names()
    code, text = filled("rm", first, second)
    assert code == 0 and text.splitlines() == [f"removed {first}", f"removed {second}"]
    assert Store(folder).verify() == {third: None}
    for wrong in (first, "../store", "."):
        assert filled("rm", third, wrong)[0] == 2
        assert Store(folder).names() == [third]


def test_a_store_is_verified_image_by_image(filled: Callable[..., Any], folder: Path) -> None:
    names = Store(folder).names()
    assert filled("verify") == (0, "".join(f"{name}: whole\n" for name in names))
    shutil.copy(folder / names[0] / "output.log", folder / names[0] / "extra")
    code, text = filled("verify", "--json")
    assert code == 74
    assert [row["ok"] for row in json.loads(text)] == [False, True, True]

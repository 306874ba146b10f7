"""What people look at, of real checkpoints and restores on the emulated GPU with real CRIU."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flowgpu import timeline
from flowgpu.image.reader import Image
from flowgpu.image.store import Store
from flowgpu.jobs import JobDir, Registry
from flowgpu.report import source
from flowgpu.report.source import where_the_pause_went
from flowgpu.timeline import COORDINATOR, CRIU, GHOST, JOB, MOVE, PAUSED
from tests.emu.test_checkpoint import FLOWGPU, ROOT, Run, emulated_machine, flowgpu
from tests.emu.test_takeover import kill_coordinator
from tests.unit.report_lib import check, check_trace, words

BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")
BROWSER_SECONDS = 100
ROUNDED = 1e-4
"""A timeline has six digits of a second, and a manifest some of its own."""


@pytest.fixture(scope="module", autouse=True)
def runtime_dir() -> Iterator[Path]:
    with emulated_machine() as base:
        yield base


class Seen:
    """A job whose images were taken while it ran, which was dumped then, and restored."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store, self.image = folder, folder / "store", folder / "image"
        program = str(ROOT / "workloads" / "digits_mlp.py")
        words = [sys.executable, program, "--steps", "2000", "--step-delay", "0.02"]
        run = Run("seen", words, folder, "", "--engine", "replay")
        try:
            run.wait_lines(2)
            asked = ("--store", self.store, "--every", 0.5, "--count", 2)
            done = flowgpu("checkpoint", run.name, *asked)
            assert done.returncode == 0, done.stderr
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("OTEL_TRACES_EXPORTER", "console")
                dumped = flowgpu("pause-and-dump", run.name, "--output", self.image, "--json")
            assert dumped.returncode == 0, dumped.stderr
            self.report, self.spans = json.loads(dumped.stdout), dumped.stderr
            self.of_the_dump = timeline.read(record().timeline)
            restored = flowgpu("restore", self.image, "--detach", "--json")
            assert restored.returncode == 0, restored.stderr
            self.of_the_restore = timeline.read(record().timeline)
        finally:
            flowgpu("kill", "seen")
            run.kill()


def record() -> JobDir:
    registry = Registry()
    return registry.dir(registry.find("seen").id)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(tmp_path_factory.mktemp("seen"))


def test_the_timeline_of_an_image_is_that_of_its_report(seen: Seen) -> None:
    image = Image(seen.image)
    found = timeline.of_image(image)
    assert found is not None
    phases = image.manifest.phases
    for name in ("prepare", "handover", "strip", "commit"):
        (span,) = found.find(COORDINATOR, name)
        assert span.seconds == pytest.approx(phases[name], abs=ROUNDED)
    (dump,) = found.find(CRIU, "dump")
    assert dump.seconds == pytest.approx(phases["criu"], abs=ROUNDED)
    (move,) = found.find(GHOST, MOVE)
    assert move.bytes == image.manifest.counts.gpu_bytes_stored
    (pause,) = found.find(JOB, PAUSED)
    assert pause.seconds == pytest.approx(image.manifest.pause_seconds, abs=ROUNDED)
    (task,) = {span.track for span in found.spans if span.track.startswith("task ")}
    assert task == f"task {image.manifest.tasks[0].pid}"
    # The coordinator had the task's device files when that closed them.
    (strip,), (freed,) = found.find(task, "strip"), found.find(task, "free memory")
    assert strip.end <= freed.begin
    # One step of the coordinator follows another.
    steps = [span for span in found.spans if span.track == COORDINATOR]
    assert all(a.end <= b.begin for a, b in itertools.pairwise(steps))
    # All of them in the pause, however long the machine has let them wait for one another.
    within = [min(one.end, pause.end) - max(one.begin, pause.begin) for one in steps]
    went = where_the_pause_went(source.of_image(seen.image))
    expected = sum(taken for taken in within if taken > 0)
    assert sum(taken for _, taken in went) == pytest.approx(expected, abs=ROUNDED * len(steps))
    assert expected > pause.seconds / 2


def test_a_job_has_the_whole_of_its_newest_checkpoint_or_restore(seen: Seen) -> None:
    dump, restore = seen.of_the_dump, seen.of_the_restore
    assert dump is not None and restore is not None
    assert (dump.kind, dump.error, dump.result["image"]) == ("checkpoint", "", str(seen.image))
    assert dump.timeline.find(COORDINATOR, "kill")  # which is behind the manifest
    assert (restore.kind, restore.error) == ("restore", "")
    (move,) = restore.timeline.find(GHOST, MOVE)
    assert move.bytes == Image(seen.image).manifest.counts.gpu_bytes_stored
    assert restore.timeline.find(CRIU, "restore")
    assert restore.timeline.seconds <= restore.result["restore_seconds"]


@pytest.mark.parametrize("what", ["image", "store", "job"])
def test_a_report_of_a_real_run_opens_in_a_browser(seen: Seen, what: str) -> None:
    subject = {"image": seen.image, "store": seen.store, "job": "seen"}[what]
    output = seen.folder / f"{what}.html"
    done = flowgpu("report", subject, "-o", output)
    assert done.returncode == 0, done.stderr
    html = output.read_text()
    check(html)
    expected = {
        "image": "The job stood still for",
        "store": f"{len(Store(seen.store).names())} images.",
        "job": "The restore took",
    }
    assert expected[what] in words(html)
    if BROWSER is None:
        pytest.skip("there is no Chromium on this machine")
    picture = output.with_suffix(".png")
    flags = ["--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1100,2000"]
    opened = subprocess.run(
        [BROWSER, "--headless", *flags, f"--screenshot={picture}", f"file://{output}"],
        capture_output=True,
        text=True,
        timeout=BROWSER_SECONDS,
        check=True,
    )
    assert "CONSOLE" not in opened.stderr
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize("what", ["image", "store", "job"])
def test_a_trace_of_a_real_run_is_by_the_rules(seen: Seen, what: str) -> None:
    subject = {"image": seen.image, "store": seen.store, "job": "seen"}[what]
    output = seen.folder / f"{what}.json"
    done = flowgpu("trace", subject, "-o", output)
    assert done.returncode == 0, done.stderr
    trace = json.loads(output.read_text())
    check_trace(trace)
    rows = trace["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in rows if one["name"] == "process_name"}
    pid = Image(seen.image).manifest.tasks[0].pid
    expected = {COORDINATOR, GHOST, CRIU, f"task {pid}"} | ({JOB} if what != "job" else set())
    assert expected == set(names.values())
    if what == "job":
        return
    # CRIU's own log has the process, within the dump.
    (dump, *more) = [one for one in rows if names.get(one["pid"]) == CRIU and one["ph"] == "X"]
    process = [one for one in more if one["name"] == f"python ({pid})"]
    images = 1 if what == "image" else len(Store(seen.store).names())
    assert len(process) == images
    assert process[0]["ts"] >= dump["ts"]
    assert process[0]["dur"] > 0.1 * dump["dur"]
    assert {one["tid"] for one in (dump, *more)} == {0}  # within it
    assert len([one for one in rows if one["ph"] == "C"]) == images


def test_a_dump_is_a_span_where_opentelemetry_is_asked_for(seen: Seen) -> None:
    assert seen.report["image"] == str(seen.image)  # what is printed is the report alone
    for name in ("checkpoint", "coordinator: gate", "ghost: move", "criu: dump"):
        assert f'"name": "{name}"' in seen.spans


def told(*words: object) -> dict[tuple[str, str], float]:
    """What `flowgpu metrics` says, by name and result or nothing, of the one job of its name."""
    done = flowgpu("metrics", *words)
    assert done.returncode == 0, done.stderr
    families = text_string_to_metric_families(done.stdout)
    return {
        (
            sample.name,
            f"{sample.labels.get('job_name')} {sample.labels.get('result', '')}".strip(),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_count_what_was_done_across_a_restore(seen: Seen) -> None:
    found = told("--store", seen.store)
    images = len(Store(seen.store).names())
    assert found["flowgpu_checkpoint_operations_total", "seen done"] == images + 1
    assert found["flowgpu_checkpoint_operations_total", "seen failed"] == 0
    assert found["flowgpu_restore_operations_total", "seen done"] == 1
    assert found["flowgpu_checkpoint_pause_seconds_count", "seen"] == images + 1
    assert found["flowgpu_store_last_success_timestamp_seconds", "seen"] > 0


def test_what_is_counted_outlives_a_coordinator(tmp_path: Path) -> None:
    program = str(ROOT / "workloads" / "digits_mlp.py")
    words_of = [sys.executable, program, "--steps", "2000", "--step-delay", "0.02"]
    run = Run("taken", words_of, tmp_path, "", "--engine", "replay")
    try:
        run.wait_lines(2)
        for number in (1, 2):
            done = flowgpu("checkpoint", "taken", "--output", tmp_path / f"image{number}")
            assert done.returncode == 0, done.stderr
            assert told()["flowgpu_checkpoint_operations_total", "taken done"] == number
            kill_coordinator("taken")
    finally:
        run.kill()


def on_a_terminal(*words: object) -> str:
    """What a command draws on the terminal that its standard error is."""
    ours, theirs = pty.openpty()
    drawn = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the last writer has gone
            while data := os.read(ours, 65536):
                drawn.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    command = [*FLOWGPU, *map(str, words)]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    reader.join()
    os.close(ours)
    assert done.returncode == 0, drawn.decode()
    return drawn.decode()


def training(name: str, folder: Path, fault: str = "") -> Run:
    """A job of which something is to be seen."""
    program = str(ROOT / "workloads" / "digits_mlp.py")
    words_of = [sys.executable, program, "--steps", "2000", "--step-delay", "0.02"]
    return Run(name, words_of, folder, fault, "--engine", "replay")


def assert_in_order(drawn: str, *names: str) -> None:
    places = [drawn.find(name) for name in names]
    assert min(places) >= 0, drawn
    assert places == sorted(places), drawn


def test_a_terminal_shows_the_step_that_is_waited_for(tmp_path: Path) -> None:
    run = training("shown", tmp_path)
    try:
        run.wait_lines(2)
        drawn = on_a_terminal("pause-and-dump", "shown", "--output", tmp_path / "image")
        assert_in_order(drawn, "prepare", "gate", "criu", "commit")
        drawn = on_a_terminal("restore", tmp_path / "image", "--detach")
        # The two sides are restored beside each other.
        assert_in_order(drawn, "verify", "criu", "mapback", "open")
        assert_in_order(drawn, "verify", "ghost", "copy", "open")
    finally:
        flowgpu("kill", "shown")
        run.kill()


def test_a_failed_checkpoint_can_be_looked_at(tmp_path: Path) -> None:
    run = training("fails", tmp_path, "image_full:1")
    try:
        run.wait_lines(2)
        failed = flowgpu("pause-and-dump", "fails", "--output", tmp_path / "image")
        assert failed.returncode != 0
        done = flowgpu("report", "fails", "-o", tmp_path / "report.html")
        assert done.returncode == 0, done.stderr
        assert told()["flowgpu_checkpoint_operations_total", "fails failed"] == 1
        said = words((tmp_path / "report.html").read_text())
        assert "The checkpoint failed after" in said
        (error,) = [line for line in failed.stderr.splitlines() if line.startswith("Error: ")]
        assert error.removeprefix("Error: ")[:30] in said
    finally:
        run.kill()

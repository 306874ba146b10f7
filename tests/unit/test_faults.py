"""Faults on purpose (coordinator/faults.py), and what the matrix takes for left behind."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import faults
from coordinator.failures import FailedPhase, explain
from coordinator.ghost_client import GhostError
from coordinator.phases import Phase
from flowgpu.errors import CheckpointFailed, CriuFailed, FlowError, LimitTooLow, NotEnoughDisk
from flowgpu.host.pages import PagesUnavailable
from flowgpu.options import CheckpointOptions
from flowgpu.wire import Fault
from tests.faults import points
from tests.faults.case import Held
from tests.patience import SECONDS

OPTIONS = CheckpointOptions(Path("/image"))
FULL = os.strerror(errno.ENOSPC)


@pytest.fixture(autouse=True)
def no_passes() -> Iterator[None]:
    faults.reset()
    yield
    faults.reset()


def test_a_setting_names_the_pass_or_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWGPU_FAULT", "gate:2")
    assert [faults.fires(Fault.GATE) for _ in range(3)] == [False, True, False]
    assert not faults.fires(Fault.STRIP)
    monkeypatch.setenv("FLOWGPU_FAULT", "gate:0")
    assert [faults.fires(Fault.GATE) for _ in range(2)] == [True, True]


def test_a_file_may_name_another_fault_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting = tmp_path / "fault"
    monkeypatch.setenv("FLOWGPU_FAULT", f"@{setting}")
    found = []
    for text in ("gate:1", "", "gate:2", "strip"):
        setting.write_text(text)
        found.append([faults.fires(Fault.GATE), faults.fires(Fault.GATE)])
    assert found == [[True, False], [False, False], [False, True], [False, False]]


@pytest.mark.parametrize(
    ("point", "code"), [(Fault.IMAGE_FULL, errno.ENOSPC), (Fault.IMAGE_ERROR, errno.EIO)]
)
def test_a_write_fails_as_the_system_would_let_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, point: Fault, code: int
) -> None:
    monkeypatch.setenv("FLOWGPU_FAULT", point)
    with pytest.raises(OSError, match=str(tmp_path)) as caught:
        faults.check_write(tmp_path, faults.IMAGE_WRITE)
    assert caught.value.errno == code
    faults.check_write(tmp_path, faults.IMAGE_WRITE)


def test_a_phase_stops_the_process_until_it_is_continued() -> None:
    program = "from coordinator import faults; faults.halt('gate'); print('on')"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "FLOWGPU_FAULT": "phase_disk"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        stopped = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert stopped is not None and stopped.si_status == signal.SIGSTOP
        process.send_signal(signal.SIGCONT)
        said = process.communicate(timeout=SECONDS)
    assert said == ("on\n", "fault injected at phase_disk\nfault injected at gate\n")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(errno.ENOSPC, FULL), NotEnoughDisk),
        (OSError(errno.EDQUOT, "quota"), NotEnoughDisk),
        (OSError(errno.EIO, "error"), CheckpointFailed),
        (GhostError("wait: no", "NO_SPACE"), NotEnoughDisk),
        (GhostError("wait: no", "IO"), CheckpointFailed),
        (CriuFailed(action="dump", cause=f"cannot write pages-1.img: {FULL}"), NotEnoughDisk),
        (CriuFailed(action="dump", cause="cannot write: Input/output error"), CriuFailed),
        (PagesUnavailable(f"cannot write pages-1.img: {FULL}"), NotEnoughDisk),
    ],
)
def test_a_full_disk_has_one_name(error: Exception, named: type[FlowError]) -> None:
    found = explain(FailedPhase("checkpoint", error, Phase.COMMIT, late=False), "job", OPTIONS)
    assert type(found) is named


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EFBIG, "File too large"),
        GhostError("prepare-copy: cannot reserve space: File too large", "NO_SPACE"),
        CriuFailed(action="dump", cause="cannot write pages-1.img: File too large"),
    ],
)
def test_a_limit_of_file_sizes_is_named_where_there_is_one(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = FailedPhase("checkpoint", error, Phase.PREPARE, late=False)
    for limit, named in ((10 << 20, True), (resource.RLIM_INFINITY, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda number, limit=limit: (limit, limit))
        found = explain(failure, "job", OPTIONS)
        assert isinstance(found, LimitTooLow) == named
        assert ("where `ulimit -f` is 10.0 MiB: " in str(found)) == named


BEFORE = Held(frozenset({5}), 10, 20, frozenset({"task.sock"}), frozenset())


@pytest.mark.parametrize(
    ("now", "left"),
    [
        (BEFORE, []),
        (replace(BEFORE, beside=frozenset()), []),
        (replace(BEFORE, beside=frozenset({5, 7})), ["process 7"]),
        (replace(BEFORE, ours=11), ["1 descriptors of the coordinator"]),
        (replace(BEFORE, theirs=22), ["2 descriptors of the job"]),
        (replace(BEFORE, files=frozenset({"task.sock", "view"})), ["view"]),
        (replace(BEFORE, files=frozenset()), ["no task.sock"]),
        (replace(BEFORE, shared=frozenset({"flowgpu-1"})), ["/dev/shm/flowgpu-1"]),
    ],
)
def test_whatever_is_left_is_seen(now: Held, left: list[str]) -> None:
    assert now.unlike(BEFORE) == left


@pytest.mark.parametrize("all_tasks", [[1, 2], [2], [1]])
def test_every_fault_is_tried(all_tasks: list[int]) -> None:
    actions = ("pause-and-dump", "leave-running", "restore")
    tried = {
        fault
        for fault in Fault
        for action in actions
        for tasks in all_tasks
        if points.is_tried(fault, tasks, action, all_tasks)
    }
    assert tried == set(Fault)

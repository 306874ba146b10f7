"""The native engine's rules: order, verification of states, and undoing in reverse."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from coordinator import device
from coordinator.engine import EngineError, EngineLost, EngineSpoilt, NativeEngine, ProcessState
from tests.patience import SECONDS

PIDS = [11, 12, 13]
NEXT = {
    "lock": (ProcessState.RUNNING, ProcessState.LOCKED),
    "checkpoint": (ProcessState.LOCKED, ProcessState.CHECKPOINTED),
    "restore": (ProcessState.CHECKPOINTED, ProcessState.LOCKED),
    "unlock": (ProcessState.LOCKED, ProcessState.RUNNING),
}


class Api:
    """The driver's state machine; `fail` names calls that fail, `lie` those that do nothing."""

    def __init__(
        self,
        fail: set[tuple[str, int]] = frozenset(),  # type: ignore[assignment]
        lie: str = "",
        why: str = "",
    ) -> None:
        self.states = dict.fromkeys(PIDS, ProcessState.RUNNING)
        self.calls: list[tuple[str, int]] = []
        self.fail, self.lie, self.why = fail, lie, why
        self.gpus: Mapping[str, str] = {}

    def _call(self, name: str, pid: int) -> None:
        self.calls.append((name, pid))
        before, after = NEXT[name]
        if (name, pid) in self.fail:
            raise RuntimeError(f"{name} of {pid}{self.why}")
        assert self.states[pid] is before, f"{name} of {pid} in state {self.states[pid].name}"
        if name != self.lie:
            self.states[pid] = after

    def lock(self, pid: int, timeout_ms: int) -> None:
        assert timeout_ms > 0
        self._call("lock", pid)

    def checkpoint(self, pid: int) -> None:
        self._call("checkpoint", pid)

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        self.gpus = gpus
        self._call("restore", pid)

    def unlock(self, pid: int) -> None:
        self._call("unlock", pid)

    def state(self, pid: int) -> ProcessState:
        return self.states[pid]


def soon() -> float:
    return time.monotonic() + SECONDS


@pytest.fixture(params=[True, False], ids=["at once", "one by one"])
def at_once(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_all_are_locked_before_any_is_checkpointed_and_restored_before_any_is_unlocked(
    at_once: bool,
) -> None:
    api = Api()
    engine = NativeEngine(api, at_once=at_once)
    engine.strip(PIDS, soon())
    engine.rebuild(PIDS, {"a": "b"}, soon())
    names = [name for name, _ in api.calls]
    assert names == ["lock"] * 3 + ["checkpoint"] * 3 + ["restore"] * 3 + ["unlock"] * 3
    assert api.gpus == {"a": "b"}
    assert set(api.states.values()) == {ProcessState.RUNNING}


@pytest.mark.parametrize("call", ["lock", "checkpoint"])
@pytest.mark.parametrize("pid", PIDS)
def test_a_failure_leaves_every_process_running(call: str, pid: int, at_once: bool) -> None:
    api = Api(fail={(call, pid)})
    with pytest.raises(EngineError, match=f"{call} of {pid}") as caught:
        NativeEngine(api, at_once=at_once).strip(PIDS, soon())
    assert not isinstance(caught.value, EngineLost)
    assert set(api.states.values()) == {ProcessState.RUNNING}
    assert api.calls.count((call, pid)) == 1, "a failed call is never repeated"


def test_a_process_for_which_the_driver_finds_no_memory_is_spoilt_and_runs_on() -> None:
    api = Api(fail={("checkpoint", 12)}, why=": CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(EngineSpoilt, match=r"^process 12: checkpoint of 12"):
        NativeEngine(api).strip(PIDS, soon())
    assert set(api.states.values()) == {ProcessState.RUNNING}


@pytest.mark.parametrize(("call", "explained"), [("lock", False), ("checkpoint", True)])
def test_what_an_earlier_checkpoint_has_spoilt_is_explained(call: str, explained: bool) -> None:
    api = Api(fail={(call, 12)}, why=": CUDA_ERROR_UNKNOWN")
    with pytest.raises(EngineError, match="CUDA_ERROR_UNKNOWN") as caught:
        NativeEngine(api).strip(PIDS, soon())
    assert not isinstance(caught.value, EngineSpoilt)
    assert ("cannot be checkpointed any more" in str(caught.value)) == explained


@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_success_is_believed_only_when_the_state_agrees(call: str) -> None:
    api = Api(lie=call)
    with pytest.raises(EngineError, match="expected"):
        NativeEngine(api).strip(PIDS, soon())
    assert set(api.states.values()) == {ProcessState.RUNNING}


@pytest.mark.parametrize("call", ["restore", "unlock"])
def test_a_process_that_cannot_be_brought_back_is_lost(call: str) -> None:
    api = Api(fail={("checkpoint", 13), (call, 12)})
    with pytest.raises(EngineLost, match=f"{call} of 12"):
        NativeEngine(api).strip(PIDS, soon())


def test_a_process_in_another_state_is_refused_before_anything_is_done() -> None:
    api = Api()
    api.states[12] = ProcessState.FAILED
    with pytest.raises(EngineError, match="process 12 is FAILED"):
        NativeEngine(api).strip(PIDS, soon())
    assert api.calls == []


class Machine(Api):
    """Where one of its GPUs becomes another of them, it wants all of them in pairs."""

    own = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")

    def machine_gpus(self) -> list[str]:
        return [*self.own]

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        moved = any(old != new and new in self.own for old, new in gpus.items())
        if (moved and set(self.own) - gpus.keys()) or len(set(gpus.values())) < len(gpus):
            raise RuntimeError("cuCheckpointProcessRestore: CUDA_ERROR_INVALID_VALUE")
        super().restore(pid, gpus)


@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        ({}, {}),
        ({"GPU-1": "GPU-8"}, {"GPU-1": "GPU-8"}),
        ({"GPU-1": "GPU-1"}, {"GPU-1": "GPU-1"}),
        *(
            (wanted, {"GPU-0": "GPU-1", "GPU-1": "GPU-0", "GPU-2": "GPU-2", "GPU-3": "GPU-3"})
            for wanted in ({"GPU-1": "GPU-0"}, {"GPU-0": "GPU-1", "GPU-1": "GPU-0"})
        ),
        (
            {"GPU-0": "GPU-1", "GPU-1": "GPU-2"},
            {"GPU-0": "GPU-1", "GPU-1": "GPU-2", "GPU-2": "GPU-0", "GPU-3": "GPU-3"},
        ),
    ],
)
def test_a_mapping_onto_gpus_of_the_machine_names_all_of_them(
    wanted: dict[str, str], given: dict[str, str]
) -> None:
    api = Machine()
    api.states = dict.fromkeys(PIDS, ProcessState.CHECKPOINTED)
    NativeEngine(api).rebuild(PIDS, wanted, 0.0)
    assert api.gpus == given
    assert set(api.states.values()) == {ProcessState.RUNNING}


def test_the_machine_has_gpus_that_the_driver_does_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bus, uuid in (("0000:01:00.0", "GPU-b"), ("0000:02:00.0", "GPU-a")):
        (tmp_path / bus).mkdir()
        text = f"Model: \t\t NVIDIA H100\nIRQ:   \t\t 42\nGPU UUID: \t {uuid}\nVideo BIOS: \t ??\n"
        (tmp_path / bus / "information").write_text(text)
    monkeypatch.setattr(device, "KERNEL_GPUS", tmp_path)
    shown = [SimpleNamespace(uuid="GPU-c"), SimpleNamespace(uuid="GPU-b")]
    driver = SimpleNamespace(_cu=None, _call=None, gpus=lambda: shown)
    api = device.CudaCheckpoints(cast(device.CudaDriver, driver))
    assert api.machine_gpus() == ["GPU-a", "GPU-b", "GPU-c"]


class Meeting(Api):
    """Calls of these names return when all processes are in one."""

    names = ("checkpoint", "restore")

    def __init__(self) -> None:
        super().__init__()
        self.met = {name: threading.Barrier(len(PIDS)) for name in self.names}

    def _call(self, name: str, pid: int) -> None:
        if name in self.met:
            self.met[name].wait(SECONDS)
        super()._call(name, pid)


def test_several_processes_are_checkpointed_and_restored_at_once() -> None:
    api = Meeting()  # whose calls fail when they are alone
    NativeEngine(api).strip(PIDS, soon())
    assert set(api.states.values()) == {ProcessState.CHECKPOINTED}
    NativeEngine(api).rebuild(PIDS, {}, soon())
    assert set(api.states.values()) == {ProcessState.RUNNING}


def test_of_several_failures_the_first_is_told_when_all_have_ended() -> None:
    api = Api(fail={("checkpoint", 12), ("checkpoint", 13)})
    with pytest.raises(EngineError, match="checkpoint of 12"):
        NativeEngine(api).strip(PIDS, soon())
    assert ("checkpoint", 11) in api.calls and ("checkpoint", 13) in api.calls
    assert set(api.states.values()) == {ProcessState.RUNNING}


def test_no_time_left_locks_nothing() -> None:
    api = Api()
    with pytest.raises(EngineError, match="no time left"):
        NativeEngine(api).strip(PIDS, time.monotonic() - 1)
    assert api.calls == []


def test_rebuild_mends_whatever_was_left() -> None:
    api = Api()
    api.states.update({11: ProcessState.CHECKPOINTED, 12: ProcessState.LOCKED})
    NativeEngine(api).rebuild(PIDS, {}, soon())
    assert set(api.states.values()) == {ProcessState.RUNNING}

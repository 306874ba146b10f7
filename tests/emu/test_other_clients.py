"""Libraries beside CUDA that use the driver: NVML is kept, the hardware's decoder is refused."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from flowgpu.errors import Unsupported
from tests.emu.gpu_job import GPU, said_across_a_restore, said_with_a_checkpoint_between
from tests.emu.intercept_lib import compile_program
from tests.emu.test_checkpoint import flowgpu, runtime_dir

__all__ = ["runtime_dir"]

# NVML (tests/emu/programs/nvml.c), initialised twice and used all the time, by threads too.
NVML = (
    GPU
    + """
import threading
nvml, device, degrees = ctypes.CDLL(sys.argv[2]), ctypes.c_void_p(), ctypes.c_uint()
poller, nine = ctypes.CDLL(sys.argv[2].replace("nvml.so", "poller.so")), ctypes.c_int(9)
poller.poller_calls.restype = poller.poller_ends.restype = ctypes.c_long
assert [nvml.nvmlInit_v2(), nvml.nvmlInit_v2()] == [0, 0]
assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
def temperature():
    return nvml.nvmlDeviceGetTemperature(device, 0, ctypes.byref(degrees)), degrees.value
def polled():
    before = [poller.poller_calls(which) for which in (0, 1)]
    return until(lambda: all(poller.poller_calls(which) > before[which] for which in (0, 1)))
threading.Thread(target=nvml.nvmlEventSetWait_v2, args=(None, None, 600_000), daemon=True).start()
assert poller.poller_begins(device) == 0
print("before", temperature(), nvml.nvmlSumForTest(*range(1, 9), ctypes.byref(nine)), polled())
went()
print("after", temperature(), polled(), poller.poller_ends())
print("ends", [nvml.nvmlShutdown() for _ in range(3)], temperature()[0])
print("gpu", gpu(), flush=True)
os._exit(0)  # a thread waits for events
"""
)


# Its return after the checkpoint takes until the program has used the GPU again.
SLOW_NVML = (
    GPU
    + """
import threading
nvml, device, degrees = ctypes.CDLL(sys.argv[2]), ctypes.c_void_p(), ctypes.c_uint()
assert nvml.nvmlInit_v2() == nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
held = os.environ["NVML_HELD_BY"] = sys.argv[1] + "-held"
open(held, "w").close()
went()
print("gpu", gpu(), flush=True)
answers = []
def ask():
    answers.append(nvml.nvmlDeviceGetTemperature(device, 0, ctypes.byref(degrees)))
asker = threading.Thread(target=ask)
asker.start()
asker.join(0.1)
os.unlink(held)
asker.join()
print("asks", (answers[0], degrees.value), flush=True)
"""
)


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("nvml") / "nvml.so"
    options = ["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    compile_program("nvml.c", library, *options)
    found = [str(library), f"-Wl,-rpath,{library.parent}", "-Wl,--no-as-needed"]
    library.with_name("libnvidia-ml.so.1").symlink_to(library)
    compile_program("nvml_poller.c", library.with_name("poller.so"), *options[:2], *found)
    return library


BEFORE_NVML = ["before (0, 40) 45 True", "ready"]
AFTER_NVML = ["after (0, 40) True 0", "ends [0, 0, 1] 1", "gpu True"]


def test_nvml_is_there_as_before_when_replay_has_ended_cuda(nvml: Path, tmp_path: Path) -> None:
    """No thread that polls finds it shut down. The native engine leaves it to the driver, which the
    emulated one does not do."""
    said = said_across_a_restore("nvml", NVML, tmp_path, str(nvml), engine="replay")
    assert said == [*BEFORE_NVML, *AFTER_NVML]


def test_nvml_is_there_in_a_job_left_running_and_in_its_copy(nvml: Path, tmp_path: Path) -> None:
    done, said = said_with_a_checkpoint_between(
        "nvml-live", "replay", NVML, tmp_path, nvml, "--leave-running"
    )
    assert done.returncode == 0, done.stderr
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == 0, restored.stderr
    assert said == [*BEFORE_NVML, *AFTER_NVML]
    assert restored.stdout.splitlines() == AFTER_NVML


def test_a_job_left_running_goes_on_before_nvml_is_back(nvml: Path, tmp_path: Path) -> None:
    done, said = said_with_a_checkpoint_between(
        "nvml-slow", "replay", SLOW_NVML, tmp_path, nvml, "--leave-running"
    )
    assert done.returncode == 0, done.stderr
    assert said == ["ready", "gpu True", "asks (0, 40)"]


@pytest.mark.parametrize("options", [(), ("--leave-running",)])
@pytest.mark.parametrize("fault", ["criu_dump", "commit"])
def test_nvml_is_there_after_a_checkpoint_that_failed(
    fault: str,
    options: tuple[str, ...],
    nvml: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLOWGPU_FAULT", f"{fault}:1")
    done, said = said_with_a_checkpoint_between(
        "nvml-failed", "replay", NVML, tmp_path, nvml, *options
    )
    assert done.returncode == 73, done.stderr
    assert said == [*BEFORE_NVML, *AFTER_NVML]


@pytest.mark.parametrize("engine", ["native", "replay"])
def test_another_client_of_the_driver_is_named_and_the_job_goes_on(
    engine: str, tmp_path: Path
) -> None:
    """libnvcuvid, which nvJPEG loads for the hardware's decoder."""
    empty, library = tmp_path / "empty.c", tmp_path / "libnvcuvid.so.1"
    empty.touch()
    subprocess.run(["cc", "-shared", "-o", library, empty], check=True)
    program = GPU + "ctypes.CDLL(sys.argv[2])\nwent()\nprint('gpu', gpu())\n"
    done, said = said_with_a_checkpoint_between("cuvid", engine, program, tmp_path, library)
    assert done.returncode == Unsupported.exit_code
    assert re.search(r"uses libnvcuvid beside CUDA \(process \d+\), which", done.stderr)
    assert said == ["ready", "gpu True"]

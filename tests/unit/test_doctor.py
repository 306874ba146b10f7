"""What `flowgpu doctor` finds and says."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowgpu import doctor, launch
from flowgpu.doctor import Check
from flowgpu.host import probes

FAKE_DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { (void)flags; return INIT; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    strncpy(name, device ? "second" : "first", size); return 0; }
int cuDeviceTotalMem_v2(unsigned long *size, int device) { *size = (device + 1ul) << 30; return 0; }
"""


def fake_driver(folder: Path, *, init: int = 0, checkpoint: bool = True) -> Path:
    source, library = folder / "fake.c", folder / "libcuda.so.1"
    extra = "int cuCheckpointProcessLock(void) { return 0; }" if checkpoint else ""
    source.write_text(FAKE_DRIVER + extra)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-DINIT={init}", "-o", str(library), str(source)], check=True
    )
    return library


def by_name(found: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


def test_every_check_has_a_unique_name_and_a_remedy_exactly_when_it_is_not_ok() -> None:
    found = doctor.checks()
    assert len({check.name for check in found}) == len(found) > 15
    for check in found:
        assert check.found
        assert check.meaning
        assert bool(check.mend) == (check.status != "ok"), check


def test_json_carries_the_worst_status() -> None:
    good = Check("a", "ok", "x", "y")
    bad = Check("b", "warn", "x", "y", "z")
    worst = Check("c", "fail", "x", "y", "z")
    assert doctor.as_json([good])["status"] == "ok"
    assert doctor.as_json([bad, good])["status"] == "warn"
    assert doctor.as_json([bad, worst, good])["status"] == "fail"
    assert json.loads(json.dumps(doctor.as_json([bad])))["checks"][0]["mend"] == "z"


def test_table_shows_every_check_and_the_remedies() -> None:
    out = io.StringIO()
    doctor.render([Check("a", "ok", "[1]", "y"), Check("b", "warn", "x", "y", "do this")], out)
    assert "[1]" in out.getvalue()
    assert "b: do this" in out.getvalue()


def test_driver_without_gpu_is_a_warning_and_names_the_emulated_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "find_nvidia_libcuda", lambda: None)
    (check,) = doctor.check_driver()
    assert check.status == "warn"
    assert "emulated" in check.mend


def test_driver_reports_path_version_and_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = fake_driver(tmp_path)
    monkeypatch.setattr(launch, "find_nvidia_libcuda", lambda: library)
    found = by_name(list(doctor.check_driver()))
    assert {check.status for check in found.values()} == {"ok"}
    assert str(library) in found["driver"].found
    assert "CUDA 13.0" in found["driver"].found
    assert found["GPUs"].found == "first (1024 MiB), second (2048 MiB)"


def test_driver_that_does_not_start_fails_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = fake_driver(tmp_path, init=999, checkpoint=False)
    monkeypatch.setattr(launch, "find_nvidia_libcuda", lambda: library)
    found = by_name(list(doctor.check_driver()))
    assert found["driver"].status == found["GPUs"].status == "fail"
    assert "cuInit returns 999" in found["driver"].found
    assert found["native engine"].status == "warn"
    assert "only jobs that the replay engine can save" in found["native engine"].mend


def test_driver_probe_does_not_load_the_driver_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = fake_driver(tmp_path)
    monkeypatch.setenv("LD_PRELOAD", "")
    assert probes.driver(library).gpus
    assert str(library) not in Path("/proc/self/maps").read_text()


def test_broken_driver_is_named(tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.1"
    library.write_text("no library")
    assert "libcuda.so.1" in probes.driver(library).error


def test_missing_criu_fails_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWGPU_CRIU", str(tmp_path / "absent"))
    check = by_name(list(doctor.check_criu()))["CRIU"]
    assert check.status == "fail"
    assert "make setup" in check.mend


def test_missing_libraries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWGPU_LIB", str(tmp_path))
    found = list(doctor.check_libraries())
    assert [check.status for check in found] == [*["fail"] * 4, "warn", "warn"]
    assert all("make build" in check.mend for check in found)


def test_capabilities_agree_with_the_kernels_answer_to_a_dropped_one() -> None:
    code = (
        "import ctypes; from flowgpu.host import probes\n"
        "before = probes.capabilities()\n"
        "PR_CAPBSET_DROP, SYS_PTRACE = 24, 19\n"
        "ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, SYS_PTRACE, 0, 0, 0)\n"
        "import os, sys\n"
        "if len(sys.argv) > 1: os.execv(sys.executable, [sys.executable, '-c', "
        "'from flowgpu.host import probes; print(*sorted(probes.capabilities()))'])\n"
    )
    if "CAP_SYS_PTRACE" not in probes.capabilities():
        pytest.skip("this process may not trace, so it cannot lose the right")
    done = subprocess.run(
        [sys.executable, "-c", code, "again"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    left = set(done.stdout.split())
    assert left == probes.capabilities() - {"CAP_SYS_PTRACE"}


def test_pagemap_scan_leaves_no_descriptor_and_agrees_with_criu() -> None:
    before = os.listdir("/proc/self/fd")
    answer = probes.pagemap_scan()
    probes.userfaultfd()
    probes.io_uring()
    probes.memfd()
    assert os.listdir("/proc/self/fd") == before
    from flowgpu.host.criu import Criu

    assert answer == Criu.locate().has_feature("pagemap_scan")


def test_bracketed_setting_is_read(tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always [madvise] never\n")
    assert probes.chosen(setting) == "madvise"
    assert probes.chosen(tmp_path / "absent") == ""


def test_driver_release_is_read(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    assert probes.driver_release(version) == "580.159.04"

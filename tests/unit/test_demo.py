"""The demo against a stand-in for the command line, right and wrong."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import SECONDS
from workloads.demo import DemoError, Run, compare, loss_text, shown_steps

ROOT = Path(__file__).resolve().parents[2]

# Speaks the commands that the demo uses. Its job prints steps and stops when a file says so; what
# a restored job prints after the pause depends on the fault asked for.
STAND_IN = r"""
import json, os, sys, time
from pathlib import Path

fault, folder = sys.argv[1], Path(sys.argv[2])
verb, arguments = sys.argv[3], sys.argv[4:]
asked, said = folder / "asked", folder / "said"

def value(step, bad=False):
    return f"{(2.0 / (step + 1)).hex()}/{'f' if bad else 'a'}{step:031d}"

if verb == "run":
    name, steps = arguments[1], int(arguments[arguments.index("--steps") + 1])
    (folder / "steps").write_text(str(steps))
    for step in range(steps):
        print(f"step {step} {value(step)}", flush=True)
        if not name.endswith("-plain"):
            said.write_text(str(step))
            time.sleep(0.05)
            if asked.exists() and fault != "never-stops":
                (folder / "stopped").touch()
                sys.exit(75 if fault != "wrong-code" else 0)
    print("done 00ff")
elif verb == "pause-and-dump":
    assert arguments[1] == "--output" and arguments[3] == "--json"
    if fault == "pause-fails":
        sys.exit(70)
    asked.touch()
    while not (folder / "stopped").exists():
        time.sleep(0.01)
        if fault == "never-stops":
            break
    keys = "total_seconds gpu_bytes_reserved gpu_bytes_active gpu_bytes_stored cpu_bytes"
    print(json.dumps({"job": arguments[0], "image": arguments[2], "engine": "native",
                      "gpu": "emulated", "pause_seconds": 0.5, "image_bytes": 5 << 20,
                      "phases": {}, "allocations": 1, **dict.fromkeys(keys.split(), 1)}))
elif verb == "restore":
    assert arguments[1:] == ["--detach", "--json"]
    print(json.dumps({"job": "demo", "restore_seconds": 0.25, "phases": {}}))
elif verb == "logs":
    assert arguments == ["demo", "--follow"]
    last, steps = int(said.read_text()), int((folder / "steps").read_text())
    for step in range(steps):
        if fault == "loses-a-step" and step == last + 2:
            continue
        print(f"step {step} {value(step, fault == 'changes-a-byte' and step == steps - 1)}")
    print("done 00ff" if fault != "other-end" else "done 0000")
"""


def run_demo(tmp_path: Path, fault: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    cli = shlex.join([sys.executable, str(script), fault, str(tmp_path)])
    command = [sys.executable, "-m", "workloads.demo", "--steps", "40", "--cli", cli]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)


def test_demo_succeeds_and_shows_both_runs(tmp_path: Path) -> None:
    result = run_demo(tmp_path, "none")
    assert result.returncode == 0, result.stderr
    assert "steps after the restore are equal to the bit" in result.stdout
    assert "emulated" in result.stdout and "exit code 75" in result.stdout
    assert "5.0 MiB" in result.stdout and "0.25 s" in result.stdout
    # Both ends of the run are in the table, the middle of it is not.
    assert loss_text((2.0 / 1).hex() + "/a") in result.stdout
    assert "..." in result.stdout


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("changes-a-byte", "different: [39]"),
        ("loses-a-step", "missing: ["),
        ("other-end", "final digest equal: False"),
    ],
)
def test_demo_fails_when_a_later_step_differs(tmp_path: Path, fault: str, words: str) -> None:
    result = run_demo(tmp_path, fault)
    assert result.returncode == 1
    assert words in result.stdout


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("pause-fails", "pause-and-dump ended with exit code 70"),
        ("wrong-code", "ended with exit code 0, not 75"),
        ("never-stops", "ended with exit code 0, not 75"),
    ],
)
def test_demo_names_the_step_that_failed(tmp_path: Path, fault: str, words: str) -> None:
    result = run_demo(tmp_path, fault)
    assert result.returncode == 1
    assert words in result.stderr


def test_compare_needs_steps_after_the_pause() -> None:
    run = Run({0: "0x1p+0/a"}, "00")
    assert not compare(run, run, last_before=0).equal
    assert compare(run, run, last_before=-1).equal


def test_a_step_printed_twice_must_have_one_value() -> None:
    run = Run()
    run.add("step 3 0x1p+0/a\n")
    run.add("step 3 0x1p+0/a\n")
    with pytest.raises(DemoError, match="step 3"):
        run.add("step 3 0x1p+0/b\n")


def test_shown_steps_are_the_ends_the_pause_and_differences() -> None:
    assert shown_steps(list(range(100)), 50, [77]) == [0, 1, 48, 49, 50, 51, 52, 53, 77, 98, 99]

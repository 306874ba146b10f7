"""`flowgpu top` on a real terminal, which tmux is, and a real job that is saved meanwhile."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu.host.criu import Criu
from flowgpu.jobs import Registry
from tests.emu.test_checkpoint import FLOWGPU, ROOT, Run, emulated_machine, flowgpu
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for

EVERY = 7200
"""Seconds between two images: no other one comes while a test looks."""


@pytest.fixture(scope="module", autouse=True)
def runtime_dir() -> Iterator[Path]:
    with emulated_machine() as base:
        yield base


class Tmux:
    """A terminal of 80 by 24, with a shell command on it."""

    def __init__(self, folder: Path, command: str) -> None:
        self._words = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        self._call("new-session", "-d", "-x", "80", "-y", "24", command)

    def _call(self, *words: str) -> str:
        done = subprocess.run(
            [*self._words, *words],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
            env=os.environ | {"LC_ALL": "C.UTF-8", "TERM": "xterm-256color"},
        )
        return done.stdout

    def shows(self) -> str:
        return self._call("capture-pane", "-p")

    def press(self, *keys: str) -> None:
        self._call("send-keys", *keys)

    def wait_for(self, *patterns: str) -> str:
        """What is shown, once each pattern is found in a line of it: it may be half drawn."""

        def found() -> str:
            shown = self.shows()
            return shown if all(re.search(one, shown, re.MULTILINE) for one in patterns) else ""

        shown: str = wait_for(found, f"{patterns} shown", SECONDS)
        return shown

    def end(self) -> None:
        self._call("kill-server")


def slow_criu(folder: Path) -> tuple[Path, Path]:
    """A CRIU whose dumps wait until the second path is there."""
    program, go = folder / "criu", folder / "go"
    real = Criu.locate().program
    program.write_text(
        f'#!/bin/sh\n[ "$1" = dump ] && while [ ! -e {go} ]; do sleep 0.05; done\n'
        f'exec {real} "$@"\n'
    )
    program.chmod(0o755)
    return program, go


@pytest.fixture
def on_a_terminal(runtime_dir: Path) -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not on this machine")
    pytest.importorskip("textual", reason="the Python package textual is not installed")
    command = shlex.join([*FLOWGPU, "top", "--delay", "0.2"])
    # The shell stays, so that what was said last can be read.
    tmux = Tmux(runtime_dir, f"cd {ROOT} && {command}; echo ended with $?; read line")
    yield tmux
    tmux.end()


def test_a_job_is_followed_from_its_start_through_its_checkpoint_to_its_end(
    on_a_terminal: Tmux, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = on_a_terminal
    top.wait_for(r"^[\d:]{8} +no jobs")
    criu, go = slow_criu(tmp_path)
    monkeypatch.setenv("FLOWGPU_CRIU", str(criu))
    store = tmp_path / "images"
    store.mkdir()
    program = str(ROOT / "workloads" / "digits_mlp.py")
    words = [sys.executable, program, "--steps", "2000", "--step-delay", "0.02"]
    run = Run("watched", words, tmp_path, "", "--store", str(store), "--every", str(EVERY))
    saving = None
    try:
        run.wait_lines(2)
        top.wait_for(r"^watched +running +\S+ \wiB GPU +1/\d+ +- +- +(2 h|1\d\d min)")
        top.wait_for(r"images/watched +\S+ +")  # the store that it is saved to
        record = Registry().find("watched")
        saving = subprocess.Popen([*FLOWGPU, "checkpoint", "watched", "--output", tmp_path / "out"])
        top.wait_for(r"^watched +dump criu ")
        assert Registry().find("watched").state == "checkpointing"
        go.touch()
        assert saving.wait(SECONDS) == 0
        shown = top.wait_for(r"^watched +running .*GPU +1/\d+ +\d+ s +[\d.]+ m?s +")
        assert all(len(line) <= 80 for line in shown.splitlines())
        top.press("Enter")
        steps = ("stop at the gate", "take the GPU memory over", "end CUDA")
        bars = [f"{step} +[0-9.]+ m?s [█░]" for step in steps]
        top.wait_for("newest checkpoint: ", re.escape(record.id), "1 done, 0 failed", *bars)
        flowgpu("kill", "watched")
        top.wait_for("not there any more")
        top.press("Escape")
        top.wait_for(r"^[\d:]{8} +no jobs")
        top.press("a")
        top.wait_for(r"^watched +exited \(137\)")
        top.press("q")
        top.wait_for("^ended with 0")
    finally:
        go.touch()
        if saving is not None:
            saving.wait(SECONDS)
        run.kill()

"""Names that are not text, under whatever locale: what is said of them differs, nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowgpu.image.reader import Image
from flowgpu.jobs import Registry
from flowgpu.launch import emulator_socket
from tests.emu.test_cli_end_to_end import (
    FLOWGPU,
    SECONDS,
    end_emulator,
    name,
    runtime_dir,
    until,
)

__all__ = ["name", "runtime_dir"]

# A space, both quotes, a new line, what a shell and a terminal obey, a letter of two bytes, and
# one byte that is no letter in UTF-8.
ODD = b"a b'c\"d\\n\n$x*\x1b[31m\xc3\xa9\xff"
# One without letters but ASCII's, in which paths are read byte by byte.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# Python sets up en_US.UTF-8 so, which not every machine has: it refuses what is no letter.
STRICT = {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8:strict"}
LOCALES = {
    "C": {"LC_ALL": "C"},
    "POSIX, PYTHONUTF8=0": {**ASCII, "LC_ALL": "POSIX"},
    "none of that name": {"LC_ALL": "xx_YY.none"},
    "none of that name, ascii": {"LC_ALL": "xx_YY.none", "PYTHONIOENCODING": "ascii"},
    "C, PYTHONUTF8=0, ascii": {**ASCII, "PYTHONIOENCODING": "ascii"},
    "UTF-8, strict": STRICT,
}
# Says its argument, a variable and its folder, and at the end again.
SAYS = """
import os, sys, time
def say():
    words = os.fsencode(sys.argv[1]), os.environb[b"ODD"], os.getcwdb()
    print(*(word.hex() for word in words), flush=True)
say()
with open("log", "a") as log:
    log.write("some"); log.flush()
    while not os.path.exists("stop"):
        time.sleep(0.01)
say()
"""


class Commands:
    """The command line under one locale, in a folder of that name."""

    def __init__(self, folder: bytes, variables: dict[str, str]) -> None:
        package = os.fsencode(Path(__file__).resolve().parents[2])
        given = {key.encode(): value.encode() for key, value in variables.items()}
        self.env = {**os.environb, b"PYTHONPATH": package, b"ODD": ODD, **given}
        self.folder = folder

    def __call__(self, *words: str | bytes) -> bytes:
        done = subprocess.run(
            [*FLOWGPU, *words],
            capture_output=True,
            timeout=SECONDS,
            env=self.env,
            cwd=self.folder,
        )
        assert done.returncode == 0, done.stderr
        assert b"Traceback" not in done.stderr
        # What a terminal would obey is none of it.
        assert b"\x1b" not in done.stdout + done.stderr or words[0] == "logs"
        return done.stdout

    @contextmanager
    def job(self, name: str, code: str, *words: bytes) -> Iterator[subprocess.Popen[bytes]]:
        command = ["run", "--gpu", "emulated", "--name", name, "--", sys.executable, "-c", code]
        with subprocess.Popen(
            [*FLOWGPU, *command, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.env,
            cwd=self.folder,
        ) as process:
            try:
                yield process
            finally:
                process.kill()


def odd_folder(tmp_path: Path) -> bytes:
    folder = os.path.join(os.fsencode(tmp_path), ODD)
    os.mkdir(folder)
    return folder


@pytest.mark.parametrize("locale", LOCALES)
def test_a_job_of_odd_names_lives_through_every_command(
    locale: str, name: str, tmp_path: Path
) -> None:
    folder = odd_folder(tmp_path)
    flowgpu = Commands(folder, LOCALES[locale])
    image = os.path.join(folder, b"image" + ODD)
    said = b" ".join(word.hex().encode() for word in (ODD, ODD, folder)) + b"\n"
    with flowgpu.job(name, SAYS, ODD) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline() == said, process.stderr.read()
        rows = flowgpu("ps").splitlines()
        assert len(rows) == 2 and rows[1].startswith(name.encode())
        (row,) = json.loads(flowgpu("ps", "--json"))
        # Read under that locale, so in its letters.
        letters = "ascii" if "=0" in locale else "utf-8"
        assert row["command"][-1].encode(letters, "surrogateescape") == ODD
        dump = flowgpu("pause-and-dump", name, "--output", image)
        assert dump.startswith(f"dumped {name} to ".encode())
        assert dump.splitlines()[1].startswith(b"paused ")
        assert process.wait(SECONDS) == 75
        assert process.stderr.read().startswith(f"flowgpu: {name} was dumped to ".encode())
    assert any(
        f"dumped ({tmp_path}/" in line for line in flowgpu("ps", "--all").decode().split("  ")
    )
    shown = flowgpu("inspect", image)
    assert shown.startswith(b"image: ") and b"\n  name:    " + name.encode() in shown
    assert json.loads(flowgpu("inspect", image, "--json"))["job"]["name"] == name
    assert flowgpu("verify", image).endswith(b" are what was written\n")
    with open(os.path.join(folder, b"log"), "ab") as log:
        log.write(b"more")
    restored = flowgpu("restore", image, "--detach").splitlines()
    assert restored[0].startswith(f"restored {name} in ".encode())
    assert re.match(rb"cut    .*/log by 4 B, back to 4 B$", restored[2])
    Path(os.fsdecode(folder), "stop").touch()
    until(lambda: Registry().find(name).state == "exited")
    assert flowgpu("logs", name) == said * 2


@pytest.mark.parametrize(
    ("begun", "asked"), [(ASCII, STRICT), (STRICT, ASCII)], ids=["ascii, utf-8", "utf-8, ascii"]
)
def test_commands_of_another_locale_name_the_same_files(
    begun: dict[str, str], asked: dict[str, str], name: str, tmp_path: Path
) -> None:
    folder = odd_folder(tmp_path)
    image = os.path.join(folder, ODD)
    flowgpu, other = Commands(folder, begun), Commands(folder, asked)
    with flowgpu.job(name, SAYS, ODD) as process:
        assert process.stdout
        first = process.stdout.readline()
        other("ps")
        other("pause-and-dump", name, "--output", image)
    assert Image(Path(os.fsdecode(image))).manifest.job.name == name
    with open(os.path.join(folder, b"log"), "ab") as log:
        log.write(b"more")
    for commands in (flowgpu, other):
        commands("inspect", image)
        assert b"/log by 4 B" in commands("restore", image, "--detach")
        commands("ps", "--all")
        commands("kill", name)
        with open(os.path.join(folder, b"log"), "ab") as log:
            log.write(b"more")
    flowgpu("restore", image, "--detach")
    Path(os.fsdecode(folder), "stop").touch()
    until(lambda: Registry().find(name).state == "exited")
    assert other("logs", name) == first * 2


# Half a letter, as the kernel leaves it of a name that it has cut to 15 bytes, and none at all.
NAMED = """
import ctypes, sys, threading, time
libc = ctypes.CDLL(None)
def work():
    libc.prctl(15, b"\\xff\\xfe) S (", 0, 0, 0)
    named.set()
    time.sleep(1000)
named = threading.Event()
threading.Thread(target=work, daemon=True).start()
named.wait()
"""


def test_a_process_whose_name_is_no_text_is_dumped(name: str, tmp_path: Path) -> None:
    code = NAMED + 'libc.prctl(15, b"Modell-f\\xc3\\xbcnf-\\xc3", 0, 0, 0)\n'
    code += "exec(open(sys.argv[1]).read())"
    (tmp_path / "program").write_text(SAYS)
    flowgpu = Commands(os.fsencode(tmp_path), {})
    with flowgpu.job(name, code, os.fsencode(tmp_path / "program")) as process:
        assert process.stdout
        first = process.stdout.readline()
        flowgpu("pause-and-dump", name, "--output", "image")
    flowgpu("restore", "image", "--detach")
    (tmp_path / "stop").touch()
    until(lambda: Registry().find(name).state == "exited")
    assert flowgpu("logs", name) == first * 2


def test_a_gpu_job_of_odd_folders_and_threads_comes_back(runtime_dir: Path, tmp_path: Path) -> None:
    """All that the ghost, the mover and CRIU are told has their names in it."""
    folder = Path(os.fsdecode(odd_folder(tmp_path)))
    code = (
        f"{NAMED}import runpy\nrunpy.run_module('tests.emu.checkpoint_task', run_name='__main__')"
    )
    task = [sys.executable, "-c", code, str(folder)]
    env = {**os.environ, "FLOWGPU_RUNTIME_DIR": os.fsdecode(os.fsencode(runtime_dir) + b"/" + ODD)}

    def flowgpu(*words: str | Path) -> None:
        done = subprocess.run(
            [*FLOWGPU, *words], capture_output=True, timeout=SECONDS, env={**env, **ASCII}
        )
        assert done.returncode == 0, done.stderr

    command = ["run", "--gpu", "emulated", "--name", "odd", "--", *task]
    with subprocess.Popen([*FLOWGPU, *command], env=env) as process:
        until((folder / "ready").exists)
        flowgpu("pause-and-dump", "odd", "--output", folder / "image")
        process.wait(SECONDS)
    flowgpu("verify", folder / "image")
    flowgpu("restore", folder / "image", "--detach")
    (folder / "go.1").touch()
    until((folder / "done.1").exists)
    flowgpu("kill", "odd")
    end_emulator(emulator_socket(Path(env["FLOWGPU_RUNTIME_DIR"])))

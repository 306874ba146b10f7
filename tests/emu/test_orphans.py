"""What a job's script leaves in the background belongs to the job: it is dumped, and comes back
below the script. Real CRIU, emulated GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowgpu.errors import DUMPED_EXIT, Unsupported
from tests.emu.gpu_job import GPU
from tests.emu.test_checkpoint import FLOWGPU, ROOT, SECONDS, emulated_machine, flowgpu
from tests.unit.coordinator_job import wait_for

# Becomes a daemon in one of these ways, and then answers at a Unix socket: what it was told so far,
# its ids and its parent's. A `worker` uses the GPU.
SERVE = """
import os, socket, sys
how, path, for_gpu = sys.argv[1:]
listening = socket.socket(socket.AF_UNIX)
listening.bind(path)
listening.listen()
if os.fork():
    os._exit(0)
if how != "plain":
    os.setsid()
if how in ("twice", "group") and os.fork():
    os._exit(0)
if how == "group":
    os.setpgid(0, 0)
if how == "worker":
    exec(for_gpu)
told = []
while True:
    client, _ = listening.accept()
    word = client.recv(100).decode()
    if word == "end":
        os._exit(0)
    told.append((word, how != "worker" or gpu()))
    ids = [os.getpid(), os.getsid(0), os.getpgid(0), os.getppid()]
    client.send(repr((told, ids)).encode())
    client.close()
"""
WAYS = ("plain", "session", "twice", "group", "worker")

# Its first argument is the file that lets it go on, the second a folder for sockets. The daemon
# `led` is an orphan in the session of a process that lives on.
PROGRAM = (
    GPU
    + f"""
import socket
SERVE, WAYS, FOR_GPU = {SERVE!r}, {WAYS!r}, {GPU!r}
"""
    + """
leading = "import os, subprocess, sys, time; os.setsid(); "
leading += "subprocess.run([sys.executable, '-c', *sys.argv[1:]]); time.sleep(1000)"
def place(how):
    return os.path.join(sys.argv[2], how)
def ask(how, word):
    client = socket.socket(socket.AF_UNIX)
    client.connect(place(how))
    client.send(word.encode())
    return client.recv(1000).decode()
for how in WAYS:
    subprocess.run([sys.executable, "-c", SERVE, how, place(how), FOR_GPU], check=True)
leader = subprocess.Popen([sys.executable, "-c", leading, SERVE, "plain", place("led"), ""])
until(lambda: os.path.exists(place("led")))
ways = [*WAYS, "led"]
root = os.getppid()
def orphaned(how):
    return eval(ask(how, "there?"))[1][3] == root
until(lambda: all(map(orphaned, ways)))
before = {how: eval(ask(how, "first")) for how in ways}
print("below the script:", all(ids[3] == root for _, ids in before.values()))
went()
for how in ways:
    told, ids = eval(ask(how, "second"))
    print(how, told == [*before[how][0], ("second", True)], ids == before[how][1])
for how in ways:
    ask(how, "end")
ended = [before[how][1][0] for how in ways]
print("waited for:", until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in ended)))
leader.kill()
leader.wait()
print("gpu", gpu(), flush=True)
"""
)
SAID = ["below the script: True", "ready", *(f"{how} True True" for how in (*WAYS, "led"))]
SAID += ["waited for: True", "gpu True"]


@contextmanager
def job(name: str, folder: Path, *words: str) -> Iterator[Any]:
    """A job that is ready; gives its output's file, and its process."""
    out = folder / "out"
    command = [*FLOWGPU, "run", "--gpu", "emulated", "--name", name, "--", *words]
    with (
        open(out, "wb") as output,
        subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output) as process,
    ):
        try:
            wait_for(
                lambda: "ready\n" in out.read_text() or process.poll() is not None, "ready", SECONDS
            )
            assert process.poll() is None, out.read_text()
            yield out, process
        finally:
            flowgpu("kill", name)


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_daemons_of_a_script_come_back_below_it(shell: str, tmp_path: Path) -> None:
    """From an image of the running job, a dump, and a dump of what was restored."""
    name, go = f"daemons-{shell}", tmp_path / "go"
    script = tmp_path / "script"
    script.write_text(f'#!/usr/bin/env {shell}\necho "$0"\n"$@"\nexit $?\n')
    script.chmod(0o700)
    path = os.path.relpath(script, ROOT)
    words = [path, sys.executable, "-c", PROGRAM, str(go), str(tmp_path)]
    images = [tmp_path / "live", tmp_path / "image", tmp_path / "again"]
    with job(name, tmp_path, *words) as (out, process):
        for verb, image in zip(("checkpoint", "pause-and-dump"), images, strict=False):
            done = flowgpu(verb, name, "--output", image)
            assert done.returncode == 0, done.stderr
        assert process.wait(SECONDS) == DUMPED_EXIT
        said = [line for line in out.read_text().splitlines() if not line.startswith("flowgpu: ")]
        restored = flowgpu("restore", images[1], "--detach")
        assert restored.returncode == 0, restored.stderr
        done = flowgpu("pause-and-dump", name, "--output", images[2])
        assert done.returncode == 0, done.stderr
    go.touch()
    for image in images:
        restored = flowgpu("restore", image)
        assert restored.returncode == 0, restored.stderr
        assert [*said, *restored.stdout.splitlines()] == [path, *SAID]


def test_orphans_of_another_program_are_refused_by_name(tmp_path: Path) -> None:
    """It might take one for a child of its own. The job goes on."""
    program = f"import subprocess, sys\nSERVE = {SERVE!r}\n" + GPU
    program += (
        "subprocess.run([sys.executable, '-c', SERVE, 'plain', sys.argv[2], ''], check=True)\n"
    )
    program += "went()\nprint('gpu', gpu(), flush=True)\n"
    go, place = tmp_path / "go", tmp_path / "socket"
    words = [sys.executable, "-c", program, str(go), str(place)]
    with job("no-script", tmp_path, *words) as (out, process):
        done = flowgpu("pause-and-dump", "no-script", "--output", tmp_path / "image")
        assert done.returncode == Unsupported.exit_code, done.stderr
        assert "which has left the job's process tree" in done.stderr
        go.touch()
        assert process.wait(SECONDS) == 0
        assert out.read_text().splitlines() == ["ready", "gpu True"]


def test_orphans_of_ranks_stay_with_the_first_process_of_the_job(tmp_path: Path) -> None:
    program = GPU + "went()\nos.kill(int(sys.argv[2]), 9)\nprint('gpu', gpu(), flush=True)\n"
    script = 'pid=$(sh -c "sleep 1000 > /dev/null & echo \\$!"); "$@" $pid; exit $?'
    go = tmp_path / "go"
    words = ["run", "--join", "ranks", "--gpu", "emulated", "--", "sh", "-c", script, "sh"]
    outs = [tmp_path / f"out-{rank}" for rank in range(2)]
    ranks = []
    try:
        for rank, out in enumerate(outs):
            place = {
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_NODES": "1",
                "SLURM_STEP_TASKS_PER_NODE": "2",
                "SLURM_STEP_NODELIST": "here",
                "SLURM_NODEID": "0",
                "SLURM_LOCALID": str(rank),
                "SLURM_PROCID": str(rank),
            }
            command = [*FLOWGPU, *words, sys.executable, "-c", program, str(go)]
            with open(out, "wb") as file:
                env = {**os.environ, **place}
                ranks.append(subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=env))
        wait_for(lambda: outs[0].read_text().count("ready") == 2, "both ranks", SECONDS)
        done = flowgpu("pause-and-dump", "ranks", "--output", tmp_path / "image")
        assert done.returncode == 0, done.stderr
        assert [rank.wait(SECONDS) for rank in ranks] == [DUMPED_EXIT] * 2
    finally:
        flowgpu("kill", "ranks")
        for rank in ranks:
            rank.kill()
            rank.wait()
    go.touch()
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == 0, restored.stderr
    assert restored.stdout.splitlines() == ["gpu True"] * 2


def test_the_emulated_device_is_no_orphan_of_a_job(tmp_path: Path) -> None:
    """It would end before the program uses it, which then would start another one."""
    go = tmp_path / "go"
    script = 'sleep 3; "$@"; exit $?'
    program = GPU + "went()\nprint('gpu', gpu(), flush=True)\n"
    with emulated_machine(FLOWGPU_EMU_IDLE="1"):
        words = ["sh", "-c", script, "sh", sys.executable, "-c", program, str(go)]
        with job("late", tmp_path, *words) as (_, process):
            done = flowgpu("pause-and-dump", "late", "--output", tmp_path / "image", "--json")
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["gpus"] == 1
            assert process.wait(SECONDS) == DUMPED_EXIT
        go.touch()
        restored = flowgpu("restore", tmp_path / "image")
        assert restored.returncode == 0, restored.stderr
        assert restored.stdout.splitlines() == ["gpu True"]

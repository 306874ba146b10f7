"""The command line on real jobs without CUDA: real coordinator, real CRIU, emulated GPU."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowgpu import errors
from flowgpu.jobs import Registry
from flowgpu.launch import emulator_socket
from tests.patience import SECONDS

FLOWGPU = [sys.executable, "-m", "flowgpu"]
COUNTER = """
import os, sys, time
n = 0
while not os.path.exists(sys.argv[1]):
    print(n, flush=True)
    n += 1
    time.sleep(0.02)
print("done", file=sys.stderr)
sys.exit(5)
"""


@pytest.fixture(scope="module", autouse=True)
def runtime_dir() -> Iterator[Path]:
    """A runtime folder with a path short enough for sockets; its emulated device is ended."""
    with pytest.MonkeyPatch.context() as patch:
        base = Path(tempfile.mkdtemp(prefix="flowgpu-"))
        patch.setenv("FLOWGPU_RUNTIME_DIR", str(base))
        yield base
        end_emulator(emulator_socket(base))
        shutil.rmtree(base)


def end_emulator(path: Path) -> None:
    """End the emulated device that was started to listen at `path`, and wait for it."""
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(path) in (process.info["cmdline"] or [])
    ]
    for process in found:
        process.terminate()
    assert psutil.wait_procs(found, timeout=SECONDS)[1] == []


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A job name of this test alone; what runs of it at the end is ended."""
    made = "t" + re.sub(r"[^a-z0-9]", "", request.node.name.lower())[:50]
    yield made
    flowgpu("kill", made)


def flowgpu(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FLOWGPU, *map(str, args)], capture_output=True, text=True, timeout=SECONDS, **options
    )


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return flowgpu("run", "--gpu", "emulated", "--", *command, **options)


def python(code: str, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", code, *args, **options)


@contextlib.contextmanager
def started(*args: str) -> Iterator[subprocess.Popen[str]]:
    """A `flowgpu` command that runs beside the test."""
    with subprocess.Popen(
        [*FLOWGPU, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def counting(
    name: str, stop: Path = Path("/no/such/file")
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """A job that counts until `stop` exists, says so on its standard error and exits with 5."""
    command = [sys.executable, "-c", COUNTER, str(stop)]
    return started("run", "--gpu", "emulated", "--name", name, "--", *command)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def job(name: str) -> dict[str, Any]:
    """What ps says about the newest job called `name`; empty if there is none."""
    jobs = json.loads(flowgpu("ps", "--all", "--json").stdout)
    return next((found for found in reversed(jobs) if found["name"] == name), {})


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout
    return [process.stdout.readline().strip() for _ in range(count)]


def rest_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What is left of both streams, and the end of the process.

    Not communicate(), which passes over what readline() has read ahead.
    """
    assert process.stdout and process.stderr
    out, err = process.stdout.read(), process.stderr.read()
    process.wait(SECONDS)
    return out, err


def finish(process: subprocess.Popen[str], stop: Path) -> tuple[list[str], str]:
    """Let a counting job end: the numbers it said till then, and its standard error."""
    some = read_lines(process, 3)
    stop.touch()
    rest, messages = rest_of(process)
    assert process.returncode == 5
    return some + rest.split(), messages


def numbers(first: int, end: int) -> list[str]:
    return [str(n) for n in range(first, end)]


# run


def test_output_goes_to_its_own_stream_and_the_exit_code_is_the_jobs() -> None:
    done = python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 3)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_job_ended_by_a_signal_gives_128_and_its_number(signum: int) -> None:
    assert run("sh", "-c", f"kill -{signum} $$").returncode == 128 + signum


def test_megabytes_of_binary_output_come_byte_for_byte() -> None:
    code = "import os,sys\nfor i in range(400): sys.stdout.buffer.write(bytes(range(256)) * 64)"
    done = subprocess.run(
        [*FLOWGPU, "run", "--gpu", "emulated", "--", sys.executable, "-c", code],
        capture_output=True,
        timeout=SECONDS,
    )
    assert done.stdout == bytes(range(256)) * 64 * 400
    assert done.returncode == 0


def test_the_job_has_the_users_environment_folder_and_file(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_text("from a file\n")
    environment = {**os.environ, "SOME_NAME": "some value", "PYTHONPATH": os.getcwd()}
    with data.open() as file:
        done = run(
            "sh", "-c", "echo $SOME_NAME; pwd; cat", cwd=tmp_path, env=environment, stdin=file
        )
    assert done.stdout == f"some value\n{tmp_path}\nfrom a file\n"


def test_a_job_without_a_file_as_input_reads_nothing() -> None:
    assert run("cat", input="typed").stdout == ""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_commands_do_without_standard_streams(closed: str, tmp_path: Path) -> None:
    code = tmp_path / "code"
    for words, expected in (
        (["ps", "--all"], 0),
        (["kill", "no-such-job"], errors.UnknownJob.exit_code),
        (["run", "--gpu", "emulated", "--", "sh", "-c", "echo out; echo err >&2; exit 7"], 7),
    ):
        script = f'"$@" {closed}; echo $? > {code}'
        done = subprocess.run(
            ["sh", "-c", script, "sh", *FLOWGPU, *words], capture_output=True, timeout=SECONDS
        )
        assert (code.read_text(), b"Traceback" in done.stderr) == (f"{expected}\n", False)


def test_an_interrupt_goes_to_every_process_of_the_group_and_the_job_decides() -> None:
    script = """
        trap 'wait; echo parent; exit 9' INT
        (trap 'echo child; exit' INT; echo up; sleep 60 & wait) &
        wait; wait
    """
    with started("run", "--gpu", "emulated", "--", "bash", "-c", script) as process:
        assert read_lines(process, 1) == ["up"]
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, _ = rest_of(process)
    assert sorted(out.split()) == ["child", "parent"]
    assert process.returncode == 9


def test_a_terminate_ends_a_job_that_does_not_mind_it() -> None:
    with started("run", "--gpu", "emulated", "--", "sleep", "60") as process:
        until(lambda: any(j["command"] == ["sleep", "60"] for j in running()))
        process.terminate()
        assert process.wait(SECONDS) == 128 + signal.SIGTERM


def running() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(flowgpu("ps", "--json").stdout)
    return [item for item in found if item["state"] == "running"]


def test_a_job_whose_reader_goes_away_gets_sigpipe() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m flowgpu run --gpu emulated -- yes | head -n 1"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout == "y\n"


def test_a_program_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    script = tmp_path / "bad"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = run(str(script))
    assert done.returncode == errors.StartFailed.exit_code
    assert "could not be started" in done.stderr
    assert str(script) in done.stderr


def test_nothing_of_a_job_outlives_its_root() -> None:
    done = run("sh", "-c", "sleep 60 & echo $!")
    pid = int(done.stdout)
    with contextlib.suppress(FileNotFoundError):
        assert "sleep" not in Path(f"/proc/{pid}/comm").read_text()


# ps, logs, kill


def test_a_running_job_is_listed_has_logs_and_can_be_killed(name: str) -> None:
    with counting(name) as process:
        assert read_lines(process, 3) == ["0", "1", "2"]
        found = job(name)
        assert (found["state"], found["gpu"]) == ("running", "emulated")
        assert os.getsid(found["root_pid"]) == found["root_pid"]
        assert found["coordinator_pid"] != process.pid
        assert flowgpu("logs", name).stdout.splitlines()[:3] == ["0", "1", "2"]
        with started("logs", "--follow", found["id"][:8]) as follower:
            assert read_lines(follower, 3) == ["0", "1", "2"]
            assert flowgpu("kill", name).returncode == 0
            rest_of(follower)
        rest_of(process)
        assert process.returncode == 128 + signal.SIGKILL
    found = job(name)
    assert (found["state"], found["exit_code"]) == ("exited", 137)
    assert flowgpu("kill", name).returncode == errors.UnknownJob.exit_code


def test_a_name_in_use_is_refused(name: str) -> None:
    with counting(name) as process:
        read_lines(process, 1)
        done = flowgpu("run", "--gpu", "emulated", "--name", name, "--", "true")
        assert done.returncode == errors.JobExists.exit_code
        assert f"Error: A job named '{name}' already runs here.\nhint: " in done.stderr


def test_a_job_without_coordinator_and_keeper_is_lost_and_can_be_ended(name: str) -> None:
    command = ["sleep", "1000"]
    with started("run", "--gpu", "emulated", "--name", name, "--", *command) as process:
        until(lambda: job(name).get("state") == "running")
        found = job(name)
        for pid in (found["keeper_pid"], found["coordinator_pid"]):
            os.kill(pid, signal.SIGKILL)
        assert process.wait(SECONDS) == errors.CoordinatorGone.exit_code
    assert job(name)["state"] == "lost"
    dump = flowgpu("pause-and-dump", name, "--output", "/nowhere")
    assert dump.returncode == errors.CoordinatorGone.exit_code
    assert flowgpu("kill", name).returncode == 0
    until(lambda: not Path(f"/proc/{found['root_pid']}/exe").exists())
    flowgpu("ps", "--prune")
    assert job(name) == {}


# pause-and-dump and restore


def test_a_dumped_job_goes_on_where_it_was_in_another_process(name: str, tmp_path: Path) -> None:
    image, stop = tmp_path / "image", tmp_path / "stop"
    with counting(name, stop) as process:
        seen = read_lines(process, 5)
        dump = flowgpu("pause-and-dump", name, "--output", image, "--json")
        rest, messages = rest_of(process)
    assert process.returncode == errors.DUMPED_EXIT
    assert f"{name} was dumped to {image}" in messages
    before = seen + rest.split()
    result = json.loads(dump.stdout)
    assert (result["job"], result["image"], dump.returncode) == (name, str(image), 0)
    found = job(name)
    assert (found["state"], found["exit_code"], found["image"]) == ("dumped", 75, str(image))

    with started("restore", str(image)) as process:
        after, messages = finish(process, stop)
    said = before + after
    assert said == numbers(0, len(said))
    assert f"flowgpu: restored {name} in " in messages
    assert messages.endswith("done\n")
    # The log has what was said before the dump, too.
    assert flowgpu("logs", name).stdout.split() == [*said, "done"]
    assert job(name)["state"] == "exited"


def test_an_image_can_be_restored_again_under_another_name(name: str, tmp_path: Path) -> None:
    image = dumped(name, tmp_path / "image")
    for again in (f"{name}-a", f"{name}-b"):
        done = flowgpu("restore", image, "--detach", "--json", "--name", again)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["job"] == again
        assert result["restore_seconds"] > 0
        assert job(again)["state"] == "running"
        twice = flowgpu("restore", image)
        assert twice.returncode == errors.JobExists.exit_code
        assert flowgpu("kill", again).returncode == 0


def dumped(name: str, image: Path) -> Path:
    """An image of a job that would count for minutes."""
    with counting(name) as process:
        read_lines(process, 2)
        done = flowgpu("pause-and-dump", name, "--output", image)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"dumped {name} to {image}\npaused ")
        rest_of(process)
    return image


def test_a_job_left_running_loses_nothing_and_its_image_is_whole(name: str, tmp_path: Path) -> None:
    image, stop = tmp_path / "image", tmp_path / "stop"
    with counting(name, stop) as process:
        seen = read_lines(process, 5)
        dump = flowgpu("pause-and-dump", name, "--output", image, "--leave-running", "--json")
        assert dump.returncode == 0, dump.stderr
        assert job(name)["state"] == "running"
        rest, _ = finish(process, stop)
    assert seen + rest == numbers(0, len(seen + rest))
    assert flowgpu("verify", image).returncode == 0
    stop.unlink()
    with started("restore", str(image)) as process:
        said, _ = finish(process, stop)
    # It starts within what the first one said: where the image was taken.
    assert 5 <= int(said[0]) <= len(seen + rest)
    assert said == numbers(int(said[0]), int(said[0]) + len(said))


def test_a_tree_of_processes_comes_back_whole(name: str, tmp_path: Path) -> None:
    image = tmp_path / "image"
    go = tmp_path / "go"
    script = f"""
        child() {{ echo child $1; while [ ! -e {go} ]; do sleep 0.05; done; exit $1; }}
        child 3 & first=$!
        child 4 & second=$!
        wait $first; a=$?; wait $second; echo $a $?
    """
    run_it = ["run", "--gpu", "emulated", "--name", name, "--", "bash", "-c", script]
    with started(*run_it) as process:
        assert sorted(read_lines(process, 2)) == ["child 3", "child 4"]
        dump = flowgpu("pause-and-dump", name, "--output", image)
        assert dump.returncode == 0, dump.stderr
        rest_of(process)
    go.touch()
    back = flowgpu("restore", image)
    assert (back.stdout, back.returncode) == ("3 4\n", 0), back.stderr


def test_signals_reach_a_restored_job(name: str, tmp_path: Path) -> None:
    image = dumped(name, tmp_path / "image")
    with started("restore", str(image)) as process:
        read_lines(process, 2)
        process.send_signal(signal.SIGTERM)
        rest_of(process)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_dump_that_is_refused_leaves_the_job_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with counting(name) as process:
        read_lines(process, 1)
        done = flowgpu("pause-and-dump", name, "--output", tmp_path, "--json")
        assert done.returncode == errors.OutputNotEmpty.exit_code
        assert done.stdout == ""
        read_lines(process, 5)
        assert job(name)["state"] == "running"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# What opens a descriptor that CRIU has no image of, and what is said of it. Other ends are in
# process PID: a pipe in READ and WRITE, a terminal's slave in SLAVE; it listens at PORT.
UNDUMPABLE = {
    "userfaultfd": ("ctypes.CDLL(None).syscall(323, 1)", "a userfaultfd as fd "),
    "io_uring": (
        # Past FlowGPU's own syscall, from which there is none.
        "ctypes.CDLL('libc.so.6').syscall(425, 4, bytes(120))",
        "an io_uring as fd ",
    ),
    "reads a pipe": ("os.open('/proc/PID/fd/READ', os.O_RDONLY)", "a pipe to a process outside"),
    "writes a pipe": ("os.open('/proc/PID/fd/WRITE', os.O_WRONLY)", "a pipe to a process outside"),
    "TCP": (
        "s = socket.create_connection(('127.0.0.1', PORT))",
        "a TCP connection to a process outside (`--tcp close` closes it in the image) as fd ",
    ),
    "Unix": (
        "s = socket.socket(socket.AF_UNIX); s.connect('SERVER')",
        ", its other end SERVER",
    ),
    "terminal": (
        "os.open('SLAVE', os.O_RDWR | os.O_NOCTTY)",
        "SLAVE, the terminal of a process outside the job, as fd ",
    ),
}


@pytest.fixture
def outside() -> Iterator[dict[str, str]]:
    """The other ends that UNDUMPABLE speaks of."""
    (read, write), (master, slave) = os.pipe(), os.openpty()
    ends = {"PID": os.getpid(), "READ": read, "WRITE": write, "SLAVE": os.ttyname(slave)}
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX) as local,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        ends["SERVER"] = f"{folder}/server"
        local.bind(ends["SERVER"])
        local.listen()
        accepted: list[tuple[socket.socket, object]] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                accepted.append(local.accept())

        accepting = threading.Thread(target=accept)
        accepting.start()
        yield {name: str(end) for name, end in ends.items()} | {
            "PORT": str(server.getsockname()[1])
        }
        local.shutdown(socket.SHUT_RDWR)
        accepting.join()
        for connection, _ in accepted:
            connection.close()
    for fd in (read, write, master, slave):
        os.close(fd)


@pytest.mark.parametrize("kind", UNDUMPABLE)
def test_what_criu_cannot_dump_is_named_before_the_pause(
    kind: str, name: str, outside: dict[str, str], tmp_path: Path
) -> None:
    opens, said = UNDUMPABLE[kind]
    for word, end in outside.items():
        opens, said = opens.replace(word, end), said.replace(word, end)
    code = f"import ctypes, os, socket\n{opens}\n{COUNTER}"
    command = [sys.executable, "-c", code, "/no/such/file"]
    with started("run", "--gpu", "emulated", "--name", name, "--", *command) as process:
        read_lines(process, 1)
        done = flowgpu("pause-and-dump", name, "--output", tmp_path / "image")
        error = errors.Unsupported if "pipe" in kind else errors.CriuUnsupported
        assert done.returncode == error.exit_code, done.stderr
        assert said in done.stderr
        read_lines(process, 5)
        log = Registry().dir(job(name)["id"]).coordinator_log.read_text()
        flowgpu("kill", name)
    assert "checkpoint: prepare failed" in log
    assert "checkpoint: gate" not in log


def test_a_socket_in_flight_that_criu_cannot_restore_is_named(name: str, tmp_path: Path) -> None:
    code = f"""import socket
left, right = socket.socketpair()
ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
socket.send_fds(left, [b"one"], [ends[1].fileno()])
ends[0].close()
ends[1].close()
{COUNTER}"""
    command = [sys.executable, "-c", code, "/no/such/file"]
    with started("run", "--gpu", "emulated", "--name", name, "--", *command) as process:
        read_lines(process, 1)
        done = flowgpu("pause-and-dump", name, "--output", tmp_path / "image")
        assert done.returncode == errors.CriuUnsupported.exit_code, done.stderr
        assert "another one waits whose other end is closed" in done.stderr
        read_lines(process, 5)
        flowgpu("kill", name)
    assert not list(tmp_path.iterdir())
    assert not (tmp_path / "image").exists()


def test_a_damaged_image_is_named_and_not_restored(name: str, tmp_path: Path) -> None:
    image = dumped(name, tmp_path / "image")
    victim = next((image / "criu").glob("pages-*.img"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    for verb in ("verify", "restore"):
        done = flowgpu(verb, image)
        assert done.returncode == errors.ImageDamaged.exit_code
        assert victim.name in done.stderr
        assert done.stdout == ""
    assert job(name)["state"] == "dumped"
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert flowgpu("verify", image).returncode == 0
    assert flowgpu("restore", image, "--detach").returncode == 0


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    for verb in ("inspect", "verify", "restore"):
        done = flowgpu(verb, tmp_path)
        assert done.returncode == errors.ImageDamaged.exit_code
        assert done.stderr.startswith("Error: ")


def test_inspect_tells_what_an_image_holds(name: str, tmp_path: Path) -> None:
    image = dumped(name, tmp_path / "image")
    summary = json.loads(flowgpu("inspect", image, "--json").stdout)
    assert summary["job"]["name"] == name
    assert summary["cpu_bytes"] > 0
    assert f"  name:    {name}\n" in flowgpu("inspect", image).stdout


def test_doctor_answers_in_json() -> None:
    done = flowgpu("doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == (found["status"] == "fail")
    assert {"name", "status", "found", "meaning", "mend"} == set(found["checks"][0])

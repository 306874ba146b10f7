"""What surrounds a command and its job: descriptors, the folder, Python's variables, Ctrl-Z."""

# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flowgpu.errors import (
    DUMPED_EXIT,
    CommandNotFound,
    FlowError,
    Unsupported,
    WorkingFolderGone,
    all_errors,
)
from flowgpu.host.proctree import fd_targets
from flowgpu.launch import emulated_driver
from tests.emu.intercept_lib import compile_program
from tests.emu.test_cli_end_to_end import (
    FLOWGPU,
    SECONDS,
    flowgpu,
    job,
    name,
    read_lines,
    rest_of,
    runtime_dir,
    started,
    until,
)

ROOT = Path(__file__).resolve().parents[2]
RUN = shlex.join([*FLOWGPU, "run", "--gpu", "emulated"])
MODULES = ("json", "click", "rich", "numpy", "socket", "subprocess", "logging", "coordinator")


def bash(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=SECONDS, check=False
    )


def test_a_job_reads_what_the_shell_substitutes() -> None:
    done = bash(f"{RUN} -- sh -c 'cat $0 $1' <(echo one) <(echo two)")
    assert (done.returncode, done.stdout) == (0, "one\ntwo\n"), done.stderr


def test_a_reader_sees_the_end_of_a_pipe_as_soon_as_the_job_has_closed_it(name: str) -> None:
    read, write = os.pipe()
    script = f"echo given > $0; exec {write}>&-; echo closed; sleep 100"
    words = [*FLOWGPU, "run", "--gpu", "emulated", "--name", name, "--", "bash", "-c", script]
    with (
        subprocess.Popen(
            [*words, f"/dev/fd/{write}"], pass_fds=[write], stdout=subprocess.PIPE, text=True
        ) as process,
        os.fdopen(read) as source,
    ):
        os.close(write)
        try:
            assert read_lines(process, 1) == ["closed"]
            assert source.read() == "given\n"
        finally:
            flowgpu("kill", name)


def test_files_that_the_command_has_open_are_the_jobs_and_pipes_of_others_are_not(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    data.write_text("from a file\n")
    look = "cat <&7; readlink /proc/self/fd/8; n=9; [ -e /proc/self/fd/$n ] || echo no pipe"
    done = bash(f"{RUN} -- bash -c {shlex.quote(look)} 7<{data} 8<{tmp_path} 9> >(cat)")
    assert (done.returncode, done.stdout) == (0, f"from a file\n{tmp_path}\nno pipe\n"), done.stderr


def test_the_program_alone_has_a_descriptor(name: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = f"exec {RUN} --name {name} -- sh -c 'echo up; cat $0' /dev/fd/7 7<>{pipe}"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert read_lines(process, 1) == ["up"]
            found = job(name)
            holders = [found["coordinator_pid"], found["keeper_pid"], process.pid]
            held = {target for pid in holders for _, target in fd_targets(pid)}
            assert held
            assert str(pipe) not in held
            assert os.readlink(f"/proc/{found['root_pid']}/fd/7") == str(pipe)
        finally:
            flowgpu("kill", name)


def test_a_job_with_a_substituted_file_is_dumped_once_its_other_end_has_closed(
    name: str, tmp_path: Path
) -> None:
    go, end, image = tmp_path / "go", tmp_path / "end", tmp_path / "image"
    # The first line is there at once, the second and the end of the file only later.
    source = f"echo one; until [ -e {go} ]; do sleep 0.01; done; echo two"
    program = (
        'exec 5<"$0"; read a <&5; echo $a; read b <&5; echo $b; read c <&5; echo no more; '
        f"until [ -e {end} ]; do sleep 0.01; done; read d <&5; echo $? end"
    )
    script = f"exec {RUN} --name {name} -- bash -c {shlex.quote(program)} <({source})"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert read_lines(process, 1) == ["one"]
            done = flowgpu("pause-and-dump", name, "--output", image)
            assert done.returncode == Unsupported.exit_code
            assert "a pipe to a process outside the job" in done.stderr
            go.touch()
            assert read_lines(process, 2) == ["two", "no more"]
            done = flowgpu("pause-and-dump", name, "--output", image)
            assert done.returncode == 0, done.stderr
            assert process.wait(SECONDS) == DUMPED_EXIT
        finally:
            flowgpu("kill", name)
    end.touch()
    for _ in range(2):
        restored = flowgpu("restore", image)
        assert (restored.returncode, restored.stdout) == (0, "1 end\n"), restored.stderr


def test_a_job_under_make_has_its_job_server(tmp_path: Path) -> None:
    file = tmp_path / "Makefile"
    file.write_text(
        f"all:\n\t+@{RUN} -- $(MAKE) -f {file} one two\none:\n\t@echo one\ntwo:\n\t@echo two\n"
    )
    done = subprocess.run(
        ["make", "-j2", "-f", str(file)], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert "jobserver unavailable" not in done.stderr
    assert {"one", "two"} <= set(done.stdout.split("\n"))


LISTENS = """
import os, socket, sys
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_a_job_has_the_sockets_of_a_service_manager() -> None:
    words = [*FLOWGPU, "run", "--gpu", "emulated", "--"]
    look = 'echo "$LISTEN_FDS $((LISTEN_PID - $$)) $0"; readlink /proc/self/fd/3'
    done = subprocess.run(
        [sys.executable, "-c", LISTENS, *words, "sh", "-c", look, "it's"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 0 it's\nsocket:[")


def test_commands_in_a_folder_that_is_gone_say_so(command: list[str], tmp_path: Path) -> None:
    for words, error in (
        (["run", "--gpu", "emulated", "--", "true"], WorkingFolderGone),
        (["pause-and-dump", "nonesuch", "--output", "image"], FlowError),
        (["ps"], None),
        (["kill", "nonesuch"], FlowError),
    ):
        line = shlex.join([*command, *words])
        done = bash(f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir ../gone; {line}")
        assert "Traceback" not in done.stderr
        assert (done.returncode == 0) is (error is None), done.stderr
        if error is WorkingFolderGone:
            assert done.returncode == error.exit_code


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """`flowgpu` as `make setup` installs it, for other folders than this one."""
    script = tmp_path / "flowgpu"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from flowgpu.cli import main\nsys.exit(main())\n"
    )
    script.chmod(0o755)
    return [str(script)]


@pytest.fixture
def shadows(tmp_path: Path) -> Path:
    """A folder of modules that end whoever loads them."""
    folder = tmp_path / "shadows"
    folder.mkdir()
    for module in MODULES:
        (folder / f"{module}.py").write_text(f"raise SystemExit('{module} of the user')\n")
    return folder


PYTHON = {
    "PYTHONOPTIMIZE": "2",
    "PYTHONWARNINGS": "error",
    "PYTHONDEVMODE": "1",
    "PYTHONSTARTUP": "/nonesuch",
    "PYTHONUTF8": "0",
}


def test_a_job_is_dumped_and_restored_whatever_is_set_for_python(
    name: str, command: list[str], shadows: Path, tmp_path: Path
) -> None:
    """Command, coordinator and ghost do not see it, and the job does."""
    link = (f"-L{emulated_driver().parent}", "-l:libcuda.so.1")
    program = compile_program("user.c", tmp_path / "user", *link)
    stop, image = tmp_path / "stop", tmp_path / "image"
    variables = {**PYTHON, "PYTHONPATH": str(shadows)}
    environment = {**os.environ, **variables}
    shown = [f"{key}={value}" for key, value in variables.items()]
    script = f"env | grep '^PYTHON' | sort; {program} {stop}"
    words = [*command, "run", "--gpu", "emulated", "--name", name, "--", "sh", "-c", script]

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words],
            env=environment,
            cwd=shadows,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    with subprocess.Popen(
        words, env=environment, cwd=shadows, stdout=subprocess.PIPE, text=True
    ) as process:
        lines = read_lines(process, len(shown) + 3)
        assert set(shown) <= set(lines)
        done = call("pause-and-dump", name, "--output", str(image))
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        assert process.wait(SECONDS) == DUMPED_EXIT
    stop.touch()
    done = call("restore", str(image))
    assert done.returncode == 0, done.stderr


def test_errors_keep_their_words_without_docstrings() -> None:
    done = flowgpu("kill", "nonesuch", env={**os.environ, **PYTHON})
    assert done.stderr.startswith("Error: No job named 'nonesuch' runs here.\n")
    code = (
        "import json\nfrom flowgpu.errors import all_errors\n"
        "print(json.dumps([error.template() for error in all_errors()]))"
    )
    shown = subprocess.run(
        [sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True
    )
    assert json.loads(shown.stdout) == [error.template() for error in all_errors()]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_ctrl_z_stops_job_and_command_and_both_go_on(name: str, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    script = f"sleep 100 & echo up; until [ -e {stop} ]; do sleep 0.01; done; kill $!; echo end"
    # Not sh: while its child is stopped between vfork(2) and exec, a dash waits: D, and not T.
    words = ["run", "--gpu", "emulated", "--name", name, "--", "bash", "-c", script]
    with started(*words) as process:
        assert read_lines(process, 1) == ["up"]
        root = job(name)["root_pid"]
        process.send_signal(signal.SIGTSTP)
        until(lambda: state(process.pid) == "T" and state(root) == "T")
        stop.touch()
        process.send_signal(signal.SIGCONT)
        out, err = rest_of(process)
    assert (process.returncode, out) == (0, "end\n"), err

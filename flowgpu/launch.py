"""Where the native libraries are, which driver a job gets, and the environment of each process.

This file is the only one that writes these variables:

======================  =========================================  ===========================
variable                in a task of the job                       in the ghost
======================  =========================================  ===========================
`LD_PRELOAD`            the user's, then the intercept library,    not set
                        the memory stub, the counts of NCCL, and
                        what hands these variables on
`LD_LIBRARY_PATH`       the user's                                 the driver's folder, then the
                                                                   user's
`FLOWGPU_REAL_LIBCUDA`  the real or the emulated libcuda.so.1      the same
`FLOWGPU_SOCKET`        `task.sock` in the job's directory         empty: of no job
`FLOWGPU_REPLAY`        not with `--engine native`, else 1         not set
`FLOWGPU_UNTRIED`       what `--untried` names                     not set
`NCCL_CUMEM_HOST...`,   0, unless the user has set them            the user's
`NCCL_RAS_ENABLE`
`FLOWGPU_EMU_SOCKET`    emulated: the device daemon's socket       the same
`FLOWGPU_EMUD`          emulated: the device daemon's program      the same
`FLOWGPU_ADDRESSES`     not set; native/exec gives it to programs  not set
                        that start in a job that was restored on
                        hosts with other addresses
`FLOWGPU_PACKAGES`      not set                                    folders of Python packages
`PYTHON...`             the user's                                 `PYTHONPATH`: this package's
                                                                   folder; where Python is
======================  =========================================  ===========================

and reads three from the user: `FLOWGPU_LIB`, another folder of native libraries,
`FLOWGPU_RUNTIME_DIR` (flowgpu/jobs.py) and `FLOWGPU_JOIN` (flowgpu/nodes.py). Task variables stay
in the image, so a restored job finds its sockets again because its directory is made under the same
id. CRIU's are in flowgpu/host/criu.py. A task that starts a program hands them on, also where it
has changed or cleaned the environment (native/exec), unless that names another job or none.

The emulated device's daemon is started here, before the job: as a child of a task it would be in
the tree that CRIU dumps.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from flowgpu.errors import LibrariesUnusable, NoGpu, NotBuilt, StartFailed
from flowgpu.jobs import JobDir, prepare_runtime_dir
from flowgpu.nodes import SECRET, Membership
from flowgpu.options import RestoreOptions
from flowgpu.vocabulary import EngineChoice, GhostChoice, GpuChoice, GpuKind

PACKAGE = Path(__file__).resolve().parent
OURS = (
    "FLOWGPU_REAL_LIBCUDA",
    "FLOWGPU_SOCKET",
    "FLOWGPU_REPLAY",
    "FLOWGPU_UNTRIED",
    "FLOWGPU_EMU_SOCKET",
    "FLOWGPU_EMUD",
)
ADDRESSES = "FLOWGPU_ADDRESSES"
MEMORY_STUB = "libflowgpu_memstub.so"
NCCL_COUNTS = "libflowgpu_nccl.so"
EXEC_HOOKS = "libflowgpu_exec.so"
DRIVER_FOLDERS = (
    "/usr/local/nvidia/lib64",  # Kubernetes device plugin and older container toolkits
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/run/opengl-driver/lib",  # NixOS
)
# Without the first, memory of the host that ranks share is the driver's. Threads and sockets of the
# second outlive all communicators.
FOR_NCCL = {"NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_RAS_ENABLE": "0"}
# The driver has tens of MiB; the toolkit's link stub and the libraries of this project have less.
SMALLEST_DRIVER = 4 << 20


@dataclasses.dataclass(frozen=True)
class Driver:
    """The driver that a job's calls end in."""

    kind: GpuKind
    libcuda: Path
    reason: str  # why `auto` came to it, in a few words


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the coordinator is told: one JSON object on the file descriptor of --spec-fd.

    `kind` is `run` or `restore`, or `container`: then others start and end the root task. `env` is
    the complete environment of the root task (run only) and `ghost_env` that of the ghost. `stdin`
    is a file that the root task reads, None for /dev/null. `image` is the image's folder (restore
    only). The root task is not started, or let run again after a restore, before the first client
    has attached if `wait_for_client`: so no output is missed. `ghost`: when it is started
    (docs/limits.md, a full GPU). `engine`: what the tasks are prepared for, which their environment
    tells them. `gpus`: UUIDs of the image's GPUs; `options`: what the restore is asked for (restore
    only). `umask` is that of the root task (run only). `member`: which node it is of a job of
    several.
    """

    kind: Literal["run", "restore", "container"]
    id: str
    name: str
    command: list[str]
    cwd: str
    gpu: GpuKind
    job_dir: str
    env: dict[str, str]
    ghost_env: dict[str, str]
    stdin: str | None = None
    image: str | None = None
    wait_for_client: bool = False
    ghost: GhostChoice = "auto"
    engine: EngineChoice = "auto"
    gpus: list[str] = dataclasses.field(default_factory=list)
    options: RestoreOptions = dataclasses.field(default_factory=RestoreOptions)
    umask: int = 0o022
    descriptors: list[int] = dataclasses.field(default_factory=list)  # of ours, for the program
    member: Membership | None = None

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes | str) -> Spec:
        """Read what `to_json` wrote. Raises TypeError for unknown or missing keys."""
        data: dict[str, Any] = json.loads(text)
        made: dict[str, Any] = {"options": RestoreOptions(**data["options"])}
        if data.get("member"):
            made["member"] = Membership(**data["member"])
        return cls(**{**data, **made})


def library_dir() -> Path:
    """Folder of native libraries: $FLOWGPU_LIB, `build/lib` of a checkout, else `flowgpu/lib`."""
    chosen = os.environ.get("FLOWGPU_LIB")
    if chosen:
        return Path(os.path.abspath(chosen))
    root = PACKAGE.parent
    return root / "build" / "lib" if (root / "CMakeLists.txt").is_file() else PACKAGE / "lib"


def program(name: str) -> Path:
    """A native program, where the build leaves it or where the package has it."""
    beside = library_dir().parent / "bin" / name
    return beside if beside.is_file() else library_dir() / name


def intercept_library() -> Path:
    """The library that is preloaded into tasks. Raises NotBuilt."""
    return _built("intercept/libcuda.so.1")


def kernels_ptx() -> Path:
    """The chunk kernels that the ghost loads. Raises NotBuilt."""
    return _built("flowgpu_chunks.ptx")


def memory_stub() -> Path:
    """The library that is preloaded into tasks behind it (native/memstub). Raises NotBuilt."""
    return _built(MEMORY_STUB)


def nccl_counts() -> Path:
    """The library behind that, which counts what ranks of NCCL issue (native/nccl). Raises
    NotBuilt."""
    return _built(NCCL_COUNTS)


def exec_hooks() -> Path:
    """The library behind that, which hands all of them on to other programs (native/exec). Raises
    NotBuilt."""
    return _built(EXEC_HOOKS)


def task_libraries() -> list[Path]:
    """These four. Raises NotBuilt."""
    return [intercept_library(), memory_stub(), nccl_counts(), exec_hooks()]


def preloaded() -> str:
    """The libraries of a task as LD_PRELOAD takes them. Raises NotBuilt, LibrariesUnusable."""
    paths = list(map(str, task_libraries()))
    # The dynamic linker says so too, but into the program's standard error, and runs it without.
    if any(re.search(r"[\s:$]", path) for path in paths):
        raise LibrariesUnusable(path=library_dir())
    return ":".join(paths)


def criu_plugins() -> Path:
    """The folder of what CRIU loads for tasks that hold a GPU (native/criu_plugin). Raises
    NotBuilt."""
    return _built("criu/flowgpu_left_out.so").parent


def container_plugin() -> Path:
    """What a CRIU that others run loads (native/criu_plugin/container.cpp). Raises NotBuilt."""
    return _built("container/flowgpu_container.so")


def emulated_driver() -> Path:
    """The emulated driver's libcuda.so.1. Raises NotBuilt."""
    return _built("emu/libcuda.so.1")


def emulator_daemon() -> Path:
    """The program of the emulated device. Raises NotBuilt."""
    beside = library_dir().parent / "bin" / "flowgpu-emud"  # where a build tree has programs
    return beside if beside.is_file() else _built("emu/flowgpu-emud")


def _built(name: str) -> Path:
    path = library_dir() / name
    if not path.is_file():
        raise NotBuilt(name=name)
    return path


def choose_driver(choice: GpuChoice) -> Driver:
    """The driver for `--gpu choice`. Raises NoGpu if `nvidia` is not there, NotBuilt."""
    if choice == "emulated":
        return Driver("emulated", emulated_driver(), "asked for")
    device = nvidia_device()
    libcuda = find_nvidia_libcuda()
    if device and libcuda:
        return Driver("nvidia", libcuda, f"found {device} and {libcuda}")
    missing = "no libcuda.so.1 was found" if device else "no NVIDIA device that this user may open"
    if choice == "nvidia":
        raise NoGpu(reason=missing)
    return Driver("emulated", emulated_driver(), missing)


def nvidia_device() -> str | None:
    """A GPU's device file that this process may open, None without it or /dev/nvidiactl."""
    if not os.access("/dev/nvidiactl", os.R_OK | os.W_OK):
        return None
    names = sorted(name for name in os.listdir("/dev") if re.fullmatch(r"nvidia[0-9]+", name))
    return next((f"/dev/{name}" for name in names if os.access(f"/dev/{name}", os.R_OK)), None)


def find_nvidia_libcuda() -> Path | None:
    """NVIDIA's libcuda.so.1 in the order of ld.so: LD_LIBRARY_PATH, cache, known folders."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    candidates = [Path(folder) / "libcuda.so.1" for folder in folders if folder]
    candidates += _loader_cache("libcuda.so.1")
    candidates += [Path(folder) / "libcuda.so.1" for folder in DRIVER_FOLDERS]
    return next((path.absolute() for path in candidates if _is_nvidia_driver(path)), None)


def _is_nvidia_driver(path: Path) -> bool:
    """True unless the file is a link stub of the toolkit, one of our libraries, or of another word
    size than this machine's."""
    try:
        with path.open("rb") as file:
            head = file.read(5)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    is_elf64 = head == b"\x7fELF\x02"
    return is_elf64 and size >= SMALLEST_DRIVER and library_dir() not in path.resolve().parents


def _loader_cache(name: str) -> list[Path]:
    """Paths that ld.so's cache has for `name`, best first."""
    for program in ("/sbin/ldconfig", "ldconfig"):
        try:
            listing = subprocess.run(
                [program, "-p"], capture_output=True, text=True, timeout=10, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        return [
            Path(line.rpartition("=> ")[2].strip())
            for line in listing.splitlines()
            if line.split(maxsplit=1)[:1] == [name]
        ]
    return []


def clean_env(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without what an outer `flowgpu run` put into it, nor what the nodes of a job alone are
    to know: a job's environment is in its image."""
    cleaned = {key: value for key, value in env.items() if key not in (*OURS, ADDRESSES, SECRET)}
    ours = f"{library_dir()}/"
    preload = [path for path in re.split(r"[\s:]+", env.get("LD_PRELOAD", "")) if path]
    kept = [path for path in preload if not path.startswith(ours)]
    if kept:
        cleaned["LD_PRELOAD"] = ":".join(kept)
    else:
        cleaned.pop("LD_PRELOAD", None)
    return cleaned


def find_program(command: str, env: Mapping[str, str], cwd: str) -> str | None:
    """The file that `command` runs, as execvp would find it; None if there is none."""
    if os.path.dirname(command):
        return shutil.which(os.path.join(cwd, command))
    return shutil.which(command, path=env.get("PATH", os.defpath))


SHELLS = {"sh", "ash", "bash", "dash", "ksh", "mksh", "zsh"}
FIRST_LINE_BYTES = 256  # of a script, so far as the kernel reads it


def is_shell(program: str) -> bool:
    """True for a shell, or a script of one."""
    with suppress(OSError), open(program, "rb") as file:
        first = file.readline(FIRST_LINE_BYTES)
        words = os.fsdecode(first[2:]).split() if first.startswith(b"#!") else [program]
        names = [os.path.basename(word) for word in words if not word.startswith("-")]
        return bool(names) and names[names[0] == "env" and len(names) > 1] in SHELLS
    return False


def fitted_env(env: dict[str, str], program: str) -> tuple[dict[str, str], str]:
    """Environment of a job's first program, and why it has none of our libraries in it; "" if it
    has. Those that it starts, and that can take them, do not get them either. Raises NotBuilt."""
    library = ctypes.CDLL(str(exec_hooks()))
    library.flowgpu_exec_unfit.restype = ctypes.c_char_p
    why: bytes | None = library.flowgpu_exec_unfit(os.fsencode(program))
    if why is None:
        return env, ""
    preloads = clean_env(env).get("LD_PRELOAD")
    fitted = {key: value for key, value in env.items() if key != "LD_PRELOAD"}
    return fitted | ({"LD_PRELOAD": preloads} if preloads else {}), why.decode()


def task_env(
    env: Mapping[str, str],
    driver: Driver,
    job: JobDir,
    base: Path,
    engine: EngineChoice = "auto",
    untried: str | None = None,
) -> dict[str, str]:
    """Environment of the root task of `job`, from the user's `env`.

    `untried`: one of vocabulary.UNTRIED.
    """
    result = clean_env(env)
    theirs = result.get("LD_PRELOAD")
    result["LD_PRELOAD"] = f"{theirs}:{preloaded()}" if theirs else preloaded()
    result["FLOWGPU_SOCKET"] = str(job.task_socket)
    for name, value in FOR_NCCL.items():
        result.setdefault(name, value)
    if engine != "native":
        result["FLOWGPU_REPLAY"] = "1"
    if untried:
        result["FLOWGPU_UNTRIED"] = untried
    result.update(_driver_env(driver, base))
    return result


def ghost_env(env: Mapping[str, str], driver: Driver, base: Path) -> dict[str, str]:
    """Environment of the ghost: the chosen driver as libcuda.so.1, and nothing preloaded."""
    result = coordinator_env(env)
    theirs = result.get("LD_LIBRARY_PATH")
    folder = str(driver.libcuda.parent)
    result["LD_LIBRARY_PATH"] = f"{folder}:{theirs}" if theirs else folder
    result.update(_driver_env(driver, base))
    return result


def _driver_env(driver: Driver, base: Path) -> dict[str, str]:
    result = {"FLOWGPU_REAL_LIBCUDA": str(driver.libcuda)}
    if driver.kind == "emulated":
        result["FLOWGPU_EMU_SOCKET"] = str(emulator_socket(base))
        result["FLOWGPU_EMUD"] = str(emulator_daemon())
    return result


def coordinator_env(env: Mapping[str, str]) -> dict[str, str]:
    """Environment of the coordinator: nothing preloaded; finds this package in a checkout.

    It and the ghost run with -S, that is without `site`: what other packages have Python load at
    each start (`*.pth`) can take as long as all of ours. So they are told where packages are.
    """
    result = {key: value for key, value in clean_env(env).items() if not _is_for_python(key)}
    result.pop("LD_PRELOAD", None)
    # A command that runs in a job would hand that one's variables on.
    result["FLOWGPU_SOCKET"] = ""
    standard = os.path.dirname(os.__file__)
    behind = sys.path[sys.path.index(standard) :] if standard in sys.path else []
    result["PYTHONPATH"] = str(PACKAGE.parent)
    # Behind the standard library, and last what the user has named: see coordinator/__init__.py.
    result["FLOWGPU_PACKAGES"] = ":".join(behind)
    # numpy's library of linear algebra, which nothing here uses, starts a thread a processor.
    result["OPENBLAS_NUM_THREADS"] = "1"
    return result


def _is_for_python(variable: str) -> bool:
    """True if the variable may make Python do other things, or fail. Those that only say where
    Python finds itself and compiled files are harmless."""
    harmless = ("PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")
    return variable.startswith("PYTHON") and variable not in harmless


def emulator_socket(base: Path) -> Path:
    """Socket of the emulated device's daemon; its name tells tools what the connection is."""
    return base / "flowgpu-emu.sock"


def start_emulator(base: Path) -> None:
    """Start the emulated device's daemon unless one answers. Raises NotBuilt, StartFailed."""
    path = emulator_socket(base)
    if answers(path):
        return
    prepare_runtime_dir(base)
    # The lock that the emulated driver takes too, when a task starts the daemon.
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answers(path):
            _spawn_emulator(path, base / "flowgpu-emud.log")
    finally:
        os.close(lock)


def _spawn_emulator(path: Path, log: Path) -> None:
    """The daemon's first process ends with 0 as soon as the socket listens."""
    program = str(emulator_daemon())
    pid = os.posix_spawn(
        program,
        [program, "--socket", str(path), "--background"],
        coordinator_env(os.environ),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    _, status = os.waitpid(pid, 0)
    if status != 0:
        code = os.waitstatus_to_exitcode(status)
        raise StartFailed(job="emulated GPU", reason=f"its daemon ended with {code}, see {log}")


def answers(path: Path) -> bool:
    """True if something accepts connections on the Unix socket `path`."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                continue
            return True
    return False


def start_coordinator(spec: Spec) -> subprocess.Popen[bytes]:
    """Start the coordinator of a job in a session of its own.

    Returns at once; the coordinator is ready when control.sock in `spec.job_dir` accepts.
    """
    # A pipe: a file, in memory too, would be bound by `ulimit -f`.
    fd, to_coordinator = os.pipe()
    # One that has ended is told of by who waits for it.
    with suppress(BrokenPipeError), os.fdopen(to_coordinator, "wb") as stream:
        try:
            log = os.open(
                JobDir(Path(spec.job_dir)).coordinator_log,
                os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
                0o600,
            )
            try:
                process = subprocess.Popen(
                    # -P: a user's folder must not lend the coordinator its modules. utf8: paths
                    # come from commands of any locale, also where its own has no letters for them.
                    [
                        *(sys.executable, "-P", "-S", "-X", "utf8"),
                        *("-m", "coordinator", "--spec-fd", str(fd)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=coordinator_env(os.environ),
                    cwd="/",
                    pass_fds=(fd, *spec.descriptors),
                    start_new_session=True,
                )
            finally:
                os.close(log)
        finally:
            os.close(fd)
        stream.write(spec.to_json())
    return process

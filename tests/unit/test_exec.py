"""The library that hands a job's variables on to programs, alone: every function that starts one.

In a job: tests/emu/test_started_programs.py.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from flowgpu import launch
from tests.patience import SECONDS

EXPORTS = {
    "flowgpu_exec_unfit",
    *("execl", "execle", "execlp", "execv", "execve", "execveat", "execvp", "execvpe", "fexecve"),
    *("posix_spawn", "posix_spawnp", "pidfd_spawn", "pidfd_spawnp", "popen", "syscall", "system"),
    *("accept", "accept4", "bind", "connect", "getpeername", "getsockname", "recvfrom", "recvmmsg"),
    *("recvmsg", "sendmmsg", "sendmsg", "sendto", "__recvfrom_chk"),
}
JOB = {name: f"/of the job's/{name}" for name in launch.OURS}
"""With spaces and a quote, as paths may have them."""

# Runs argv[1], with `lib`, `words` (an argument vector) and `given` (an environment) in reach, once
# its own environment is as argv[2] says, and prints what the program that it starts has.
PROBE = """
import ctypes, json, os, sys
lib = ctypes.CDLL(None, use_errno=True)
given = json.loads(sys.argv[2])
os.environ.clear()
os.environ.update(given)
def vector(texts):
    return (ctypes.c_char_p * (len(texts) + 1))(*map(os.fsencode, texts))
words = vector(["env", "-0"])
given = vector([f"{key}={value}" for key, value in given.items()])
actions = None
def child(call):
    pid = os.fork()
    if pid == 0:
        call()
        os._exit(100 + ctypes.get_errno())
    return os.waitpid(pid, 0)[1]
def wait(call):
    pid = ctypes.c_int()
    error = call(ctypes.byref(pid))
    return os.waitpid(pid.value, 0)[1] if error == 0 else error
def read(stream):
    lib.fgetc.argtypes = lib.pclose.argtypes = [ctypes.c_void_p]
    while (letter := lib.fgetc(stream)) >= 0:
        os.write(1, bytes([letter]))
    return lib.pclose(stream)
lib.popen.restype = ctypes.c_void_p
ctypes.set_errno(0)
sys.exit(os.waitstatus_to_exitcode(eval(sys.argv[1])))
"""

OF_ENVIRON = {  # functions whose program gets the process's environment
    "execv": 'child(lambda: lib.execv(b"/usr/bin/env", words))',
    "execvp": 'child(lambda: lib.execvp(b"/usr/bin/env", words))',
    "execl": 'child(lambda: lib.execl(b"/usr/bin/env", b"env", b"-0", None))',
    "execlp": 'child(lambda: lib.execlp(b"/usr/bin/env", b"env", b"-0", None))',
    "system": 'lib.system(b"/usr/bin/env -0")',
    "popen": 'read(lib.popen(b"/usr/bin/env -0", b"r"))',
}
OF_ARGUMENT = {  # and those whose program gets one that they are given
    "execve": 'child(lambda: lib.execve(b"/usr/bin/env", words, given))',
    "execvpe": 'child(lambda: lib.execvpe(b"/usr/bin/env", words, given))',
    "execle": 'child(lambda: lib.execle(b"/usr/bin/env", b"env", b"-0", None, given))',
    "fexecve": 'child(lambda: lib.fexecve(os.open("/usr/bin/env", os.O_PATH), words, given))',
    "execveat": 'child(lambda: lib.execveat(-100, b"/usr/bin/env", words, given, 0))',
    "posix_spawn": (
        'wait(lambda pid: lib.posix_spawn(pid, b"/usr/bin/env", None, None, words, given))'
    ),
    "posix_spawnp": (
        'wait(lambda pid: lib.posix_spawnp(pid, b"/usr/bin/env", None, None, words, given))'
    ),
}
CALLS = OF_ENVIRON | OF_ARGUMENT


def started(call: str, given: dict[str, str], **more: str) -> dict[str, str]:
    """What a program has that `call` starts with the environment `given`, in a task of a job."""
    environment = {**os.environ, **JOB, "LD_PRELOAD": launch.preloaded(), **more}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, call, json.dumps(given)],
        env=environment,
        capture_output=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, (done.returncode, done.stderr.decode())
    assert done.stderr == b""
    entries = [entry.decode().partition("=") for entry in done.stdout.split(b"\0") if entry]
    found = {name: value for name, _, value in entries}
    # Shells set these by themselves.
    return {name: value for name, value in found.items() if name not in ("PWD", "SHLVL", "_")}


def test_the_library_has_these_functions_and_needs_libc_alone() -> None:
    library = launch.exec_hooks()
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[2] for line in listed.splitlines()} == EXPORTS
    dynamic = subprocess.run(
        ["readelf", "-d", library], capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic) == ["libc.so.6"]
    assert "BIND_NOW" in dynamic, "the dynamic linker takes locks, which a vfork's child must not"


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_program_gets_what_a_cleaned_environment_lacks(call: str) -> None:
    assert started(call, {"A": "1"}) == {"A": "1", "LD_PRELOAD": launch.preloaded(), **JOB}
    assert started(call, {}) == {"LD_PRELOAD": launch.preloaded(), **JOB}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_program_keeps_the_libraries_that_it_is_given(call: str) -> None:
    theirs = "/lib/x86_64-linux-gnu/libm.so.6 /lib/x86_64-linux-gnu/libdl.so.2"
    kept = theirs.replace(" ", ":")
    found = started(call, {"LD_PRELOAD": theirs, "FLOWGPU_REPLAY": "theirs"})
    assert found == {**JOB, "LD_PRELOAD": f"{kept}:{launch.preloaded()}"} | {
        "FLOWGPU_REPLAY": "theirs"
    }
    part = f"{launch.intercept_library()}:{kept}"
    assert started(call, {"LD_PRELOAD": part, **JOB})["LD_PRELOAD"] == found["LD_PRELOAD"]


@pytest.mark.parametrize("socket", ["", "/of/another/job"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_program_of_another_job_or_of_none_gets_nothing(call: str, socket: str) -> None:
    assert started(call, {"FLOWGPU_SOCKET": socket}) == {"FLOWGPU_SOCKET": socket}


def test_a_title_over_the_environment_is_not_handed_on() -> None:
    """setproctitle writes over the memory in which the program was given its variables."""
    begin = 'int(open("/proc/self/stat").read().rpartition(")")[2].split()[47])'
    end = 'int(open("/proc/self/stat").read().rpartition(")")[2].split()[48])'
    overwrite = f"ctypes.memset({begin}, 84, {end} - {begin})"
    found = started(f"({overwrite}, {OF_ARGUMENT['execve']})[1]", {})
    assert found == {"LD_PRELOAD": launch.preloaded(), **JOB}


@pytest.mark.parametrize("name", ["execve", "posix_spawn", "execvpe"])
def test_a_large_environment_is_handed_on_too(name: str) -> None:
    given = {f"K{n}": "v" for n in range(6000)}
    assert started(CALLS[name], given) == {**given, "LD_PRELOAD": launch.preloaded(), **JOB}


FULL = """
import ctypes, os, resource, sys
ours, libc = ctypes.CDLL(None, use_errno=True), ctypes.CDLL("libc.so.6", use_errno=True)
# The kernel takes a quarter of it.
resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.RLIM_INFINITY))
quiet = os.open("/dev/null", os.O_WRONLY)
def starts(lib, size):
    texts = [f"K{n:04}=".ljust(100, "x") for n in range(size // 100)] + ["L=".ljust(size % 100 + 2)]
    given = (ctypes.c_char_p * (len(texts) + 1))(*map(os.fsencode, texts))
    words = (ctypes.c_char_p * 2)(b"true")
    pid = ctypes.c_int()
    if sys.argv[1].startswith("posix_spawn"):
        call = getattr(lib, sys.argv[1])
        if call(ctypes.byref(pid), b"/bin/true", None, None, words, given):
            return False
        return os.waitpid(pid.value, 0)[1] == 0
    child = os.fork()
    if child == 0:
        getattr(lib, sys.argv[1])(b"/bin/true", words, given)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0
fits, too_much = 0, 1 << 20
while too_much - fits > 1:
    middle = (fits + too_much) // 2
    fits, too_much = (middle, too_much) if starts(libc, middle) else (fits, middle)
print(fits > 100_000, starts(ours, fits), starts(ours, too_much))
"""


@pytest.mark.parametrize("name", ["execve", "posix_spawn", "execvpe", "posix_spawnp"])
def test_what_fits_only_without_ours_starts_without(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, name],
        env={**os.environ, **JOB, "LD_PRELOAD": launch.preloaded()},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert (done.stdout, done.stderr) == ("True True False\n", "")


COMMANDS = [
    (r"""printf '%s\n' "$0" "it's" '"' "$#" '\\' """, 0),
    ("# nothing", 0),
    ("exit 3", 3),
    ("nonesuch", 127),
    ("kill -9 $$", -9),
]


@pytest.mark.parametrize(("command", "code"), COMMANDS, ids=[c for c, _ in COMMANDS])
@pytest.mark.parametrize("call", ["lib.system({})", "read(lib.popen({}, b'r'))"])
def test_a_command_means_to_system_and_popen_what_it_meant(
    call: str, command: str, code: int
) -> None:
    done = [
        subprocess.run(
            [sys.executable, "-c", PROBE, call.format(os.fsencode(command)), json.dumps(given)],
            env={**os.environ, **JOB, "LD_PRELOAD": launch.preloaded()},
            capture_output=True,
            check=False,
            timeout=SECONDS,
        )
        for given in ({}, {**JOB, "LD_PRELOAD": launch.preloaded()})
    ]
    results = [(one.returncode, one.stdout, one.stderr) for one in done]
    assert results[0] == results[1]
    assert results[0][0] in (code, 256 + code)  # exit(-9) is 247


def test_libraries_that_a_program_could_not_read_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind chroot the dynamic linker would complain of them in the program's output."""
    built = launch.preloaded().split(":")
    for path in built:
        copy = tmp_path / Path(path).relative_to(launch.library_dir())
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    monkeypatch.setenv("FLOWGPU_LIB", str(tmp_path))
    gone = f"(os.unlink({str(launch.memory_stub())!r}), {OF_ARGUMENT['execve']})[1]"
    preloads = launch.preloaded()
    assert started(gone, {"LD_PRELOAD": preloads, "A": "1"}) == {"A": "1"}


def test_errno_of_a_program_that_is_not_there_is_the_kernels() -> None:
    call = 'child(lambda: lib.execve(b"/nonesuch", words, given))'
    done = subprocess.run(
        [sys.executable, "-c", PROBE, call, "{}"],
        env={**os.environ, **JOB, "LD_PRELOAD": launch.preloaded()},
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 100 + errno.ENOENT


ASAN = "it is built with AddressSanitizer"
OTHER_LOADER = "its dynamic linker is not glibc's"
OTHER_MACHINE = "it is a program of another machine or word size"
GLIBC, MUSL = "/lib64/ld-linux-x86-64.so.2", "/lib/ld-musl-x86_64.so.1"
EM_386, EM_X86_64, EM_AARCH64 = 3, 62, 183
PT_LOAD, PT_DYNAMIC, PT_INTERP = 1, 2, 3
DT_NULL, DT_NEEDED, DT_STRTAB = 0, 1, 5


def elf64(loader: str = GLIBC, *needed: str, machine: int = EM_X86_64) -> bytes:
    """A program's headers, its dynamic linker and the libraries that it needs; no code."""
    base, head = 0x400000, 64 + 3 * 56
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in needed)
    places = [1 + sum(len(name) + 1 for name in needed[:n]) for n in range(len(needed))]
    interpreter = loader.encode() + b"\0" if loader else b""
    at = head + len(interpreter)
    entries = [(DT_NEEDED, place) for place in places] + [(DT_STRTAB, base + at), (DT_NULL, 0)]
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    size = at + len(strings) + len(dynamic)
    headers = [
        (PT_LOAD, 5, 0, base, base, size, size, 4096),
        (PT_DYNAMIC, 6, at + len(strings), 0, 0, len(dynamic), len(dynamic), 8),
        *([(PT_INTERP, 4, head, 0, 0, len(interpreter), len(interpreter), 1)] if loader else []),
    ]
    magic = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    file = magic + struct.pack(
        "<HHIQQQIHHHHHH", 2, machine, 1, base, 64, 0, 0, 64, 56, len(headers), 0, 0, 0
    )
    file += b"".join(struct.pack("<IIQQQQQQ", *header) for header in headers)
    return file.ljust(head, b"\0") + interpreter + strings + dynamic


def elf32(loader: str, machine: int = EM_386) -> bytes:
    interpreter = loader.encode() + b"\0" if loader else b""
    headers = [(PT_LOAD, 0, 0, 0, 200, 200, 5, 4096)]
    headers += [(PT_INTERP, 116, 0, 0, len(interpreter), len(interpreter), 4, 1)] if loader else []
    file = b"\x7fELF\x01\x01\x01".ljust(16, b"\0")
    file += struct.pack("<HHIIIIIHHHHHH", 2, machine, 1, 0, 52, 0, 0, 52, 32, len(headers), 0, 0, 0)
    file += b"".join(struct.pack("<IIIIIIII", *header) for header in headers)
    return file.ljust(116, b"\0") + interpreter


FILES = {
    "of glibc": (elf64(GLIBC, "libm.so.6", "libc.so.6"), ""),
    "of glibc elsewhere": (elf64("/nix/store/glibc-2.40/lib/ld-linux-x86-64.so.2"), ""),
    "with a long loader": (elf64("/" + "x" * 300 + GLIBC), ""),
    "static": (elf64(""), ""),
    "of musl": (elf64(MUSL, "libc.musl-x86_64.so.1"), OTHER_LOADER),
    "of Android": (elf64("/system/bin/linker64"), OTHER_LOADER),
    "of another machine": (elf64("/lib/ld-linux-aarch64.so.1", machine=EM_AARCH64), OTHER_MACHINE),
    "of 32 bits": (elf32("/lib/ld-linux.so.2"), OTHER_MACHINE),
    "of 32 bits, static": (elf32(""), ""),
    "of 32 bits of another machine": (elf32("", machine=40), OTHER_MACHINE),
    "with gcc's ASan": (elf64(GLIBC, "libm.so.6", "libasan.so.8"), ASAN),
    "with the ASan of clang": (
        elf64(GLIBC, *(f"lib{n}.so" for n in range(70)), "/opt/libclang_rt.asan-x86_64.so"),
        ASAN,
    ),
    "with TSan": (elf64(GLIBC, "libtsan.so.2"), ""),
    "cut short": (elf64(MUSL)[:100], ""),
    "of nonsense": (elf64(MUSL)[:64] + b"\xff" * 300, ""),
    "empty": (b"", ""),
    "a script without a program": (b"#!\n", ""),
    "a script of one that is missing": (b"#!/nonesuch\n", ""),
}


@pytest.mark.parametrize(("data", "why"), FILES.values(), ids=FILES)
def test_a_program_that_takes_no_preloads_is_known_by_its_file(
    tmp_path: Path, data: bytes, why: str
) -> None:
    program, script, second = (tmp_path / name for name in ("program", "script", "second"))
    program.write_bytes(data)
    script.write_text(f"#! {program} -x\n")
    second.write_text(f"#!{script}\n")
    for path in (program, script, second):
        assert launch.fitted_env({}, str(path)) == ({}, why)


def test_what_is_no_file_takes_preloads(tmp_path: Path) -> None:
    loop, pipe = tmp_path / "loop", tmp_path / "pipe"
    loop.write_text(f"#!{loop}\n")
    os.mkfifo(pipe)
    for path in (loop, pipe, tmp_path, tmp_path / "missing"):
        assert launch.fitted_env({}, str(path)) == ({}, "")


def built(folder: Path, *words: str) -> Path:
    """A program that says that it runs; skips where this machine cannot build it."""
    source, program = folder / "program.c", folder / "program"
    source.write_text('#include <stdio.h>\nint main(void) { puts("runs"); return 0; }\n')
    if not shutil.which(words[0]):
        pytest.skip(f"{words[0]} is not here")
    done = subprocess.run(
        [*words, str(source), "-o", str(program)], capture_output=True, text=True, check=False
    )
    if re.search(r"cannot find \S*libasan", done.stderr):
        pytest.skip("the libraries of AddressSanitizer are not here")
    assert done.returncode == 0, done.stderr
    return program


REAL = {
    "asan": (["cc", "-fsanitize=address"], True),
    "static asan": (["cc", "-fsanitize=address", "-static-libasan"], False),
    "musl": (["musl-gcc"], True),
    "static musl": (["musl-gcc", "-static"], False),
    "glibc": (["cc"], False),
}


@pytest.mark.parametrize(("words", "unfit"), REAL.values(), ids=REAL)
def test_a_program_that_takes_no_preloads_starts(
    tmp_path: Path, words: list[str], unfit: bool
) -> None:
    program = built(tmp_path, *words)
    fitted, why = launch.fitted_env({"LD_PRELOAD": launch.preloaded()}, str(program))
    assert bool(why) is unfit
    assert ("LD_PRELOAD" in fitted) is not unfit
    for name in ("execve", "execvp", "posix_spawn", "posix_spawnp", "system"):
        for given in ({}, {**JOB, "LD_PRELOAD": launch.preloaded()}):
            call = CALLS[name].replace("/usr/bin/env", str(program))
            done = subprocess.run(
                [sys.executable, "-c", PROBE, call, json.dumps(given)],
                env={**os.environ, **JOB, "LD_PRELOAD": launch.preloaded()},
                capture_output=True,
                text=True,
                check=False,
                timeout=SECONDS,
            )
            assert (done.returncode, done.stdout, done.stderr) == (0, "runs\n", ""), name


SYSCALLS = """
import ctypes, os
lib = ctypes.CDLL(None, use_errno=True)
lib.syscall.restype = ctypes.c_long
words = lambda *all: lib.syscall(*map(ctypes.c_long, all))
print(words(39) == os.getpid(), words(3, 999), ctypes.get_errno())
at = words(9, 0, 4096, 3, 0x22, -1, 0)
ctypes.memset(at, 7, 4096)
print(at > 0, ctypes.string_at(at, 2), words(11, at, 4096))
print(words(425, 4, ctypes.addressof(ctypes.create_string_buffer(120))), ctypes.get_errno())
"""


def test_syscall_gives_no_io_uring_and_is_else_as_the_c_librarys() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SYSCALLS],
        env=os.environ | {"LD_PRELOAD": str(launch.library_dir() / "libflowgpu_exec.so")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        f"True -1 {errno.EBADF}",
        "True b'\\x07\\x07' 0",
        f"-1 {errno.EPERM}",
    ]

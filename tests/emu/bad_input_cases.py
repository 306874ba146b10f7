"""Every bad input: how it is made, the command that gets it and what that says. One list for the
tests and for docs/reference/bad-input.md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from flowgpu import errors
from flowgpu.errors import FlowError
from flowgpu.jobs import Registry

NOBODY = 65534
OWN = "own.so"
AS_NOBODY = f"""
import os, sys
import click
import flowgpu.cli, flowgpu.client, flowgpu.image.inspect, flowgpu.render, flowgpu.start
click.wrap_text("")  # imports more; the checkout may be where others cannot read, in /root
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
flowgpu.cli.main(sys.argv[1:])
"""
FLOWGPU = [sys.executable, "-m", "flowgpu"]


@dataclass
class World:
    """What a case is made in: `folder` is its own and must be as before when the command ends."""

    folder: Path
    job: str  # a running one
    image: Path  # a copy of a good one, of a GPU job that has been dumped
    runtime: Path
    libraries: Path  # those that the dumped job had mapped
    files: Path  # the folder with what it had open: `log` to append to, `input` to read, and OWN
    command: list[str] = field(default_factory=lambda: list(FLOWGPU))
    env: dict[str, str] = field(default_factory=dict)
    undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def output(self) -> Path:
        return self.folder / "out"


@dataclass(frozen=True)
class Case:
    """`message` is the first line, with DIR for the folder and * for what differs."""

    name: str
    verb: str
    error: type[FlowError] | None  # None: a wrong argument, of which the hint is the usage
    message: str
    make: Callable[[World], object]

    @property
    def code(self) -> int:
        return self.error.exit_code if self.error else 2


def rewrite(image: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as a program would that knows the rule of its digest."""
    fields = json.loads((image / "manifest.json").read_text())
    del fields["format"], fields["manifest_digest"]
    change(fields)
    lines = [f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in fields.items()]
    body = ('{"format": "flowgpu-image",\n' + "".join(lines)).encode()
    last = f'"manifest_digest": "{xxhash.xxh3_128_hexdigest(body)}"}}\n'
    (image / "manifest.json").write_bytes(body + last.encode())


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[World], object]:
    return lambda world: rewrite(world.image, change)


def flip(name: str) -> Callable[[World], object]:
    def make(world: World) -> None:
        path = next(world.image.glob(name))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    return make


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[World], object]:
    """In the place of a file of the image `make` puts something else."""

    def change(world: World) -> None:
        path = next(world.image.glob(name))
        path.unlink()
        make(path)

    return change


def resized(name: str, by: int) -> Callable[[World], object]:
    def make(world: World) -> None:
        path = next(world.image.glob(name))
        os.truncate(path, path.stat().st_size + by)

    return make


def added(name: str, make: Callable[[Path], object]) -> Callable[[World], object]:
    return lambda world: make(world.image / name)


def deep(world: World) -> None:
    """Folders in folders, deeper than Python's stack."""
    here = os.open(world.image, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    # What Python 3.11 itself cannot remove.
    world.undo.append(lambda: subprocess.run(["rm", "-r", world.image / "d"], check=True))


def full(world: World) -> None:
    world.output.mkdir()
    (world.output / "mine").write_text("mine")


def mounted(options: str) -> Callable[[World], object]:
    def make(world: World) -> None:
        world.output.parent.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(world.output.parent)]
        subprocess.run(command, check=True)
        world.undo.append(lambda: subprocess.run(["umount", str(world.output.parent)], check=True))

    return make


def program(text: str) -> Callable[[World], object]:
    """A CRIU of that text."""

    def make(world: World) -> None:
        path = world.folder / "criu"
        path.write_text(text)
        path.chmod(0o755)
        world.env["FLOWGPU_CRIU"] = str(path)

    return make


def variables(**values: str) -> Callable[[World], object]:
    return lambda world: world.env.update(values)


OLD_CRIU = "#!/bin/sh\necho Version: 3.17\n"


def unprivileged(world: World) -> None:
    drop = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
    world.command = [*drop, *FLOWGPU]


def unprivileged_job(world: World) -> None:
    unprivileged(world)
    weak_job(world)


def job_with_an_old_criu(world: World) -> None:
    program(OLD_CRIU)(world)
    weak_job(world)


def weak_job(world: World) -> None:
    """Whose coordinator cannot do what it has to."""
    sleep = ["run", "--gpu", "emulated", "--name", "weak", "--", "sleep", "1000"]
    job = subprocess.Popen(
        [*world.command, *sleep], stderr=subprocess.DEVNULL, env={**os.environ, **world.env}
    )

    def end() -> None:
        subprocess.run([*FLOWGPU, "kill", "weak"], capture_output=True, check=True)
        job.wait()

    world.undo.append(end)
    while not any(
        one.state == "running" for one in Registry(world.runtime).all() if one.name == "weak"
    ):
        time.sleep(0.01)


def other_user(world: World) -> None:
    world.command = [sys.executable, "-c", AS_NOBODY]


def opened(world: World) -> None:
    """Another user, with every folder on the way open to all: only the socket's peer tells."""
    other_user(world)
    (found,) = (
        path.parent
        for path in world.runtime.glob("jobs/*/job.json")
        if json.loads(path.read_text())["name"] == world.job
    )
    opens: list[tuple[Path, int]] = [(world.runtime, 0o755), (found.parent, 0o755), (found, 0o755)]
    opens += [(found / "job.json", 0o644), (found / "control.sock", 0o666)]
    for path, mode in opens:
        before = path.stat().st_mode & 0o777
        path.chmod(mode)
        world.undo.append(lambda path=path, before=before: path.chmod(before))


def library(change: Callable[[Path], object]) -> Callable[[World], object]:
    """The library that the job had mapped is another one by now."""

    def make(world: World) -> None:
        path = world.libraries / "intercept" / "libcuda.so.1"
        kept = path.with_name("kept")
        path.rename(kept)
        world.undo.append(lambda: kept.rename(path))
        shutil.copy(kept, path)
        change(path)

    return make


def job_file(name: str, change: Callable[[Path], object]) -> Callable[[World], object]:
    """A file that the job had open is not as it was."""

    def make(world: World) -> None:
        path = world.files / name
        kept = path.with_name("kept")
        shutil.copy(path, kept)
        world.undo.append(lambda: kept.rename(path))
        change(path)

    return make


def build_own(path: Path, answer: int) -> None:
    """A library of the job's own, with a build id that goes by what is in it."""
    words = ["cc", "-shared", "-fPIC", "-Wl,--build-id=sha1", "-x", "c", "-", "-o", str(path)]
    code = f"int answer(void) {{ return {answer}; }}"
    subprocess.run(words, input=code, text=True, check=True)


def another_build(path: Path) -> None:
    before = path.stat()
    build_own(path, 2)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def longer(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def moved(name: str) -> Callable[[World], object]:
    """FlowGPU is in a folder of that name."""

    def make(world: World) -> None:
        (world.folder / name).symlink_to(world.libraries.parent)
        world.env["FLOWGPU_LIB"] = str(world.folder / name / "lib")

    return make


def nothing(world: World) -> None:
    """The verb's arguments are what is bad."""


DUMP = "pause-and-dump JOB --output DIR/out"
RESTORE = "restore DIR/image --detach"
VERIFY = "verify DIR/image"
INSPECT = "inspect DIR/image"
DAMAGED = "Error: The image DIR/image is damaged: "
VERSION = "Error: The image DIR/image has format version "
READS = "; this FlowGPU reads 1 and 2 and 3 and 4."
NO_IMAGE = "Error: No image can be written to DIR/"


def on_output() -> Iterable[Case]:
    kept = "Error: DIR/out exists and is not an empty folder."
    not_empty, unusable = errors.OutputNotEmpty, errors.OutputUnusable
    yield Case("output has files", DUMP, not_empty, kept, full)
    yield Case("output is a file", DUMP, not_empty, kept, lambda w: w.output.write_text("mine"))
    yield Case(
        "output is a link to a folder with files",
        DUMP,
        not_empty,
        "Error: DIR exists and is not an empty folder.",
        lambda w: w.output.symlink_to(w.folder),
    )
    yield Case("output is a FIFO", DUMP, not_empty, kept, lambda w: os.mkfifo(w.output))
    yield Case(
        "output is below a file",
        "pause-and-dump JOB --output DIR/file/out",
        unusable,
        f"{NO_IMAGE}file/out: Not a directory.",
        lambda w: (w.folder / "file").write_text("mine"),
    )
    yield Case(
        "output cannot be made",
        "pause-and-dump JOB --output /proc/none/out",
        unusable,
        "Error: No image can be written to /proc/none/out: No such file or directory.",
        nothing,
    )
    long = "long" * 62
    yield Case(
        "output has too long a name",
        f"pause-and-dump JOB --output DIR/{long}",
        unusable,
        "Error: No image can be written to DIR/*long: File name too long.",
        nothing,
    )
    yield Case(
        "output on a read-only file system",
        "pause-and-dump JOB --output DIR/out",
        unusable,
        f"{NO_IMAGE}out: Read-only file system.",
        mounted("ro"),
    )
    yield Case(
        "too little disk",
        DUMP,
        errors.NotEnoughDisk,
        "Error: DIR/out.partial-* has * free, and the image of job 'JOB' needs up to * MiB.",
        mounted("size=1m"),
    )


def on_names() -> Iterable[Case]:
    unknown = "Error: No job named 'none' runs here."
    for verb in ("pause-and-dump none --output DIR/out", "kill none", "logs none"):
        yield Case("unknown job", verb, errors.UnknownJob, unknown, nothing)
    yield Case(
        "name of a job with odd letters",
        "kill JOB\x1b[31m",
        errors.UnknownJob,
        "Error: No job named 'JOB\\x1b[31m' runs here.",
        nothing,
    )
    for what, name in (
        ("a path", "a/b"),
        ("two lines", "a\nb"),
        ("bytes that are no text", "\udcff"),
    ):
        yield Case(
            f"{what} for a job's name",
            f"run --gpu emulated --name {name} true",
            None,
            "Usage: flowgpu run [OPTIONS] COMMAND...",
            nothing,
        )
    yield Case(
        "no folder of that name",
        "restore DIR/absent",
        None,
        "Usage: flowgpu restore [OPTIONS] DIR",
        nothing,
    )
    yield Case(
        "a file as an image",
        "verify DIR/image/manifest.json",
        None,
        "Usage: flowgpu verify [OPTIONS] DIR",
        nothing,
    )
    yield Case(
        "a folder that is no image",
        "restore DIR/empty",
        errors.ImageDamaged,
        "Error: The image DIR/empty is damaged: manifest.json: missing, so this is no image, or no "
        "whole one.",
        lambda w: (w.folder / "empty").mkdir(),
    )


def on_files() -> Iterable[Case]:
    def damaged(name: str, verb: str, reason: str, make: Callable[[World], object]) -> Case:
        return Case(name, verb, errors.ImageDamaged, f"{DAMAGED}{reason}.", make)

    pages = "criu/pages-*.img"
    no_digest = "does not have its digest"
    yield damaged("a byte of CPU memory", RESTORE, f"{pages} {no_digest}", flip(pages))
    yield damaged(
        "a byte of GPU data",
        RESTORE,
        "*chunk 0 of DIR/image/gpu0.data is damaged",
        flip("gpu0.data"),
    )
    yield damaged(
        "a byte of GPU data", VERIFY, f"chunk 0 of gpu0.data {no_digest}", flip("gpu0.data")
    )
    yield damaged("a byte of a table", RESTORE, f"gpu0.chunks {no_digest}", flip("gpu0.chunks"))
    yield damaged("a byte of CRIU's", RESTORE, f"criu/core-*.img {no_digest}", flip("criu/core-*"))
    yield damaged(
        "a byte of the digests", RESTORE, f"gpu0.digests {no_digest}", flip("gpu0.digests")
    )
    yield damaged(
        "a byte of the manifest",
        RESTORE,
        "manifest.json: it does not have its digest",
        flip("manifest.json"),
    )
    yield damaged("a file is missing", RESTORE, "* is missing", replaced(pages, lambda path: 0))
    yield damaged("a file is cut", RESTORE, f"{pages} has * bytes, not *", resized(pages, -1))
    yield damaged(
        "a file has grown", RESTORE, "gpu0.data has * bytes, not *", resized("gpu0.data", 1)
    )
    for name, make in (
        ("link", lambda path: path.symlink_to("/etc/passwd")),
        ("FIFO", os.mkfifo),
        ("device", lambda path: os.mknod(path, 0o20600, os.makedev(1, 5))),
    ):
        yield damaged(
            f"a {name} for a file",
            RESTORE,
            "output.log is not a regular file",
            replaced("output.log", make),
        )
        yield damaged(
            f"a {name} for the manifest",
            INSPECT,
            "manifest.json: *",
            replaced("manifest.json", make),
        )
    yield damaged(
        "a folder for the manifest",
        INSPECT,
        "manifest.json: not a regular file",
        replaced("manifest.json", os.mkdir),
    )
    yield damaged(
        "a manifest of a terabyte",
        INSPECT,
        "manifest.json: it has more than 67108864 bytes",
        lambda w: os.truncate(w.image / "manifest.json", 1 << 40),
    )
    yield damaged("a file too many", VERIFY, "extra is not part of it", added("extra", Path.touch))
    yield damaged(
        "a name with escapes",
        VERIFY,
        r"ab\x1b[2J\udcff is not part of it",
        added("ab\x1b[2J\udcff", Path.touch),
    )
    yield damaged(
        "a folder too many",
        VERIFY,
        "the folder extra is not part of it",
        added("extra", Path.mkdir),
    )
    yield damaged("folders 1500 deep", VERIFY, "the folder d is not part of it", deep)


def on_manifest() -> Iterable[Case]:
    def damaged(name: str, reason: str, change: Callable[[dict[str, Any]], object]) -> Case:
        message = f"{DAMAGED}manifest.json: {reason}."
        return Case(name, RESTORE, errors.ImageDamaged, message, manifest(change))

    later = errors.ImageVersion
    yield Case(
        "another version",
        RESTORE,
        later,
        f"{VERSION}9{READS}",
        manifest(lambda m: m.update(version=9)),
    )
    yield Case(
        "a field of a later version",
        RESTORE,
        later,
        f"{VERSION}2 with an unknown field manifest.new{READS}",
        manifest(lambda m: m.update(new=1)),
    )
    yield damaged("a field is missing", "manifest.criu is missing", lambda m: m.pop("criu"))
    yield damaged("a wrong type", "manifest.root_pid is not int", lambda m: m.update(root_pid="1"))
    yield damaged(
        "a number of 400 digits",
        "manifest.pause_seconds is not float",
        lambda m: m.update(pause_seconds=10**400),
    )
    yield damaged(
        "a path out of the image",
        "it has path '../../etc/passwd', which does not fit",
        lambda m: m["files"][0].update(path="../../etc/passwd"),
    )
    yield damaged(
        "another engine",
        "it has engine 'other', which does not fit",
        lambda m: m.update(engine="other"),
    )
    yield damaged(
        "a process that is not the job's",
        "it has a task that is no process of the job, which does not fit",
        lambda m: m["tasks"][0].update(pid=1),
    )
    yield damaged(
        "a stream is missing",
        "it has pipes ['stderr'], which does not fit",
        lambda m: m["pipes"].pop("stdout"),
    )
    yield Case(
        "an id that is a path",
        RESTORE,
        errors.ImageDamaged,
        f"{DAMAGED}it has no usable job id and name.",
        manifest(lambda m: m["job"].update(id="../../etc")),
    )


def on_machine() -> Iterable[Case]:
    missing = errors.MissingCapability
    yield Case(
        "no capabilities",
        RESTORE,
        missing,
        "Error: CRIU's restore needs the capability CAP_SYS_ADMIN, which this process does not "
        "have.",
        unprivileged,
    )
    yield Case(
        "a job without capabilities",
        "pause-and-dump weak --output DIR/out",
        missing,
        "Error: CRIU's dump needs the capability CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE, which "
        "this process does not have.",
        unprivileged_job,
    )
    no_criu = "Error: No CRIU that works here: DIR/criu"
    yield Case(
        "an old CRIU",
        RESTORE,
        errors.CriuMissing,
        f"{no_criu} is version 3.17, version 4.2 or newer is needed.",
        program(OLD_CRIU),
    )
    yield Case(
        "a job with an old CRIU",
        "pause-and-dump weak --output DIR/out",
        errors.CriuMissing,
        f"{no_criu} is version 3.17, version 4.2 or newer is needed.",
        job_with_an_old_criu,
    )
    yield Case(
        "a CRIU that fails",
        RESTORE,
        errors.CriuMissing,
        f"{no_criu} *.",
        program("#!/bin/sh\nexit 1\n"),
    )
    yield Case(
        "a CRIU that is no program", RESTORE, errors.CriuMissing, f"{no_criu} *.", program("junk")
    )
    yield Case(
        "another GPU model",
        RESTORE,
        errors.GpuMismatch,
        "Error: The image was taken on Another GPU, and this machine has *.",
        manifest(lambda m: m["gpus"][0].update(name="Another GPU", uuid="GPU-0")),
    )
    yield Case(
        "another driver version",
        RESTORE,
        errors.DriverMismatch,
        "Error: The image was taken with CUDA driver version 12080, and this machine has *.",
        manifest(lambda m: m["gpus"][0].update(driver="12080")),
    )
    yield Case(
        "another processor",
        RESTORE,
        errors.ProcessorMismatch,
        "Error: This machine's processor lacks what programs of the image may use: amx_fp128, "
        "avx4096.",
        manifest(lambda m: m["cpu_features"].extend(["amx_fp128", "avx4096"])),
    )
    for name, change in (
        ("a library with another byte", last_byte),
        ("a longer library", longer),
        ("a missing library", Path.unlink),
    ):
        yield Case(
            name,
            RESTORE,
            errors.FileMissing,
            "Error: */intercept/libcuda.so.1, which the job had open or mapped, is missing or "
            "another file.",
            library(change),
        )
    for name, folder in (("a space", "li b"), ("a colon", "li:b"), ("a dollar", "$LIB")):
        yield Case(
            f"FlowGPU in a folder with {name}",
            "run --gpu emulated true",
            errors.LibrariesUnusable,
            f"Error: The native libraries in DIR/{folder}/lib cannot be loaded into a job: "
            "LD_PRELOAD takes no path with a space, `:` or `$`.",
            moved(folder),
        )
    yield Case(
        "another build of a library of the job's, of equal size and time",
        RESTORE,
        errors.FileMissing,
        f"Error: */{OWN}, which the job had open or mapped, is missing or another file.",
        job_file(OWN, another_build),
    )
    for name, file, change, found in (
        (
            "a library of the job's has grown",
            OWN,
            longer,
            f"{OWN} has * bytes and had *, and the job only read it",
        ),
        ("a log has grown", "log", longer, "log has 6 bytes and had 5"),
        ("a log is shorter", "log", lambda path: os.truncate(path, 1), "log has 1 bytes and had 5"),
        ("a log is missing", "log", Path.unlink, "log is missing"),
        (
            "a file that was only read has grown",
            "input",
            longer,
            "input has 5 bytes and had 4, and the job only read it",
        ),
    ):
        yield Case(
            f"{name} since the dump",
            f"{RESTORE} --files refuse" if name == "a log has grown" else RESTORE,
            errors.FilesChanged,
            f"Error: Files of job 'badgpu' are not as they were at its dump: */{found}.",
            job_file(file, change),
        )


def on_users() -> Iterable[Case]:
    unsafe = "Error: The runtime folder * cannot be used: Permission denied."
    for verb in ("ps --all", DUMP, "kill JOB", "logs JOB"):
        yield Case("another user", verb, errors.RuntimeDirUnsafe, unsafe, other_user)
    for verb in (DUMP, "kill JOB"):
        theirs = f"Error: Job 'JOB' is not user {NOBODY}'s, who may ask nothing of it."
        yield Case("another user, folders open", verb, errors.OtherUser, theirs, opened)
    yield Case("another user, folders open", "logs JOB", errors.RuntimeDirUnsafe, unsafe, opened)
    yield Case(
        "another user's image", RESTORE, None, "Usage: flowgpu restore [OPTIONS] DIR", other_user
    )
    yield Case(
        "a runtime folder that others may write to",
        "run --gpu emulated true",
        errors.RuntimeDirUnsafe,
        "Error: The runtime folder /tmp cannot be used: other users may write to it.",
        variables(FLOWGPU_RUNTIME_DIR="/tmp"),
    )


CASES: list[tuple[str, list[Case]]] = [
    ("Output of a checkpoint", list(on_output())),
    ("Names", list(on_names())),
    ("Files of an image", list(on_files())),
    ("Its manifest, with the right digest", list(on_manifest())),
    ("The machine", list(on_machine())),
    ("Users", list(on_users())),
]

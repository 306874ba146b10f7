"""Whatever is wrong is said in one line with its exit code, and nothing else happens."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from flowgpu import launch
from flowgpu.host import criu_view
from flowgpu.jobs import Registry
from tests.emu.bad_input_cases import CASES, FLOWGPU, OWN, Case, World, build_own
from tests.emu.test_cli_end_to_end import counting, flowgpu, read_lines, runtime_dir, started, until
from tests.patience import SECONDS

GPU_JOB = "badgpu"
CPU_JOB = "badcpu"
FLAT = [(title, case) for title, cases in CASES for case in cases]
__all__ = ["runtime_dir"]


@pytest.fixture(scope="module")
def image(runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of a job that used the GPU, with libraries and files of its own beside it."""
    folder = tmp_path_factory.mktemp("good")
    libraries = folder / "lib"
    built = launch.library_dir()
    unused = shutil.ignore_patterns("*test*")
    for name in ("lib", "bin"):  # programs are found beside the libraries
        shutil.copytree(built.with_name(name), folder / name, symlinks=True, ignore=unused)
    (folder / "log").write_text("some\n")
    (folder / "input").write_text("read")
    build_own(folder / OWN, 1)
    opens = 'exec 3>>"$0/log" 4<"$0/input"; exec "$@"'
    task = ["bash", "-c", opens, str(folder)]
    task += [sys.executable, "-m", "tests.emu.checkpoint_task", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWGPU_LIB", str(libraries))
        patch.setenv("LD_PRELOAD", str(folder / OWN))
        words = ("run", "--gpu", "emulated", "--engine", "native", "--name", GPU_JOB, "--", *task)
        with started(*words) as process:
            until((folder / "ready").exists)
            done = flowgpu("pause-and-dump", GPU_JOB, "--output", folder / "image")
            assert done.returncode == 0, done.stderr
            process.wait(SECONDS)
    return folder / "image"


@pytest.fixture(scope="module")
def running(runtime_dir: Path) -> Iterator[subprocess.Popen[str]]:
    with counting(CPU_JOB) as process:
        read_lines(process, 1)
        yield process
        flowgpu("kill", CPU_JOB)


def tree(folder: Path) -> dict[str, str]:
    """What is in a folder: types, modes and digests."""
    found = {}
    for at, folders, names in os.walk(folder):
        if at.count("/d/d/d"):
            folders.clear()
        for name in folders + names:
            path = Path(at) / name
            status = path.lstat()
            whole = path.is_file() and not path.is_symlink() and status.st_size < 1 << 30
            digest = xxhash.xxh3_64_hexdigest(path.read_bytes()) if whole else ""
            found[os.fspath(path)] = f"{status.st_mode:o} {digest}"
    return found


@pytest.mark.parametrize(
    "case", [case for _, case in FLAT], ids=[f"{title}: {case.name}" for title, case in FLAT]
)
def test_bad_input_is_named_and_changes_nothing(
    case: Case,
    image: Path,
    running: subprocess.Popen[str],
    runtime_dir: Path,
    tmp_path: Path,
) -> None:
    files = image.parent
    world = World(tmp_path, CPU_JOB, tmp_path / "image", runtime_dir, files / "lib", files)
    shutil.copytree(image, world.image)
    words = case.verb.replace("DIR", str(tmp_path)).replace("JOB", CPU_JOB).split(" ")
    try:
        case.make(world)
        before = tree(tmp_path)
        done = subprocess.run(
            [*world.command, *words],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env={**os.environ, "LC_ALL": "C", **world.env},
        )
        assert tree(tmp_path) == before
    finally:
        for undo in reversed(world.undo):
            undo()
        shutil.rmtree(tmp_path, ignore_errors=True)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("flowgpu: ")]
    assert done.returncode == case.code, done.stderr
    assert done.stdout == ""
    expected = case.message.replace("DIR", str(tmp_path)).replace("JOB", CPU_JOB)
    if case.error is None:
        assert expected.startswith("Usage: ") and lines[0].startswith("Usage: ")
    else:
        assert re.fullmatch(re.escape(expected).replace(r"\*", ".*"), lines[0]), lines[0]
        assert lines[1:] == [f"hint: {case.error.hint}"]
    read_lines(running, 2)
    assert Registry(runtime_dir).find(GPU_JOB).state == "dumped"


@pytest.mark.parametrize("umask", [0, 0o777], ids=["open", "closed"])
def test_files_are_private_whatever_the_umask_which_the_job_keeps(
    umask: int, runtime_dir: Path, tmp_path: Path
) -> None:
    code = """if True:
        import os, sys, time
        print(mask := os.umask(0), flush=True)
        log = open(sys.argv[1], "a")
        os.umask(mask)
        for _ in range(10000):
            log.write("line\\n")
            log.flush()
            time.sleep(0.01)
    """
    command = [*FLOWGPU, "run", "--gpu", "emulated", "--name", f"mask{umask}", "--"]
    image, series = tmp_path / "out", tmp_path / "store"

    def masked(*words: str | Path) -> str:
        done = flowgpu(*words, umask=umask)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    with subprocess.Popen(
        [*command, sys.executable, "-c", code, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        umask=umask,
    ) as process:
        assert read_lines(process, 1) == [str(umask)]
        once = ("--every", "60", "--count", "1")
        masked("checkpoint", f"mask{umask}", "--store", series, *once)
        masked("pause-and-dump", f"mask{umask}", "--output", image)
    assert f"mask{umask} " in masked("ps", "--all")
    masked("inspect", image)
    masked("store", "verify", series)
    with (tmp_path / "log").open("a") as log:
        log.write("more")
    assert "cut  " in masked("restore", image, "--detach")
    record = Registry(runtime_dir).find(f"mask{umask}")
    assert f"Umask:\t{umask:04o}\n" in Path(f"/proc/{record.root_pid}/status").read_text()
    assert masked("logs", f"mask{umask}") == f"{umask}\n"
    masked("kill", f"mask{umask}")
    (parts,) = tmp_path.glob("out.cut-*")
    for folder in (image, series, parts, runtime_dir / "jobs" / record.id):
        for at, _, names in os.walk(folder):
            assert Path(at).stat().st_mode & 0o777 == 0o700, at
            for name in names:
                mode = (Path(at) / name).stat().st_mode & 0o777
                assert mode in (0o600, 0o700), (name, oct(mode))
    assert masked("verify", image)


def test_damaged_image_files_of_criu_are_read_or_left_to_criu(
    image: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading them may begin before they are verified."""
    drawn = random.Random(1)
    files = sorted((image / "criu").glob("*.img"))
    parsed = [path for path in files if path.name.startswith(("pagemap-", "mm-", "core-", "pst"))]
    images = tmp_path / "images"
    images.mkdir()
    for path in files:
        (images / path.name).symlink_to(path)
    left = 0
    for number in range(80):
        victim = drawn.choice(parsed)
        data = bytearray(victim.read_bytes())
        at = drawn.randrange(min(len(data), drawn.choice([40, len(data)])))
        data[at : at + drawn.randrange(3)] = drawn.choice([b"", b"\0", b"\xff" * 11, data[:at]])
        (images / victim.name).unlink()
        (images / victim.name).write_bytes(data)
        view = criu_view.make(images, tmp_path / f"view{number}")
        if view is not None:
            view.remove()
        left += view is None
        assert not (tmp_path / f"view{number}").exists()
        (images / victim.name).unlink()
        (images / victim.name).symlink_to(victim)
    assert 0 < left < 80
    assert len(caplog.messages) == left
    assert not [text for text in caplog.messages if "was ended" in text], caplog.messages

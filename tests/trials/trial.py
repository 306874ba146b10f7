"""One program undisturbed, then dumped and restored twice, or left running and its copies restored.

    python -m tests.trials.trial MODULE NAME FOLDER LANE "ENGINE MODE"...

Prints an object of JSON for each: the outcome, and in words what was found. Outcomes are:

same                 every line is that of the undisturbed run
refused: CLASS       by the dump before the pause, and the job went on with the right lines
second dump ...      the same of the second dump of a job that is left running
refused then: CLASS  by the restore; with its files as they were at the dump the lines are right
told                 a line of a copy is another, and the report of the dump said what is not kept
different            some line is another
lost                 the job ended, or did not go on, after a dump
image useless        the image does not restore
hang                 a command or the job did not end
litter               files were left that an undisturbed run does not leave

It runs in a mount namespace of its own with an empty /dev/shm, so what is there is the program's.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from difflib import unified_diff
from importlib import import_module
from pathlib import Path

from flowgpu import start
from flowgpu.errors import DUMPED_EXIT, all_errors
from flowgpu.host.criu import memory_folder
from tests.gpu.site import ROOT, Call, Site, Trouble
from tests.patience import SECONDS
from tests.trials.prelude import LEFT, PROGRAMS, SAME, TOLD, Here, Program, words

KILL_SECONDS = 10.0
SHM = Path("/dev/shm")
CLASSES = {cls.exit_code: cls.__name__ for cls in reversed(all_errors())}
NEW_NAMESPACE, PRIVATE, RECURSIVE = 0x20000, 1 << 18, 1 << 14
PASSED = ("flowgpu: ", "Error: ", "cut ", "what was cut")


class Found(Exception):
    """An outcome other than `same`, and its details."""

    def __init__(self, outcome: str, details: str = "") -> None:
        super().__init__(outcome)
        self.outcome, self.details = outcome, details


def alone() -> None:
    """A mount namespace of this process, with an empty /dev/shm. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def do(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    do(libc.unshare(NEW_NAMESPACE))
    do(libc.mount(None, b"/", None, PRIVATE | RECURSIVE, None))
    do(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777"))


def spoken(text: str) -> list[str]:
    """Lines of a program, without those of FlowGPU."""
    return [line for line in text.splitlines() if not line.startswith(PASSED)]


def reason(failed: Call) -> str:
    """What a command says of its failure."""
    errors = [line for line in failed.stderr.splitlines() if line.startswith("Error: ")]
    return errors[0].removeprefix("Error: ") if errors else failed.stderr.strip()[-500:]


class Run:
    """A run of a program: as a job of the site for that engine, or without FlowGPU."""

    def __init__(self, site: Site, program: Program, place: Path, engine: str = "") -> None:
        place.mkdir()
        self.site, self.program, self.name = site, program, place.name
        self.here = Here(place / "go", place.parent / f"{place.name}.files")
        self.here.folder.mkdir()
        self.out, self.err = place / "out", place / "err"
        self._listen()
        command = words(program.module, program.body.__name__, self.here.go, self.here.folder)
        options = ["--gpu", site.kind, "--engine", engine, "--name", self.name]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            if engine:
                job = ("run", *options, "--", *command)
                self.process = site.start(*job, stdout=out, stderr=err)
            else:
                self.process = site.start_plain(command, out, err)

    def _listen(self) -> None:
        """Be the machine's log daemon."""
        self._daemon = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._daemon.bind(str(self.here.log))

    def lines(self) -> list[str]:
        return spoken(self.out.read_text()) + spoken(self.err.read_text(errors="replace"))

    def wait_ready(self) -> None:
        deadline = time.monotonic() + SECONDS
        while "ready" not in self.lines():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Found("not ready", "\n".join(self.lines()[-20:]))
            time.sleep(0.005)

    def wait_end(self) -> int:
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            said = "\n".join(self.lines())
            raise Found("hang: the job", f"{said}\n{self.log()[-1000:]}") from None

    def call(self, *command: str) -> Call:
        try:
            return self.site.call(*command, seconds=SECONDS)
        except Trouble as trouble:
            raise Found(f"hang: {command[0]}", f"{trouble}\n{self.log()[-1000:]}") from None

    def kill(self) -> None:
        """End all of it, also when its coordinator does not answer."""
        for job in self.site.registry.all():
            if job.name == self.name and job.live:
                with suppress(Trouble):
                    self.site.call("kill", self.name, seconds=KILL_SECONDS)
                start.kill_coordinator(self.site.registry.dir(job.id))
                start.kill_lost(self.site.registry.dir(job.id), signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self._daemon.close()
        self.here.log.unlink()

    def log(self) -> str:
        """What the coordinator has said."""
        job = next((job for job in self.site.registry.all() if job.name == self.name), None)
        path = job and self.site.registry.dir(job.id).coordinator_log
        return path.read_text(errors="replace") if path and path.exists() else ""


class Trial:
    """A program and its lines without a dump."""

    def __init__(self, program: Program, site: Site, base: Path) -> None:
        self.program, self._site, self._base = program, site, base
        run = Run(site, program, base / "undisturbed")
        run.here.go.touch()
        try:
            self._code = run.wait_end()
            self._lines = run.lines()
        finally:
            run.kill()
        if "ready" not in self._lines or self._code != 0:
            raise Found("not undisturbed", "\n".join([f"code {self._code}", *self._lines]))
        self._left = self._litter(run)
        self._told: list[str] = []  # what the last dump has said that it does not keep
        _empty(SHM)

    def __call__(self, engine: str, mode: str) -> dict[str, str]:
        """What became of it."""
        place = self._base / f"{self.program.name}-{engine}-{mode.split()[0]}"
        run = Run(self._site, self.program, place, engine)
        began, outcome, details = time.monotonic(), SAME, ""
        try:
            run.wait_ready()
            (self._leave if mode == LEFT else self._restore)(run, place, engine)
        except Found as found:
            outcome, details = found.outcome, found.details
        finally:
            run.kill()
            _empty(SHM)
            shutil.rmtree(place, ignore_errors=True)
        seconds = f"{time.monotonic() - began:.1f}"
        return {"outcome": outcome, "details": details, "seconds": seconds}

    def _restore(self, run: Run, place: Path, engine: str) -> None:
        kept = self._dump(run, place / "image", engine)
        code = run.wait_end()
        if code != DUMPED_EXIT:
            raise Found("lost", f"the dumped job ended with {code}")
        run.here.go.touch()
        before = run.lines()
        for number in (1, 2):
            self._bring_back(run, place / "image", before, f"restore {number}", kept)
            self._clear(run, f"restore {number}")

    def _leave(self, run: Run, place: Path, engine: str) -> None:
        images = [place / f"image-{number}" for number in (1, 2)]
        kept = [self._dump(run, image, engine, "--leave-running") for image in images]
        before = run.lines()
        run.here.go.touch()
        self._same(run.wait_end(), run.lines(), "the job left running", "lost")
        self._clear(run, "the job left running")
        for number, image in enumerate(images, 1):
            self._bring_back(run, image, before, f"copy {number}", kept[number - 1])
            self._clear(run, f"copy {number}")

    def _dump(self, run: Run, image: Path, engine: str, *options: str) -> Path:
        """Make an image; gives a copy of the program's folder of then."""
        second = image.name.endswith("2")
        paused = run.log().count("checkpoint: gate ")
        command = ("pause-and-dump", run.name, "--output", str(image), "--engine", engine, "--json")
        done = run.call(*command, *options, *self.program.options)
        if done.code != 0:
            name = CLASSES.get(done.code, f"code {done.code}")
            run.here.go.touch()
            self._same(run.wait_end(), run.lines(), f"the job after {name}", "lost")
            late = run.log().count("checkpoint: gate ") > paused
            how = "failed in the pause" if late else "refused"
            raise Found(f"{'second dump ' * second}{how}: {name}", reason(done))
        self._told = json.loads(done.stdout).get("not_kept", [])
        kept = image.with_name(f"{image.name}.files")
        shutil.copytree(run.here.folder, kept, symlinks=True, ignore=_only_files)
        return kept

    def _bring_back(self, run: Run, image: Path, before: list[str], what: str, kept: Path) -> None:
        done = run.call("restore", str(image))
        name = CLASSES.get(done.code)
        if done.code != self._code and name and "Error: " in done.stderr:
            _put_back(kept, run.here.folder)
            again = run.call("restore", str(image))
            failed = again.code == done.code and "Error: " in again.stderr
            # At the first one nothing has changed.
            if failed or what == "restore 1":
                raise Found("image useless", f"{what}, {name}: {reason(again)}")
            self._compare(again, before, f"{what} with its files put back, after {name}")
            raise Found(f"refused then: {name}", reason(done))
        self._compare(done, before, what)

    def _compare(self, done: Call, before: list[str], what: str) -> None:
        self._same(done.code, before + spoken(done.stdout) + spoken(done.stderr), what)

    def _same(self, code: int, lines: list[str], what: str, otherwise: str = "different") -> None:
        if lines == self._lines and code == self._code:
            return
        if self._told and what.startswith(("restore", "copy")) and code == self._code:
            raise Found(TOLD, "; ".join(self._told))
        there = unified_diff(self._lines, lines, "undisturbed", what, lineterm="", n=0)
        text = "\n".join(line for line in [*there][2:] if "  File " not in line)[-1500:]
        worse = otherwise if "ready" not in lines or code != self._code else "different"
        raise Found(worse, f"{what} ended with {code}\n{text}")

    def _clear(self, run: Run, what: str) -> None:
        """Empty /dev/shm, where nothing is left that an undisturbed run does not leave."""
        litter = self._litter(run) - self._left
        _empty(SHM)
        if litter:
            raise Found("litter", f"{what} left {' '.join(sorted(litter))}")

    def _litter(self, run: Run) -> set[str]:
        """Files in memory, and in the program's folder those of CRIU's."""
        found = {str(path) for path in SHM.iterdir() if path != memory_folder()}
        return found | {path.name for path in run.here.folder.rglob("*link_remap*")}


def _only_files(folder: str, names: list[str]) -> list[str]:
    paths = {name: Path(folder, name) for name in names}
    return [n for n, p in paths.items() if not (p.is_file() or p.is_dir() or p.is_symlink())]


def _put_back(kept: Path, folder: Path) -> None:
    """Files of a folder as they were, each in its old inode where it has one still: SQLite takes
    no other. What is no file stays."""
    for path in folder.rglob("*"):
        if (path.is_symlink() or path.is_file()) and not os.path.lexists(
            kept / path.relative_to(folder)
        ):
            path.unlink()
    for old in kept.rglob("*"):
        path = folder / old.relative_to(kept)
        if old.is_dir() and not old.is_symlink():
            path.mkdir(exist_ok=True)
        elif old.is_file() and not old.is_symlink():
            path.write_bytes(old.read_bytes())
            shutil.copystat(old, path)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path == memory_folder():  # of CRIU's, for all jobs
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def main() -> None:
    module, name, base, lane, *cases = sys.argv[1:]
    import_module(f"tests.trials.programs.{module}")
    alone()
    os.chdir(ROOT)
    images = Path(base)
    with Site("nvidia" if lane == "nvidia" else "emulated", images=images) as site:
        site.end_when_terminated()
        try:
            trial = Trial(PROGRAMS[name], site, images)
        except Found as found:
            answer = {"outcome": found.outcome, "details": found.details}
            print(json.dumps(dict.fromkeys(cases, answer)), flush=True)
            return
        for case in cases:
            engine, _, mode = case.partition(" ")
            print(json.dumps({case: trial(engine, mode)}), flush=True)


if __name__ == "__main__":
    main()

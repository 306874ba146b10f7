"""Dump and restore process trees with CRIU's command line.

    criu = Criu.locate()
    criu.dump(pid, images)                  # tasks are left stopped: kill them, or resume_tree(pid)
    pid = criu.restore(images, inherit_fds={pipe.key: fd})     # a child of this process

What was found out with CRIU 4.2.1 and is relied on here:

* `restore -d --restore-sibling` makes the restored root a child of the process that started CRIU
  (the launcher replaces itself, so there is none between), and it can be waited for.
* A dump that is killed leaves no task frozen: the kernel ends the tracing, and the code that CRIU
  had put into the tasks returns to where they were when its socket closes. But a task in which CRIU
  is just putting this code there or taking it away dies of SIGTRAP. So the tasks are stopped first,
  and are put back as they were (standstill.py). Still, a dump that is to end is first made to fail:
  a write to a file fails by a limit, and CRIU gives the tasks back itself.
* A restore waits for ever for a task that is killed after its parent has its own SIGCHLD handler
  again: in the last stage nobody else looks. So we do.
* `--inherit-fd fd[N]:pipe:[INODE]` connects an outside pipe again; the inode is the one at dump.
"""

from __future__ import annotations

import logging
import math
import os
import re
import resource
import select
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgpu import launch
from flowgpu.errors import CriuFailed, CriuMissing, CriuTimeout, FlowError, PidTaken
from flowgpu.host import criu_images, criu_log, criu_sockets
from flowgpu.host.criu_view import View
from flowgpu.host.pages import MEMORY_LIBRARY, PageServer
from flowgpu.host.proctree import (
    arguments,
    end_before_others,
    ids_in_use,
    outside_session,
    task_states,
    tree_pids,
)
from flowgpu.host.settings import Survey
from flowgpu.host.standstill import Standstill
from flowgpu.image.space import is_memory

logger = logging.getLogger(__name__)

MINIMUM_VERSION = (4, 2)
# native/criu_plugin knows how this version calls a plugin.
PLUGIN_VERSION = (4, 2)
FETCHED = Path(__file__).resolve().parents[2] / ".tools" / "criu" / "criu"
CHECK_SECONDS = 30.0
OWN_MEMORY, OWN_FILE = Path("/run"), "criu.kdat"
SHARED_MEMORY = Path("/dev/shm")

# Files of containers and training jobs: locks, deleted files still in use (shared memory of
# DataLoader workers), control groups that a batch system owns, not the job; datagram sockets that
# send to a daemon (syslog); TCP connections.
_COMMON_OPTIONS = (
    "--no-default-config",
    "--file-locks",
    "--link-remap",
    "--skip-in-flight",
    "--ext-unix-sk",
    "--tcp-established",
    "--manage-cgroups=ignore",
)
_LOG_LEVELS = {"dump": 4, "restore": 2}
"""Lines before an error of a dump say which process it is about. A restore says that in the line
itself, and would write a line for each page that forked processes have in common."""
_GHOST_LIMIT_BYTES = 64 << 30


# A program behind it waits for a line of standard input; at its end there, it does not begin.
_HELD = ("/bin/sh", "-c", 'read -r go && exec "$@" </dev/null', "held")
# What a dump does between two writes, on a busy machine. After it CRIU is killed: it hangs.
_FAIL_SECONDS = 5.0
# For the ids of a job that has just ended to be free.
_IDS_SECONDS = 1.0
# How often tasks are looked at, and so what CRIU has to notice by itself that one has ended.
_LOOK_SECONDS = 0.5


class CriuRun:
    """One run of CRIU in progress. Ends it on timeout or `cancel`, then calls `cleanup`.

    `gently`: not before it has had the time to let go of the tasks. `tasks`: processes without
    which it cannot end well; one that is dead at two looks ends it. `finish` is called once it has
    ended well. With `held` it begins with `go`: to start a program takes as long as to stop many.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        action: str,
        log: Path,
        timeout: float,
        environment: Mapping[str, str] | None = None,
        pass_fds: Iterable[int] = (),
        pages: PageServer | None = None,
        gently: bool = False,
        held: bool = False,
        tasks: Sequence[int] = (),
        cleanup: Callable[[], None],
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self.action = action
        self.log = log
        self.started = time.monotonic()
        self._deadline = self.started + timeout
        self._timeout = timeout
        self._cleanup = cleanup
        self._finish = finish
        self._pages = pages
        self._gently = gently
        self._tasks = tasks
        self._next_look = 0.0
        self._seen: set[int] = set()
        self._dead: set[int] = set()
        self._killed = 0
        # A file, not a pipe: the restored tasks may hold it open for as long as they run.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [*_HELD, *command] if held else command,
                stdin=subprocess.PIPE if held else subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=tuple(pass_fds),
                env=_environment() | dict(environment or {}),
                process_group=0,
                # Python ignores SIGXFSZ, and a dump is to: a write past the limit is an error then.
                restore_signals=not gently,
            )
        except OSError as error:
            self._stderr.close()
            cleanup()
            raise CriuMissing(reason=f"{command[0]}: {error.strerror}") from error
        if gently:
            end_before_others(self._process.pid)
        if pages is not None:
            pages.hand_over()
        # Popen.wait(timeout) looks every 50 ms, which is as long as a small dump takes.
        self._pidfd = os.pidfd_open(self._process.pid)
        self.killed_task()  # the first look: what a dump is of is there

    @property
    def pid(self) -> int:
        """Process id of CRIU."""
        return self._process.pid

    def fileno(self) -> int:
        """An fd for selectors, readable once CRIU has ended; `wait` then returns at once."""
        return self._pidfd

    def poll(self, timeout: float = 0.0) -> bool:
        """True once CRIU has ended, for which this waits up to `timeout` seconds."""
        poller = select.poll()  # select.select cannot take the fds of a job with many files
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(math.ceil(timeout * 1000)))

    def wait(self) -> float:
        """Seconds that the run took; the error that its log explains when it failed."""
        try:
            self._wait_end()
        except BaseException:
            self.cancel()
            raise
        left = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        if left is not None and left.si_code != os.CLD_EXITED:
            # One that was killed leaves helpers of its own behind, stopped.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        seconds = time.monotonic() - self.started
        if code != 0:
            error = self._explain(code)
            self._close()
            self._cleanup()
            raise error
        self._close()
        self._finish()
        return seconds

    def go(self, tasks: Sequence[int]) -> None:
        """Let it begin, where it was held; `tasks` as when it is made."""
        self._tasks = tasks
        self.started = time.monotonic()
        self.killed_task()
        assert self._process.stdin
        with suppress(BrokenPipeError):  # it was killed: `wait` says so
            self._process.stdin.write(b"go\n")
            self._process.stdin.close()

    def killed_task(self) -> int:
        """One of `tasks` that was there and was dead at two looks; 0: there is none. Then `wait`
        ends CRIU with an error that names it."""
        now = time.monotonic()
        if self._tasks and not self._killed and now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            states = {pid: set(task_states(pid).values()) for pid in self._tasks}
            self._seen |= {pid for pid, found in states.items() if found}
            lost = {pid for pid in self._seen if states[pid] <= {"Z"}}
            self._killed = min(lost & self._dead, default=0)
            self._dead = lost
        return self._killed

    def _wait_end(self) -> None:
        while (left := self._deadline - time.monotonic()) > 0:
            if killed := self.killed_task():
                raise CriuFailed(action=self.action, cause=f"process {killed} was killed")
            if self.poll(min(left, _LOOK_SECONDS) if self._tasks else left):
                return
        raise CriuTimeout(action=self.action, seconds=self._timeout)

    def cancel(self) -> None:
        """End CRIU if it still runs, and undo what it left behind."""
        self._close_gate()
        if self._gently:
            with suppress(ProcessLookupError, PermissionError):
                resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (0, 0))
                self.poll(_FAIL_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._close()
        self._cleanup()

    def _close_gate(self) -> None:
        if self._process.stdin:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def _close(self) -> None:
        self._close_gate()
        self._stderr.close()
        os.close(self._pidfd)

    def _explain(self, code: int) -> FlowError:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        words = [line for line in lines if not line.startswith("Warn ")]
        fallback = words[-1] if words else f"it ended with status {code} and no message"
        # CRIU's log says only that its connection has ended.
        reason = self._pages.failure() if self._pages is not None else ""
        if reason:
            return CriuFailed(action=self.action, cause=reason)
        return criu_log.explain_file(self.log, self.action, fallback)


@dataclass(frozen=True)
class Criu:
    """The CRIU program in use."""

    program: Path
    version: tuple[int, ...]

    @staticmethod
    def locate() -> Criu:
        """First of $FLOWGPU_CRIU (then nothing else), the fetched one, and $PATH, new enough."""
        chosen = os.environ.get("FLOWGPU_CRIU")
        candidates = [chosen] if chosen else [str(FETCHED), shutil.which("criu")]
        seen: list[str] = []
        for candidate in candidates:
            if candidate is None or not os.access(candidate, os.X_OK):
                continue
            version = _version(candidate)
            if version >= MINIMUM_VERSION:
                return Criu(Path(candidate), version)
            seen.append(f"{candidate} is version {'.'.join(map(str, version)) or 'unknown'}")
        wanted = ".".join(map(str, MINIMUM_VERSION))
        reason = "; ".join(seen) or f"{chosen or 'criu'} not found"
        raise CriuMissing(reason=f"{reason}, version {wanted} or newer is needed")

    def plugins(self) -> Path:
        """The folder of our plugin (native/criu_plugin). Raises CriuMissing, NotBuilt."""
        if self.version[: len(PLUGIN_VERSION)] != PLUGIN_VERSION:
            found, wanted = (".".join(map(str, v)) for v in (self.version, PLUGIN_VERSION))
            raise CriuMissing(
                reason=f"version {found} has other plugins than {wanted}, which is needed here"
            )
        return launch.criu_plugins()

    def check(self) -> None:
        """Let CRIU check the kernel; CriuMissing with its first complaint."""
        done = self._checked()
        if done.returncode != 0:
            lines = [line.text for line in criu_log.error_lines(done.stderr)]
            lines = lines or done.stderr.strip().splitlines()
            raise CriuMissing(reason=lines[0] if lines else "`criu check` fails")

    def remember(self) -> None:
        """Let CRIU ask the kernel now what it would ask in the first pause after a boot."""
        folder = memory_folder()
        if folder is not None and not (folder / OWN_FILE).exists():
            with suppress(CriuMissing, OSError):
                # A CRIU that was killed leaves this file, and no other CRIU writes its own then.
                (folder / f"{OWN_FILE}.tmp").unlink(missing_ok=True)
                self.check()

    def has_feature(self, name: str) -> bool:
        """Answer of `criu check --feature`. Raises CriuMissing where it does not end."""
        return self._checked("--feature", name).returncode == 0

    def _checked(self, *words: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [str(self.program), "check", "--no-default-config", *_user_options(), *words],
                capture_output=True,
                text=True,
                env=_environment(),
                timeout=CHECK_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            reason = f"`criu check` does not end in {CHECK_SECONDS:.0f} s"
            raise CriuMissing(reason=reason) from None

    def start_dump(
        self,
        pid: int,
        images_dir: Path,
        *,
        leave_stopped: bool = True,
        leave_running: bool = False,
        plugins: Path | None = None,
        timeout: float = 120.0,
        log: str = "dump.log",
        pages: PageServer | None = None,
        tasks: Callable[[], Sequence[int]] = tuple,
        notes: Path | None = None,
        survey: Survey | None = None,
        let_go: Callable[[], None] = lambda: None,
    ) -> CriuRun:
        """Begin to dump the tree of `pid` into `images_dir`, which is created.

        The tree ends stopped (each task as after SIGSTOP), running, or killed when neither is
        asked for. If the dump fails, times out or is cancelled, it runs on as before. `pages`
        writes the images of memory in CRIU's place; whoever started it closes it. `tasks` is called
        when the tree is stopped; the death of one of them ends the dump: seldom CRIU waits for ever
        for one that it had stopped. What `tasks` raises is raised, with the tree running on.
        `notes` is Standstill's. `survey` is made meanwhile, and is complete when the run is.
        `let_go` is called before the tree runs on after a failure.
        """
        if leave_stopped and leave_running:
            raise ValueError("a dump leaves the tasks stopped or running, not both")
        images_dir.mkdir(parents=True, exist_ok=True)
        command = [
            *self._command("dump", images_dir, log, plugins),
            *("--tree", str(pid)),
            *("--network-lock", "skip"),
            *("--ghost-limit", str(_GHOST_LIMIT_BYTES)),
            *("--timeout", str(max(1, math.ceil(timeout)))),
        ]
        if pages is not None:
            command += ["--page-server", "--ps-socket", str(pages.socket)]
        if leave_stopped:
            command.append("--leave-stopped")
        if leave_running:
            command.append("--leave-running")
        with suppress(ProcessLookupError):  # CRIU says so better
            if outside_session(pid):
                command.append("--shell-job")
        still: Standstill | None = None
        looked: Future[None]  # once it is

        def cleanup() -> None:
            if still is not None:
                for failed in still.put_back():
                    logger.warning("what CRIU has left: %s", failed)
                let_go()
                still.end()

        def finish() -> None:
            assert still is not None
            if survey is not None:
                if (error := looked.exception()) is not None:
                    logger.error("what CRIU does not keep", exc_info=error)
                    survey.not_kept.append(f"what CRIU forgets of the processes ({error})")
                survey.settle()
            criu_images.forget_standstill(images_dir, still.finish(survey), still.before)
            if leave_running:
                still.end()

        run = CriuRun(
            command,
            action="dump",
            log=images_dir / log,
            timeout=timeout,
            environment={} if pages is None else pages.environment,
            pass_fds=() if pages is None else pages.descriptors,
            pages=pages,
            gently=True,
            held=True,
            cleanup=cleanup,
            finish=finish,
        )
        try:
            try:
                still = Standstill(pid, timeout, notes, None if pages is None else pages.look)
            except TimeoutError as error:
                raise CriuFailed(action="dump", cause=str(error)) from error
            stopped = tasks()
            if pages is not None:
                pages.copy()
            run.go(stopped)
        except BaseException:
            run.cancel()
            raise
        pool = ThreadPoolExecutor(max_workers=1)
        looked = pool.submit(lambda: survey.look(tree_pids(pid)) if survey else None)
        pool.shutdown(wait=False)
        return run

    def dump(self, pid: int, images_dir: Path, **options: Any) -> float:
        """`start_dump` and wait; seconds that it took."""
        return self.start_dump(pid, images_dir, **options).wait()

    def restore(
        self,
        images_dir: Path,
        *,
        inherit_fds: Mapping[str, int] | None = None,
        leave_stopped: bool = False,
        plugins: Path | None = None,
        amx: bool = False,
        timeout: float = 120.0,
        log: str = "restore.log",
        work_dir: Path | None = None,
        view: View | None = None,
        script: Path | None = None,
        environment: Mapping[str, str] | None = None,
        on_started: Callable[[CriuRun], None] = lambda run: None,
    ) -> int:
        """Restore the tree and return the pid of its root, a child of this process.

        `inherit_fds` maps names of outside resources (`pipe:[INODE]`) to open fds of this process,
        which keeps them. With `leave_stopped` the tasks wait for SIGCONT. A restore that fails
        leaves nothing of the tree behind. Log and statistics go to `work_dir`, so that the images
        stay as they are; by default beside them. With `view` (of these images) CRIU reads that
        instead, and its pages are written afterwards. With `amx` the tasks may use AMX, of which
        CRIU saves no permission; it needs `plugins`. `script` is run at each stage, with
        `environment`. `on_started` is called once CRIU runs.
        """
        if view is not None and not leave_stopped:
            raise ValueError("tasks that are filled later must be left stopped")
        work_dir, images_dir = work_dir or images_dir, view.path if view else images_dir
        pids = criu_images.pids(images_dir)
        _wait_ids_free(criu_images.thread_ids(images_dir))
        fds = dict(inherit_fds or {})
        command = [
            *self._command("restore", images_dir, log, plugins),
            *("--work-dir", str(work_dir)),
            *("--restore-detached", "--restore-sibling"),
            # Without their states they were closed in the image.
            *([] if criu_sockets.tcp_streams(images_dir) else ["--tcp-close"]),
            *("--network-lock", "skip"),
            *(word for key, fd in fds.items() for word in ("--inherit-fd", f"fd[{fd}]:{key}")),
        ]
        if leave_stopped:
            command.append("--leave-stopped")
        if criu_images.is_shell_job(images_dir):
            command.append("--shell-job")
        if script is not None:
            command += ["--action-script", str(script)]
        about = dict(environment or {})
        if amx:
            about["FLOWGPU_AMX"] = "1"
        if criu_images.adopts_orphans(images_dir):
            about["LD_PRELOAD"] = str(launch.library_dir() / MEMORY_LIBRARY)
            about["FLOWGPU_SUBREAPER"] = str(pids[0])

        def cleanup() -> None:
            _remove_half_restored(pids, images_dir)

        run = CriuRun(
            command,
            action="restore",
            log=work_dir / log,
            timeout=timeout,
            environment=about,
            pass_fds=fds.values(),
            tasks=criu_images.living_pids(images_dir),
            cleanup=cleanup,
        )
        on_started(run)
        seconds = run.wait()
        began = time.monotonic()
        if view is not None:
            try:
                view.fill()
            except BaseException:
                cleanup()
                raise
        _report_restore(work_dir, seconds, time.monotonic() - began, view)
        return pids[0]

    def _command(self, verb: str, images_dir: Path, log: str, plugins: Path | None) -> list[str]:
        # Plugins of an installed CRIU must not run: its own CUDA plugin would take the GPU over.
        # A folder without any stands in for its default one.
        return [
            *(str(self.program), verb, *_COMMON_OPTIONS, *_user_options()),
            *("--images-dir", str(images_dir), "--log-file", log, f"-v{_LOG_LEVELS[verb]}"),
            *("--libdir", str(plugins or images_dir)),
        ]


def _user_options() -> list[str]:
    """CRIU refuses a user who is not root and has the capabilities, unless told to try."""
    return [] if os.geteuid() == 0 else ["--unprivileged"]


def _report_restore(work_dir: Path, criu: float, fill: float, view: View | None) -> None:
    with suppress(FlowError):  # statistics are no reason to fail
        stats = criu_images.restore_stats(work_dir)
        own = (view.seconds, fill, view.bytes >> 20) if view else (0.0, 0.0, 0)
        logger.info(
            "restored: view %.3f s, CRIU %.3f s (forking %.3f, restoring %.3f, %d pages),"
            " fill %.3f s (%d MiB)",
            *(own[0], criu, stats.forking_s, stats.restore_s, stats.pages_restored, *own[1:]),
        )


def _clean_environment() -> dict[str, str]:
    """The environment without what would load our libraries into CRIU or change its work."""
    drop = ("LD_", "CRIU_")
    return {key: value for key, value in os.environ.items() if not key.startswith(drop)}


def _environment() -> dict[str, str]:
    """The clean environment, with a place for what CRIU remembers if it needs one."""
    result = _clean_environment()
    folder, library = memory_folder(), launch.library_dir() / MEMORY_LIBRARY
    if folder is not None and library.is_file():
        result |= {"LD_PRELOAD": str(library), "FLOWGPU_CRIU_MEMORY": str(folder)}
        result["XDG_RUNTIME_DIR"] = str(folder)  # where it is, for a user who is not root
    return result


def memory_folder() -> Path | None:
    """Where CRIU's answers of the kernel are kept (native/pages/criu_memory.cpp); None: by itself.

    A folder of this user's alone, as CRIU believes what it finds there, and on a tmpfs, so that it
    is gone when another kernel runs.
    """
    with suppress(OSError):
        if os.geteuid() == 0 and is_memory(OWN_MEMORY):
            return None
        folder = SHARED_MEMORY / f"flowgpu-criu-{os.geteuid()}"
        folder.mkdir(0o700, exist_ok=True)
        about = folder.lstat()
        private = stat.S_ISDIR(about.st_mode) and not about.st_mode & 0o077
        if private and about.st_uid == os.geteuid() and is_memory(folder):
            return folder
    return None


def _version(program: str) -> tuple[int, ...]:
    try:
        done = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            env=_clean_environment(),
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"Version:\s*(\d+(?:\.\d+)*)", done.stdout)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def _wait_ids_free(ids: Sequence[int]) -> None:
    """Nobody has one of the ids any more. Raises PidTaken."""
    deadline = time.monotonic() + _IDS_SECONDS
    while taken := ids_in_use(ids):
        if time.monotonic() >= deadline:
            raise PidTaken(pid=taken[0])
        time.sleep(0.001)


def _remove_half_restored(pids: Sequence[int], images_dir: Path) -> None:
    """Kill and reap what a failed restore made: descendants of ours with a pid of the image.

    A task whose parent died early is no descendant any more, but it still has CRIU's arguments.

    They are stopped first, until no new one shows up: a child forked behind our back would be
    nobody's after its parent is killed.
    """
    found: set[int] = set()
    while True:
        alive = set(tree_pids(os.getpid())).intersection(pids)
        alive |= {pid for pid in pids if str(images_dir) in arguments(pid)}
        for pid in alive - found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        states = {state for pid in alive for state in task_states(pid).values()}
        if alive <= found and not states - set("TZX"):
            break
        found |= alive
        time.sleep(0.001)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pids[0], 0)

"""The job's supervisor: starts or restores the root task or takes it over, keeps the job's record,
answers clients, ends with the job.

Threads: the main one starts the root and waits for its end; one serves each client.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator import tickets
from coordinator.custody import Custody
from coordinator.descriptors import lift_limits
from coordinator.ghost_client import COMMAND, Ghost
from coordinator.ghosts import Ghosts
from coordinator.keeper import Kept
from coordinator.output import Output
from coordinator.process import (
    AdoptedRoot,
    OwnRoot,
    alive,
    children,
    kill_tree,
    own_children,
    reap,
    start_root,
)
from coordinator.server import Client, Server, stream_output
from coordinator.session import RunningJob
from coordinator.sessions import CLIENT_SECONDS, LINGER_SECONDS, Sessions
from coordinator.steps import Steps
from coordinator.tasks import TaskChannel
from flowgpu.errors import (
    DUMPED_EXIT,
    ENDING,
    CoordinatorGone,
    CoordinatorReplaced,
    FlowError,
    RestoreFailed,
    StartFailed,
    words_of,
)
from flowgpu.host.prctl import become_subreaper, end_with_parent
from flowgpu.image import layout
from flowgpu.jobs import (
    DUMPED,
    EXITED,
    RESTORING,
    RUNNING,
    JobDir,
    start_time,
)
from flowgpu.launch import Spec
from flowgpu.metrics import counting

if TYPE_CHECKING:
    from coordinator.leader import Leader

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
LOAD_SECONDS = 2.0
"""A job is so old when its coordinator loads what a checkpoint needs, unless one is asked for
before. That takes longer than all the rest of a start, numpy above all, and a job does not wait."""
LEADER_SECONDS = 60.0
"""For which the leader of several nodes waits at the end for those that are behind."""
TELL_SECONDS = 5.0
OUTPUT_GRACE_SECONDS = 0.5


class Supervisor(Sessions):
    """One job, from its start, restore or takeover to its end."""

    def __init__(
        self,
        spec: Spec,
        kept: Kept,
        ghost_command: Sequence[str] = COMMAND,
        *,
        ghost: Ghost | None = None,
    ) -> None:
        """`ghost`: one that is there already, to be the first."""
        self._spec = spec
        self._kept = kept
        self._takes_over = kept.writers is None
        directory = JobDir(Path(spec.job_dir))
        self._restores = spec.kind == "restore" and not self._takes_over
        if self._restores and spec.image is not None:
            _seed_log(directory, Path(spec.image))
        output = Output(directory, kept.readers, self._on_trouble)
        inodes = [os.fstat(reader).st_ino for reader in kept.readers]
        channel = TaskChannel(directory.task_socket)
        new = partial(Ghost, spec.ghost_env, ghost_command)
        ghosts = Ghosts(new, channel, warm=spec.ghost == "warm", first=ghost)
        job = RunningJob(
            id=spec.id,
            name=spec.name,
            gpu=spec.gpu,
            command=spec.command,
            cwd=spec.cwd,
            channel=channel,
            output=output,
            directory=directory.path,
            start_ghost=ghosts.start,
            keep_ghost=ghosts.keep,
            ghost=spec.ghost,
            engine=spec.engine,
            keeper=kept.keeper,
            custody=Custody(kept.custody),
            pipes=dict(zip(("stdout", "stderr"), inodes, strict=True)),
        )
        super().__init__(job, directory, ghosts)
        self._root: OwnRoot | AdoptedRoot
        self._leader: Leader | None = None
        self._device: socket.socket | None = None
        self._attached = threading.Event()
        self._exit_code: int | None = None  # of the root
        self._failure: FlowError | None = None
        self._restored = threading.Event()
        self._asked = threading.Event()  # somebody waits for the restore
        self._to_end = False
        self._restore_result: dict[str, Any] | None = None
        self._restore_steps = Steps(("verify", 0, 0))
        if self._restores:
            self._steps = self._restore_steps

    def run(self) -> None:
        """Everything; returns when the job has ended and its clients know."""
        threading.excepthook = self._on_thread_failed
        become_subreaper()
        # Handlers, not SIG_IGN: what is ignored here would be ignored by the job too.
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(signum, self._on_signal)
        pid, keeper = os.getpid(), self._kept.keeper
        if self._takes_over:
            self._job.root_pid = self._directory.read().root_pid
        else:
            # Nobody would take a job over that is not there yet: as without a coordinator.
            end_with_parent(True)
            if os.getppid() != keeper:
                return
        self._record(
            coordinator_pid=pid,
            coordinator_start=start_time(pid),
            keeper_pid=keeper,
            keeper_start=start_time(keeper),
        )
        self._hold_device()
        self._job.channel.listen()
        self._job.output.begin()
        with self._session:
            if self._takes_over:
                self._doing = ""  # it is soon over: who asks for a checkpoint waits
            server = Server(self._directory.control_socket, self._job.name, self._handlers())
            self._ghosts.begin()
            try:
                self._join()
                self._start()
            except FlowError as error:
                log.error("%s", error)
                self._failure = error
        self._steps = None
        if self._failure is None:
            # Only now: whoever hears of it may ask for a checkpoint at once.
            self._restored.set()
            if self._to_end:
                self._end_job()
            threading.Thread(target=self._load, name="load").start()
            self._wait_for_root()
        else:
            # A failure at once must not be faster than the command that wants to hear of it.
            heard = self._asked if self._restores else server.heard
            heard.wait(TELL_SECONDS)
        self._finish(server)

    def _hold_device(self) -> None:
        """Keep the emulated device, which ends without clients: a task would start another one, in
        the job's tree."""
        if path := self._spec.ghost_env.get("FLOWGPU_EMU_SOCKET"):
            self._device = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(OSError):  # a task starts it
                self._device.connect(path)

    def _start(self) -> None:
        if self._kept.writers is None:
            lift_limits()
            self._take_over()
            return
        try:
            if self._restores:
                lift_limits()
                self._restore(*self._kept.writers)
            else:
                self._before_it_runs()
                self._launch(*self._kept.writers)
                lift_limits()
        finally:
            for writer in self._kept.writers:
                os.close(writer)
        root = self._job.root_pid
        self._root = OwnRoot(root)
        self._record(
            state=RUNNING,
            root_pid=root,
            root_start=start_time(root),
            restored=self._restore_result,
        )
        end_with_parent(False)

    def _join(self) -> None:
        """Take the job's place among its nodes, if it has several."""
        member = self._spec.member
        if member is None:
            return
        from coordinator.agent import Agent

        if member.node == 0:
            from coordinator.leader import Leader

            self._leader = Leader(self._job.name, member)
        self._agent = Agent(self._job, member, self._take_part, self._on_trouble)
        self._job.ids_elsewhere = self._agent.ids_elsewhere

    def _load(self) -> None:
        if not self._ended.wait(LOAD_SECONDS):
            import coordinator.checkpoint  # noqa: F401

    def _take_over(self) -> None:
        from coordinator.takeover import settle

        record = self._directory.read()
        if record.state == RESTORING:
            kill_tree(record.root_pid)
            raise RestoreFailed(job=self._job.name, reason="its coordinator was killed")
        log.info("the job is taken over")
        tickets.give_up(self._directory.tickets, CoordinatorReplaced(job=self._job.name))
        self._restore_result = record.restored or {}
        self._exit_code = record.exit_code
        self._job.spoilt.update(record.spoilt)
        self._root = AdoptedRoot(record.root_pid, self._kept.ends)
        with self._ghosts.session():
            image = settle(self._job, record, self._agent)
        if image is not None:
            self._on_dumped(image)
        if self._dumped_to is None:
            self._record_state(dump=None)

    def _launch(self, stdout: int, stderr: int) -> None:
        try:
            spec = self._spec
            root = start_root(
                spec.command,
                spec.env,
                spec.cwd,
                spec.stdin,
                stdout,
                stderr,
                spec.umask,
                spec.descriptors,
            )
        except OSError as error:
            raise StartFailed(job=self._job.name, reason=str(error)) from error
        finally:
            for fd in spec.descriptors:
                os.close(fd)
        self._job.root_pid = root.pid
        # Waited for in _wait_for_root, by pid, like a root that CRIU has made.
        root.returncode = 0

    # Restore

    def _restore(self, stdout: int, stderr: int) -> None:
        from coordinator.restore import Restore

        image = Path(self._spec.image or "")
        try:
            restore = Restore(
                self._job,
                image,
                stdout=stdout,
                stderr=stderr,
                options=self._spec.options,
                before_resume=self._before_it_resumes,
                progress=self._restore_steps.note,
                together=self._together if self._agent is not None else None,
                member=self._spec.member,
            )
            with self._ghosts.session():
                result = self._restore_result = restore.run()
            with counting(self._directory.counts) as counts:
                counts.restored(result)
        except FlowError as error:
            self._on_failed_restore(error)
            raise
        except Exception as error:
            log.exception("restore")
            failed = RestoreFailed(job=self._job.name, reason=words_of(error))
            self._on_failed_restore(failed)
            raise failed from error
        finally:
            self._ghosts.restored()

    def _on_failed_restore(self, error: FlowError) -> None:
        if self._agent is not None:
            self._agent.restore_failed(error)
        with counting(self._directory.counts) as counts:
            counts.restores["failed"] += 1

    def _before_it_runs(self) -> None:
        # Without the command that asked for it nobody would end the job, or know of it.
        if self._spec.wait_for_client and not self._attached.wait(CLIENT_SECONDS):
            raise StartFailed(job=self._job.name, reason="the command that started it is gone")
        # Who hears of the job from now on may ask for a checkpoint, and waits for what is left.
        self._doing = ""

    def _together(self, place: str, said: Any) -> list[Any]:
        """Wait until the restores of all nodes have come there. Gives what the others say."""
        if self._agent is None:
            return []
        self._restore_steps.note("nodes", 0, 0)
        return self._agent.wait_for_all(place, said)

    def _before_it_resumes(self) -> None:
        self._before_it_runs()
        # Should this coordinator die before the job has what it needs, the next one ends it.
        root = self._job.root_pid
        self._record(root_pid=root, root_start=start_time(root))

    # The end

    def _wait_for_root(self) -> None:
        root = self._job.root_pid
        while self._exit_code is None:
            try:
                self._exit_code = self._root.code(POLL_SECONDS)
            except EOFError:
                self._failure = CoordinatorGone(job=self._job.name)
                return
            # In a session the children may be CRIU or a ghost, which it waits for itself.
            if self._session.acquire(blocking=False):
                try:
                    reap(pid for pid in children(os.getpid()) if pid != root)
                finally:
                    self._session.release()
        # While the root can still be asked: a coordinator after this one could not.
        self._record(exit_code=self._exit_code)
        reap([root])

    def _finish(self, server: Server) -> None:
        with self._session:
            self._doing = ENDING
            self._ghosts.close()
            for pid in own_children(self._kept.keeper):
                # Nothing of a job outlives its root: nobody would be left to read its output. But a
                # ghost that is killed leaves what it pinned to the kernel, which takes far longer.
                if alive(pid) and pid not in Ghost.leaving:
                    kill_tree(pid)
                reap([pid])
            self._job.channel.stop_listening()
            self._job.channel.forget()
        # Once the record says that the job has ended, a restore may make its folder anew.
        server.stop()
        self._job.output.finish(OUTPUT_GRACE_SECONDS)
        if self._dumped_to is not None:
            self._exit_code = DUMPED_EXIT
            self._record(
                state=DUMPED,
                exit_code=DUMPED_EXIT,
                image=str(self._dumped_to),
                finished=time.time(),
            )
        elif self._failure is not None:
            unrestored = self._spec.kind == "restore" and self._restore_result is None
            state = DUMPED if self._restores or unrestored else EXITED
            code = DUMPED_EXIT if state == DUMPED else self._failure.exit_code
            self._record(state=state, exit_code=code, finished=time.time())
        else:
            self._record(state=EXITED, exit_code=self._exit_code, finished=time.time())
        self._ended.set()
        self._restored.set()
        if self._agent is not None:
            self._agent.ended()
        server.finish(LINGER_SECONDS)
        if self._leader is not None:
            self._leader.finish(LEADER_SECONDS)

    def _on_signal(self, signum: int, _frame: object) -> None:
        log.info("signal %d", signum)
        if signum == signal.SIGTERM:
            self._end_job()

    def _end_job(self) -> None:
        """End all of it; one that is still to start or to be restored, as soon as it is there."""
        self._to_end = True
        if self._job.root_pid:
            kill_tree(self._job.root_pid)

    def _on_thread_failed(self, failed: threading.ExceptHookArgs) -> None:
        name = failed.thread.name if failed.thread else "?"
        error = failed.exc_value
        if error is not None:
            log.critical("thread %s", name, exc_info=error)
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            self._on_trouble(f"thread {name} of its coordinator ended: {reason}")

    def _on_trouble(self, text: str) -> None:
        """Let `ps` show it."""
        with contextlib.suppress(OSError, ValueError):
            self._record(trouble=text)

    # Requests

    def _handlers(self) -> dict[str, Any]:
        return super()._handlers() | {
            "attach": self._on_attach,
            "status": self._on_status,
            "signal": self._on_signal_request,
            "kill": self._on_kill,
            "wait-restored": self._on_wait_restored,
        }

    def _on_attach(self, client: Client, fields: dict[str, Any]) -> None:
        output = self._job.output
        begin = fields.get("from", "start")
        position = {"start": output.start, "now": output.end}.get(begin, begin)
        self._attached.set()
        stream_output(client, output, position)
        self._ended.wait()
        if self._failure is not None:
            raise self._failure
        client.send("exit", {"code": self._exit_code})

    def _on_status(self, client: Client, fields: dict[str, Any]) -> dict[str, Any]:
        tasks, steps = [], self._steps
        for task in self._job.channel.tasks():
            page = task.page
            tasks.append(
                {
                    "pid": task.pid,
                    "allocations": page.allocations,
                    "allocation_bytes": page.allocation_bytes,
                    "block_bytes": page.block_bytes,
                    "foreign_bytes": page.foreign_bytes,
                }
            )
        return {
            "job": self._job.name,
            "root_pid": self._job.root_pid,
            "doing": self._doing,
            "step": steps.now if steps else None,
            "tasks": tasks,
        }

    def _on_signal_request(self, client: Client, fields: dict[str, Any]) -> dict[str, Any]:
        signum = signal.Signals(int(fields["signum"]))
        if self._job.root_pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._job.root_pid, signum)
        return {}

    def _on_kill(self, client: Client, fields: dict[str, Any]) -> dict[str, Any]:
        self._end_job()
        return {}

    def _on_wait_restored(self, client: Client, fields: dict[str, Any]) -> dict[str, Any]:
        self._asked.set()
        told, restored = 0, False
        while not restored:
            restored = self._restored.wait(0.1)
            told = self._restore_steps.tell(client.progress, told)
        if self._failure is not None:
            raise self._failure
        if self._takes_over and self._dumped_to is not None:
            raise CoordinatorGone(job=self._job.name)
        if self._restore_result is None:
            raise FlowError(reason=f"job {self._job.name!r} was not started by a restore")
        return self._restore_result


def _seed_log(directory: JobDir, image: Path) -> None:
    with (
        contextlib.suppress(OSError),  # a missing file is for the restore to name
        open(layout.open_regular(image / layout.OUTPUT_LOG), "rb") as source,
        open(directory.output_log, "wb") as target,
    ):
        shutil.copyfileobj(source, target)

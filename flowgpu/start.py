"""Starting, restoring and ending jobs: what the command line does, without its words."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flowgpu.client import (
    Connection,
    Event,
    SignalForwarder,
    follow,
    next_of,
    reach,
    request,
    what_became,
)
from flowgpu.errors import (
    DUMPED_EXIT,
    AddressSpaceLimited,
    CoordinatorGone,
    FlowError,
    ImageDamaged,
    ProcessorMismatch,
    StartFailed,
)
from flowgpu.host import processor
from flowgpu.inherited import WITH_OWN_ID, is_listening
from flowgpu.jobs import (
    DUMPED,
    EXITED,
    LIVE_STATES,
    STARTING,
    Job,
    JobDir,
    Registry,
    is_id,
    is_name,
    is_process,
    start_time,
    user_umask,
)
from flowgpu.launch import (
    Driver,
    Spec,
    answers,
    choose_driver,
    clean_env,
    ghost_env,
    preloaded,
    start_coordinator,
    start_emulator,
    task_env,
)
from flowgpu.nodes import Membership
from flowgpu.options import CheckpointOptions, RestoreOptions
from flowgpu.vocabulary import GHOST_CHOICES, EngineChoice, GhostChoice, GpuChoice

if TYPE_CHECKING:
    from flowgpu.image.manifest import Manifest
    from flowgpu.series import Series

READY_SECONDS = 30.0
KILL_SECONDS = 10.0
WINDOW_BYTES = 1 << 44
"""Addresses that a task reserves for the memory of each GPU that it uses (native/vmm)."""


def saved(image: Path) -> Manifest:
    """What `image` says of its job; the coordinator checks the rest of it.

    Raises ImageDamaged, ImageVersion.
    """
    from flowgpu.image.manifest import Manifest

    manifest = Manifest.load(image)
    if not is_id(manifest.job.id) or not is_name(manifest.job.name):
        raise ImageDamaged(path=image, reason="it has no usable job id and name")
    return manifest


def check_processor(manifest: Manifest) -> None:
    """Raise ProcessorMismatch unless the processor has all that programs of the image may use."""
    if names := processor.lacking(manifest.cpu_features):
        raise ProcessorMismatch(names=", ".join(names))


def check_address_space() -> None:
    """Raise AddressSpaceLimited unless a process may have the addresses of a GPU's window."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < WINDOW_BYTES:
        raise AddressSpaceLimited(limit=soft, needed=WINDOW_BYTES)


def driver_for_saved(manifest: Manifest) -> Driver:
    """The driver for a job of an image; one that had not used a GPU gets what is here."""
    if manifest.gpu == "nvidia":
        return driver_for("nvidia")
    return driver_for("emulated" if manifest.gpu == "emulated" else "auto")


def driver_for(choice: GpuChoice, registry: Registry | None = None) -> Driver:
    """The driver for a new job, with the emulated device's daemon running if it is that one."""
    driver = choose_driver(choice)
    if driver.kind == "emulated":
        start_emulator((registry or Registry()).base)
    return driver


def run(
    command: list[str],
    *,
    name: str | None,
    driver: Driver,
    stdin: str | None = None,
    ghost: GhostChoice = "auto",
    engine: EngineChoice = "auto",
    untried: str | None = None,
    descriptors: Sequence[int] = (),
    series: Series | None = None,
    member: Membership | None = None,
) -> tuple[Job, int]:
    """Run `command` as a job and stream its output: its last record and exit code.

    `untried`: one of vocabulary.UNTRIED, which is refused otherwise.
    The job gets these `descriptors`, under their numbers; here they are closed. `series`: what
    takes images of it meanwhile. `member`: which node it is of a job of several.
    """
    registry = Registry()
    preloaded()  # before there is a record, what makes a start impossible is raised
    check_address_space()
    job = registry.create(
        command=command,
        cwd=os.getcwd(),
        gpu=driver.kind,
        name=name,
        store=series.folder if series else None,
        ghost=ghost,
        engine=engine,
        **places(member),
    )
    directory = registry.dir(job.id)
    env = task_env(os.environ, driver, directory, registry.base, engine, untried)
    if os.isatty(1):  # the job writes to a pipe, where Python would keep lines back
        env.setdefault("PYTHONUNBUFFERED", "1")
    spec = Spec(
        kind="run",
        id=job.id,
        name=job.name,
        command=[*WITH_OWN_ID, *command] if is_listening(os.environ) else command,
        cwd=job.cwd,
        gpu=driver.kind,
        job_dir=str(directory.path),
        env=env,
        ghost_env=ghost_env(os.environ, driver, registry.base),
        stdin=stdin,
        wait_for_client=True,
        ghost=ghost,
        engine=engine,
        umask=user_umask(),
        descriptors=list(descriptors),
        member=member,
    )
    with SignalForwarder(job.name, series.signals if series else ()) as forwarder:
        with starting(spec, directory) as attached:
            # Who reads the other end of a pipe waits until all have closed this one.
            for fd in descriptors:
                os.close(fd)
            attach(attached)
            wait_started(directory)
        with attached, series.of(directory) if series else contextlib.nullcontext():
            forwarder.deliver_to(directory.control_socket)
            code = follow(attached, forwarder)
    return last_record(directory, job), code


def restore(
    image: Path,
    manifest: Manifest,
    *,
    name: str | None,
    driver: Driver,
    detach: bool,
    progress: Callable[[Event], None],
    report: Callable[[Event], None],
    ghost: GhostChoice | None = None,
    options: RestoreOptions,
    series: Series | None = None,
    member: Membership | None = None,
) -> tuple[Job, int]:
    """Bring the job in `image` back, of which this is the manifest.

    `report` gets the result as soon as the job runs again. Then, unless `detach`, its output is
    streamed until it ends. `ghost`: when its ghost is to be started, if not as before. `series`:
    what takes images of it then. `member`: which node it is of a job of several. Returns its last
    record and its exit code, 0 if detached.
    """
    registry = Registry()
    saved = manifest.job
    # Images of earlier versions may name "cold", which is no longer offered.
    ghost = ghost or (saved.ghost if saved.ghost in GHOST_CHOICES else "auto")
    engine = cast(EngineChoice, saved.engine)
    wait_coordinator_gone(registry, saved.id)
    job = registry.create(
        command=list(saved.command),
        cwd=saved.cwd,
        gpu=driver.kind,
        name=name or saved.name,
        job_id=saved.id,
        image=str(image),
        store=series.folder if series else None,
        ghost=ghost,
        engine=engine,
        **places(member),
    )
    directory = registry.dir(job.id)
    spec = Spec(
        kind="restore",
        id=job.id,
        name=job.name,
        command=job.command,
        cwd=job.cwd,
        gpu=driver.kind,
        job_dir=str(directory.path),
        env=clean_env(os.environ),
        ghost_env=ghost_env(os.environ, driver, registry.base),
        image=str(image),
        wait_for_client=not detach,
        ghost=ghost,
        engine=engine,
        options=options,
        gpus=[gpu.uuid for gpu in manifest.gpus],
        member=member,
    )
    with contextlib.ExitStack() as stack:
        but = series.signals if series else ()
        forwarder = stack.enter_context(SignalForwarder(job.name, but)) if not detach else None
        with starting(spec, directory) as first:
            stack.enter_context(first)
            if detach:
                report(_wait_restored(first, progress))
            else:
                # Attached before the job runs again, so that nothing it says is missed.
                attach(first)
                report(_wait_restored_beside(first, progress))
        if forwarder is None:
            return last_record(directory, job), 0
        if series:
            stack.enter_context(series.of(directory))
        forwarder.deliver_to(directory.control_socket)
        code = follow(first, forwarder)
    return last_record(directory, job), code


def places(member: Membership | None) -> dict[str, Any]:
    """What the record of a job says of its nodes."""
    return {"node": member.node, "nodes": member.count} if member else {}


def attach(connection: Connection) -> None:
    """Ask for the job's output from the start of its coordinator on."""
    connection.send("attach", **{"from": "start"})


def _wait_restored(waiting: Connection, progress: Callable[[Event], None]) -> Event:
    try:
        waiting.send("wait-restored")
        return waiting.result(progress)
    except CoordinatorGone:
        # It may have been killed right after it had brought the job back: the next one knows.
        with next_of(waiting) as again:
            again.send("wait-restored")
            return again.result()


def _wait_restored_beside(attached: Connection, progress: Callable[[Event], None]) -> Event:
    try:
        with Connection(attached.path, attached.job) as waiting:
            return _wait_restored(waiting, progress)
    except CoordinatorGone:
        # A restore that failed at once ends its coordinator; who was attached is told why.
        for _ in attached.events():
            pass
        raise


def wait_started(directory: JobDir) -> None:
    """Wait until signals reach the job: until its root task runs or has failed to."""
    while (job := directory.read()).live and job.state == STARTING:
        time.sleep(0.002)


def wait_ended(registry: Registry, job: Job, seconds: float = KILL_SECONDS) -> None:
    """Wait until the record of `job` says that it has ended, `seconds` at most."""
    deadline = time.monotonic() + seconds
    while last_record(registry.dir(job.id), job).live and time.monotonic() < deadline:
        time.sleep(0.01)


def wait_coordinator_gone(registry: Registry, job_id: str) -> None:
    """Wait until nobody uses the directory of a job that has ended, such as one dumped just now."""
    with contextlib.suppress(OSError, ValueError):
        job = registry.dir(job_id).read()
        deadline = time.monotonic() + KILL_SECONDS
        while job.state not in LIVE_STATES and time.monotonic() < deadline:
            if not is_process(job.coordinator_pid, job.coordinator_start):
                return
            time.sleep(0.01)


@contextlib.contextmanager
def starting(spec: Spec, directory: JobDir) -> Iterator[Connection]:
    """Start the coordinator and connect to it; if that or the body fails, end everything."""
    process = start_coordinator(spec)
    try:
        yield _connect(process, spec, directory)
    except BaseException:
        end_started(process, spec, directory)
        raise


def end_started(process: subprocess.Popen[bytes], spec: Spec, directory: JobDir) -> None:
    """End all of a start or restore that has failed; `process` is the job's keeper."""
    with contextlib.suppress(FlowError):
        request(directory.control_socket, spec.name, "kill")
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)
    process.kill()
    process.wait()
    kill_coordinator(directory)
    # A keeper that was killed leaves CRIU at work, and what it has made. What is older is of a lost
    # job with this id, which stood in the way.
    kill_lost(directory, signal.SIGKILL, since=start_time(os.getpid()))
    _record_failure(spec, directory)


def _connect(process: subprocess.Popen[bytes], spec: Spec, directory: JobDir) -> Connection:
    """The first connection to a coordinator that is starting. Raises StartFailed."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        with contextlib.suppress(CoordinatorGone):
            return Connection(directory.control_socket, spec.name)
        if process.poll() is not None:
            raise StartFailed(job=spec.name, reason=_last_line(directory.coordinator_log))
        if time.monotonic() > deadline:
            reason = f"its coordinator did not answer in {READY_SECONDS:.0f} s"
            raise StartFailed(job=spec.name, reason=reason)
        time.sleep(0.002)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "its coordinator ended at once")


def _record_failure(spec: Spec, directory: JobDir) -> None:
    """A job that never ran has ended; one that was not restored is still in its image."""
    if directory.read().state not in LIVE_STATES:
        return
    code = StartFailed.exit_code if spec.kind == "run" else DUMPED_EXIT
    state = EXITED if spec.kind == "run" else DUMPED
    directory.update(state=state, exit_code=code, finished=time.time())


def last_record(directory: JobDir, job: Job) -> Job:
    """The record of `job` as it is now, `job` if another user of the registry has removed it."""
    try:
        return directory.read()
    except (OSError, ValueError):
        return job


def dump(
    directory: JobDir,
    job: Job,
    options: CheckpointOptions,
    progress: Callable[[Event], None] | None = None,
) -> Event:
    """Ask for a checkpoint of a running job, and give the report."""
    return ask(directory, job, "pause-and-dump", progress, **options.to_fields())


def ask(
    directory: JobDir,
    job: Job,
    verb: str,
    progress: Callable[[Event], None] | None = None,
    **fields: Any,
) -> Event:
    """Ask a job's coordinator for what takes a while, and give the report."""
    with reach(directory.control_socket, job.name, job.keeper_pid) as connection:
        try:
            connection.send(verb, **fields)
            return connection.result(progress)
        except CoordinatorGone as gone:
            raise what_became(connection) from gone


def kill(registry: Registry, job: Job, signum: int | None) -> None:
    """Send `signum` to the job's process group, or end all its processes and wait for that."""
    control = registry.dir(job.id).control_socket
    if signum is not None:
        request(control, job.name, "signal", signum=signum)
        return
    request(control, job.name, "kill")
    wait_ended(registry, job)


def kill_coordinator(directory: JobDir) -> None:
    """SIGKILL a job's coordinator, and its keeper first, so that no other comes."""
    record = directory.read()
    for pid, start in (
        (record.keeper_pid, record.keeper_start),
        (record.coordinator_pid, record.coordinator_start),
    ):
        if pid != os.getpid() and is_process(pid, start):  # it may still be the launcher
            os.kill(pid, signal.SIGKILL)


def kill_lost(directory: JobDir, signum: int, since: int = 0) -> bool:
    """Send `signum` to what still runs of a job without coordinator; False if nothing does.

    After SIGKILL nothing is left when this returns, even if CRIU was making processes. `since`:
    leave alone what started earlier, in clock ticks since boot.
    """
    deadline = time.monotonic() + KILL_SECONDS
    found = False
    looks = 0  # that found nothing, one after the other
    while looks < 2 and time.monotonic() < deadline:
        left = _left(directory, since)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        found = found or bool(left)
        if signum != signal.SIGKILL:
            break
        # A look may come to what CRIU makes before it is known as the job's, and to CRIU when that
        # is done and gone.
        looks = 0 if left else looks + 1
        time.sleep(0.005)
    if signum == signal.SIGKILL and not answers(directory.control_socket):
        for socket in (directory.control_socket, directory.task_socket):
            socket.unlink(missing_ok=True)
    return found


def _left(directory: JobDir, since: int) -> list[int]:
    from flowgpu.host.proctree import pids_of_job, tree_pids

    job = directory.read()
    found = tree_pids(job.root_pid) if is_process(job.root_pid, job.root_start) else []
    found += pids_of_job(directory.path, directory.task_socket)
    return [pid for pid in dict.fromkeys(found) if start_time(pid) >= max(since, 1)]  # 0: zombies

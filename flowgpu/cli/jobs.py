"""The verbs for jobs that run here: run, ps, logs, kill."""

from __future__ import annotations

import os
import signal
import stat
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowgpu.cli.common import (
    check_name,
    engine_option,
    find_live,
    ghost_option,
    gpu_option,
    job_argument,
    json_option,
    name_argument,
    name_option,
    node_options,
    note,
    parse_signal,
    say,
    show_json,
)
from flowgpu.cli.stored import Stored, has_ended, run_from, run_stored, stored_options
from flowgpu.errors import DUMPED_EXIT, CommandNotFound, CoordinatorGone, RuntimeDirUnsafe
from flowgpu.jobs import DUMPED, EXITED, KEEP_FINISHED_SECONDS, LOST, SUSPENDED, Job, Registry
from flowgpu.nodes import MOST_NODES, LauncherPlace, Membership, place_of, secret_of
from flowgpu.render import one_line
from flowgpu.vocabulary import UNTRIED, EngineChoice, GhostChoice, GpuChoice

if TYPE_CHECKING:
    from io import FileIO

    from flowgpu.ranks import Ranks
    from flowgpu.series import Series

FOLLOW_SECONDS = 0.1
COPY_BYTES = 1 << 20


@click.command(context_settings={"allow_interspersed_args": False})
@name_option("--name", "--job")
@click.option("--nodes", metavar="N", type=click.IntRange(2, MOST_NODES), help="Be one of N nodes")
@node_options
@click.option(
    "--join", metavar="NAME", help="Be the node that srun or mpirun says", callback=check_name
)
@gpu_option
@ghost_option("auto", "auto")
@engine_option(
    "Prepare for that engine. Every job can be checkpointed by native; for replay, the calls that "
    "make CUDA's objects are recorded. auto: for both"
)
@click.option(
    "--untried",
    type=click.Choice(UNTRIED),
    help="Allow checkpoints on parts of GPUs",
)
@stored_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    name: str | None,
    nodes: int | None,
    node: int | None,
    leader: str | None,
    join: str | None,
    gpu: GpuChoice,
    ghost: GhostChoice,
    engine: EngineChoice,
    untried: str | None,
    origin: Path | None,
    command: tuple[str, ...],
    **options: Any,
) -> int:
    """Run COMMAND so that it can be checkpointed

    Its output and exit code become those of this command: 128 + N if signal N ended it. Interrupts,
    signals to end and Ctrl-Z are passed on to the job. Standard input is passed on if it is a file,
    other open descriptors if they are files, folders or named by COMMAND, as <(...).
    """
    from flowgpu import inherited, launch, start

    words = list(command)
    asked = Stored(**options)
    name, member, ranks = member_of(name, nodes, node, leader, join)
    if ranks and not ranks.hosts:
        code = 0 if has_ended(asked, name) else ranks.wait_as_guest(words, asked.on_signal)
        return asked.dumped_exit if code == DUMPED_EXIT else code
    descriptors = inherited.for_job(words, os.environ)

    def begin(series: Series | None) -> tuple[Job, int]:
        if origin:
            return run_from(origin, name, words, series, member)
        if not launch.find_program(words[0], os.environ, os.getcwd()):
            raise CommandNotFound(command=words[0])
        driver = start.driver_for(gpu)
        if gpu == "auto":
            note(f"flowgpu: using the {driver.kind} GPU ({driver.reason})")
        return start.run(
            ranks.command(words) if ranks else words,
            name=name,
            driver=driver,
            stdin=stdin_file(),
            ghost=ghost,
            engine=engine,
            untried=untried,
            descriptors=descriptors,
            series=series,
            member=member,
        )

    if not asked.store and any(asked[1:-1]):
        raise click.UsageError("an option for images needs --store")
    with ranks.hosting() if ranks and not has_ended(asked, name) else nullcontext():
        if asked.store:
            return run_stored(asked, name, words, begin, member)
        ended, code = begin(None)
    report_end(ended, code)
    return asked.dumped_exit if ended.state == DUMPED else code


def member_of(
    name: str | None,
    nodes: int | None,
    node: int | None,
    leader: str | None,
    join: str | None,
) -> tuple[str | None, Membership | None, Ranks | None]:
    """The name of a job, which of its nodes this is by these options of `run`, and the ranks of the
    node where a launcher has started several."""
    if name and join and name != join:
        raise click.UsageError("--job and --join name one job.")
    name = name or join
    if nodes is None and node is None and leader is None and join is None:
        return name, None, None
    if name is None:
        raise click.UsageError("a job of several nodes needs --job NAME.")
    try:
        place = place_of(os.environ, name) if join else None
        if join and place is None and (nodes is None or node is None):
            raise ValueError("neither Slurm nor Open MPI says which node this is")
        ranks = ranks_of(name, place)
        if place is not None:
            if nodes is None and place.nodes == 1:
                return name, None, ranks
            nodes = place.nodes if nodes is None else nodes
            node = place.node if node is None else node
            leader = leader or place.leader
        if nodes is None or node is None or leader is None:
            raise ValueError("a job of several nodes needs --nodes N, --node K and --leader")
        if node >= nodes:
            raise ValueError(f"of {nodes} nodes the last is --node {nodes - 1}")
        return name, Membership(nodes, node, leader, secret_of(os.environ)), ranks
    except ValueError as error:
        raise click.UsageError(f"{error}.") from None


def ranks_of(name: str, place: LauncherPlace | None) -> Ranks | None:
    """Those of this node, where a launcher has started several."""
    if place is None or place.local_count == 1:
        return None
    from flowgpu.ranks import Ranks

    return Ranks(Registry(), name, place)


def stdin_file() -> str | None:
    """Path of the regular file that standard input is, if nothing of it has been read yet."""
    try:
        found = os.fstat(0)
        path = os.readlink("/proc/self/fd/0")
        # A file read in part is that of a shell loop, which goes on reading it.
        unread = stat.S_ISREG(found.st_mode) and os.lseek(0, 0, os.SEEK_CUR) == 0
        return path if unread and os.path.samestat(found, os.stat(path)) else None
    except OSError:
        return None


def report_end(job: Job, code: int) -> int:
    """Say so if the job was dumped away, which is no end of its own. Returns `code`."""
    if code == DUMPED_EXIT and job.state == DUMPED:
        image = one_line(job.image or "-")
        note(f"flowgpu: {job.name} was dumped to {image}; `flowgpu restore` brings it back")
    return code


@click.command()
@name_argument
@gpu_option
def container(name: str, gpu: GpuChoice) -> None:
    """Print options for `podman run`, for a container whose runtime takes its checkpoints

    A coordinator for job NAME waits on this machine, until the container has ended. Ask for one
    before `podman container restore` as well.
    """
    from flowgpu import container as containers
    from flowgpu.start import driver_for

    driver = driver_for(gpu)
    job = containers.begin(name, driver)
    for option in containers.options(job, driver):
        say(option)


@click.command()
@click.option("--all", "show_all", is_flag=True, help="List finished jobs too")
@click.option("--prune", is_flag=True, help="Forget finished and lost jobs first")
@json_option
def ps(show_all: bool, prune: bool, as_json: bool) -> None:
    """List jobs

    Finished jobs are kept for a day. A job is lost when its coordinator and its keeper are gone.
    """
    registry = Registry()
    pruned = registry.prune(older_than=0.0 if prune else KEEP_FINISHED_SECONDS)
    if prune:
        note(f"flowgpu: forgot {len(pruned)} job{'' if len(pruned) == 1 else 's'}")
    jobs = [job for job in registry.all() if show_all or job.shown_state not in (EXITED, DUMPED)]
    if as_json:
        show_json([job.as_json() for job in jobs])
        return
    from flowgpu import render

    several = any(job.nodes > 1 for job in jobs)
    rows = [
        [
            job.name,
            job.id,
            *([f"{job.node} of {job.nodes}" if job.nodes > 1 else "-"] if several else []),
            state_words(job),
            job.gpu,
            str(job.root_pid or "-"),
            render.age(time.time() - job.created),
            " ".join(job.command),
        ]
        for job in jobs
    ]
    node = ["NODE"] if several else []
    render.table(["NAME", "ID", *node, "STATE", "GPU", "PID", "AGE", "COMMAND"], rows)


def state_words(job: Job) -> str:
    """The state, with the exit code or image that goes with it."""
    state = job.shown_state
    if state == EXITED and job.exit_code is not None:
        return f"{state} ({job.exit_code})"
    if state == DUMPED and job.image:
        return f"{state} ({job.image})"
    if state == SUSPENDED:
        from flowgpu.render import size

        state = f"{state} ({size(job.host_bytes)} in host memory)"
    return f"{state} ({job.trouble})" if job.trouble else state


@click.command()
@job_argument
@click.option("--follow", "-f", is_flag=True, help="Go on until the job ends")
def logs(job: str, follow: bool) -> None:
    """Print the output of JOB so far, both streams"""
    from flowgpu.client import write_all

    registry = Registry()
    record = registry.find(job)
    try:
        stream = registry.dir(record.id).output_log.open("rb", buffering=0)
    except FileNotFoundError:
        return  # a job that has not started yet has said nothing
    except PermissionError as error:
        raise RuntimeDirUnsafe(path=registry.base, reason=error.strerror) from error
    with stream:
        while True:
            # Asked before reading: what the job wrote before its end is then read after it.
            live = registry.find(record.id).live
            while data := read_kept(stream):
                write_all(1, data)
            if not (follow and live):
                return
            time.sleep(FOLLOW_SECONDS)


def read_kept(stream: FileIO) -> bytes:
    """The next bytes of a log that are kept, after a note of those that are not."""
    from flowgpu.output_log import kept_from, missed

    position = stream.tell()
    data = stream.read(COPY_BYTES)
    begin = kept_from(stream.fileno(), position) if data else position
    stream.seek(position + len(data))
    if begin == position:
        return data
    note(missed(begin - position).decode().rstrip())
    stream.seek(begin)
    return read_kept(stream)


@click.command()
@job_argument
@click.option(
    "--signal",
    "signum",
    metavar="SIGNAL",
    callback=lambda _context, _parameter, value: (
        None if value is None else parse_signal(value, "--signal")
    ),
    help="Send SIGNAL (TERM, SIGTERM or 15) to the job's process group instead",
)
@json_option
def kill(job: str, signum: int | None, as_json: bool) -> None:
    """End JOB with all its processes"""
    from flowgpu import start

    registry = Registry()
    record = registry.find(job)
    if record.shown_state == LOST:
        if not start.kill_lost(registry.dir(record.id), signum or signal.SIGKILL):
            raise CoordinatorGone(job=record.name)
    else:
        start.kill(registry, find_live(registry, job), signum)
    sent = signal.Signals(signum).name if signum else None
    if as_json:
        show_json({"job": record.name, "id": record.id, "signal": sent or "SIGKILL"})
    else:
        note(f"flowgpu: sent {sent} to {record.name}" if sent else f"flowgpu: ended {record.name}")

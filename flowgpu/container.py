"""A coordinator for the job of a container, and what the container is to be started with.

The job's folder has, besides what every job's has (flowgpu/jobs.py):

==============  ===================================================================
`criu.conf`     options for the CRIU of the container's runtime
`criu/`         the plugin that this CRIU loads (native/criu_plugin/container.cpp)
==============  ===================================================================
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

from flowgpu import launch
from flowgpu.errors import JobExists
from flowgpu.jobs import ID_BYTES, Job, JobDir, Registry
from flowgpu.launch import Driver, Spec, emulator_socket, ghost_env, task_env
from flowgpu.start import starting, wait_coordinator_gone, wait_started
from flowgpu.vocabulary import EngineChoice

ENGINE: EngineChoice = "replay"
"""The driver's own checkpoint was not tried on processes of another PID namespace."""
ANNOTATION = "org.criu.config"
"""By which runc is told of a file with options for CRIU."""


def job_id(name: str) -> str:
    """Job id of a container. It is the same on every machine, as the container's environment and
    mounts name the job's folder."""
    return hashlib.sha256(name.encode()).hexdigest()[: 2 * ID_BYTES]


def begin(name: str, driver: Driver) -> Job:
    """Start a coordinator for the job of a container that is to be started or restored; the one
    that is there already will do. Raises JobExists, StartFailed."""
    registry, own = Registry(), job_id(name)
    launch.preloaded()
    wait_coordinator_gone(registry, own)
    try:
        job = registry.create(
            command=["container", name],
            cwd="/",
            gpu=driver.kind,
            name=name,
            job_id=own,
            engine=ENGINE,
        )
    except JobExists:
        there = registry.find(name)
        if there.id != own:
            raise
        return there
    directory = registry.dir(own)
    _write(directory)
    spec = Spec(
        kind="container",
        id=job.id,
        name=job.name,
        command=job.command,
        cwd=job.cwd,
        gpu=driver.kind,
        job_dir=str(directory.path),
        env={},
        ghost_env=ghost_env(os.environ, driver, registry.base),
        engine=ENGINE,
    )
    with starting(spec, directory) as first:
        first.close()
        wait_started(directory)
    return job


def _write(directory: JobDir) -> None:
    folder, plugin = directory.path / "criu", launch.container_plugin()
    folder.mkdir(0o700)
    (folder / plugin.name).symlink_to(plugin)
    (directory.path / "criu.conf").write_text(f"libdir {folder}\nlink-remap\nfile-locks\n")


def options(job: Job, driver: Driver) -> Iterator[str]:
    """For `podman run`: variables, mounts and the annotation."""
    registry = Registry()
    directory = registry.dir(job.id)
    variables = task_env({}, driver, directory, registry.base, ENGINE)
    yield from (f"--env={name}={value}" for name, value in sorted(variables.items()))
    yield f"--volume={directory.path}:{directory.path}"
    libraries = launch.library_dir()
    yield f"--volume={libraries}:{libraries}:ro"
    if driver.kind == "emulated":
        path = emulator_socket(registry.base)
        yield f"--volume={path}:{path}"
    yield f"--annotation={ANNOTATION}={directory.path / 'criu.conf'}"

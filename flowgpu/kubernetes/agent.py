"""What an agent does for one PodCheckpoint, for pods of a node that goes, and for schedulers.

The status of the object says all that the next agent has to know:

| phase        | what there is |
|--------------|---------------|
| none         | nobody has begun; the agent of the pod's node claims it |
| `InProgress` | `nodeName`'s agent is at work. `containers` has each image that is asked for |
| `Ready`      | all images are whole |
| `Failed`     | the condition `Failed` says why. Nothing is tried again |

An agent that finds its node's name in an object that is in progress goes on with it: an image that
is there is taken, a checkpoint that runs is waited for, and another is asked for where there is
neither.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Iterator, MutableMapping
from datetime import UTC, datetime
from pathlib import Path

from flowgpu.errors import (
    Busy,
    CoordinatorReplaced,
    ImageDamaged,
    ImageVersion,
    OutputNotEmpty,
    words_of,
)
from flowgpu.image.manifest import Manifest
from flowgpu.image.reader import Image
from flowgpu.image.store import Store
from flowgpu.jobs import CHECKPOINTING
from flowgpu.kubernetes import (
    AT_TAINT,
    GROUP,
    KIND,
    LAST_BYTES,
    LAST_TIME,
    NOTED,
    PLURAL,
    VERSION,
    VOLCANO_LAST_TIME,
)
from flowgpu.kubernetes.api import Api, ApiError, Object
from flowgpu.kubernetes.inside import Container, Failed, Job, container_ids, first_processes

log = logging.getLogger(__name__)

IN_PROGRESS, READY, FAILED = "InProgress", "Ready", "Failed"
STOPPED = "Stopped"
MOST_ATTEMPTS = 3
"""Agents that begin with one object: a checkpoint that ends its agent is not tried for ever."""
PASSING = (Busy.__name__, CoordinatorReplaced.__name__)
RETRY_SECONDS = 0.5
BUSY_SECONDS = 600.0
CONFLICT, GONE = 409, 404


def path_of(namespace: str, name: str = "") -> str:
    """The path of PodCheckpoints, or of one."""
    path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"
    return f"{path}/{name}" if name else path


def pod_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


Locks = MutableMapping[str, asyncio.Lock]


class Taking:
    """One PodCheckpoint, from its claim to its end."""

    def __init__(
        self, api: Api, node: str, locks: Locks, namespace: str, name: str, uid: str
    ) -> None:
        """`locks`: of pods, of which one PodCheckpoint at a time is taken."""
        self._api, self._node, self._locks = api, node, locks
        self._namespace, self._name, self._uid = namespace, name, uid
        self._spec: Object = {}
        self._status: Object = {}
        self._pod: Object = {}

    async def run(self) -> None:
        """Take the images, if they are for this node's agent to take."""
        try:
            while True:
                try:
                    claimed = await self._claim()
                    break
                except Changed:
                    continue
            if claimed:
                async with self._locks.setdefault(self._status["podUID"], asyncio.Lock()):
                    await self._take()
        except Gone:
            log.info("%s/%s was deleted: its images stay", self._namespace, self._name)

    async def _claim(self) -> bool:
        """True if it is this agent's to take. Raises Gone, Changed."""
        try:
            found = await self._api.get(path_of(self._namespace, self._name))
        except ApiError as error:
            if error.status == GONE:
                raise Gone from error
            raise
        if found["metadata"]["uid"] != self._uid:
            raise Gone
        self._spec, self._status = found["spec"], found.get("status") or {}
        if self._status.get("phase") in (READY, FAILED):
            return False
        ours = self._status.get("nodeName", self._node) == self._node
        version = found["metadata"]["resourceVersion"]
        if not ours:
            return False
        try:
            self._pod = await self._api.get(pod_path(self._namespace, self._spec["sourcePodName"]))
        except ApiError as error:
            if error.status != GONE:
                raise
            await self._fail(Failed("PodNotFound", str(error)), version)
            return False
        uid, node = self._pod["metadata"]["uid"], self._pod["spec"].get("nodeName")
        if self._status.get("podUID", uid) != uid:
            await self._fail(Failed("PodEnded", "another pod has the name by now"), version)
            return False
        if not node:
            await self._fail(Failed("PodNotRunning", "the pod is on no node yet"), version)
            return False
        if node != self._node:
            return False
        attempts = self._status.get("attempts", 0) + 1
        if attempts > MOST_ATTEMPTS:
            words = f"{MOST_ATTEMPTS} agents have ended while they took it"
            await self._fail(Failed("AgentEnded", words))
            return False
        begun: Object = {"phase": IN_PROGRESS, "nodeName": node, "attempts": attempts}
        if "startTime" not in self._status:
            begun |= {"startTime": now(), "podUID": uid}
        await self._say(begun, version)
        return True

    async def _take(self) -> None:
        """Raises Gone."""
        try:
            images = [one async for one in self._images()]
        except Failed as error:
            await self._fail(error)
            return
        except Gone:
            raise
        except Exception as error:
            log.exception("%s/%s", self._namespace, self._name)
            await self._fail(Failed("InternalError", words_of(error)))
            return
        taken, created = [row for row, _ in images], [when for _, when in images]
        size = sum(one["sizeBytes"] for one in taken)
        done = {
            "phase": READY,
            "completionTime": now(),
            "sizeBytes": size,
            "pauseSeconds": max(one["pauseSeconds"] for one in taken),
            "checkpointLocation": taken[0]["checkpointLocation"],
            "conditions": conditions(True, "CheckpointCompleted", "the images are whole"),
        }
        pod = pod_path(self._namespace, self._spec["sourcePodName"])
        await note(self._api, pod, self._status["podUID"], min(created), size)
        await self._say(done)
        if self._spec.get("postCheckpointState") == STOPPED:
            await self._end_pod()

    async def _images(self) -> AsyncIterator[tuple[Object, str]]:
        """Each image that was written, as the status has it, and its time. Raises Failed."""
        found = 0
        for container in await self._containers():
            for job in await container.jobs():
                found += 1
                yield await self._image(container, job)
        if not found:
            raise Failed("NoJob", "no job of FlowGPU runs in the pod's containers")

    async def _containers(self) -> list[Container]:
        running = container_ids(self._pod)
        names = self._spec.get("containers") or list(running)
        if strange := [name for name in names if name not in running]:
            raise Failed("ContainerNotRunning", f"container {strange[0]} of the pod does not run")
        return [one for one in await containers_of(self._pod) if one.name in names]

    async def _image(self, container: Container, job: Job) -> tuple[Object, str]:
        folder = self._folder(job)
        fd = container.open(str(Path(folder).parent))
        seen = Path(f"/proc/self/fd/{fd}") / job.name
        try:
            planned = self._planned(container, job)
            begun = planned is not None
            while True:
                if planned is None:
                    planned = f"{folder}/{Store(seen).next_image().name}"
                    await self._plan(container, job, planned)
                image = seen / Path(planned).name
                if await self._dump(container, job, planned, image, begun):
                    break
                planned = None
            manifest = manifest_of(image)
        finally:
            os.close(fd)
        pause = round(manifest.pause_seconds, 3)
        written = {"sizeBytes": manifest.counts.image_bytes, "pauseSeconds": pause}
        await self._plan(container, job, planned, **written)
        return {"checkpointLocation": planned, **written}, manifest.created

    def _folder(self, job: Job) -> str:
        """The store of the job's images. Raises Failed."""
        location = self._spec.get("location")
        if location:
            return f"{location.rstrip('/')}/{job.name}"
        if job.store is None:
            words = f"job {job.name} was started without --store: give spec.location"
            raise Failed("NoLocation", words)
        return job.store

    def _planned(self, container: Container, job: Job) -> str | None:
        """The image that an agent before has asked for."""
        for row in self._status.get("containers", ()):
            if (row["name"], row["job"]) == (container.name, job.name):
                return str(row["checkpointLocation"])
        return None

    async def _plan(self, container: Container, job: Job, image: str, **written: object) -> None:
        row = {"name": container.name, "job": job.name, "checkpointLocation": image, **written}
        own = (container.name, job.name)
        rows = [
            one for one in self._status.get("containers", ()) if (one["name"], one["job"]) != own
        ]
        await self._say({"containers": [*rows, row]})

    async def _dump(
        self, container: Container, job: Job, planned: str, image: Path, begun: bool
    ) -> bool:
        """Ask for the image, once no other is written any more.

        False if the job has written another one of this name by itself. `begun`: an agent before
        has asked for it, perhaps. Raises Failed.
        """
        stop = self._spec.get("postCheckpointState") == STOPPED
        deadline = asyncio.get_running_loop().time() + BUSY_SECONDS
        while True:
            try:
                if begun:
                    await self._wait_idle(container, job)
                    if image.exists():
                        return True
                await container.dump(
                    job, planned, stop=stop, timeout=self._spec.get("timeoutSeconds")
                )
                return True
            except Failed as error:
                # The command ends with the container that the dumped job was all of.
                if image.exists():
                    return begun or error.reason != OutputNotEmpty.__name__
                late = asyncio.get_running_loop().time() > deadline
                if error.reason not in PASSING or late:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _wait_idle(self, container: Container, job: Job) -> None:
        """A checkpoint that an agent before has asked for goes on without it."""
        while any(
            one.name == job.name and one.state == CHECKPOINTING for one in await container.jobs()
        ):
            await asyncio.sleep(RETRY_SECONDS)

    async def _fail(self, error: Failed, version: str | None = None) -> None:
        said = conditions(False, error.reason, str(error))
        await self._say({"phase": FAILED, "completionTime": now(), "conditions": said}, version)

    async def _say(self, status: Object, version: str | None = None) -> None:
        """Write into the status, of this version if one is given. Raises Gone, Changed."""
        metadata = {"uid": self._uid}
        if version:
            metadata["resourceVersion"] = version
        path = path_of(self._namespace, self._name) + "/status"
        try:
            done = await self._api.merge(path, {"metadata": metadata, "status": status})
        except ApiError as error:
            if error.status == CONFLICT and version:
                raise Changed from error
            if error.status in (GONE, CONFLICT):  # another object has the name by now
                raise Gone from error
            raise
        self._status = done.get("status") or {}

    async def _end_pod(self) -> None:
        """Its jobs are dumped; the kubelet would start their commands here again."""
        path = pod_path(self._namespace, self._spec["sourcePodName"])
        try:
            await self._api.delete(path, {"preconditions": {"uid": self._status["podUID"]}})
        except ApiError as error:
            if error.status not in (GONE, CONFLICT):
                raise


class Gone(Exception):
    """The PodCheckpoint was deleted."""


class Changed(Exception):
    """It was changed since this agent has read it, perhaps by another agent."""


async def containers_of(pod: Object) -> list[Container]:
    """Those of a pod of this node that run."""
    first = await asyncio.to_thread(first_processes, pod["metadata"]["uid"])
    ids = container_ids(pod)
    return [Container(name, first[one]) for name, one in ids.items() if one in first]


async def note(api: Api, path: str, uid: str, when: str, size: int) -> None:
    """Tell schedulers until when a pod has lost nothing, and what an image of it takes."""
    noted = {LAST_TIME: when, VOLCANO_LAST_TIME: when, LAST_BYTES: str(size)}
    try:
        await api.merge(path, {"metadata": {"uid": uid, "annotations": noted}})
    except ApiError as error:  # it may have ended meanwhile
        if error.status not in (GONE, CONFLICT):
            raise


def manifest_of(image: Path) -> Manifest:
    """Raises Failed."""
    try:
        return Image(image).manifest
    except (ImageDamaged, ImageVersion) as error:
        raise Failed(type(error).__name__, str(error)) from error


def conditions(ready: bool, reason: str, message: str) -> list[Object]:
    """Both of an object that has ended."""
    said = {"reason": reason, "message": message, "lastTransitionTime": now()}
    return [
        {"type": kind, "status": str(true), **said}
        for kind, true in ((READY, ready), (FAILED, not ready))
    ]


def leaving(pods: list[Object], taints: set[str]) -> Iterator[Object]:
    """A PodCheckpoint for each running pod that wants to leave a node with these taints.

    Its name is the same each time, so that an agent that begins anew asks for none twice.
    """
    for pod in pods:
        metadata = pod["metadata"]
        wanted = metadata.get("annotations", {}).get(AT_TAINT, "")
        met = sorted(taints & {key.strip() for key in wanted.split(",")} - {""})
        if not met or "deletionTimestamp" in metadata or pod["status"].get("phase") != "Running":
            continue
        tag = hashlib.sha256(f"{metadata['uid']} {met[0]}".encode()).hexdigest()[:8]
        yield {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {
                "name": f"{metadata['name'][:200]}-{tag}",
                "namespace": metadata["namespace"],
                "annotations": {AT_TAINT: met[0]},
            },
            "spec": {"sourcePodName": metadata["name"], "postCheckpointState": STOPPED},
        }


async def newest(pod: Object) -> tuple[str, int] | None:
    """When the newest images of a pod's jobs were made, and their bytes; None unless all have one.

    The job whose newest image is the oldest would lose the most. Raises Failed.
    """
    times, size = [], 0
    for container in await containers_of(pod):
        for job in await container.jobs():
            if job.store is None:
                return None
            fd = container.open(str(Path(job.store).parent))
            try:
                store = Store(Path(f"/proc/self/fd/{fd}") / Path(job.store).name)
                names = store.names()
                if not names:
                    return None
                manifest = manifest_of(store.path / names[-1])
            finally:
                os.close(fd)
            times.append(manifest.created)
            size += manifest.counts.image_bytes
    return (min(times), size) if times else None


class Noting:
    """Pods of the node whose jobs write images by themselves."""

    def __init__(self, api: Api, node: str) -> None:
        self._api = api
        self._query = {
            "fieldSelector": f"spec.nodeName={node},status.phase=Running",
            "labelSelector": NOTED,
        }

    async def look(self) -> None:
        """Note what is newer than what is noted. Raises ApiError."""
        found = await self._api.get("/api/v1/pods", **self._query)
        for pod in found["items"]:
            metadata = pod["metadata"]
            try:
                now_there = await newest(pod)
            except Failed as error:
                log.warning("%s/%s: %s", metadata["namespace"], metadata["name"], error)
                continue
            noted = metadata.get("annotations", {}).get(LAST_TIME, "")
            if now_there and now_there[0] > noted:
                path = pod_path(metadata["namespace"], metadata["name"])
                await note(self._api, path, metadata["uid"], *now_there)


class Node:
    """The node's taints, and the pods that want to leave for them."""

    def __init__(self, api: Api, name: str) -> None:
        self._api, self._name = api, name
        self._taints: set[str] = set()

    async def look(self) -> None:
        """Ask for images of pods once a taint is there that was not. Raises ApiError."""
        node = await self._api.get(f"/api/v1/nodes/{self._name}")
        taints = {taint["key"] for taint in node["spec"].get("taints", ())}
        new = taints - self._taints
        if new:
            found = await self._api.get("/api/v1/pods", fieldSelector=f"spec.nodeName={self._name}")
            for wanted in leaving(found["items"], new):
                await self._ask(wanted)
        self._taints = taints

    async def _ask(self, wanted: Object) -> None:
        log.info("%s leaves the node", wanted["spec"]["sourcePodName"])
        try:
            await self._api.create(path_of(wanted["metadata"]["namespace"]), wanted)
        except ApiError as error:
            if error.status != CONFLICT:
                raise

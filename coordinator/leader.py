"""The leader of a job of several nodes: a part of node 0's coordinator.

Every node's coordinator dials it, its own as well (agent.py). It takes requests for checkpoints,
suspensions and resumes from any of them, leads all nodes through one (epoch.py), and lets the nodes
of a restore go on together. What it has in memory is worth nothing once it has ended: the next one
of node 0 begins anew, and the image's files say what was committed.

Threads: one accepts, one receives from each connection, one does each request. `_changed` guards
all that they share; messages are sent while it is held, so that each node gets them in one order.
Beats alone are sent without it, and have no order.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flowgpu
from coordinator.cut_of_nodes import Word
from coordinator.epoch import Epoch, Verdict, is_committed, settle, take_away
from coordinator.node_stream import BEAT_SECONDS, Message, NodeStream, StreamEnded
from coordinator.others import WAYS, Barrier
from coordinator.phases import UNDO_SECONDS
from coordinator.reunion import Reunion
from flowgpu import nodes
from flowgpu.errors import (
    Busy,
    FlowError,
    InternalError,
    LeaderGone,
    NodeFailed,
    NodesDisagree,
    NodesMissing,
    NotSuspended,
    OutputUnusable,
    PeerIsIdle,
    words_of,
)
from flowgpu.image import job_file, layout
from flowgpu.image.job_file import JobFile, Part
from flowgpu.image.writer import check_output
from flowgpu.nodes import Membership
from flowgpu.options import CheckpointOptions, SuspendOptions

log = logging.getLogger(__name__)

JOIN_SECONDS = 10.0
"""For which a request waits for nodes that have not dialled yet."""
END_SECONDS = 2 * UNDO_SECONDS
"""For nodes to say what became of an epoch that is decided."""
LOST_SECONDS = 10.0
"""After which a node that is lost in a restore fails it on all."""
STRANGERS = 16
"""Connections at a time of which it is not known yet who they are."""
ACCEPT_SECONDS = 0.1


class Leader:
    """It listens from the call on. Raises LeaderGone where it cannot."""

    def __init__(self, job: str, member: Membership) -> None:
        self._job = job
        self._member = member
        self._changed = threading.Condition()
        self._streams: dict[int, NodeStream] = {}
        self._ids: dict[int, str] = {}
        self._ended: set[int] = set()
        self._epoch: Epoch | None = None
        self._image: Path | None = None  # of a checkpoint under way
        self._doing = ""
        self._asked = 0  # requests that are under way
        self._ready: dict[str, dict[int, Any]] = {}  # by the place that restores have come to
        self._lost_since: dict[int, float] = {}  # nodes that others wait for in a restore
        self._restore_failed: FlowError | None = None
        self._reunion = Reunion()
        self._strangers = threading.Semaphore(STRANGERS)
        host, port = nodes.address(member.leader)
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(place[:2], family=family, backlog=128)
        except OSError as error:
            reason = f"it cannot listen there: {error.strerror or error}"
            raise LeaderGone(job=job, leader=member.leader, reason=reason) from error
        for work in (self._accept, self._beat):
            threading.Thread(target=work, daemon=True, name="leader").start()

    def finish(self, seconds: float) -> None:
        """Answer what has been asked, for so long at most, and let nobody dial any more."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._asked and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
        self._listener.close()

    # Connections

    def _accept(self) -> None:
        while True:
            self._strangers.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                self._strangers.release()
                if self._listener.fileno() < 0:
                    return
                log.error("a node cannot connect: %s", error)
                time.sleep(ACCEPT_SECONDS)
                continue
            threading.Thread(
                target=self._serve, args=(connection,), daemon=True, name="node"
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        stream, node = None, -1
        try:
            try:
                stream = NodeStream(connection, self._member.secret, dialled=False)
                node = self._welcome(stream)
            finally:
                self._strangers.release()
            while True:
                self._hear(node, stream.receive())
        except StreamEnded as error:
            log.info("node %d: %s", node, error)
            self._lost(node, stream, str(error))
        except Exception as error:
            log.exception("node %d", node)
            self._lost(node, stream, words_of(error))

    def _welcome(self, stream: NodeStream) -> int:
        """Take in who it is. Raises StreamEnded for one that is none of the job."""
        hello = stream.receive()
        node = int(hello["node"])
        if why := self._against(hello, node):
            stream.send("refused", error=NodesDisagree(job=self._job, reason=why).as_dict())
            raise StreamEnded(why)
        with self._changed:
            before = self._streams.get(node)
            self._streams[node] = stream
            self._ids[node] = hello["id"]
            self._ended.discard(node)
            self._lost_since.pop(node, None)
            self._changed.notify_all()
            if before is not None:
                before.close()
            stream.send("welcome", nodes=sorted(self._streams))
            if self._restore_failed is not None:
                self._tell(node, "restore-failed", error=self._restore_failed.as_dict())
        log.info("node %d is there", node)
        return node

    def _against(self, hello: Message, node: int) -> str:
        if hello["version"] != flowgpu.__version__:
            return f"node {node} has FlowGPU {hello['version']}, node 0 {flowgpu.__version__}"
        if hello["job"] != self._job:
            return f"node {node} is of job {hello['job']!r}"
        if hello["count"] != self._member.count or not 0 <= node < self._member.count:
            return f"it is node {node} of {hello['count']}, and there are {self._member.count}"
        with self._changed:
            if node in self._streams and self._ids[node] != hello["id"]:
                return f"another node {node} is there already"
        if hello["epoch"] != self._member.epoch:
            return f"node {node} goes on from another checkpoint"
        return ""

    def _lost(self, node: int, stream: NodeStream | None, why: str) -> None:
        if stream is None:
            return
        stream.close()
        with self._changed:
            if self._streams.get(node) is not stream:
                return  # it has dialled again
            del self._streams[node]
            self._reunion.leave(node)
            for ready in self._ready.values():
                if node in ready and len(ready) < self._member.count:
                    del ready[node]
                    self._lost_since[node] = time.monotonic()
            if self._epoch is not None:
                self._abort_if(self._epoch.gone(node, self._no_part(node, why)))
            self._changed.notify_all()

    def _no_part(self, node: int, why: str) -> FlowError:
        return FlowError(reason=f"the connection to its coordinator has ended: {why}")

    def _beat(self) -> None:
        while self._listener.fileno() >= 0:
            time.sleep(BEAT_SECONDS)
            # Who commits has the lock while the disk writes, which may be slow.
            for stream in list(self._streams.values()):
                try:
                    stream.send("beat")
                except StreamEnded:
                    stream.close()  # who receives from it does the rest
            if self._changed.acquire(blocking=False):
                try:
                    self._fail_without_lost()
                finally:
                    self._changed.release()

    def _fail_without_lost(self) -> None:
        """Fail a restore that waits for a node that has been lost for long."""
        for node, since in self._lost_since.items():
            if time.monotonic() >= since + LOST_SECONDS:
                self._fail_restore(node, "its coordinator has ended while others waited for it")

    def _broadcast(self, kind: str, **fields: Any) -> None:
        # Its own node, 0, is the last: what stops or ends that must not keep it from the others.
        for node in sorted(self._streams, reverse=True):
            self._tell(node, kind, **fields)

    def _tell(self, node: int, kind: str, **fields: Any) -> None:
        """Send it, if the node is there: what it misses it asks for, or undoes by itself."""
        stream = self._streams.get(node)
        if stream is not None:
            try:
                stream.send(kind, **fields)
            except StreamEnded:
                stream.close()  # who receives from it does the rest

    # What nodes say

    def _hear(self, node: int, message: Message) -> None:
        with self._changed:
            match message["is"]:
                case "beat":
                    pass
                case "ask":
                    self._asked += 1
                    asked = (node, self._streams.get(node), message)
                    threading.Thread(
                        target=self._answer, args=asked, daemon=True, name="request"
                    ).start()
                case "doubt":
                    self._decide(node, Path(message["image"]), message["epoch"])
                case "ready":
                    place = message["place"]
                    ready = self._ready.setdefault(place, {})
                    before = len(ready)
                    ready[node] = message["said"]
                    if before == self._member.count:  # it has missed the word
                        self._tell(node, "all-ready", place=place, said=ready)
                    elif len(ready) == self._member.count:
                        log.info("all nodes have come to %s", place)
                        self._broadcast("all-ready", place=place, said=ready)
                case "renewal":
                    told = self._reunion.come(node, message["token"], message["rows"])
                    for other, ids in told.items():
                        self._tell(other, "renewed", ids=ids)
                case "unready":
                    self._reunion.leave(node, message["token"])
                case "restore-failed":
                    self._fail_restore(node, _said(message["error"]))
                case "ended":
                    self._ended.add(node)
                case kind:
                    self._hear_of_epoch(node, kind, message)
            self._changed.notify_all()

    def _fail_restore(self, node: int, why: str) -> None:
        if self._restore_failed is None:
            self._restore_failed = NodeFailed(node=node, job=self._job, reason=why)
            self._broadcast("restore-failed", error=self._restore_failed.as_dict())

    def _hear_of_epoch(self, node: int, kind: str, message: Message) -> None:
        epoch = self._epoch
        if epoch is None or epoch.id != message.get("epoch"):
            return  # of one that is over
        if kind == "failed":
            error = FlowError.from_dict(message["error"])
            self._abort_if(epoch.failed(node, error, bool(message["disturbed"])))
        elif kind == "done":
            epoch.done(node, message["result"])
        elif kind == "word" and epoch.verdict is Verdict.OPEN:
            number = message["cut"]
            told = epoch.cut(number).hear(node, Word.from_fields(message["word"]))
            for other, order in told.items():
                self._tell(other, "order", epoch=epoch.id, cut=number, order=order.to_fields())
        elif kind == "exchange":
            place = message["barrier"]
            said = epoch.exchange(node, place, message["said"])
            if said is not None:
                self._broadcast("go", epoch=epoch.id, barrier=place, said=said)
        elif kind == "reached":
            barrier = Barrier(message["barrier"])
            said = epoch.reached(node, barrier, message["said"])
            if said is not None and barrier is Barrier.COMMIT and self._image is not None:
                self._commit(epoch, self._image)
            elif said is not None:
                if barrier is Barrier.FILLED and not any(said.values()):
                    self._abort_if(epoch.failed(None, NotSuspended(job=self._job)))
                    return
                if barrier is WAYS[epoch.what][-1]:
                    epoch.committed()
                log.info("epoch %s: all nodes have come through %s", epoch.id, barrier.value)
                self._broadcast("go", epoch=epoch.id, barrier=barrier.value, said=said)

    def _abort_if(self, aborts: bool) -> None:
        epoch = self._epoch
        if aborts and epoch is not None and epoch.error is not None:
            log.info("epoch %s is aborted: %s", epoch.id, epoch.error)
            if self._image is not None:
                take_away(self._image, epoch.id)
            self._broadcast("abort", epoch=epoch.id, error=self._named(epoch).as_dict())

    def _named(self, epoch: Epoch) -> FlowError:
        if epoch.failed_node is None or isinstance(epoch.error, (NodeFailed, PeerIsIdle)):
            return epoch.error or FlowError(reason="a node has failed")
        reason = _reason(epoch.error)
        return NodeFailed(node=epoch.failed_node, job=self._job, reason=reason)

    def _commit(self, epoch: Epoch, image: Path) -> None:
        file = JobFile(
            epoch=epoch.id,
            job=self._job,
            leader=self._member.leader,
            key=secrets.token_hex(32),
            parts=tuple(Part(node, *epoch.votes[node]) for node in sorted(epoch.nodes)),
        )
        text = file.to_json()
        mark = image / job_file.mark_name(epoch.id)
        try:
            with open(mark, "r+") as target:
                target.write(text)
                target.flush()
                layout.sync(mark)
            job_file.sync_rename(mark, image / job_file.JOB_FILE)
        except OSError as error:
            if is_committed(image, epoch.id):
                log.warning("%s: %s", image, error)  # it is there, if not on the disk yet
            else:
                reason = f"{job_file.JOB_FILE}: {error.strerror or error}"
                failed = OutputUnusable(path=image, reason=reason)
                self._abort_if(epoch.failed(None, failed))
                return
        epoch.committed()
        log.info("epoch %s is committed", epoch.id)
        self._broadcast("commit", epoch=epoch.id, text=text)

    def _decide(self, node: int, image: Path, epoch_id: str) -> None:
        """Tell a node in doubt what became of an epoch, once that is known."""
        epoch = self._epoch
        if epoch is not None and epoch.id == epoch_id:
            if epoch.verdict is Verdict.OPEN:
                return  # it hears it with the others
        else:
            settle(image, epoch_id)
        if is_committed(image, epoch_id):
            text = (image / job_file.JOB_FILE).read_text()
            self._tell(node, "commit", epoch=epoch_id, text=text)
        else:
            error = NodeFailed(node=0, job=self._job, reason="the checkpoint was given up")
            self._tell(node, "abort", epoch=epoch_id, error=error.as_dict())

    # Requests

    def _answer(self, node: int, stream: NodeStream | None, message: Message) -> None:
        number, what = message["number"], message["what"]
        try:
            result = self._take(what, message["options"], node, stream)
        except FlowError as error:
            self._reply(node, number, error=error.as_dict())
        except Exception as error:
            action = f"a {what} of all nodes"
            log.exception(action)
            internal = InternalError(action=action, error=words_of(error))
            self._reply(node, number, error=internal.as_dict())
        else:
            self._reply(node, number, result=result)
        with self._changed:
            self._asked -= 1
            self._changed.notify_all()

    def _reply(self, node: int, number: int, **fields: Any) -> None:
        with self._changed:
            self._tell(node, "answer", number=number, **fields)

    def _take(
        self, what: str, fields: dict[str, Any], node: int, stream: NodeStream | None
    ) -> dict[str, Any]:
        """One checkpoint, suspension or resume of all nodes, begun again where processes that come
        and go disturb it.

        Raises FlowError, with the job as it was.
        """
        began = time.monotonic()
        image, seconds = None, 0.0
        if what == "checkpoint":
            checkpoint = CheckpointOptions.from_fields(fields)
            image, seconds = checkpoint.output, checkpoint.pause_seconds
        elif what == "suspension":
            seconds = SuspendOptions.from_fields(fields).pause_seconds
        with self._only_one(what, image):
            self._wait_for_all()
            self._refuse_without_asker(node, stream)
            if image is not None:
                check_output(image)
            while True:
                epoch = self._run(what, fields, image)
                if epoch.verdict is Verdict.COMMITTED:
                    return self._result(epoch, image, began)
                error = self._named(epoch)
                if not epoch.disturbed or time.monotonic() >= began + seconds:
                    raise error
                log.info("taken again: %s", error)

    @contextlib.contextmanager
    def _only_one(self, what: str, image: Path | None) -> Iterator[None]:
        with self._changed:
            if self._doing:
                raise Busy(job=self._job, action=f"a {self._doing}")
            self._doing, self._image = what, image
        try:
            yield
        finally:
            with self._changed:
                self._doing, self._image, self._epoch = "", None, None

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + JOIN_SECONDS
        with self._changed:
            while missing := [n for n in range(self._member.count) if n not in self._streams]:
                left = deadline - time.monotonic()
                if left <= 0 or set(missing) <= self._ended:
                    raise NodesMissing(job=self._job, nodes=", ".join(map(str, missing)))
                self._changed.wait(left)

    def _refuse_without_asker(self, node: int, stream: NodeStream | None) -> None:
        """Whose connection has ended was told that this has failed: it is not to be begun then."""
        with self._changed:
            if self._streams.get(node) is not stream:
                reason = f"the connection to node {node}, which has asked, has ended"
                raise LeaderGone(job=self._job, leader=self._member.leader, reason=reason)

    def _run(self, what: str, fields: dict[str, Any], image: Path | None) -> Epoch:
        """One try."""
        epoch = Epoch(secrets.token_hex(8), frozenset(range(self._member.count)), what)
        made = image is not None and self._make_folder(image, epoch)
        with self._changed:
            self._epoch = epoch
            log.info("epoch %s begins: a %s", epoch.id, what)
            self._broadcast("begin", epoch=epoch.id, what=what, options=fields, made=made)
            for node in epoch.nodes - self._streams.keys():
                self._abort_if(epoch.gone(node, self._no_part(node, "just now")))
            self._wait_until_over(epoch)
        if epoch.verdict is not Verdict.COMMITTED and image is not None and made:
            with contextlib.suppress(OSError):  # a node that is cut off has not removed its part
                image.rmdir()
        return epoch

    def _make_folder(self, image: Path, epoch: Epoch) -> bool:
        """With the file that names the epoch in it. True: it was not there before."""
        made = not image.exists()
        try:
            image.mkdir(layout.DIR_MODE, parents=True, exist_ok=True)
            with open(image / job_file.mark_name(epoch.id), "xb", opener=layout.private):
                pass
        except OSError as error:
            raise OutputUnusable(path=image, reason=error.strerror or str(error)) from error
        return made

    def _wait_until_over(self, epoch: Epoch) -> None:
        deadline = None
        while not epoch.over:
            if epoch.verdict is not Verdict.OPEN:
                deadline = deadline or time.monotonic() + END_SECONDS
                if time.monotonic() >= deadline:
                    log.warning("nothing is heard of nodes %s", epoch.missing)
                    epoch.give_up(epoch.missing)
                    return
            self._changed.wait(1.0)

    def _result(self, epoch: Epoch, image: Path | None, began: float) -> dict[str, Any]:
        """The reports of all nodes as one: the longest times, and all bytes."""
        found = [epoch.results[node] for node in sorted(epoch.results)]
        if image is None and (missing := sorted(epoch.nodes - epoch.results.keys())):
            nodes = ", ".join(map(str, missing))
            raise NodesMissing(job=self._job, nodes=f"{nodes}, once the {epoch.what} was done")
        if not found:
            raise NodesMissing(job=self._job, nodes="all, once the image was complete")
        whole = together(found)
        if image is not None:
            whole["image"] = str(image)
        whole["total_seconds"] = time.monotonic() - began
        whole["nodes"] = {node: epoch.results.get(node) for node in sorted(epoch.nodes)}
        return whole


def together(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The reports of several nodes as one, with the words of the first."""
    whole = dict(reports[0])
    for name, value in whole.items():
        all_of_it = [report[name] for report in reports]
        if isinstance(value, list):
            whole[name] = [one for part in all_of_it for one in part]
        elif name == "phases":
            names = dict.fromkeys(phase for part in all_of_it for phase in part)
            whole[name] = {p: max(part.get(p, 0.0) for part in all_of_it) for p in names}
        elif name.endswith("_seconds"):
            whole[name] = max((one for one in all_of_it if one is not None), default=None)
        elif isinstance(value, int) and not isinstance(value, bool):
            whole[name] = sum(all_of_it)
    return whole


def _reason(error: FlowError | None) -> str:
    return str(error).rstrip(".")


def _said(error: Mapping[str, Any]) -> str:
    return _reason(FlowError.from_dict(dict(error)))

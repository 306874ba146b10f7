"""A node's connection to the leader of its job (leader.py), and its part in what that leads.

Threads: one dials and receives, one sends that the node lives, and one takes each checkpoint that
the leader begins. `_changed` guards what they share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flowgpu
from coordinator.cut_of_nodes import Order, Part, Word
from coordinator.epoch import DOUBT_SECONDS, is_committed, take_away
from coordinator.node_stream import BEAT_SECONDS, Message, NodeStream, StreamEnded, dial
from coordinator.others import Barrier, Others
from coordinator.process import alive
from coordinator.renewal import Ranks
from coordinator.session import Progress, RunningJob
from flowgpu import nodes
from flowgpu.errors import FlowError, JobEnded, LeaderGone, NodesMissing
from flowgpu.image import job_file, layout
from flowgpu.nodes import Membership
from flowgpu.options import CheckpointOptions

log = logging.getLogger(__name__)

ASK_SECONDS = 10.0
"""For which a request waits for a leader that has not been reached yet."""
LEADER_SECONDS = 120.0
ALL_SECONDS = 600.0
"""For which a restore waits for its leader, and then for all nodes."""
DIAL_SECONDS, FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 10.0, 0.05, 2.0
TOLD_SECONDS = 10.0
"""From when on `ps` says that the leader is not reached."""
TELL_SECONDS = 10.0
LOOK_SECONDS = 0.5
LATE_SECONDS = 1.0
"""For which an answer is waited for whose connection has ended, once nothing else is."""


class Agent:
    """The connection, made again whenever it ends."""

    def __init__(
        self,
        job: RunningJob,
        member: Membership,
        take_part: Callable[[Round], None],
        on_trouble: Callable[[str], None],
    ) -> None:
        """`take_part` takes this node's part in a checkpoint; `on_trouble` is for `ps`."""
        self.job = job
        self.member = member
        self.changed = threading.Condition()
        self.stream: NodeStream | None = None  # once the leader has said welcome
        self._take_part = take_part
        self._on_trouble = on_trouble
        self._why = "it was not reached yet"
        self._refused: FlowError | None = None
        self._round: Round | None = None
        self._numbers = itertools.count()
        self._answers: dict[int, Message] = {}
        self._progress: Progress | None = None
        self._doubt: tuple[Path, str] | None = None  # of a coordinator before this one
        self._decided: bool | None = None
        self._waits_with: Message | None = None  # in a restore: place, and what is said there
        self._passed: dict[str, list[Any]] = {}  # by place, what the others have said
        self._restore_failed: FlowError | None = None
        self._renewal: Message | None = None  # communicators that wait for ranks of other nodes
        self._renewed: dict[int, bytes] = {}  # ids that have come for them
        self._closed = False
        for work in (self._run, self._beat):
            threading.Thread(target=work, daemon=True, name="agent").start()

    def ask(self, what: str, fields: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Have the leader do it on all nodes (WAYS in others.py), with these options, and give its
        report. Raises FlowError.

        Where the leader's answer is lost, this node's part tells what became of it.
        """
        self._progress = progress
        stream = self._wait_for_leader(ASK_SECONDS)
        number, before = next(self._numbers), self._round
        try:
            stream.send("ask", number=number, what=what, options=fields)
        except StreamEnded as error:
            raise self.gone(str(error)) from error
        with self.changed:
            while number not in self._answers and self.stream is stream:
                self.changed.wait(LOOK_SECONDS)
            image = Path(fields.get("output", ""))
            own = self._wait_for_own(number, before, what, image)
            answer = self._answers.pop(number, None)
        if answer is None:
            if own is not None and (report := own.report()) is not None:
                return report
            raise self.gone(self._why)
        if "error" in answer:
            raise FlowError.from_dict(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _wait_for_own(
        self, number: int, before: Round | None, what: str, image: Path
    ) -> Round | None:
        """Wait for an answer that may come by the next connection, or until this node's part in
        what was asked for is over. Gives that part, None if there is none; `changed` is held."""
        deadline = math.inf
        while number not in self._answers:
            own = self._round if self._round is not before else None
            if own is not None and (own.what, own.image) != (what, image):
                own = None
            if own is not None and not own.over:
                deadline = math.inf
            elif deadline == math.inf:
                deadline = time.monotonic() + LATE_SECONDS
            elif time.monotonic() >= deadline:
                return own
            self.changed.wait(LOOK_SECONDS)
        return None

    def wait_for_all(self, place: str, said: Any) -> list[Any]:
        """This node's restore has come there: wait until all have. Gives what each of the others
        has said there. Raises FlowError."""
        log.info("waits for all nodes: %s", place)
        ready = {"place": place, "said": said}
        with self.changed:
            self._waits_with = ready
        with contextlib.suppress(StreamEnded):  # said again once there is another connection
            self._wait_for_leader(LEADER_SECONDS).send("ready", **ready)
        deadline = time.monotonic() + ALL_SECONDS
        reached = time.monotonic()
        with self.changed:
            while place not in self._passed:
                if self._restore_failed is not None:
                    raise self._restore_failed
                if self.stream is not None:
                    reached = time.monotonic()
                elif time.monotonic() >= reached + LEADER_SECONDS:
                    raise self.gone(self._why)
                if time.monotonic() >= deadline:
                    missing = f"those that node {self.member.node} has waited for"
                    raise NodesMissing(job=self.job.name, nodes=missing)
                self.changed.wait(LOOK_SECONDS)
            return self._passed[place]

    def ids_elsewhere(
        self, ranks: Mapping[int, Ranks], ids: Mapping[int, bytes], seconds: float
    ) -> dict[int, bytes]:
        """As renewal.IdsElsewhere."""
        rows = [[one, *own, ids.get(one, b"").hex()] for one, own in ranks.items()]
        token = secrets.token_hex(8)
        deadline = time.monotonic() + seconds
        with self.changed:
            self._renewal, self._renewed = {"token": token, "rows": rows}, {}
            self._say_renewal()
            while self._renewed.keys() < ranks.keys():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self.changed.wait(min(left, LOOK_SECONDS))
            found, self._renewal = self._renewed, None
            if found.keys() < ranks.keys() and self.stream is not None:
                with contextlib.suppress(StreamEnded):
                    self.stream.send("unready", token=token)
        log.info("%d of %d communicators across nodes have ids", len(found), len(ranks))
        return found

    def restore_failed(self, error: FlowError) -> None:
        """Tell the others that this node is not going to be restored, if they can be told."""
        with self.changed:
            if self._restore_failed is not None:
                return
        with contextlib.suppress(FlowError, StreamEnded):
            self._wait_for_leader(TELL_SECONDS).send("restore-failed", error=error.as_dict())

    def decide(self, image: Path, epoch: str) -> bool:
        """What became of an epoch for which a coordinator before this one may have voted.

        Waits until that is known. True: it is committed.
        """
        shared = (image / job_file.mark_name(epoch)).exists()
        with self.changed:
            self._doubt = image, epoch
            self._say_doubt()
        doubt = Doubt(image, epoch, shared)
        while True:
            with self.changed:
                if self._decided is not None:
                    return self._decided
                self.changed.wait(LOOK_SECONDS)
                reached = self.stream is not None
            decided = doubt.look(reached)
            if decided is not None:
                return decided

    def ended(self) -> None:
        """The job has ended on this node. What this node has to say of its part is said first: the
        process may end."""
        deadline = time.monotonic() + TELL_SECONDS
        with self.changed:
            while self._round is not None and not self._round.over:
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self.changed.wait(left)
            self._closed = True
            if self.stream is not None:
                with contextlib.suppress(StreamEnded):
                    self.stream.send("ended")

    def say(self, stream: NodeStream | None, kind: str, **fields: Any) -> None:
        """Tell the leader of this connection. Raises LeaderGone."""
        with self.changed:
            if stream is None or self.stream is not stream:
                raise self.gone(self._why)
        try:
            stream.send(kind, **fields)
        except StreamEnded as error:
            raise self.gone(str(error)) from error

    def gone(self, why: str) -> FlowError:
        """That the leader cannot be asked, and why."""
        if self._refused is not None:
            return self._refused
        return LeaderGone(job=self.job.name, leader=self.member.leader, reason=why)

    def trouble(self, text: str) -> None:
        """Let `ps` show it."""
        self._on_trouble(text)

    def _wait_for_leader(self, seconds: float) -> NodeStream:
        deadline = time.monotonic() + seconds
        with self.changed:
            while self.stream is None:
                left = deadline - time.monotonic()
                if left <= 0 or self._refused is not None:
                    raise self.gone(self._why)
                self.changed.wait(left)
            return self.stream

    # The connection

    def _run(self) -> None:
        pause, cut_off, told = FIRST_PAUSE_SECONDS, time.monotonic(), False
        while self._refused is None and not self._closed:
            try:
                stream = self._join()
            except StreamEnded as error:
                self._why = str(error)
                if not told and time.monotonic() - cut_off >= TOLD_SECONDS:
                    told = True
                    self._on_trouble(f"its leader at {self.member.leader}: {error}")
                time.sleep(pause)
                pause = min(2 * pause, MOST_PAUSE_SECONDS)
                continue
            if told:
                told = False
                self._on_trouble("")
            pause = FIRST_PAUSE_SECONDS
            try:
                while True:
                    self._hear(stream.receive())
            except StreamEnded as error:
                log.info("the leader: %s", error)
                self._why = str(error)
            except Exception:
                log.exception("the leader")
                self._why = "what it said was not understood"
            stream.close()
            cut_off = time.monotonic()
            with self.changed:
                self.stream = None
                self.changed.notify_all()
        if self._refused is not None:
            log.error("%s", self._refused)
            self._on_trouble(str(self._refused))

    def _join(self) -> NodeStream:
        """Dial, and say who this is. Raises StreamEnded."""
        member = self.member
        stream = dial(nodes.address(member.leader), member.secret, DIAL_SECONDS)
        try:
            stream.send(
                "hello",
                version=flowgpu.__version__,
                job=self.job.name,
                id=self.job.id,
                node=member.node,
                count=member.count,
                epoch=member.epoch,
            )
            try:
                answer = stream.receive()
            except StreamEnded as error:
                why = f"{error}; is {nodes.SECRET} the same there, and is it node 0 of this job?"
                raise StreamEnded(why) from error
            if answer["is"] == "refused":
                with self.changed:
                    self._refused = FlowError.from_dict(answer["error"])
                    self.changed.notify_all()
                raise StreamEnded(str(self._refused))
            with self.changed:
                self.stream = stream
                self.job.path = stream.own_host
                waits = self._waits_with
                if waits is not None and waits["place"] not in self._passed:
                    stream.send("ready", **waits)
                self._say_doubt()
                self._say_renewal()
                if self._round is not None and self._round.over:
                    self._round.say_done()  # it may not have been heard
                self.changed.notify_all()
        except BaseException:
            with self.changed:
                self.stream = None
            stream.close()
            raise
        log.info("the leader at %s is reached", member.leader)
        return stream

    def _say_doubt(self) -> None:
        """Ask what became of what this node, or a coordinator before, has voted for."""
        doubts = [self._doubt] if self._doubt else []
        if self._round is not None and self._round.in_doubt:
            doubts.append((self._round.image, self._round.id))
        if self.stream is not None:
            for image, epoch in doubts:
                with contextlib.suppress(StreamEnded):
                    self.stream.send("doubt", image=str(image), epoch=epoch)

    def _say_renewal(self) -> None:
        if self.stream is not None and self._renewal is not None:
            with contextlib.suppress(StreamEnded):  # said again once there is another connection
                self.stream.send("renewal", **self._renewal)

    def _beat(self) -> None:
        while not self._closed:
            time.sleep(BEAT_SECONDS)
            stream = self.stream  # who writes to a slow disk may have the lock
            if stream is not None:
                with contextlib.suppress(StreamEnded):
                    stream.send("beat")

    def _hear(self, message: Message) -> None:
        with self.changed:
            match message["is"]:
                case "begin":
                    self._begin(message)
                case "go" | "order" | "abort" | "commit":
                    self._go_on(message)
                case "answer":
                    self._answers[message["number"]] = message
                case "renewed":
                    for token, communicator, id_ in message["ids"]:
                        if self._renewal is not None and self._renewal["token"] == token:
                            self._renewed[communicator] = bytes.fromhex(id_)
                case "all-ready":
                    message["said"].pop(str(self.member.node), None)
                    self._passed[message["place"]] = list(message["said"].values())
                case "restore-failed":
                    self._restore_failed = FlowError.from_dict(message["error"])
            self.changed.notify_all()

    def _begin(self, message: Message) -> None:
        assert self.stream is not None
        progress = self._progress or (lambda phase, done, total: None)
        self._round = Round(self, self.stream, message, progress)
        threading.Thread(
            target=self._take_part, args=(self._round,), daemon=True, name="round"
        ).start()

    def _go_on(self, message: Message) -> None:
        kind, epoch = message["is"], message["epoch"]
        if self._round is not None and self._round.id == epoch:
            self._round.hear(message)
        elif self._doubt is not None and self._doubt[1] == epoch and kind in ("abort", "commit"):
            image, _ = self._doubt
            if kind == "commit":
                write_job_file(image, epoch, message["text"])
            self._doubt, self._decided = None, kind == "commit"
            if self.stream is not None:
                with contextlib.suppress(StreamEnded):
                    self.stream.send("done", epoch=epoch, result=None)


class Doubt:
    """What a node that has voted can see by itself of what became of an epoch."""

    def __init__(self, image: Path, epoch: str, shared: bool) -> None:
        """`shared`: it has seen the leader's file in its folder."""
        self._image, self._epoch, self._shared = image, epoch, shared
        self._cut_off: float | None = None

    def look(self, reached: bool) -> bool | None:
        """True: it is committed; False: it never will be; None: not known.

        `reached`: there is a leader, which says it sooner or later.
        """
        if reached:
            self._cut_off = None
            return None
        now = time.monotonic()
        if self._cut_off is None:
            self._cut_off = now
        if is_committed(self._image, self._epoch):
            return True
        if not self._shared or now - self._cut_off < DOUBT_SECONDS:
            return None
        take_away(self._image, self._epoch)
        return is_committed(self._image, self._epoch)


class Round(Others):
    """This node's part in one checkpoint, suspension or resume of all of them."""

    alone = False

    def __init__(
        self,
        agent: Agent,
        stream: NodeStream,
        message: Message,
        progress: Progress,
    ) -> None:
        """`message`: that it begins."""
        self.id: str = message["epoch"]
        self.what: str = message["what"]
        self.fields: dict[str, Any] = message["options"]
        self.image = Path(self.fields.get("output", ""))
        """That of all nodes, in a checkpoint."""
        self.progress = progress
        self.in_doubt = False
        self.over = False
        """True once this node has done its part, or has undone it."""
        self._agent = agent
        self._stream = stream
        self._through: dict[str, list[Any]] = {}
        self._error: FlowError | None = None
        self._committed = False
        self._result: dict[str, Any] | None = None
        self._exchanges = self._cuts = 0
        self._orders: dict[int, Order] = {}  # the newest of each cut
        self._made: bool = message["made"] or not self.image.exists()
        """The folder of the image was not there before."""
        self._shared = (self.image / job_file.mark_name(self.id)).exists()

    @property
    def options(self) -> CheckpointOptions:
        """Those of this node's checkpoint."""
        asked = CheckpointOptions.from_fields(self.fields)
        part = self.image / job_file.part_name(self._agent.member.node)
        return dataclasses.replace(asked, output=part)

    def hear(self, message: Message) -> None:
        """What the leader says of it; `Agent.changed` is held."""
        if message["is"] == "go":
            said = message["said"]
            said.pop(str(self._agent.member.node), None)
            self._through[message["barrier"]] = list(said.values())
        elif message["is"] == "order":
            self._orders[message["cut"]] = Order.from_fields(message["order"])
        elif message["is"] == "abort":
            self._error = FlowError.from_dict(message["error"])
        else:
            write_job_file(self.image, self.id, message["text"])
            self._committed = True

    def reached(self, barrier: Barrier, deadline: float, said: Any = None) -> list[Any]:
        return self._wait("reached", barrier.value, deadline, said)

    def exchange(self, deadline: float, said: Any) -> list[Any]:
        self._exchanges += 1
        place = f"exchange {self._exchanges}"
        try:
            return self._wait("exchange", place, deadline, said)
        except TimeoutError as error:
            # The others may be going on just now: the leader says who was first.
            self.failed(FlowError(reason=str(error)), False)
            return self._heard(place, math.inf)

    def _wait(self, kind: str, place: str, deadline: float, said: Any) -> list[Any]:
        self._agent.say(self._stream, kind, epoch=self.id, barrier=place, said=said)
        return self._heard(place, deadline)

    def _heard(self, place: str, deadline: float) -> list[Any]:
        with self._agent.changed:
            while place not in self._through:
                self._check()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("the other nodes did not come so far in time")
                self._agent.changed.wait(min(left, LOOK_SECONDS))
            return self._through[place]

    def _check(self) -> None:
        """Raise FlowError where it is given up; `Agent.changed` is held."""
        if self._error is not None:
            raise self._error
        if self._agent.stream is not self._stream:
            raise self._agent.gone("the connection has ended")

    def cut(self) -> Part:
        self._cuts += 1
        number, known = self._cuts, None

        def say(word: Word) -> None:
            fields = {"epoch": self.id, "cut": number, "word": word.to_fields()}
            self._agent.say(self._stream, "word", **fields)

        def hear(seconds: float) -> Order | None:
            nonlocal known
            deadline = time.monotonic() + seconds
            with self._agent.changed:
                while (order := self._orders.get(number)) is known:
                    self._check()
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return order
                    self._agent.changed.wait(min(left, LOOK_SECONDS))
                known = order
                return order

        return Part(say, hear)

    def vote(self, part: Path, connections: int) -> None:
        try:
            said = [job_file.part_digest(part), connections]
            with self._agent.changed:
                if self._error is not None:
                    raise self._error
                self.in_doubt = True
            with contextlib.suppress(LeaderGone):  # it may have heard it
                fields = {"epoch": self.id, "barrier": Barrier.COMMIT.value, "said": said}
                self._agent.say(self._stream, "reached", **fields)
            log.info("epoch %s: voted", self.id)
            self._wait_for_verdict()
        except BaseException:
            if not self.in_doubt:
                self._remove(part)
            raise

    def _wait_for_verdict(self) -> None:
        agent, doubt, told = self._agent, Doubt(self.image, self.id, self._shared), False
        while True:
            with agent.changed:
                if self._committed or self._error is not None:
                    break
                agent.changed.wait(LOOK_SECONDS)
                reached = agent.stream is not None
            decided = doubt.look(reached)
            with agent.changed:
                if decided:
                    self._committed = True
                elif decided is not None:
                    self._error = agent.gone("nothing was heard of it, and there is no image")
            if not reached and not told:
                told = True
                agent.trouble(f"waits for its leader at {agent.member.leader}")
            if not alive(agent.job.root_pid):
                raise JobEnded(agent.job.name, "checkpoint", Barrier.COMMIT.name)
        self.in_doubt = False
        if told:
            agent.trouble("")
        if not self._committed and self._error is not None:
            raise self._error

    def _remove(self, part: Path) -> None:
        shutil.rmtree(part, ignore_errors=True)
        if self._made:
            with contextlib.suppress(OSError):  # the parts of others are there
                self.image.rmdir()

    def failed(self, error: FlowError, disturbed: bool) -> None:
        with contextlib.suppress(FlowError):  # then the leader knows by the connection's end
            said = {"epoch": self.id, "error": error.as_dict(), "disturbed": disturbed}
            self._agent.say(self._agent.stream, "failed", **said)

    def done(self, result: dict[str, Any] | None) -> None:
        with self._agent.changed:
            if self._made and not self._committed:
                with contextlib.suppress(OSError):
                    self.image.rmdir()
            self._result, self.over = result, True
            self._agent.changed.notify_all()
            self.say_done()

    def say_done(self) -> None:
        """Tell the leader, if there is a connection, what became of this node's part."""
        with contextlib.suppress(FlowError):
            self._agent.say(self._agent.stream, "done", epoch=self.id, result=self._result)

    def report(self) -> dict[str, Any] | None:
        """This node's report in the place of the leader's, once it is over; None: there is no
        image. Raises FlowError where that is known to have failed."""
        if self._error is not None and not self._committed:
            raise self._error
        if self.what == "checkpoint" and not self._committed:
            return None
        member = self._agent.member
        if self._result is None:
            missing = f"all, once the {self.what} was done"
            raise NodesMissing(job=self._agent.job.name, nodes=missing)
        reports = dict.fromkeys(range(member.count)) | {member.node: self._result}
        image = {"image": str(self.image)} if self.what == "checkpoint" else {}
        return self._result | image | {"nodes": reports}


def write_job_file(image: Path, epoch: str, text: str) -> None:
    """Have the file of a committed epoch also where the leader's disk is not this node's."""
    if is_committed(image, epoch):
        return
    partial = image / f".{job_file.JOB_FILE}-{epoch}"
    try:
        with open(partial, "w", opener=layout.private) as file:
            file.write(text)
            file.flush()
            layout.sync(partial)
        job_file.sync_rename(partial, image / job_file.JOB_FILE)
    except OSError as error:  # the leader's is what counts, and can be copied here
        log.error("%s has no %s: %s", image, job_file.JOB_FILE, error)

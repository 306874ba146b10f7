"""The client of a coordinator, against one that plays a script."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_coordinator import Event, FakeCoordinator, output

from flowgpu import client
from flowgpu.client import Connection, SignalForwarder, follow, request
from flowgpu.errors import Busy, CoordinatorGone, FlowError
from tests.patience import SECONDS

RESULT = {"event": "result", "answer": 42}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


def attached(path: Path) -> Connection:
    connection = Connection(path, "train")
    connection.send("attach", **{"from": "start"})
    return connection


def test_a_request_has_its_fields_and_gives_the_result(path: Path) -> None:
    with FakeCoordinator(path, {"status": [RESULT]}) as fake:
        assert request(path, "train", "status", deep=True) == {"answer": 42}
    assert fake.requests == [{"verb": "status", "deep": True}]


def test_an_error_of_the_coordinator_is_raised_as_it_was(path: Path) -> None:
    error = Busy(job="train", action="a checkpoint")
    with (
        FakeCoordinator(path, {"kill": [{"event": "error", **error.as_dict()}]}),
        pytest.raises(Busy, match="a checkpoint") as raised,
    ):
        request(path, "train", "kill")
    assert raised.value.exit_code == Busy.exit_code


def test_an_error_that_this_version_does_not_know_keeps_its_message(path: Path) -> None:
    error = {"event": "error", "error": "Novel", "message": "the moon is full", "exit_code": 99}
    with (
        FakeCoordinator(path, {"kill": [error]}),
        pytest.raises(FlowError, match="the moon is full"),
    ):
        request(path, "train", "kill")


def test_no_socket_and_a_dead_socket_mean_that_the_coordinator_is_gone(path: Path) -> None:
    with pytest.raises(CoordinatorGone, match="train"):
        request(path, "train", "status")
    with FakeCoordinator(path, {}):
        pass
    with pytest.raises(CoordinatorGone, match="train"):
        request(path, "train", "status")


def test_a_coordinator_that_dies_within_an_answer_is_gone(path: Path) -> None:
    progress = {"event": "progress", "phase": "copy"}
    with FakeCoordinator(path, {"status": [progress]}), pytest.raises(CoordinatorGone):
        request(path, "train", "status")


def test_a_coordinator_that_hangs_counts_as_gone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "REQUEST_SECONDS", 0.05)
    done = threading.Event()

    def hang(_request: Event) -> Iterator[Event]:
        done.wait(SECONDS)
        yield RESULT

    with FakeCoordinator(path, {"kill": hang}):
        with pytest.raises(CoordinatorGone):
            request(path, "train", "kill")
        done.set()


def test_progress_is_shown_before_the_result(path: Path) -> None:
    steps = [{"event": "progress", "phase": "copy", "done": n} for n in range(3)]
    seen: list[Event] = []
    with (
        FakeCoordinator(path, {"pause-and-dump": [*steps, RESULT]}),
        Connection(path, "train") as asked,
    ):
        asked.send("pause-and-dump")
        assert asked.result(seen.append) == {"answer": 42}
    assert [event["done"] for event in seen] == [0, 1, 2]


def test_events_split_over_reads_come_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "READ_BYTES", 7)
    with FakeCoordinator(path, {"status": [{"event": "result", "text": "é\n" * 50}]}):
        assert request(path, "train", "status") == {"text": "é\n" * 50}


def test_output_comes_byte_for_byte_on_its_own_stream(
    path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    noise = bytes(range(256)) * 300
    script = [output(b"\xff\x00\n"), output(b"oops", "stderr"), output(noise)]
    with (
        FakeCoordinator(path, {"attach": [*script, {"event": "exit", "code": 7}]}),
        attached(path) as connection,
    ):
        assert follow(connection, SignalForwarder("train")) == 7
    assert capfdbinary.readouterr() == (b"\xff\x00\n" + noise, b"oops")


def test_output_is_written_before_the_next_event_comes(
    path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    seen: list[bytes] = []

    def script(_request: Event) -> Iterator[Event]:
        yield output(b"no newline")
        deadline = time.monotonic() + SECONDS
        # To read it empties the file, and with it what is written meanwhile.
        while not os.fstat(1).st_size and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(capfdbinary.readouterr().out)
        yield {"event": "exit", "code": 0}

    with FakeCoordinator(path, {"attach": script}), attached(path) as connection:
        follow(connection, SignalForwarder("train"))
    assert seen == [b"no newline"]


def test_signals_go_to_the_job_and_this_process_lives(path: Path) -> None:
    sent = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]

    def script(_request: Event) -> Iterator[Event]:
        for count, signum in enumerate(sent, 1):
            os.kill(os.getpid(), signum)
            deadline = time.monotonic() + SECONDS
            while len(fake.requests) < count + 1 and time.monotonic() < deadline:
                time.sleep(0.005)
        yield {"event": "exit", "code": 0}

    with FakeCoordinator(path, {"attach": script, "signal": [RESULT]}) as fake:
        before = signal.getsignal(signal.SIGTERM)
        with SignalForwarder("train") as forwarder, attached(path) as connection:
            forwarder.deliver_to(path)
            follow(connection, forwarder)
        assert signal.getsignal(signal.SIGTERM) is before
    assert [asked.get("signum") for asked in fake.requests[1:]] == sent


def test_a_signal_before_the_job_runs_is_delivered_when_it_does(path: Path) -> None:
    with (
        FakeCoordinator(path, {"signal": [RESULT]}) as fake,
        SignalForwarder("train") as forwarder,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        assert fake.requests == []
        forwarder.deliver_to(path)
    assert fake.requests == [{"verb": "signal", "signum": signal.SIGTERM}]


def test_a_second_interrupt_before_the_job_runs_gives_up() -> None:
    with SignalForwarder("train"), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_an_ignored_signal_stays_ignored(path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalForwarder("train") as forwarder:
            os.kill(os.getpid(), signal.SIGHUP)
            forwarder.deliver_to(path)  # nothing listens: a signal kept back would not be lost
        assert forwarder._pending == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_reader_that_goes_away_is_a_sigpipe_for_the_job(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(writer if fd == 1 else fd, data))
    script = [output(b"1"), output(b"2"), output(b"3", "stderr"), {"event": "exit", "code": 141}]
    try:
        with (
            FakeCoordinator(path, {"attach": script, "signal": [RESULT]}) as fake,
            attached(path) as connection,
        ):
            forwarder = SignalForwarder("train")
            forwarder.deliver_to(path)
            assert follow(connection, forwarder) == 141
    finally:
        os.close(writer)
    assert fake.requests[1:] == [{"verb": "signal", "signum": signal.SIGPIPE}]
    assert capfdbinary.readouterr().err == b"3"


def test_a_non_blocking_reader_gets_everything() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    data = os.urandom(1 << 20)
    received = bytearray()

    def read() -> None:
        while chunk := os.read(reader, 1 << 16):
            received.extend(chunk)

    thread = threading.Thread(target=read)
    thread.start()
    client.write_all(writer, data)
    os.close(writer)
    thread.join()
    os.close(reader)
    assert bytes(received) == data

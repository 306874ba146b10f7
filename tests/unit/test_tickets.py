"""What a program is told of the checkpoints that it asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path

from coordinator import tickets
from coordinator.tickets import Ticket
from flowgpu.errors import FlowError


def error_of(ticket: Ticket) -> str:
    state, _, text = os.readlink(ticket.path).partition(" ")
    assert state == "failed"
    return str(FlowError.from_dict(json.loads(text)))


def test_a_ticket_is_read_without_a_descriptor(tmp_path: Path) -> None:
    ticket = Ticket(tmp_path / "tickets")
    assert os.readlink(ticket.path) == f"waiting {os.getpid()}"
    ticket.running(0.25)
    assert os.readlink(ticket.path) == "running 0.25"
    assert os.listdir(ticket.path.parent) == ["0"]


def test_an_error_is_shortened_to_what_a_link_holds(tmp_path: Path) -> None:
    ticket = Ticket(tmp_path / "tickets")
    ticket.failed(FlowError(reason="short"))
    assert error_of(ticket) == str(FlowError(reason="short"))
    ticket.failed(FlowError(reason="\N{SNOWMAN}" * 5000))
    assert error_of(ticket).count("\N{SNOWMAN}") > 100


def test_a_checkpoint_that_nobody_takes_has_failed(tmp_path: Path) -> None:
    kept, ended = Ticket(tmp_path), Ticket(tmp_path)
    ended.done(0.5)
    tickets.give_up(tmp_path, FlowError(reason="gone"))
    assert error_of(kept) == str(FlowError(reason="gone"))
    assert os.readlink(ended.path) == "done 0.5"

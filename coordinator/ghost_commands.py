"""What a coordinator asks its ghost for, and what the ghost answers.

A command is a JSON line on a socket, and so is its answer. Descriptors go beside the line, as the
field `fds`. Commands run in the order in which they were asked; one that is `at_once` runs in a
thread of its own. Where one fails, the answer has its error and the kind of that error instead: a
status of the mover, or the name of an exception.

The end of the socket ends the process: a ghost does not outlive its coordinator.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, dataclass_transform, get_args

from coordinator.device import Gpu
from coordinator.move_plan import Plan

Answer = TypeVar("Answer")
T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def message(kind: type[T]) -> type[T]:
    """A frozen dataclass, for mypy. Python makes no more than what these are made with.

    All methods of forty classes take it 20 ms more, at the start of each coordinator and ghost.
    """
    return dataclass(eq=False, repr=False, match_args=False)(kind)


class Command(Generic[Answer]):
    """One thing to ask for; the type argument is what the ghost answers."""

    do: ClassVar[str]
    at_once: ClassVar[bool]
    answer: ClassVar[type[Any]]
    named: ClassVar[dict[str, type[Command[Any]]]] = {}

    def __init_subclass__(cls, *, at_once: bool = False) -> None:
        cls.do = re.sub(r"\B(?=[A-Z])", "-", cls.__name__).lower()
        cls.at_once = at_once
        (cls.answer,) = get_args(cls.__dict__["__orig_bases__"][0])
        Command.named[cls.do] = cls


def parts_of(message: Command[Any] | object) -> tuple[dict[str, Any], Sequence[int]]:
    """The fields of a command or an answer for a line, and the descriptors that go beside it."""
    fields = {} if message is None else dict(vars(message))
    return fields, fields.pop("fds", ())


# Answers


@message
class Machine:
    """The driver and the GPUs of the ghost."""

    version: int
    has_checkpoints: bool  # the engine native needs the driver's checkpoint API
    gpus: tuple[Gpu, ...]
    warm: tuple[int, ...]  # ordinals that `warm` was asked for


@message
class Size:
    """An amount of memory or of data."""

    bytes: int


@message
class SizeIfRoom:
    """None: there is no room."""

    bytes: int | None


@message
class Ordinals:
    """The GPU of each block that was sent."""

    ordinals: tuple[int, ...]


@message
class Created:
    """A descriptor of each block, in their order."""

    fds: tuple[int, ...]


@message
class Held:
    """Seconds that it took to copy on the GPU what is in use; None: memory must not change."""

    seconds: float | None


@message
class Reduced:
    """What a copy left out of one GPU's data: the reductions it used, and bytes after each.

    Those that are `replicated` are in the memory of a GPU before this one too.
    """

    reductions: tuple[str, ...]
    active: int
    nonzero: int
    distinct: int
    replicated: int


@message
class Planned:
    """The copy of one GPU: its blocks in the order of their bytes, and what it leaves out."""

    keys: tuple[int, ...]
    reduced: Reduced


@message
class Copies:
    """By ordinal. Links that are not worth it are gone."""

    gpus: dict[int, Planned]


@message
class HowFar:
    """Bytes moved, and bytes to move."""

    done: int
    total: int


@message
class Carried:
    """Bytes that copies have moved; of these, what GPUs took from each other, and how long the
    slowest took."""

    bytes: int
    passed_bytes: int
    passed_seconds: float


@message
class ServiceThreads:
    """The thread of each process that must run for `Rebuild`."""

    threads: tuple[int, ...]


# Parts of commands


@message
class DumpFiles:
    """The files of one GPU's copy, and the number of its extent in the image."""

    data: str
    table: str
    index: int


@message
class Target:
    """Where a copy of all blocks goes, and how."""

    plan: Plan
    files: dict[int, DumpFiles]  # by ordinal
    links: str | None  # a folder with links to what images before have
    gpus: int  # of the image
    reductions: tuple[str, ...]


@message
class Extent:
    """A file of an image with bytes of chunks, and their digests."""

    data: str
    digests: str
    slots: int
    frames: tuple[int, ...] | None  # bytes of each, where it is packed


@message
class FillFiles:
    """What one GPU is filled from: its chunk table and number, and all extents of the image."""

    table: str | None  # version 1 of an image has none
    index: int
    size: int  # bytes of all blocks
    extents: tuple[Extent, ...]


# Commands. Ordinals are those of the ghost's driver; keys are the coordinator's, of blocks.


@message
class Hello(Command[Machine]):
    """Initialise the driver, the first time."""


@message
class Open(Command[None]):
    """Make contexts."""

    ordinals: tuple[int, ...]


@message
class Warm(Command[None]):
    """Make contexts with the chunk kernels: all the device memory that a checkpoint will want."""

    ordinals: tuple[int, ...]


@message
class Room(Command[Size]):
    """Tell the free memory of that GPU which has least."""

    ordinals: tuple[int, ...]


@message
class Import(Command[Ordinals]):
    """Import and map blocks."""

    keys: tuple[int, ...]
    sizes: tuple[int, ...]
    devices: tuple[int, ...]
    """The tasks' numbers of the GPUs, which are a hint."""
    fds: tuple[int, ...]


@message
class Create(Command[Created]):
    """Allocate exportable blocks of these sizes, and map them."""

    ordinal: int
    sizes: tuple[int, ...]


@message
class Drop(Command[None]):
    """Release blocks that the task has freed."""

    keys: tuple[int, ...]


@message
class CopyBefore(Command[SizeIfRoom]):
    """Copy what is in use and no link has yet, while the task runs; answers what is new."""

    plan: Plan
    active: str | None  # parts of blocks, as of chunks.pack_parts; None: all
    links: str
    reductions: tuple[str, ...]
    keep: int  # bytes of each GPU
    seconds: float


@message
class Expect(Command[Size]):
    """Look how much a copy would store, about."""

    target: Target
    active: str | None  # as in CopyBefore


@message
class PrepareCopy(Command[None]):
    """Make the arena and the files of a copy, while the task runs."""

    target: Target
    active: str | None  # as in CopyBefore
    in_use: int  # bytes, when all stands still
    most: int  # bytes to prepare for
    seconds: float


@message
class Shadow(Command[Size]):
    """Take device memory for a copy of what is in use; 0: there is too little."""

    keep: int  # bytes of each GPU


@message
class Copy(Command[Copies]):
    """Start to copy every block to its GPU's file."""

    target: Target
    active: str | None  # as in CopyBefore


@message
class Fill(Command[None], at_once=True):
    """Start to fill the created blocks of a GPU as `PrepareFill` has said, checking every chunk's
    digest."""

    ordinal: int
    poison: bool


@message
class Reach(Command[None]):
    """Let the GPUs reach what they take from each other, once all blocks are there. Until then
    each fill does its own part."""


@message
class Reset(Command[None]):
    """End what is left of a checkpoint, so that another can begin. Contexts, kernels and the arena
    stay."""


@message
class PrepareFill(Command[None], at_once=True):
    """Make the arena; pin it, and plan the fill from an image, if there are any GPUs. Their blocks
    need not be there yet."""

    plan: Plan
    files: dict[int, FillFiles]  # by ordinal


@message
class WaitHeld(Command[Held], at_once=True):
    """Wait until all that is in use has been copied on the GPU, if it is to be."""

    seconds: float


@message
class Progress(Command[HowFar], at_once=True):
    """Tell how far the copies are."""


@message
class Wait(Command[Carried], at_once=True):
    """Wait until all bytes have left the GPU, or are where they belong."""

    stage: str  # out | done
    seconds: float


@message
class Cancel(Command[None], at_once=True):
    """End all copies: no thread uses the GPU or a file any more."""


@message
class Forget(Command[None], at_once=True):
    """Give the device memory up: everything is unmapped and released."""


@message
class Strip(Command[None], at_once=True):
    """Take CUDA out of processes."""

    pids: tuple[int, ...]
    seconds: float


@message
class Threads(Command[ServiceThreads], at_once=True):
    """Tell which threads put CUDA back into processes."""

    pids: tuple[int, ...]


@message
class Rebuild(Command[None], at_once=True):
    """Put CUDA back into processes."""

    pids: tuple[int, ...]
    gpus: dict[str, str]  # old to new UUIDs, of those that change


QUIT_SECONDS = 5.0
"""For which a ghost may take to end."""


@message
class Quit(Command[None], at_once=True):
    """End, with all device memory free when it is answered."""

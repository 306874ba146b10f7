"""What a checkpoint has to do with the other nodes of its job: nothing, where there are none."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgpu.errors import FlowError

if TYPE_CHECKING:
    from coordinator.cut_of_nodes import Part


class Barrier(Enum):
    """A place in a checkpoint at which each node waits until all have come there."""

    LOOK = "look"
    """It has looked at its TCP connections."""
    LOOK_AGAIN = "look again"
    """It has once more, after all had; and says what it has."""
    PREPARE = "prepare"
    """It refuses nothing, and nothing of it is stopped yet."""
    GATE = "gate"
    """None of its GPUs waits for another node: no image is taken before this holds on all."""
    STOPPED = "stopped"
    """Its processes are."""
    CONNECTED = "connected"
    """It says which TCP connections it has, now that nobody makes any."""
    SETTLED = "settled"
    """What they had sent to other nodes has come there."""
    CAPTURE = "capture"
    """They are dumped. It says what it has of each connection. None goes on before this."""
    COMMIT = "commit"
    """Its part of the image is whole: its vote."""
    PARK = "park"
    """In a suspension: what its GPUs had is in the host's memory."""
    FILLED = "filled"
    """In a resume: its GPUs have that again, and nothing is lost if it goes no further. It says
    whether it was suspended."""


WAYS = {
    "checkpoint": tuple(one for one in Barrier if one not in (Barrier.PARK, Barrier.FILLED)),
    "suspension": (Barrier.PREPARE, Barrier.GATE, Barrier.PARK),
    "resume": (Barrier.FILLED,),
}
"""Through which of them all nodes come in what is done to a job, in this order."""


class Others:
    """The other nodes of a job that has none. agent.py has those of one that has."""

    alone = True
    id = ""
    """Names the checkpoint of all nodes."""

    def reached(self, barrier: Barrier, deadline: float, said: Any = None) -> list[Any]:
        """Wait until all nodes have come there. Gives what each of the others has said.

        Raises FlowError, TimeoutError.
        """
        return []

    def exchange(self, deadline: float, said: Any) -> list[Any]:
        """As `reached`, at a place that comes as often as it is needed. All nodes come to the same
        ones, in one order."""
        return []

    def any_of(self, deadline: float, here: bool) -> bool:
        """True if it is so on any of the nodes; all ask at the same place."""
        return any([here, *self.exchange(deadline, here)])

    def cut(self) -> Part | None:
        """This node's part of one more cut through the ranks of all; None: it is the whole."""
        return None

    def vote(self, part: Path, connections: int) -> None:
        """This node's image is whole, with so many TCP connections to other nodes: wait until
        those of all nodes are one image.

        Raises FlowError, with the part removed.
        """

    def failed(self, error: FlowError, disturbed: bool) -> None:
        """Tell the others at once that there will be no image, before anything is undone."""

    def done(self, result: dict[str, Any] | None) -> None:
        """Tell the others that this node has done its part, or has undone it."""


ALONE = Others()

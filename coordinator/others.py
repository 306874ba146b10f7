"""What a checkpoint has to do with the other nodes of its job: nothing, where there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coordinator.phases import Phase
from flowgpu.errors import FlowError


class Others:
    """The other nodes of a job that has none. agent.py has those of one that has."""

    alone = True
    id = ""
    """Of the checkpoint of all nodes."""

    def reached(self, phase: Phase, deadline: float) -> None:
        """Wait until all nodes have come to the end of this phase. Raises FlowError,
        TimeoutError."""

    def vote(self, part: Path) -> None:
        """This node's image is whole: wait until those of all nodes are one image.

        Raises FlowError, with the part removed.
        """

    def failed(self, error: FlowError, disturbed: bool) -> None:
        """Tell the others at once that there will be no image, before anything is undone."""

    def done(self, result: dict[str, Any] | None) -> None:
        """Tell the others that this node has done its part, or has undone it."""


ALONE = Others()

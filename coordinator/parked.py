"""What a coordinator knows of a suspended job: enough to bring it back, or to write its image."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from coordinator.records import GpuSide
from flowgpu import codec
from flowgpu.image import layout


@dataclass(frozen=True)
class Parked:
    """A suspended job. That its file is there is what says that it is one."""

    gpu: GpuSide
    keeps_context: bool
    seconds: float
    """The time for which the job stood until its memory was in the host's."""

    def save(self, path: Path) -> None:
        """Write it in one step."""
        temporary = path.with_suffix(".new")
        with open(temporary, "wb", opener=layout.private) as file:
            file.write(json.dumps(dataclasses.asdict(self)).encode())
        os.replace(temporary, path)

    @staticmethod
    def load(path: Path) -> Parked | None:
        """What `save` has written; None: the job is not suspended. Raises OSError, ValueError."""
        try:
            return codec.decode(Parked, json.loads(path.read_bytes()), "parked")
        except FileNotFoundError:
            return None

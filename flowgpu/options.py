"""What a user may ask of a checkpoint and of a restore.

The command line makes these, and they go whole to the coordinator and to what does the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flowgpu.errors import FlowError
from flowgpu.vocabulary import (
    COMMUNICATORS_CHOICES,
    ENGINE_CHOICES,
    MODE_CHOICES,
    REDUCTIONS,
    TCP_CHOICES,
    CommunicatorsChoice,
    EngineChoice,
    FilesChoice,
    ModeChoice,
    TcpChoice,
)

PAUSE_SECONDS = 60.0
PREPARE_SECONDS, LEAST_SECONDS = 120.0, 5.0
"""What the preparation may take without a timeout, and with any."""


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """What one checkpoint is asked for. A value that it cannot have raises FlowError."""

    output: Path  # the folder of the image
    leave_running: bool = False
    timeout: float | None = None  # seconds for the preparation, and for the pause
    engine: EngineChoice = "auto"
    base: Path | None = None  # an image before, of which this one takes what has not changed
    without: tuple[str, ...] = ()  # reductions
    wait_minimum: float = 0.5  # seconds, or a step, for the memory in use to be near its minimum
    compress: bool = False  # pages and extents, where it pays
    mode: ModeChoice = "any"
    tcp: TcpChoice = "job"  # those to processes outside: refuse the job, or close them in the image

    communicators: CommunicatorsChoice = "keep"  # NCCL's: as they are, or ended and made anew

    def __post_init__(self) -> None:
        self._require("output", self.output.is_absolute())
        self._require("timeout", self.timeout is None or self.timeout > 0)
        self._require("engine", self.engine in ENGINE_CHOICES)
        self._require("without", set(self.without) <= set(REDUCTIONS))
        self._require("wait_minimum", self.wait_minimum >= 0)
        self._require("mode", self.mode in MODE_CHOICES)
        self._require("mode", self.leave_running or self.mode != "cow")
        self._require("tcp", self.tcp in TCP_CHOICES)
        self._require("communicators", self.communicators in COMMUNICATORS_CHOICES)

    def _require(self, name: str, fits: bool) -> None:
        if not fits:
            raise _refused(name, getattr(self, name))

    def to_fields(self) -> dict[str, Any]:
        """As a request has them (client.py); what is None is left out."""
        found = dataclasses.asdict(self) | {"output": str(self.output)}
        found |= {"base": self.base and str(self.base), "without": list(self.without)}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> CheckpointOptions:
        """Read what `to_fields` has made; what is missing is the default. Raises FlowError."""
        given: dict[str, Any] = {}
        for name, value in fields.items():
            if name not in cls.__dataclass_fields__:
                raise FlowError(reason=f"this coordinator knows no option {name!r}")
            try:
                given[name] = _MADE.get(name, str)(value)
            except (TypeError, ValueError) as error:
                raise _refused(name, value) from error
        if "output" not in given:
            raise FlowError(reason="the option 'output' of a checkpoint is missing")
        return cls(**given)

    @property
    def pause_seconds(self) -> float:
        """Most seconds from the first closing of a gate until the job is gone or runs again."""
        return self.timeout or PAUSE_SECONDS

    @property
    def prepare_seconds(self) -> float:
        """For all that comes before."""
        return max(self.timeout, LEAST_SECONDS) if self.timeout else PREPARE_SECONDS

    @property
    def reductions(self) -> tuple[str, ...]:
        """Reductions that are used, in the order of the manifest's."""
        return tuple(name for name in REDUCTIONS if name not in self.without)


_MADE: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("output", "base"), Path),
    **dict.fromkeys(("timeout", "wait_minimum"), float),
    **dict.fromkeys(("leave_running", "compress"), bool),
    "without": tuple,
}
"""What makes an option of a JSON value; `str` makes the others."""


def _refused(name: str, value: object) -> FlowError:
    return FlowError(reason=f"the option {name!r} of a checkpoint cannot be {value!s}")


@dataclasses.dataclass(frozen=True)
class SuspendOptions:
    """What one suspension is asked for. A value that it cannot have raises FlowError."""

    keep_context: bool = False  # CUDA stays in the processes: only their memory goes
    timeout: float | None = None  # as of a checkpoint
    engine: EngineChoice = "auto"

    def to_fields(self) -> dict[str, Any]:
        """As a request has them (client.py); what is None is left out."""
        found = dataclasses.asdict(self)
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> SuspendOptions:
        """Read what `to_fields` has made; what is missing is the default. Raises FlowError."""
        try:
            return cls(**fields)
        except TypeError as error:
            raise FlowError(reason=f"an option of a suspension: {error}") from error

    @property
    def pause_seconds(self) -> float:
        """As of a checkpoint."""
        return self.timeout or PAUSE_SECONDS

    def pause(self, folder: Path) -> CheckpointOptions:
        """Options of the way out of the GPU, which is that of a checkpoint to the folder."""
        return CheckpointOptions(folder, timeout=self.timeout, engine=self.engine)


@dataclasses.dataclass(frozen=True)
class RestoreOptions:
    """What one restore is asked for."""

    poison: bool = False
    """True: memory that the image does not define is filled with a pattern."""
    files: FilesChoice = "truncate"
    """What becomes of files of the job that have grown since the dump."""
    addresses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What stands for addresses of the image's host (addresses.py)."""

"""FlowGPU: checkpoint and restore CUDA processes without changing them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowgpu.sdk import Checkpoint, checkpoint

__all__ = ["Checkpoint", "checkpoint"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What programs call: its modules are not for every process that imports this."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flowgpu import sdk

    return getattr(sdk, name)

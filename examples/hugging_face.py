"""A checkpoint of the whole job every N steps of a Hugging Face Trainer.

trainer = Trainer(..., callbacks=[FlowGPUCallback("images", every=500)])
flowgpu run -- python train.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import flowgpu


class FlowGPUCallback(TrainerCallback):
    def __init__(self, folder: str, every: int) -> None:
        self.folder, self.every = Path(folder), every

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step % self.every == 0:
            flowgpu.checkpoint(self.folder / f"step-{state.global_step}")

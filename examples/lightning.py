"""A checkpoint of the whole job every N batches of a PyTorch Lightning Trainer.

trainer = Trainer(..., callbacks=[FlowGPUCallback("images", every=500)])
flowgpu run -- python train.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

import flowgpu


class FlowGPUCallback(Callback):
    def __init__(self, folder: str, every: int) -> None:
        self.folder, self.every = Path(folder), every

    def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
        if trainer.global_step % self.every == 0:
            flowgpu.checkpoint(self.folder / f"step-{trainer.global_step}")

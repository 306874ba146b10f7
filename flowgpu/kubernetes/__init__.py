"""The agent of a Kubernetes node: it takes images of pods that PodCheckpoint objects name.

    python -m flowgpu.kubernetes        with NODE_NAME; needs the extra `kubernetes`

`operator.py` hears of objects and of the node by kopf, `agent.py` takes one image, `inside.py`
finds a pod's processes and runs `flowgpu` in its containers, `api.py` asks the API server. What an
agent knows is in the status of the objects: another one goes on where it has ended.
"""

from __future__ import annotations

GROUP, VERSION, PLURAL = "checkpoint.flowgpu.io", "v1alpha1", "podcheckpoints"
KIND = "PodCheckpoint"

LAST_TIME = f"{GROUP}/last-checkpoint-time"
LAST_BYTES = f"{GROUP}/last-checkpoint-bytes"
VOLCANO_LAST_TIME = "volcano.sh/last-checkpoint-time"
"""By which Volcano's plugin `checkpoint` chooses whom to preempt."""
NOTED = f"{GROUP}/noted"
"""Label of a pod whose jobs write images by themselves: the agent notes when the newest was."""
AT_TAINT = f"{GROUP}/at-taint"
"""Annotation with keys of taints, by commas: a pod is dumped away when its node gets one."""

"""How one checkpoint is taken. PREPARE makes the plan, and every phase reads it.

A plan is frozen. What shows up later, until the gates are closed, makes another one. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.task_state import Step
from flowgpu import wire
from flowgpu.errors import EngineUnusable
from flowgpu.options import CheckpointOptions


@dataclass(frozen=True)
class Plan:
    """What is decided for one checkpoint."""

    options: CheckpointOptions
    engine: wire.Engine = wire.Engine.NATIVE
    reason: str = ""
    """Why it is that engine; empty where there was no choice."""
    keeps_context: bool = False
    """True if CUDA stays in the tasks, so that nobody has to save anything: `engine` is idle."""
    late: bool = False
    """True: the ghost takes the place of the tasks' contexts, which STRIP ends."""
    can_keep: bool = False
    """True if every task can keep CUDA and its memory, and CRIU leaves out what is the driver's."""

    @property
    def saver(self) -> wire.Engine:
        """Who is to save what a task has beside its blocks."""
        return wire.Engine.NONE if self.keeps_context else self.engine

    @property
    def keeps_cuda(self) -> bool:
        """True if nothing is taken from the tasks: they have only lent their memory."""
        replays = self.engine is wire.Engine.REPLAY
        return self.options.leave_running and replays and self.can_keep and not self.late

    @property
    def taking(self) -> Step:
        """What HANDOVER does with each task of this version.

        By replay its memory ends with its CUDA, so it need not let go of each block before.
        """
        return Step.LEND if self.saver is wire.Engine.REPLAY else Step.HAND_OVER

    @property
    def holds(self) -> bool:
        """True if the ghost copies to free memory of the GPU first, where there is enough."""
        return self.options.leave_running and not self.late and self.options.mode != "stop"

    @property
    def recopies(self) -> bool:
        """True if the ghost copies what is in use while the job runs, and later what has
        changed."""
        return self.options.mode == "recopy"

    @property
    def rebuilds(self) -> bool:
        """True if NCCL's communicators are ended, and made anew when the job goes on."""
        return self.options.communicators == "rebuild"

    @property
    def why_not_early(self) -> str:
        """Why no pages are copied while the job runs, but all of them in the freeze; empty: they
        are."""
        if not self.options.leave_running and not self.recopies:
            return "the job is to end"
        if self.options.mode == "stop":
            return "asked for"
        if self.rebuilds:
            return "communicators are ended in the pause"
        if self.engine is not wire.Engine.REPLAY:
            return f"the engine is {self.engine.name.lower()}"
        return "the ghost has no room beside the job" if self.late else ""

    def without_replay(self, why: str, job: str) -> Plan:
        """The plan where replay cannot be. Raises EngineUnusable where that was asked for."""
        if self.options.engine == "replay":
            raise EngineUnusable(job=job, engine="replay", reason=why)
        return replace(self, engine=wire.Engine.NATIVE, reason=f"no replay: {why}")


def choose(
    options: CheckpointOptions,
    job: str,
    prepared: Mapping[int, bool],
    refusals: Callable[[], Sequence[str]],
) -> Plan:
    """The plan with the engine for all tasks. Raises EngineUnusable.

    `prepared`: of each task's process id, whether it was started for the engine replay.
    `refusals` asks for what that cannot save.
    """
    plan = Plan(options)
    if options.engine == "native":
        return replace(plan, reason="asked for")
    if options.engine == "auto" and not any(prepared.values()):
        return plan
    if not all(prepared.values()):
        pid = next(pid for pid, ready in prepared.items() if not ready)
        why = f"process {pid} was started with --engine native"
    else:
        why = "; ".join(refusals())
    if why:
        return plan.without_replay(why, job)
    reason = "asked for" if options.engine == "replay" else "it can save every task"
    return replace(plan, engine=wire.Engine.REPLAY, reason=reason)

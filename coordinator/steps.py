"""How far it is, what is being done to a job."""

from __future__ import annotations

from coordinator.session import Progress

Step = tuple[str, int, int]
"""See Progress."""


class Steps:
    """One step a phase, each as it was last; the last one is now."""

    def __init__(self, *first: Step) -> None:
        self._steps = list(first)

    def note(self, phase: str, done: int, total: int) -> None:
        """A Progress that notes what it is told."""
        if self._steps and self._steps[-1][0] == phase:
            self._steps[-1] = (phase, done, total)
        else:
            self._steps.append((phase, done, total))

    @property
    def now(self) -> Step | None:
        """The phase that is under way."""
        return self._steps[-1] if self._steps else None

    def tell(self, progress: Progress, told: int) -> int:
        """Tell the steps from number `told` on; gives the number of the last, to be told again.

        A phase that is over between two looks is told as well.
        """
        steps = self._steps[told:]
        for step in steps:
            progress(*step)
        return max(told + len(steps) - 1, 0)

"""Options that say how often a job is checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

if TYPE_CHECKING:
    from flowgpu.frequency import Period

Verb = TypeVar("Verb", bound=Callable[..., Any])
Every = float | Literal["auto"] | None
SECONDS = click.FloatRange(min=0, min_open=True)


class _Every(click.ParamType[Any]):
    name = "period"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | Literal["auto"]:
        if value == "auto":
            return "auto"
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number of seconds nor 'auto'.", param, ctx)
        return SECONDS.convert(number, param, ctx)


def every_option(what: str) -> Callable[[Verb], Verb]:
    """Give a command the option --every."""
    return click.option("--every", metavar="SECONDS|auto", type=_Every(), help=what)


def failures_option(what: str, *, required: bool) -> Callable[[Verb], Verb]:
    """Give a command the option --failures-per-hour."""
    return click.option(
        "--failures-per-hour", metavar="F", type=SECONDS, required=required, help=what
    )


def period_of(every: Every, failures_per_hour: float | None) -> Period | None:
    """What was asked for; None: nothing. Raises UsageError for options that do not fit."""
    from flowgpu.frequency import best, fixed

    if (every == "auto") != (failures_per_hour is not None):
        raise click.UsageError("--every auto and --failures-per-hour need each other.")
    if failures_per_hour is not None:
        return best(failures_per_hour)
    return None if every is None else fixed(float(every))

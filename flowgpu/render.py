"""How data looks to people: units, tables and progress, on a terminal by rich, plain elsewhere.

rich is imported only where a terminal is written to: `flowgpu ps` in a script must start quickly.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

PLAIN_SECONDS = 2.0  # between two lines of one phase where no bar can be drawn
WIDEST_KEPT = 32  # of a column that a narrow terminal does not cut
BAR_WIDTH = 40
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def printable(text: str) -> str:
    """`text` with escapes for what a terminal would obey or cannot be written to it.

    Names in an image and on disk are anyone's, and need not be text in any encoding.
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def one_line(text: str) -> str:
    """Make a name printable that stands among others, where a new line would be another name."""
    return printable(text).replace("\n", "\\n")


def take_any_text(*streams: TextIO | None) -> None:
    """Let these streams write escapes for what their encoding does not have.

    Under another locale than the one that a name comes from there is always such a letter, and
    what was asked for is done by the time it is told.
    """
    for stream in streams:
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def size(count: float) -> str:
    """`count` bytes in binary units with three digits: `1.46 GiB`."""
    unit = 0
    while abs(count) >= 1023.5 and unit + 1 < len(UNITS):
        count /= 1024
        unit += 1
    if unit == 0:
        return f"{count:.0f} B"
    return f"{count:.{2 if count < 9.995 else 1 if count < 99.95 else 0}f} {UNITS[unit]}"


def rate(bytes_per_second: float) -> str:
    """A transfer rate as hardware data sheets give it: `54.2 GB/s`."""
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_second >= scale:
            return f"{bytes_per_second / scale:.1f} {unit}"
    return f"{bytes_per_second / 1e3:.0f} kB/s"


def seconds(duration: float) -> str:
    """A measured time: `0.81 s`, `35 ms`."""
    return f"{duration:.2f} s" if duration >= 0.1 else f"{duration * 1e3:.0f} ms"


def age(duration: float) -> str:
    """Time since something in its largest unit: `5 min`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if duration >= 2 * length:
            return f"{duration / length:.0f} {unit}"
    return f"{max(duration, 0):.0f} s"


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO | None = None
) -> None:
    """Print `rows` under `columns`: a rich table on a terminal, aligned text elsewhere."""
    file = file or sys.stdout
    rows = [[one_line(cell) for cell in row] for row in rows]
    if not file.isatty():
        lines = [columns, *rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
        for line in lines:
            cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            print("  ".join(cells).rstrip(), file=file)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        # The last column, a command, is the one to cut.
        longest = max((len(row[index]) for row in rows), default=0)
        kept = 0 if index == len(columns) - 1 else min(longest, WIDEST_KEPT)
        drawn.add_column(column, overflow="ellipsis", no_wrap=True, min_width=kept)
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    Console(file=file).print(drawn)


def funnel(stages: Sequence[tuple[str, int]], file: TextIO | None = None) -> None:
    """Print (name, bytes) of what is left after each stage, with its part of the first as a bar."""
    file = file or sys.stdout
    whole = max(stages[0][1] if stages else 0, 1)
    full, half = ("━", "╸") if file.isatty() else ("#", "")
    rows = []
    for name, amount in stages:
        steps = round(2 * BAR_WIDTH * min(amount / whole, 1.0)) or int(amount > 0)
        bar = full * (steps // 2) + (half if steps % 2 else "")
        rows.append((name, size(amount), f"{amount / whole:.1%}", bar))
    table(("GPU data", "size", "part", ""), rows, file)


def outline(data: Mapping[str, Any]) -> Iterator[str]:
    """Nested data as indented `key: value` lines; keys that name bytes or seconds get units."""
    width = max((len(key) for key, value in data.items() if not _nested(value)), default=0)
    for key, value in data.items():
        if not _nested(value):
            yield f"{key + ':':{width + 1}} {_value(key, value)}"
            continue
        yield f"{key}:"
        for item in value if isinstance(value, list) else [value]:
            lines = list(outline(item)) if isinstance(item, Mapping) else [str(item)]
            lead = "  - " if isinstance(value, list) else "  "
            for line in lines:
                yield lead + line
                lead = " " * len(lead)


def _nested(value: object) -> bool:
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value)


def _value(key: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if "bytes" in key or key in ("memory", "size"):
            return f"{size(value)} ({value})"
        if key.endswith("seconds"):
            return seconds(value)
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None or value == {} else str(value)


class Progress:
    """Shows `progress` events of the coordinator: {phase, done, total: bytes, rate: bytes/s}.

    Without a terminal a phase without bytes is told only if it takes a while, and one with bytes
    only if some are left when it is first heard of.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr
        self._bars: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._phase = ""
        self._shown = 0.0
        self._later: threading.Timer | None = None

    def __enter__(self) -> Progress:
        if self._file.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            self._bars = Bars(
                TextColumn("{task.description:10}"),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[amount]}"),
                console=Console(file=self._file),
                transient=True,
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bars off the terminal; what is printed afterwards is not disturbed."""
        self._wait_no_more()
        if self._bars:
            self._bars.stop()

    def __call__(self, event: Mapping[str, Any]) -> None:
        phase = str(event.get("phase", ""))
        done = float(event.get("done") or 0)
        total = float(event.get("total") or 0)
        amount = self._amount(done, total, float(event.get("rate") or 0))
        if self._bars:
            self._draw(self._bars, phase, done, total, amount)
        elif phase != self._phase or total:
            self._tell(phase, amount, over=done >= total)
        self._phase = phase

    def _tell(self, phase: str, amount: str, *, over: bool) -> None:
        """A line of a phase that begins, or of one that goes on now and then."""
        new = phase != self._phase
        if new:
            self._wait_no_more()
        if not amount:
            self._later = threading.Timer(PLAIN_SECONDS, self._print, [f"flowgpu: {phase}"])
            self._later.daemon = True
            self._later.start()
        elif new and over:
            self._shown = math.inf  # nor is another event of it
        elif new or time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._shown = time.monotonic()
            self._print(f"flowgpu: {phase} {amount}")

    def _print(self, line: str) -> None:
        print(line, file=self._file, flush=True)

    def _wait_no_more(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later.join()
            self._later = None

    @staticmethod
    def _amount(done: float, total: float, speed: float) -> str:
        if not total:
            return ""
        return f"{size(done)} of {size(total)}" + (f", {rate(speed)}" if speed else "")

    def _draw(self, bars: RichProgress, phase: str, done: float, total: float, amount: str) -> None:
        if phase not in self._tasks:
            # A phase without bytes shows by its end only; the next one's start is that end.
            if self._phase in self._tasks:
                last = self._tasks[self._phase]
                bars.update(last, total=1.0, completed=1.0)
            self._tasks[phase] = bars.add_task(phase, total=None, amount="")
        bars.update(self._tasks[phase], completed=done, total=total or None, amount=amount)

"""Tables of the parts of FlowGPU measured alone: mover, kernels on chunks, memory stub."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.report import number

Document = dict[str, Any]
Row = dict[str, Any]
GIB = 1 << 30


def _section(document: Document, name: str, key: str) -> Any:
    return document["sections"].get(name, {}).get(key) or ()


def _share(rate: float | None, limit: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:.1f} ({rate / limit:.0%})" if limit else f"{rate:.1f}"


def _table(heads: Sequence[str], right_from: int, rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown, columns from `right_from` on to the right; nothing without rows."""
    if not rows:
        return []
    rule = ["---" if column < right_from else "---:" for column in range(len(heads))]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(rule)}|"]
    return lines + [f"| {' | '.join(cells)} |" for cells in rows]


def mover_table(document: Document) -> list[str]:
    """GB/s of the copies of a checkpoint alone, and what they are of a plain pinned copy."""
    heads = (
        *("mode", "threads", "piece, MiB", "streams", "GiB", "prepare, s"),
        *("out of the GPU, GB/s (of pinned)", "in the file, GB/s", "restore, GB/s (of pinned)"),
    )
    rows = []
    for row in _section(document, "mover", "rows"):
        size = row.get("bytes")
        rows.append(
            [
                *(str(row.get(key, "-")) for key in ("mode", "threads", "piece", "streams")),
                number(None if size is None else size / GIB, 1),
                number(row.get("dump_prep_s")),
                _share(row.get("out_gbs"), row.get("d2h_gbs")),
                number(row.get("done_gbs"), 1),
                _share(row.get("restore_gbs"), row.get("h2d_gbs")),
            ]
        )
    return _table(heads, 1, rows)


def variants_lines(document: Document) -> list[str]:
    """The mover's variants as the program printed them, for a block of code."""
    return [str(line) for line in _section(document, "mover_variants", "table")]


def chunks_table(document: Document) -> list[str]:
    """Bytes a second of the kernels on chunks, beside a copy by the driver."""
    heads = ("kernel", "threads a chunk", "order of chunks", "read, GB/s", "written, GB/s", "right")
    rows = []
    for row in _section(document, "chunks", "rows"):
        right = row.get("right")
        rows.append(
            [
                str(row.get("kernel", "-")),
                *(str(row.get(key, "-")) for key in ("threads_a_chunk", "order")),
                number(row.get("read_gbs"), 0),
                number(row.get("written_gbs"), 0),
                "-" if right is None else "yes" if right else "**no**",
            ]
        )
    return _table(heads, 3, rows)


STUB_ROWS = {
    "live_4000": "4,000 blocks in use",
    "live_60000": "60,000 blocks in use",
    "two_threads": "4,000 blocks in use, two threads",
    "cold": "256 KiB used by the program between two events, median",
    "cold_mean": "256 KiB used by the program between two events, mean",
    "coldest": "8 MiB used by the program between two events, median",
    "coldest_mean": "8 MiB used by the program between two events, mean",
}


def memstub_table(document: Document) -> list[str]:
    """Nanoseconds of an event of an allocator in the memory stub."""
    found = dict(_section(document, "memstub", "nanoseconds"))
    rows = []
    for name, value in found.items():
        samples = value if isinstance(value, list) else [value]
        rows.append([STUB_ROWS.get(name, name), number(statistics.median(samples), 1)])
    return _table(("allocator with", "ns an event"), 1, rows)

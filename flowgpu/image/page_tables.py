"""Page tables: where each page of a file of CRIU's is that an image does not have as it was written
(docs/reference/image-format.md, "Shared pages").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
ROW = np.dtype([("source", "<u4"), ("count", "<u4"), ("first", "<u8")])


def begins(source: Array, page: Array) -> Array:
    """True for each page that does not follow the page before it in the same source."""
    found = np.ones(len(source), np.bool_)
    found[1:] = (source[1:] != source[:-1]) | (page[1:] != page[:-1] + 1)
    return found


def rows_of(source: Array, page: Array) -> Array:
    """The rows that say for each page in which source it is, and which page of it that is."""
    starts = np.flatnonzero(begins(source, page))
    rows = np.empty(len(starts), ROW)
    rows["source"], rows["first"] = source[starts], page[starts]
    rows["count"] = np.diff(starts, append=len(source))
    return rows


def pages_of(rows: Array) -> tuple[Array, Array]:
    """Source and page of each page, i64, of rows that were decoded."""
    counts = rows["count"].astype(np.int64)
    starts = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(starts, counts)
    source = np.repeat(rows["source"].astype(np.int64), counts)
    return source, np.repeat(rows["first"].astype(np.int64), counts) + within


def decode(data: bytes, pages: int, sources: Sequence[int]) -> Array:
    """The rows in `data`, of a file of so many pages; `sources` are the pages of each source.

    Raises ValueError, which says what does not fit.
    """
    if len(data) % ROW.itemsize:
        raise ValueError(f"it has {len(data)} bytes, which are no whole rows")
    rows = np.frombuffer(data, ROW)
    source, count, first = (np.ascontiguousarray(rows[name]) for name in ROW.names or ())
    total = int(count.sum(dtype=np.uint64))
    if total != pages:
        raise ValueError(f"its rows are of {total} pages, not of {pages}")
    _no_row(count == 0, "is empty")
    _no_row(source >= len(sources), "names no source of the image")
    have = np.array(sources, np.uint64)[source]
    _no_row((first > have) | (count > have - first), "ends behind its source")
    onward = (source[1:] == source[:-1]) & (first[1:] == first[:-1] + count[:-1])
    _no_row(onward, "should be one with the next")
    return rows


def _no_row(wrong: Array, problem: str) -> None:
    if wrong.any():
        raise ValueError(f"row {int(np.argmax(wrong))} {problem}")

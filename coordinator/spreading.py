"""Who of several GPUs does what each of them could: store a chunk that all have, or read it.

Chunks that the same GPUs have are cut, in their order, into one part for each of these, so that
what a GPU gets lies together in its memory. Parts are as large as levels the GPUs' loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def mask_type(gpus: int) -> npt.DTypeLike:
    """The type of an integer that has a bit for each GPU."""
    return np.min_scalar_type((1 << gpus) - 1)


def spread(having: Array, loads: list[int]) -> tuple[Array, Array]:
    """Choose a GPU for each chunk that several have; `having` has a bit a chunk for each that does.

    Gives the numbers of those chunks and the GPU of each. `loads` are the chunks that the GPUs have
    to do anyway; what they have alone is added first, then what they are given.
    """
    for gpu in range(len(loads)):
        loads[gpu] += int(np.count_nonzero(having == 1 << gpu))
    several = np.flatnonzero(having & (having - 1))
    masks = having[several]
    order = np.argsort(masks, kind="stable")
    ordered = masks[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] ^ 1) != 0)
    kinds, ends = ordered[starts], np.append(starts[1:], len(order))
    chosen = np.empty(len(several), np.int64)
    # Who has the least choice comes first.
    for kind in sorted(range(len(kinds)), key=lambda kind: int(kinds[kind]).bit_count()):
        gpus = [gpu for gpu in range(len(loads)) if int(kinds[kind]) >> gpu & 1]
        rows = order[starts[kind] : ends[kind]]
        counts = level([loads[gpu] for gpu in gpus], len(rows))
        chosen[rows] = np.repeat(gpus, counts)
        for gpu, count in zip(gpus, counts, strict=True):
            loads[gpu] += count
    return several, chosen


def level(loads: Sequence[int], amount: int) -> list[int]:
    """How much of `amount` each gets, so that the largest load is as small as can be."""
    order = sorted(range(len(loads)), key=lambda number: loads[number])
    shares = [0] * len(loads)
    total = amount
    for count, number in enumerate(order, 1):
        total += loads[number]
        if count == len(order) or total <= count * loads[order[count]]:
            break
    height, more = divmod(total, count)
    for place, number in enumerate(order[:count]):
        shares[number] = height + (place < more) - loads[number]
    return shares

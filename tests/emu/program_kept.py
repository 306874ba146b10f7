"""Programs that found something, by what it was."""

from __future__ import annotations

from typing import Any

START: list[list[Any]] = [["init", 0], ["retain_primary", 0], ["use", 0]]

KEPT: dict[str, list[list[Any]]] = {
    "the device died of a copy of 1 TiB from host to host": [
        *START,
        ["unified", ["n", -1, 0], ["b", 0, 0], 1 << 40, None],
        ["synchronize"],
    ],
    "memory made under a context that had ended kept every checkpoint from being taken": [
        *START,
        ["reset_primary", 0],
        ["create", 2 << 20, 0, 1],
        ["checkpoint"],
    ],
}

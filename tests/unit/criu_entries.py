"""CRIU's image files as pycriu reads them, for the tests to change and to compare with."""

from __future__ import annotations

import importlib
import struct
import sys
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parents[2] / ".tools" / "criu" / "python"
MAGIC_BYTES = 8


def _pycriu(module: str) -> Any:
    """A module of the installed package, or of the one that `make setup` fetches."""
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    return importlib.import_module(f"pycriu.{module}")


def load(path: Path) -> list[dict[str, Any]]:
    """Entries of an image file."""
    with path.open("rb") as file:
        entries: list[dict[str, Any]] = _pycriu("images").load(file)["entries"]
    return entries


def messages(path: Path, *kinds: str) -> list[Any]:
    """Its protobuf messages; `kinds` are their types in order, the last that of all that follow."""
    data, at = path.read_bytes(), MAGIC_BYTES
    found: list[Any] = []
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        kind = getattr(_pycriu("images.pb"), kinds[min(len(found), len(kinds) - 1)])
        found.append(kind.FromString(data[at + 4 : end]))
        at = end
    return found


def make(kind: str, **fields: Any) -> Any:
    """A message of a type."""
    return getattr(_pycriu("images.pb"), kind)(**fields)


def rewrite(path: Path, messages: list[Any]) -> None:
    """Put messages in the place of an image file's, or of one that is not there."""
    data = [message.SerializePartialToString() for message in messages]
    parts = [struct.pack("<I", len(part)) + part for part in data]
    head = path.read_bytes()[:MAGIC_BYTES] if path.exists() else bytes(MAGIC_BYTES)
    path.unlink(missing_ok=True)  # it may be a link
    path.write_bytes(head + b"".join(parts))

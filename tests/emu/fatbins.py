"""Writes fat binaries as compilers do, for tests of the emulated driver."""

from __future__ import annotations

import ctypes
import struct

_MAGIC = 0xBA55ED50
_FLAGS = {"none": 0x11, "lz4": 0x2011, "zstd": 0x8011}


def _pack(text: bytes, packing: str) -> bytes:
    out = ctypes.create_string_buffer(2 * len(text) + 1024)
    if packing == "lz4":
        size = ctypes.CDLL("liblz4.so.1").LZ4_compress_default(text, out, len(text), len(out))
    else:
        compress = ctypes.CDLL("libzstd.so.1").ZSTD_compress
        compress.restype = ctypes.c_size_t
        size = compress(out, ctypes.c_size_t(len(out)), text, ctypes.c_size_t(len(text)), 3)
    return out.raw[:size]


def entry(payload: bytes, packing: str, *, kind: int = 1, architecture: int = 70) -> bytes:
    """One entry of a container: `kind` 1 is PTX, 2 is a cubin."""
    stored = payload if packing == "none" else _pack(payload, packing)
    padded = stored + bytes(-len(stored) % 8)
    header = struct.pack(
        "<HHIQIIIIIIQQQ",
        kind,
        0x0101,
        64,
        len(padded),
        0 if packing == "none" else len(stored),
        0,
        0,
        architecture,
        0,
        0,
        _FLAGS[packing],
        0,
        0 if packing == "none" else len(payload),
    )
    return header + padded


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", _MAGIC, 1, 16, len(body)) + body


def fatbin(payload: bytes, packing: str, *, kind: int = 1, architecture: int = 70) -> bytes:
    """A container with one entry."""
    return container(entry(payload, packing, kind=kind, architecture=architecture))

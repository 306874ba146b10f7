"""What a filter answers is worked out as the kernel does."""

from __future__ import annotations

import struct

import pytest

from flowgpu.host import seccomp

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
NR, ARCH, FIRST = 0, 4, 16  # of struct seccomp_data
LOAD, EQUAL, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x45, 0x54, 0x06


def program(*rows: tuple[int, int, int, int]) -> bytes:
    return b"".join(seccomp.INSTRUCTION.pack(*row) for row in rows)


def asked(number: int, *words: int) -> bytes:
    return seccomp.DATA.pack(number, seccomp.AUDIT_ARCH_X86_64, 0, *words, *[0] * (6 - len(words)))


# A library writes such filters: another architecture ends the process, socket(AF_INET) fails.
SOCKETS = program(
    (LOAD, 0, 0, ARCH),
    (EQUAL, 1, 0, seccomp.AUDIT_ARCH_X86_64),
    (RETURN, 0, 0, KILL),
    (LOAD, 0, 0, NR),
    (EQUAL, 0, 3, 41),
    (LOAD, 0, 0, FIRST),
    (EQUAL, 0, 1, 2),
    (RETURN, 0, 0, EPERM),
    (RETURN, 0, 0, ALLOW),
)
# This filter uses arithmetic and memory: it forbids mmap and mprotect of what is writable and
# executable at once.
EXECUTABLE = program(
    (LOAD, 0, 0, FIRST + 16),
    (AND, 0, 0, 6),
    (0x02, 0, 0, 3),  # to memory
    (LOAD, 0, 0, NR),
    (EQUAL, 1, 0, 9),
    (EQUAL, 0, 4, 10),
    (0x60, 0, 0, 3),  # from memory
    (0x07, 0, 0, 0),  # to x
    (0x87, 0, 0, 0),  # from x
    (EQUAL, 1, 0, 6),
    (RETURN, 0, 0, ALLOW),
    (RETURN, 0, 0, KILL),
)


@pytest.mark.parametrize(
    ("filters", "data", "answer"),
    [
        (SOCKETS, asked(41, 1), ALLOW),
        (SOCKETS, asked(41, 2), EPERM),
        (SOCKETS, asked(42, 2), ALLOW),
        (SOCKETS, struct.pack("=iI56x", 41, 0x40000003), KILL),
        (EXECUTABLE, asked(9, 0, 0, 3), ALLOW),
        (EXECUTABLE, asked(9, 0, 0, 7), KILL),
        (EXECUTABLE, asked(10, 0, 0, 6), KILL),
        (EXECUTABLE, asked(1, 0, 0, 7), ALLOW),
        (program((LOAD, 0, 0, NR), (ANY_BIT, 0, 1, 8), (RETURN, 0, 0, KILL), (0x16, 0, 0, 0)),
         asked(4), 4),
        (program((0x80, 0, 0, 0), (0x16, 0, 0, 0)), asked(1), seccomp.DATA.size),
        (program((0x00, 0, 0, 7), (0x74, 0, 0, 1), (0x94 - 0x10, 0, 0, 0), (0x16, 0, 0, 0)),
         asked(1), 0xFFFFFFFD),
    ],
)  # fmt: skip
def test_a_filter_answers_as_in_the_kernel(filters: bytes, data: bytes, answer: int) -> None:
    assert seccomp.run(filters, data) == answer


def test_a_call_that_a_filter_takes_for_unknown_is_not_missed() -> None:
    """So do containers answer clone3, and a libc makes its thread by clone."""
    unknown = program((LOAD, 0, 0, NR), (EQUAL, 0, 1, 435), (RETURN, 0, 0, ENOSYS),
                      (RETURN, 0, 0, ALLOW))  # fmt: skip
    assert seccomp.forbids([unknown, SOCKETS], 435, ()) is False
    assert seccomp.forbids([unknown, SOCKETS], 41, (2,)) is True
    assert seccomp.forbids([unknown, SOCKETS], 41, (1,)) is False

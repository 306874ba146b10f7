"""Turn a log of CRIU into one error with its cause.

The texts are those of CRIU 4.2; tests provoke the frequent ones with the real program. A line that
no rule knows is quoted as it is. CRIU names a file by number only; the process lives on after a
failed dump, so /proc still tells what the number stood for.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flowgpu.errors import (
    CriuFailed,
    CriuUnsupported,
    FileChanged,
    FileMissing,
    FlowError,
    LimitTooLow,
    MissingCapability,
    PidTaken,
)
from flowgpu.host.proctree import fd_of, fd_target, mapping_at

# CRIU raises its own limit as far as it may, and asks what network devices can do: it goes on
# where it may not.
HARMLESS = ("rlimit: Can't setup RLIMIT_NOFILE for self", "tun: Unable to create tun")

_ERROR = r"(?:\([\d.]+\)\s+)?(?:pie:\s+)?(?:(\d+):\s+)?Error\s+\([^)]*\):\s*(.+)$"


@dataclass(frozen=True)
class ErrorLine:
    """Text of an error line, without time and source position, and the process it is about."""

    pid: int
    text: str


Rule = tuple[str, Callable[[re.Match[str], ErrorLine, str], FlowError]]


def _unsupported(what: str) -> Callable[[re.Match[str], ErrorLine, str], FlowError]:
    return lambda found, _, action: CriuUnsupported(
        action=action, what=what.format(*found.groups())
    )


def _file(found: re.Match[str], line: ErrorLine, action: str) -> FlowError:
    name = fd_target(line.pid, int(found[1])) or found[2]
    return CriuUnsupported(action=action, what=f"{name} open as fd {found[1]} (process {line.pid})")


def _unsendable_file(_: re.Match[str], line: ErrorLine, action: str) -> FlowError:
    # Since Linux 6.7 the kernel refuses to pass a ring over a socket, which is how CRIU gets files.
    fd = fd_of(line.pid, "anon_inode:[io_uring]")
    if fd is None:
        return CriuFailed(action=action, cause=f"the files of process {line.pid} cannot be sent")
    return CriuUnsupported(action=action, what=f"an io_uring as fd {fd} (process {line.pid})")


def _mapping(found: re.Match[str], _: ErrorLine, action: str) -> FlowError:
    pid, address = int(found[1]), int(found[2], 16)
    name = mapping_at(pid, address) or f"something at {address:#x}"
    return CriuUnsupported(action=action, what=f"a mapping of {name} (process {pid})")


def _missing(found: re.Match[str], _: ErrorLine, __: str) -> FlowError:
    # The path is relative to the root in what CRIU logs.
    return FileMissing(path="/" + found[1].lstrip("/"))


def _no_memory(_: re.Match[str], line: ErrorLine, action: str) -> FlowError:
    cause = (
        f"the kernel refused a process its address space ({line.text.rstrip('.')}), which "
        "`ulimit -v`, `ulimit -d`, vm.overcommit_memory and vm.max_map_count bound"
    )
    return CriuFailed(action=action, cause=cause)


def _few_descriptors(found: re.Match[str], _: ErrorLine, action: str) -> FlowError:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    reason = f"one of its processes needs {found[1]} descriptors with those of CRIU"
    return LimitTooLow(what=f"CRIU's {action}", flag="-n", allowed=allowed, reason=reason)


_CAPABILITIES = {"21": "CAP_SYS_ADMIN", "40": "CAP_CHECKPOINT_RESTORE"}


def _lacking(fallback: str, action: str) -> FlowError | None:
    found = re.search(r"Effective capability (\d+) missing", fallback)
    if found is None:
        return None
    name = _CAPABILITIES.get(found[1], f"number {found[1]}")
    return MissingCapability(action=f"CRIU's {action}", capability=name)


def _capability(_: re.Match[str], __: ErrorLine, action: str) -> FlowError:
    return MissingCapability(
        action=f"CRIU's {action}", capability="CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE"
    )


def _clock(_: re.Match[str], __: ErrorLine, action: str) -> FlowError:
    return MissingCapability(action=f"CRIU's {action}", capability="CAP_SYS_TIME")


RULES: list[Rule] = [
    (r"Can't dump file (\d+) of that type \[\d+\] \((.*?)\)", _file),
    (r"send_fds failed \(-22\)", _unsendable_file),
    (r"Can't handle non-regular mapping on (\d+)'s map ([0-9a-f]+)", _mapping),
    (r"Can't open (\d+)'s mapfile link ([0-9a-f]+)", _mapping),
    (r"External socket is used", _unsupported("a Unix socket with an outside peer")),
    (r"Can't dump half of stream unix", _unsupported("one end of a Unix socket")),
    (r"Connected TCP socket", _unsupported("a connected TCP socket")),
    (r"tty: Found (?:dangling tty|slave peer index)", _unsupported("an outside terminal")),
    (r"Can't dump ghost file (\S+) of (\d+) size", _unsupported("the deleted file {0}, too large")),
    (
        r"File (\S+) has bad size (\d+) \(expect (\d+)\)",
        lambda found, *_: FileChanged(
            path="/" + found[1].lstrip("/"), found=found[2], expected=found[3]
        ),
    ),
    (r"File (\S+) has bad mode", _missing),
    (r"File (\S+) has (?:different|bad) build-?ID", _missing),
    (r"Can't open file (\S+) on restore", _missing),
    (r"Can't open file (\S+): No such file", _missing),
    (
        r"(?:map ANON_VMA|reserve memory .*|private vma|fork for \d+): Cannot allocate memory",
        _no_memory,
    ),
    (r"Can't chose service_fd_base: \d+ (\d+)", _few_descriptors),
    (r"Can't restore [0-9a-fx]+ mapping with (?:0x)?f+4$", _no_memory),  # -ENOMEM
    (
        r"(?:Can't fork for|Pid) (\d+)(?:: File exists| do not match)",
        lambda found, *_: PidTaken(pid=found[1]),
    ),
    (
        r"Unable to create a thread: -17",
        lambda _, line, __: PidTaken(pid=f"of a thread of process {line.pid}"),
    ),
    (r"Unable to set a \w+ clock offset: Operation not permitted", _clock),
    (r"(?:seize|fork|clone).*Operation not permitted|CAP_CHECKPOINT_RESTORE", _capability),
]


def error_lines(log: str) -> list[ErrorLine]:
    """Error lines of a log, the harmless ones left out."""
    found: list[ErrorLine] = []
    pid = 0
    for line in log.splitlines():
        error = re.match(_ERROR, line)
        about = re.search(r"\(pid: (\d+)\)", line)
        pid = int(error[1]) if error and error[1] else int(about[1]) if about else pid
        if error and not error[2].startswith(HARMLESS):
            found.append(ErrorLine(pid, error[2].strip()))
    return found


def explain(log: str, action: str, fallback: str) -> FlowError:
    """The error that a failed run of CRIU amounts to; `action` is `dump` or `restore`."""
    lines = error_lines(log)
    for line in lines:
        for pattern, make in RULES:
            found = re.search(pattern, line.text)
            if found:
                return make(found, line, action)
    # Said before there is a log.
    if lacking := _lacking(fallback, action):
        return lacking
    # The first error is the cause, what follows are its consequences.
    return CriuFailed(action=action, cause=(lines[0].text if lines else fallback).rstrip("."))


def explain_file(log: Path, action: str, fallback: str) -> FlowError:
    """`explain` for a log that may not exist, or not have its end."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        text = ""
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if 0 < allowed <= len(text.encode()) and not error_lines(text):
        reason = f"CRIU's log has {len(text)} bytes by then, and it ended without a reason in it"
        size = f"{allowed} bytes"
        return LimitTooLow(what=f"CRIU's {action}", flag="-f", allowed=size, reason=reason)
    return explain(text, action, fallback)

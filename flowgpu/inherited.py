"""Descriptors, from 3 on, that the command was started with, and those that are for its job.

Many are there by accident: what started the command did not close them. A job that had the end of a
pipe or a terminal of others could not be checkpointed. So these are the job's only where the job is
told of them: by `/dev/fd/N` in its command, as shells have it for `<(...)`, by `make`, or by a
service manager.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence

FIRST = 3
NAMED = re.compile(r"/(?:dev|proc/self|proc/thread-self)/fd/([0-9]+)")
JOBSERVER = re.compile(r"--jobserver-(?:auth|fds)=([0-9]+),([0-9]+)")
WITH_OWN_ID = ["/bin/sh", "-c", 'export LISTEN_PID=$$; exec "$0" "$@"']
"""Runs a command whose process is the one that descriptors are for: sd_listen_fds(3)."""


def for_job(command: Sequence[str], env: Mapping[str, str]) -> list[int]:
    """The descriptors that `command` is to have, sorted."""
    named = {int(fd) for word in command for fd in NAMED.findall(word)}
    named.update(int(fd) for pair in JOBSERVER.findall(env.get("MAKEFLAGS", "")) for fd in pair)
    if is_listening(env):
        named.update(range(FIRST, FIRST + int(env["LISTEN_FDS"])))
    return [fd for fd, is_file in sorted(_inherited()) if is_file or fd in named]


def is_listening(env: Mapping[str, str]) -> bool:
    """True if a service manager has given this process descriptors."""
    return env.get("LISTEN_PID") == str(os.getpid()) and env.get("LISTEN_FDS", "").isdecimal()


def _inherited() -> Iterator[tuple[int, bool]]:
    """Each, and whether it is a file or folder. Python's own are not inheritable."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if fd >= FIRST and os.get_inheritable(fd):
                mode = os.fstat(fd).st_mode
                yield fd, stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        except OSError:  # the one of this list
            continue

"""The root of a job of several ranks (ranks.py): starts those of a file, and waits for all.

It is in the job's image, so it loads little, and nothing of this package.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
NOT_FOUND = 127


def main() -> int:
    """Run them. Gives the first exit code that is not 0."""
    with open(sys.argv[1]) as file:
        ranks = json.load(file)
    # Handlers, which programs do not inherit: the signal is sent to each of them as well.
    for signum in SIGNALS:
        signal.signal(signum, lambda *_: None)
    folder = os.path.dirname(os.environ["FLOWGPU_SOCKET"])
    numbers: dict[int, int] = {}  # of the ranks, by process id
    codes: dict[int, int] = {}

    def ended(number: int, code: int) -> None:
        codes[number] = code
        with open(os.path.join(folder, f"code-{number}"), "w") as file:
            file.write(str(code))

    for number, rank in enumerate(ranks):
        words, others = rank["words"], {name: rank[name] for name in ("env", "cwd", "umask")}
        try:
            numbers[subprocess.Popen(words, **others).pid] = number
        except OSError as error:
            print(f"flowgpu: {words[0]}: {error.strerror}", file=sys.stderr, flush=True)
            ended(number, NOT_FOUND)
    while len(codes) < len(ranks):
        pid, status = os.wait()
        if pid in numbers:
            code = os.waitstatus_to_exitcode(status)
            ended(numbers[pid], code if code >= 0 else 128 - code)
    return next((code for _, code in sorted(codes.items()) if code), 0)


if __name__ == "__main__":
    sys.exit(main())

"""A Multi-Process Service for clients of the emulated GPU: `python mps_service.py FOLDER`.

It gives each client a socket and pipes, and says how many clients it has whenever that changes.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import sys

PR_SET_NAME = 15
PIPES = 4


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"nvidia-cuda-mps-server", 0, 0, 0)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.bind(os.path.join(sys.argv[1], "control"))
    control.listen()
    clients: dict[socket.socket, list[int]] = {}
    print(len(clients), flush=True)
    while True:
        ready, _, _ = select.select([control, *clients], [], [])
        for one in ready:
            if one is not control:
                for fd in clients.pop(one):
                    os.close(fd)
                one.close()
            else:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ends = [os.pipe() for _ in range(PIPES)]
                given = [fd for n, pair in enumerate(ends) for fd in pair[n % 2 : n % 2 + 1]]
                kept = [fd for n, pair in enumerate(ends) for fd in pair[1 - n % 2 : 2 - n % 2]]
                caller, _ = control.accept()
                with caller, theirs:
                    socket.send_fds(caller, [b"1"], [theirs.fileno(), *given])
                for fd in given:
                    os.close(fd)
                clients[ours] = kept
        print(len(clients), flush=True)


if __name__ == "__main__":
    main()

"""Which address of a host stands for one that an image has, and how processes are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flowgpu import launch
from flowgpu.host import addresses
from flowgpu.host.addresses import Choice, Moves, agree, choose
from flowgpu.image.manifest import Address
from tests.patience import SECONDS

LEADS, OTHER = Address("eth0", "10.0.0.5"), Address("ib0", "10.1.0.5")


def chosen(
    now: list[Address],
    path: str,
    alone: bool = False,
    used: tuple[str, ...] = (),
    here: str = "",
    given: Moves | None = None,
) -> Choice:
    return choose([LEADS, OTHER], used, now, path, alone, given or {}, lambda host: host == here)


def test_an_address_that_is_here_stays() -> None:
    found = chosen([Address("eth0", "10.0.0.5")], "10.0.0.5", here="10.0.0.5")
    assert found.moves["10.0.0.5"] == "10.0.0.5"


@pytest.mark.parametrize("name", ["eth0", "ens3"])
def test_what_leads_to_the_leader_stands_for_what_did_and_other_ones_go_by_their_interface(
    name: str,
) -> None:
    now = [Address(name, "10.2.0.9"), Address("ib0", "10.3.0.9")]
    assert chosen(now, "10.2.0.9").moves == {"10.0.0.5": "10.2.0.9", "10.1.0.5": "10.3.0.9"}


def test_what_is_given_comes_first() -> None:
    now = [Address("eth0", "10.2.0.9")]
    given = {"10.0.0.5": "10.2.0.8", "10.9.9.9": "10.2.0.7"}
    found = chosen(now, "10.2.0.9", here="10.0.0.5", given=given)
    assert found.moves == {"10.0.0.5": "10.2.0.8", "10.1.0.5": "10.2.0.9"}


def test_any_address_of_the_kind_stands_for_one_that_nothing_else_does() -> None:
    now = [Address("lan", "10.2.0.9"), Address("lan", "fd00::9")]
    found = chosen(now, "10.2.0.9", used=("fd00::5",)).moves
    assert found == {"10.0.0.5": "10.2.0.9", "10.1.0.5": "10.2.0.9", "fd00::5": "fd00::9"}
    alone = chosen(now, "", alone=True).moves
    assert alone == {"10.0.0.5": "10.2.0.9", "10.1.0.5": "127.129.0.5"}


def test_nodes_on_one_machine_have_loopback_addresses_of_their_own() -> None:
    found = chosen([], "127.0.0.1")
    assert found.moves == {"10.0.0.5": "127.128.0.5", "10.1.0.5": "127.129.0.5"}


def test_a_host_with_one_address_gives_it_for_all() -> None:
    found = chosen([Address("eth0", "10.2.0.9")], "10.2.0.9")
    assert found.moves == {"10.0.0.5": "10.2.0.9", "10.1.0.5": "10.2.0.9"}


def test_one_machine_without_a_network_has_loopback() -> None:
    found = chosen([], "", alone=True, used=("fd00::5",))
    assert found.moves == {"10.0.0.5": "127.128.0.5", "10.1.0.5": "127.129.0.5", "fd00::5": "::1"}


def test_what_a_socket_needs_and_nothing_fits_is_named() -> None:
    now = [Address("eth0", "10.2.0.9")]
    assert chosen(now, "10.2.0.9", used=("fd00::5",)).lacking == ["fd00::5"]


def test_addresses_of_loopback_go_back_to_where_others_reach_them() -> None:
    saved, here = [Address("lo", "127.205.33.1")], {"127.205.33.1", "10.2.0.9"}
    now = [Address("eth0", "10.2.0.9")]
    for path, wanted in (("10.2.0.9", "10.2.0.9"), ("127.0.0.1", "127.205.33.1")):
        found = choose(saved, (), now, path, False, {}, here.__contains__)
        assert found.moves == {"127.205.33.1": wanted}


def test_what_several_nodes_have_had_is_each_ones_own_and_unclear_where_that_moves() -> None:
    bridge = "172.17.0.1"
    own = {"10.0.0.5": "10.2.0.9", bridge: bridge}
    there = {"10.0.0.6": "10.2.0.8", bridge: "10.2.0.8"}
    found = agree("10.2.0.9", own, [("10.2.0.8", there), ("10.2.0.7", {"fd00::1": "fd00::2"})])
    assert found.own == own
    assert found.moves == {**own, "10.0.0.6": "10.2.0.8", "fd00::1": "fd00::2"}
    assert found.unclear == {bridge}
    found = agree("10.2.0.7", {}, [("10.2.0.8", there), ("10.2.0.9", own)])
    assert bridge not in found.moves and found.unclear == {bridge}


def test_nodes_that_are_reached_by_one_address_have_loopback_addresses_of_their_own() -> None:
    path = "10.2.0.9"
    found = agree(path, {"10.0.0.5": path}, [(path, {"10.0.0.6": path, path: path})])
    assert found.own == {"10.0.0.5": "127.128.0.5"}
    assert found.moves == {"10.0.0.5": "127.128.0.5", "10.0.0.6": "127.128.0.6", path: path}
    assert not found.unclear


def test_the_addresses_of_this_host_are_the_systems() -> None:
    found = {one.host for one in addresses.here("")}
    said = subprocess.run(
        ["hostname", "-I"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert found == {*said}


# Says where it connects to and what it is told, each time that it is asked.
ASKER = """
import socket, subprocess, sys
listener = socket.create_server(("", 0))
for line in sys.stdin:
    host = line.strip()
    near = socket.create_connection((host, listener.getsockname()[1]))
    listener.accept()
    env = subprocess.run(["env"], env={}, capture_output=True, text=True).stdout
    found = [line for line in env.splitlines() if "ADDRESSES" in line]
    print(near.getpeername()[0], *found, flush=True)
"""


def test_programs_go_on_with_what_they_know_first(tmp_path: Path) -> None:
    library = launch.library_dir() / launch.EXEC_HOOKS
    env = os.environ | {"LD_PRELOAD": str(library), "FLOWGPU_SOCKET": str(tmp_path / "socket")}
    with subprocess.Popen(
        [sys.executable, "-c", ASKER], env=env, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as program:  # fmt: skip

        def ask(host: str) -> list[str]:
            assert program.stdin and program.stdout
            program.stdin.write(f"{host}\n")
            program.stdin.flush()
            return program.stdout.readline().split()

        def tell(moves: dict[str, str]) -> None:
            program.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, program.pid, os.WSTOPPED | os.WNOWAIT)
            addresses.tell([program.pid], moves)
            program.send_signal(signal.SIGCONT)

        assert ask("127.0.0.1") == ["127.0.0.1"]
        tell({"192.0.2.7": "127.0.0.1", "127.0.0.1": "127.0.0.1"})
        given = "FLOWGPU_ADDRESSES=127.0.0.1=127.0.0.1,192.0.2.7=127.0.0.1"
        assert ask("192.0.2.7") == ["127.0.0.1", given]
        tell({"127.0.0.1": "127.0.0.2", "192.0.2.8": "192.0.2.8"})
        given = "FLOWGPU_ADDRESSES=127.0.0.1=127.0.0.2,192.0.2.7=127.0.0.2"
        assert ask("192.0.2.7") == ["127.0.0.1", given]
        tell({"127.0.0.2": "127.0.0.1"})
        given = "FLOWGPU_ADDRESSES=127.0.0.1=127.0.0.1,192.0.2.7=127.0.0.1,127.0.0.2=127.0.0.1"
        assert ask("127.0.0.2") == ["127.0.0.1", given]
        assert program.stdin
        program.stdin.close()
        assert program.wait(SECONDS) == 0

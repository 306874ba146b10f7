"""Jobs of several nodes: which node of which job a command is of, and who says so."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping

SECRET = "FLOWGPU_JOIN"
"""The variable with what the nodes of a job, and nobody else, know."""
LEAST_SECRET = 16
MOST_NODES = 4096
FIRST_PORT, PORTS = 20000, 10000
"""Where a leader listens that was given no port: below those that the kernel gives away."""


@dataclasses.dataclass(frozen=True)
class Membership:
    """Which node of a job this is, and how it reaches the others."""

    count: int
    node: int
    leader: str  # HOST:PORT, where node 0 listens
    secret: str
    epoch: str = ""  # that of the image, at a restore
    connected: bool = False  # by TCP to other nodes, in that image


def address(leader: str) -> tuple[str, int]:
    """HOST:PORT in its two parts. Raises ValueError."""
    host, colon, port = leader.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError(f"{leader!r} is not HOST:PORT")
    return host, int(port)


@dataclasses.dataclass(frozen=True)
class LauncherPlace:
    """Where a launcher has started a process; None: it does not say."""

    nodes: int
    node: int
    leader: str | None = None
    local_rank: int = 0
    local_count: int = 1  # processes that were started on this node
    launch: str = ""  # the same for all of them, and another one each time


def place_of(env: Mapping[str, str], job: str) -> LauncherPlace | None:
    """What Slurm or Open MPI says in the environment of each process. Raises ValueError."""
    if "SLURM_NODEID" in env and (nodes := env.get("SLURM_STEP_NUM_NODES")):
        first = _first_host(env.get("SLURM_STEP_NODELIST", ""))
        which = f"{env.get('SLURM_JOB_ID', '')} {job}"
        port = FIRST_PORT + zlib.crc32(which.encode()) % PORTS
        leader = f"{first}:{port}" if first else None
        node = int(env["SLURM_NODEID"])
        here = _on_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""), node)
        launch = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
        return LauncherPlace(
            int(nodes), node, leader, int(env.get("SLURM_LOCALID", "0")), here, launch
        )
    if "OMPI_COMM_WORLD_RANK" in env:
        size, here = int(env["OMPI_COMM_WORLD_SIZE"]), int(env["OMPI_COMM_WORLD_LOCAL_SIZE"])
        if size % here:
            raise ValueError("mpirun has not started as many processes on each node")
        node = int(env["OMPI_COMM_WORLD_RANK"]) // here
        launch = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
        launch = re.sub(r"[^A-Za-z0-9_.-]", "-", launch)
        local = int(env.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
        return LauncherPlace(size // here, node, None, local, here, launch)
    return None


def _on_node(tasks: str, node: int) -> int:
    """How many processes there are on a node by Slurm's list, as in `4(x2),1`."""
    counts: list[int] = []
    for number, times in re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", tasks):
        counts += [int(number)] * min(int(times or 1), MOST_NODES)
    return counts[node] if node < len(counts) else 1


def _first_host(hosts: str) -> str:
    """The first of Slurm's list, as in `node[07-12,15],gpu1`."""
    found = re.match(r"([^,\[\]]+)(?:\[([0-9]+)[^\]]*\]([^,\[\]]*))?", hosts)
    return "".join(part or "" for part in found.groups()) if found else ""


def secret_of(env: Mapping[str, str]) -> str:
    """What the nodes have in common. Raises ValueError."""
    secret = env.get(SECRET, "")
    if len(secret) < LEAST_SECRET:
        raise ValueError(
            f"the nodes of a job know each other by the variable {SECRET}: set it to the same "
            f"random text of at least {LEAST_SECRET} letters on each"
        )
    return secret

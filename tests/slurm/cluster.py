"""A Slurm of one's own: munge, slurmctld and a slurmd a node, as root, in a private folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import cast

from flowgpu.errors import DUMPED_EXIT
from tests.unit.coordinator_job import wait_for

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "contrib" / "slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "sinfo", "scancel")
START_SECONDS, JOB_SECONDS = 60.0, 120.0
NOT_ENDED = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "PREEMPTED")


def missing() -> list[str]:
    """Programs of Slurm that are not installed."""
    return [name for name in PROGRAMS if not shutil.which(name, path=_path())]


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [one.getsockname()[1] for one in sockets]


class Cluster:
    """Slurm with the lines of contrib/slurm, a partition `low`, and `high` that preempts it."""

    def __init__(
        self, folder: Path, nodes: int = 1, cpus: int = 2, without: tuple[str, ...] = ()
    ) -> None:
        """`without`: settings of contrib/slurm/flowgpu.conf that this one does not have."""
        self.folder = folder
        self.nodes = [f"node{number}" for number in range(nodes)]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
        shutil.copy(SHIPPED / "cli_filter.lua", folder)
        lines = (SHIPPED / "flowgpu.conf").read_text().splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith(without)] if without else lines
        (folder / "flowgpu.conf").write_text("".join(kept))
        (folder / "slurm.conf").write_text(self._conf(cpus))
        (folder / "gres.conf").write_text("Name=gpu Type=fake File=/dev/null\n")
        # Where cgroups are those of version 2, slurmd asks systemd for one, which may not be there.
        (folder / "cgroup.conf").write_text("IgnoreSystemd=yes\n")

    def _conf(self, cpus: int) -> str:
        host = socket.gethostname()
        control, *ports = free_ports(1 + len(self.nodes))
        state = self.folder / "state"
        state.mkdir()
        for node in self.nodes:
            (self.folder / node).mkdir()
        lines = [
            "ClusterName=flowgpu",
            f"SlurmctldHost={host}(127.0.0.1)",
            "AuthType=auth/munge",
            # Else a requeued job waits two minutes for its old credential to end.
            f"AuthInfo=socket={self.folder}/munge.socket,cred_expire=5",
            "SlurmUser=root",
            "SlurmdUser=root",
            f"SlurmctldPort={control}",
            f"StateSaveLocation={state}",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmctldLogFile={self.folder}/slurmctld.log",
            f"SlurmdSpoolDir={self.folder}/%n",
            f"SlurmdPidFile={self.folder}/%n.pid",
            f"SlurmdLogFile={self.folder}/%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SlurmdParameters=config_overrides",  # more processors than there are
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=bf_interval=1,sched_interval=1,requeue_delay=1",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "KillWait=5",
            "ReturnToService=2",
            "GresTypes=gpu",
            "Include flowgpu.conf",
            *(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
                f"CPUs={cpus} RealMemory=4000 Gres=gpu:fake:1"
                for node, port in zip(self.nodes, ports, strict=True)
            ),
            "PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=60",
            "PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60",
        ]
        return "\n".join(lines) + "\n"

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(AssertionError):  # where slurmctld never came up
            self.ask("scancel", "--user=root", "--full")
            wait_for(lambda: not self.ask("squeue", "-h"), "the end of all jobs", JOB_SECONDS)
        for process in reversed(self._daemons):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self._daemons):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(64))
        words = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
        options = [f"--{option}={self.folder}/munge.{ending}" for option, ending in words.items()]
        seed = f"--seed-file={self.folder}/munge.seed"
        self._daemon("munged", "--foreground", "--force", *options, seed)
        wait_for(lambda: (self.folder / "munge.socket").exists(), "munged", START_SECONDS)
        self._daemon("slurmctld", "-D", "-c")
        for node in self.nodes:
            self._daemon("slurmd", "-D", "-N", node)
        wait_for(self._is_up, f"Slurm, whose logs are in {self.folder}", START_SECONDS)

    def _daemon(self, *words: str) -> None:
        with open(self.folder / f"{words[0]}.out", "ab") as out:
            self._daemons.append(
                subprocess.Popen(words, stdout=out, stderr=out, env=self._env, cwd=self.folder)
            )

    def _is_up(self) -> bool:
        words = ["sinfo", "-h", "-N", "-p", "low", "-o", "%T"]
        done = subprocess.run(words, capture_output=True, text=True, env=self._env)
        return done.stdout.split() == ["idle"] * len(self.nodes)

    def ask(self, *words: object, **variables: str) -> str:
        """What a command of Slurm prints, with these in its environment; it must succeed."""
        done = subprocess.run(
            [*map(str, words)],
            capture_output=True,
            text=True,
            env={**self._env, **variables},
            cwd=self.folder,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def bring_back(self, node: str) -> None:
        """Let a node take jobs again; one that was down may do so by itself."""
        if self.ask("sinfo", "-h", "-n", node, "-p", "low", "-o", "%T").strip() != "idle":
            with contextlib.suppress(AssertionError):
                self.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
        wait_for(self._is_up, f"{node} to be idle", JOB_SECONDS)

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        text = self.ask("scontrol", "show", "job", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_end(self, number: str, seconds: float = JOB_SECONDS) -> dict[str, str]:
        """Wait until the job has ended in any way; one that was dumped is FAILED for a moment."""

        def found() -> dict[str, str] | None:
            job = self.job(number)
            dumped = job["ExitCode"] == f"{DUMPED_EXIT}:0"
            return None if job["JobState"] in NOT_ENDED or dumped else job

        return cast(dict[str, str], wait_for(found, f"job {number} to end", seconds))

    def wait_state(self, number: str, state: str, seconds: float = JOB_SECONDS) -> dict[str, str]:
        def found() -> dict[str, str] | None:
            job = self.job(number)
            return job if job["JobState"] == state else None

        return cast(dict[str, str], wait_for(found, f"job {number} to be {state}", seconds))

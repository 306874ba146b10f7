"""An HTCondor pool of one's own: its daemons as root, and two users whom only it knows.

It runs in a mount namespace of its own, where this checkout lies at /mnt (tests/ordinary_user.py)
and the users are in /etc/passwd. As by default, HTCondor gives each job a private /tmp there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowgpu.host.proctree import arguments
from tests.ordinary_user import FLOWGPU, HERE, ROOT, here
from tests.unit.coordinator_job import wait_for

FETCHED = ROOT / ".tools" / "htcondor" / "bin"
SHIPPED = ROOT / "contrib" / "htcondor"
LAUNCHER = ROOT / "contrib" / "capabilities" / "flowgpu.sh"
CAPABILITIES = "cap_sys_admin,cap_sys_ptrace,cap_sys_time,cap_net_admin,cap_setpcap"
CAPABILITIES += ",cap_checkpoint_restore"
USERS = {"flowgpu-job": 64991, "flowgpu-boss": 64992}
START_SECONDS, JOB_SECONDS = 90.0, 180.0
GPUS = [f"GPU-466c6f77-4750-552d-656d-752d3030{number}00" for number in (30, 31)]
"""The emulated ones."""

CONFIG = """\
RELEASE_DIR = {programs}
BIN = {programs}
SBIN = {programs}
LIBEXEC = {programs}
LOCAL_DIR = {folder}
LOG = {folder}/log
SPOOL = {folder}/spool
EXECUTE = {folder}/execute
RUN = {folder}/run
LOCK = {folder}/lock
CONDOR_IDS = 0.0
CONDOR_HOST = 127.0.0.1
COLLECTOR_HOST = 127.0.0.1:0
COLLECTOR_ADDRESS_FILE = {folder}/collector
NETWORK_INTERFACE = 127.0.0.1
USE_SHARED_PORT = False
DAEMON_LIST = MASTER COLLECTOR NEGOTIATOR SCHEDD STARTD
SEC_DEFAULT_AUTHENTICATION_METHODS = FS, CLAIMTOBE
ALLOW_WRITE = *
ALLOW_READ = *
ALLOW_ADMINISTRATOR = *
ALLOW_DAEMON = *
NEGOTIATOR_INTERVAL = 2
NEGOTIATOR_MIN_INTERVAL = 1
NEGOTIATOR_CYCLE_DELAY = 1
SCHEDD_INTERVAL = 2
UPDATE_INTERVAL = 2
MASTER_BACKOFF_CONSTANT = 1
RUNBENCHMARKS = False
HIBERNATION_PLUGIN =
MACHINE_RESOURCE_INVENTORY_GPUs = {folder}/bin/gpus
NUM_CPUS = 2
MEMORY = 2000
SLOT_TYPE_1 = cpus=1
NUM_SLOTS_TYPE_1 = 2
START = True
SUSPEND = False
PREEMPT = False
KILL = False
# A user with a better priority takes a machine from one with a worse.
PREEMPTION_REQUIREMENTS = RemoteUserPrio > TARGET.SubmitterUserPrio * 1.2
# The connection of a machine that is gone is given up at once.
JOB_DEFAULT_LEASE_DURATION = 20
"""
SCRIPT = """\
mount --bind {root} {here}
for file in passwd group; do mount --bind {folder}/$file /etc/$file; done
cd / && exec {programs}/condor_master -f
"""


def missing() -> list[str]:
    """What lacks to run a pool."""
    from tests.ordinary_user import missing as lacks

    programs = [name for name in ("nsenter", "setcap", "setpriv", "unshare") if not _which(name)]
    return [*lacks(), *([] if FETCHED.exists() else ["HTCondor"]), *programs]


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Pool:
    """Two slots with a GPU each, and users who may dump and restore jobs there."""

    def __init__(self) -> None:
        base = ROOT / "build"
        self.folder = Path(tempfile.mkdtemp(prefix="condor-", dir=base))
        self.folder.chmod(0o755)
        for name in ("bin", "execute", "lock", "log", "run", "spool"):
            (self.folder / name).mkdir()
        (self.folder / "execute").chmod(0o1777)
        words = {"folder": here(self.folder), "programs": here(FETCHED)}
        (self.folder / "config").write_text(CONFIG.format(**words))
        self._users()
        self._programs()
        self.env = {
            "CONDOR_CONFIG": f"{here(self.folder)}/config",
            "PATH": f"{here(FETCHED)}:/usr/sbin:/usr/bin:/sbin:/bin",
        }
        script = SCRIPT.format(root=ROOT, here=HERE, **words)
        with open(self.folder / "master.out", "wb") as out:
            self._master = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script],
                stdout=out,
                stderr=out,
                env=self.env,
                start_new_session=True,
            )

    def _users(self) -> None:
        texts = {name: Path(f"/etc/{name}").read_text() for name in ("passwd", "group")}
        for user, number in USERS.items():
            texts["passwd"] += f"{user}:x:{number}:{number}::/nonexistent:/bin/sh\n"
            texts["group"] += f"{user}:x:{number}:\n"
            (self.folder / user).mkdir()
            os.chown(self.folder / user, number, number)

        for name, text in texts.items():
            (self.folder / name).write_text(text)

    def _programs(self) -> None:
        """What docs/install.md tells an administrator to put on each machine."""
        bin_folder = self.folder / "bin"
        shutil.copy(_which("setpriv") or "", bin_folder / "setpriv")
        capable = [_which("setcap") or "", f"{CAPABILITIES}=p", str(bin_folder / "setpriv")]
        subprocess.run(capable, check=True)
        python, option, starts = FLOWGPU
        (bin_folder / "program").write_text(f'#!/bin/sh\nexec {python} {option} "{starts}" "$@"\n')
        text = LAUNCHER.read_text()
        for old, new in (
            ("/opt/flowgpu/.venv/bin/flowgpu", "program"),
            ("/usr/local/libexec/flowgpu/setpriv", "setpriv"),
        ):
            assert old in text
            text = text.replace(old, f"{here(bin_folder)}/{new}")
        (bin_folder / "flowgpu").write_text(text)
        detected = ", ".join(GPUS)
        (bin_folder / "gpus").write_text(f"#!/bin/sh\necho 'DetectedGPUs=\"{detected}\"'\n")
        for path in bin_folder.iterdir():
            path.chmod(0o755)

    def __enter__(self) -> Pool:
        try:
            wait_for(self._is_up, f"the pool, whose logs are in {self.folder}/log", START_SECONDS)
            domain = self.ask("condor_config_val", "UID_DOMAIN").strip()
            # The higher, the later: others have 1000.
            self.ask("condor_userprio", "-setfactor", f"flowgpu-job@{domain}", "1000000")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(AssertionError):
            self.ask("condor_rm", "-all", "-forcex")
        self._master.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._master.wait(30)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._master.wait()
        shutil.rmtree(self.folder)

    def _is_up(self) -> bool:
        done = self.run("condor_status", "-af", "State")
        return done.stdout.split() == ["Unclaimed"] * 2

    def run(self, *words: object, user: str = "") -> subprocess.CompletedProcess[str]:
        """A command in the pool's namespace, as root or as a user in the folder of theirs."""
        inside = ["nsenter", f"--target={self._master.pid}", "--mount"]
        if user:
            inside += [f"--wdns={here(self.folder / user)}", "setpriv", "--clear-groups"]
            inside += [f"--reuid={USERS[user]}", f"--regid={USERS[user]}"]
        command = [*inside, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, env=self.env)

    def ask(self, *words: object, user: str = "") -> str:
        """What a command says; it must succeed."""
        done = self.run(*words, user=user)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def processes(self, of: Callable[[int], bool] = lambda user: True) -> list[int]:
        """Those that the pool has started, of users `of`: its folder is in their environment."""
        name, found = os.fsencode(self.folder.name), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if of(entry.stat().st_uid) and name in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def daemons(self, *names: str) -> list[int]:
        """Those of the pool with these names."""
        pids = self.processes(lambda user: user == 0)
        return [pid for pid in pids if set(names) & {Path(word).name for word in arguments(pid)}]

    def job_processes(self) -> list[int]:
        return self.processes(lambda user: user in USERS.values())


class Job:
    """contrib/htcondor/job.sub with a command, submitted by a user."""

    def __init__(self, pool: Pool, command: str, *options: str, user: str, **macros: Any) -> None:
        self.pool, self.user, self.folder = pool, user, pool.folder / user
        words = {"command": command, "flowgpu": f"{here(pool.folder)}/bin/flowgpu", **macros}
        self.hurrying = self.folder / "hurry"
        self.hurrying.unlink(missing_ok=True)
        environment = f"FLOWGPU_EMU_DEVICES=2 WORKLOAD_HURRY={here(self.hurrying)}"
        said = pool.ask(
            "condor_submit",
            *(f"{name}={value}" for name, value in {"memory": "500M", **words}.items()),
            *("-append", f'environment = "{environment}"'),
            *(word for option in options for word in ("-append", option)),
            here(SHIPPED / "job.sub"),
            user=user,
        )
        self.cluster = said.split()[-1].rstrip(".")
        self.id = f"{self.cluster}.0"
        self.name = f"job-{self.cluster}-0"

    def ad(self, name: str) -> str:
        """What HTCondor knows of the job; an empty string once it has ended."""
        return self.pool.ask("condor_q", self.id, "-allusers", "-af", name).strip()

    def _text(self, stream: str) -> str:
        """Its output: where the job runs, in the spool of one that waits, or at its end."""
        name = {"out": "_condor_stdout", "err": "_condor_stderr"}[stream]
        for folder in self.scratch():
            with contextlib.suppress(OSError):
                return (folder / name).read_text()
        for path in (self.folder / f"{self.name}.{stream}", *self._spooled(name)):
            with contextlib.suppress(OSError):
                return path.read_text()
        return ""

    def scratch(self) -> list[Path]:
        """The folder where it runs: `dir_PID`, or, from HTCondor 25 on, one in it."""
        found = []
        for folder in (self.pool.folder / "execute").glob("dir_*"):
            for place in (folder, folder / "scratch"):
                with contextlib.suppress(OSError):
                    if f"\nClusterId = {self.cluster}\n" in (place / ".job.ad").read_text():
                        found.append(place)
        return found

    def _spooled(self, what: str) -> list[Path]:
        """What HTCondor has of a job that waits."""
        spool = f"spool/*/0/cluster{self.cluster}.proc0.subproc0"
        return sorted(self.pool.folder.glob(f"{spool}/{what}"))

    def saved_pid(self) -> int:
        """A process id of its newest image."""
        manifest = self._spooled(f"{self.name}/*/manifest.json")[-1]
        return min(json.loads(manifest.read_text())["pids"])

    @property
    def lines(self) -> list[str]:
        return self._text("out").splitlines()

    @property
    def said(self) -> str:
        return self._text("err")

    def events(self, number: str) -> int:
        """How often such an event is in its log: 001 it runs, 004 it was evicted, 005 it ended."""
        log = self.folder / f"{self.name}.log"
        text = log.read_text() if log.exists() else ""
        return sum(
            line.startswith(f"{number} ({int(self.cluster):03}.") for line in text.splitlines()
        )

    def wait_event(self, number: str, count: int = 1) -> None:
        self._wait(lambda: self.events(number) >= count, f"event {number}, the {count}th")

    def wait_lines(self, count: int) -> None:
        self._wait(lambda: len(self.lines) >= count, f"{count} lines")

    def wait_restored(self, count: int) -> None:
        restored = f"restored {self.name}"
        self._wait(lambda: self.said.count(restored) >= count, f"{count} restores")

    def _wait(self, check: Callable[[], bool], what: str) -> None:
        """Until this is so; a job that has ended or is held will not do it any more."""

        def found() -> bool:
            over = self.events("005") or (self.events("012") > self.events("013"))
            if check():
                return True
            assert not over, f"no {what} of {self.id}: {self.ad('HoldReason')}\n{self.said}"
            return False

        wait_for(found, f"{what} of job {self.id}", JOB_SECONDS)

    def ends_as(self, expected: list[str]) -> None:
        """It goes to its end, with the lines of an undisturbed run."""
        self.hurrying.touch()
        self.wait_event("005")
        assert self.lines == expected, self.said


if __name__ == "__main__":
    sys.exit(bool(missing()))

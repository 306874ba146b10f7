"""Jobs of a user who is not root: dumped, restored, and going on in another folder."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from flowgpu import errors
from flowgpu.errors import DUMPED_EXIT
from flowgpu.host.probes import bounding_set_is_full
from tests.emu.test_checkpoint import SECONDS, STEP_DELAY, STEPS, end_emulator
from tests.ordinary_user import FLOWGPU, RIGHTS, USER, as_user, missing, workload
from tests.unit.coordinator_job import wait_for

absent = missing()
pytestmark = pytest.mark.skipif(bool(absent), reason=f"no user but root here: {absent}")
WORDS = workload("digits_mlp", **{"steps": STEPS, "step-delay": STEP_DELAY})


class User:
    """A folder of the user's, with a store and folders to start the same line in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runtime = folder, folder / "runtime"
        self.out, self.err, self.hurrying = (folder / name for name in ("out", "err", "hurry"))
        self.make("store")
        os.chown(folder, USER, USER)

    def make(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir()
        os.chown(path, USER, USER)
        return path

    def start(
        self, words: Iterable[str], cwd: Path, rights: Iterable[str] = RIGHTS
    ) -> subprocess.Popen[bytes]:
        environment = {
            "PATH": "/usr/bin:/bin",
            "FLOWGPU_RUNTIME_DIR": str(self.runtime),
            "WORKLOAD_HURRY": str(self.hurrying),
        }
        with open(self.out, "ab") as out, open(self.err, "ab") as err:
            return subprocess.Popen(
                as_user([*FLOWGPU, *words], rights),
                stdout=out,
                stderr=err,
                cwd=cwd,
                env=environment,
            )

    def run(self, words: Iterable[str], cwd: Path, rights: Iterable[str] = RIGHTS) -> int:
        return self.start(words, cwd, rights).wait(SECONDS)

    def line(self, *words: str) -> list[str]:
        store = ("--store", f"{self.folder}/store", "--resume", "--on-signal", "TERM=dump")
        return ["run", "--gpu", "emulated", "--name", "train", *store, "--", *(words or WORDS)]

    @property
    def lines(self) -> list[str]:
        return self.out.read_text().splitlines()

    @property
    def said(self) -> str:
        return self.err.read_text()

    def wait_runs(self, process: subprocess.Popen[bytes], lines: int) -> None:
        """Until a new job has said so many lines, or an old one is restored."""
        restored = self.said.count("restored train") if lines == 0 else 0

        def found() -> bool:
            assert process.poll() is None, self.said
            if lines:
                return self.out.exists() and len(self.lines) >= lines
            return self.said.count("restored train") > restored

        wait_for(found, "the job", SECONDS)

    def dump(self, cwd: Path, words: list[str]) -> None:
        """Start the line in a folder, and dump the job when it runs."""
        lines = 0 if self.out.exists() else 3
        process = self.start(words, cwd)
        self.wait_runs(process, lines)
        process.terminate()
        assert process.wait(SECONDS) == DUMPED_EXIT, self.said


@pytest.fixture
def user() -> Iterator[User]:
    with tempfile.TemporaryDirectory(prefix="flowgpu-") as folder:
        found = User(Path(folder))
        yield found
        end_emulator(found.runtime / "flowgpu-emu.sock")


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Lines of a run that nobody disturbed."""
    with tempfile.TemporaryDirectory(prefix="flowgpu-") as folder:
        user = User(Path(folder))
        words = workload("digits_mlp", **{"steps": STEPS, "step-delay": 0})
        assert user.run(["run", "--gpu", "emulated", "--", *words], user.folder) == 0, user.said
        end_emulator(user.runtime / "flowgpu-emu.sock")
        return user.lines


def test_a_job_of_a_user_with_the_capabilities_is_dumped_and_goes_on(
    user: User, expected: list[str]
) -> None:
    place = user.make("place")
    user.dump(place, user.line())
    assert len(user.lines) < len(expected)
    user.hurrying.touch()
    assert user.run(user.line(), place) == 0, user.said
    assert user.lines == expected


def test_a_job_whose_folder_is_gone_finds_the_one_where_its_line_is_started(
    user: User, expected: list[str]
) -> None:
    """As under a scheduler that gives each turn a folder of its own."""
    other = user.folder / "other.txt"
    other.write_text("beside\n")
    (user.folder / "link").symlink_to("other.txt")
    for turn in range(2):
        place = user.make(f"turn-{turn}")
        user.dump(place, user.line())
        shutil.rmtree(place)
    (user.folder / "turn-0").mkdir(0o700)  # another user's has its name now
    assert len(user.lines) < len(expected)
    user.hurrying.touch()
    assert user.run(user.line(), user.make("last")) == 0, user.said
    assert user.lines == expected
    assert f"it finds this folder at {user.folder}/turn-0" in user.said
    # Nobody else sees it there.
    assert not any((user.folder / "turn-0").iterdir())
    assert other.read_text() == "beside\n"


KEEPS = """
import os, time
file = open("notes", "w+")
here = os.getcwd()
for step in range(1000):
    print(step, file=file, flush=True)
    assert os.path.exists(f"{here}/notes") and open("../other").read() == "beside"
    print("step", step, flush=True)
    if os.path.exists("hurry"):
        break
    time.sleep(0.05)
file.seek(0)
assert file.read().split() == [str(number) for number in range(step + 1)]
try:
    open("../lost", "w")
except OSError as error:
    print(error.strerror, flush=True)
"""


def test_files_of_the_folder_are_found_where_they_have_moved_with_it(user: User) -> None:
    (user.folder / "other").write_text("beside")
    words = user.line("/usr/bin/python3", "-u", "-c", KEEPS)
    user.dump(user.make("first"), words)
    (user.folder / "first").rename(user.folder / "second")
    process = user.start(words, user.folder / "second")
    user.wait_runs(process, 0)
    (user.folder / "second" / "hurry").touch()
    assert process.wait(SECONDS) == 0, user.said
    assert user.lines[-1] == os.strerror(errno.EROFS)
    assert (user.folder / "second" / "notes").exists()


def test_without_the_right_to_restore_a_job_it_is_said_at_once(user: User) -> None:
    if bounding_set_is_full():
        pytest.skip("no capability is missing from the bounding set here")
    place = user.make("place")
    user.dump(place, user.line())
    rights = [right for right in RIGHTS if right != "setpcap"]
    assert user.run(user.line(), place, rights) == errors.MissingCapability.exit_code
    assert "CRIU's restore needs the capability CAP_SETPCAP" in user.said
    user.hurrying.touch()
    assert user.run(user.line(), place) == 0, user.said

"""One error class for each outcome that a user can act on.

The first paragraph of a class's docstring is the message, with a field in braces for each fact;
`exit_code` is what the command line returns and `hint` what to do next. From 60 to 127 all codes
are used; new ones go down from 52. `docs/reference/errors.md` is generated from this file by
`tools/errorlist.py`.

    raise CheckpointFailed(action="checkpoint", job="train", phase="STRIP", reason="...")
    raise CheckpointFailed("checkpoint", "train", "STRIP", "...")  # in the order of the message
"""

from __future__ import annotations

import ast
import functools
import inspect
import traceback
from pathlib import Path
from string import Formatter
from typing import Any, ClassVar

DUMPED_EXIT = 75
"""Exit code of a job whose process was dumped away: a success that asks to be restored.

It is EX_TEMPFAIL of sysexits.h: batch systems requeue on it. No error may use it.
"""


class FlowError(Exception):
    """FlowGPU failed: {reason}."""

    exit_code: ClassVar[int] = 64
    hint: ClassVar[str] = "Run `flowgpu doctor`, and report it with its output."

    def __init__(self, *args: object, **fields: object) -> None:
        names = self.field_names()
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes the fields {names}, got {args}")
        given = dict(zip(names, args, strict=False)) | fields
        if set(given) != set(names) or len(given) != len(args) + len(fields):
            raise TypeError(f"{type(self).__name__} takes the fields {names}, got {sorted(given)}")
        self.fields: dict[str, Any] = given
        super().__init__(self.template().format(**given))

    @classmethod
    def template(cls) -> str:
        """The message, with fields in braces."""
        text = inspect.cleandoc(cls.__doc__ or _docstrings()[cls.__name__])
        return " ".join(text.split("\n\n")[0].split())

    @classmethod
    def field_names(cls) -> list[str]:
        """Fields of the message in the order of their first use."""
        found = [name for _, name, _, _ in Formatter().parse(cls.template()) if name]
        return list(dict.fromkeys(found))

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form that `from_dict` reads back on the other side of a socket."""
        return {
            "error": type(self).__name__,
            "message": str(self),
            "exit_code": self.exit_code,
            "hint": self.hint,
            "fields": {name: _plain(value) for name, value in self.fields.items()},
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> FlowError:
        """The error that `as_dict` described; an unknown class comes back as FlowError."""
        for cls in all_errors():
            fields = data.get("fields", {})
            if cls.__name__ == data.get("error") and set(fields) == set(cls.field_names()):
                return cls(**fields)
        return FlowError(reason=str(data.get("message", "unknown error")))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.fields))


@functools.cache
def _docstrings() -> dict[str, str]:
    """Docstrings of this file's classes, which PYTHONOPTIMIZE=2 takes away."""
    classes = ast.parse(Path(__file__).read_text()).body
    return {
        one.name: ast.get_docstring(one) or "" for one in classes if isinstance(one, ast.ClassDef)
    }


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _rebuild(cls: type[FlowError], fields: dict[str, Any]) -> FlowError:
    return cls(**fields)


def all_errors() -> list[type[FlowError]]:
    """FlowError and every class derived from it in this file, in the order of the file."""
    return [
        value
        for value in globals().values()
        if isinstance(value, type) and issubclass(value, FlowError)
    ]


class InternalError(FlowError):
    """FlowGPU made an error of its own in {action}: {error}."""

    exit_code = 120
    hint = (
        "A running job goes on as before, and an image is untouched. Report it, with "
        "coordinator.log of the job's folder."
    )


PACKAGES = ("flowgpu", "coordinator")
FOLDERS = {Path(__file__).resolve().parents[1] / package for package in PACKAGES}


def is_internal(error: BaseException) -> bool:
    """True if nobody meant to raise the error: it has neither the system's words nor ours."""
    if type(error).__module__.partition(".")[0] in PACKAGES:
        return False
    meant = isinstance(error, OSError | RuntimeError | MemoryError)
    return not meant or isinstance(error, RecursionError | NotImplementedError)


def words_of(error: BaseException) -> str:
    """What happened, for a message. An internal error says its class and place as well."""
    said = str(error)
    if not is_internal(error):
        return said or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if FOLDERS & set(Path(frame.filename).parents)] or frames
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "nowhere"
    return f"{type(error).__name__}{said and f': {said}'} ({place})"


class UnknownJob(FlowError):
    """No job named {job!r} runs here."""

    exit_code = 65
    hint = "`flowgpu ps --all` lists the jobs."


class JobExists(FlowError):
    """A job named {job!r} already runs here."""

    exit_code = 66
    hint = "Choose another name with --name, or end the running job."


class OutputNotEmpty(FlowError):
    """{path} exists and is not an empty folder."""

    exit_code = 67
    hint = "Name a new folder for the image; an image is never written over."


class OutputUnusable(FlowError):
    """No image can be written to {path}: {reason}."""

    exit_code = 100
    hint = "Name a folder that the job's user can make. A running job goes on."


class NotEnoughDisk(FlowError):
    """{path} has {free} free, and the image of job {job!r} needs {needed}."""

    exit_code = 68
    hint = "Free space, or name a folder on a larger file system. A running job goes on."


class NotEnoughMemory(FlowError):
    """{place} has {free} of memory left, and {what} needs {needed} of it."""

    exit_code = 112
    hint = "End what is not needed, or raise the limit. A running job goes on."


class LimitTooLow(FlowError):
    """{what} does not work where `ulimit {flag}` is {allowed}: {reason}."""

    exit_code = 118
    hint = (
        "Raise the limit where `flowgpu restore` runs. A checkpoint has those of `flowgpu run`: "
        "`prlimit --pid` raises them for the processes flowgpu-coord and flowgpu-keeper of the job."
    )


class MissingCapability(FlowError):
    """{action} needs the capability {capability}, which this process does not have."""

    exit_code = 69
    hint = "Run as root, or grant the capability to the container or program."


class CriuMissing(FlowError):
    """No CRIU that works here: {reason}."""

    exit_code = 70
    hint = "`make setup` fetches one; FLOWGPU_CRIU names a program of your own."


class CriuFailed(FlowError):
    """CRIU could not {action}: {cause}."""

    exit_code = 71
    hint = "The full log lies beside CRIU's image files."


class CheckpointTimeout(FlowError):
    """The {action} of job {job!r} took longer than {seconds} s in phase {phase}."""

    exit_code = 72
    hint = "The job runs on as before. Allow more time with --timeout."


class CheckpointFailed(FlowError):
    """The {action} of job {job!r} failed in phase {phase}: {reason}."""

    exit_code = 73
    hint = "The job runs on as before."


class ImageDamaged(FlowError):
    """The image {path} is damaged: {reason}."""

    exit_code = 74
    hint = "Nothing was restored. Use another image of the job."


class RecordMissing(FlowError):
    """The image {path} has no record of CUDA objects: {reason}."""

    exit_code = 55
    hint = "The engine replay lists what it makes again: dump the job once more, with it."


class ImageVersion(FlowError):
    """The image {path} has format version {found}; this FlowGPU reads {supported}."""

    exit_code = 76
    hint = "Restore it with the FlowGPU version that its manifest names."


class GpuMismatch(FlowError):
    """The image was taken on {image}, and this machine has {here}."""

    exit_code = 77
    hint = "Restore on the same GPUs, an image of the engine replay on others of enough memory."


class TopologyMismatch(FlowError):
    """GPU {other} of the image is reached from GPU {gpu} {image}; here it is {here}."""

    exit_code = 117
    hint = (
        "Restore on GPUs that are joined as those of the image: its ranks have chosen their ways. "
        "An image taken with `--communicators rebuild` takes others."
    )


class DriverMismatch(FlowError):
    """The image was taken with CUDA driver version {image}, and this machine has {here}."""

    exit_code = 107
    hint = "Restore where the driver is the same: the job has its libraries in memory."


class ProcessorMismatch(FlowError):
    """This machine's processor lacks what programs of the image may use: {names}."""

    exit_code = 109
    hint = (
        "Restore on a machine that has it. `--processor any` restores all the same: right for jobs "
        "that were told to use less, and others end at the first such instruction (SIGILL)."
    )


class RegistersInUse(FlowError):
    """Thread {thread} of job {job!r} is using registers that CRIU cannot save: {names}."""

    exit_code = 110
    hint = (
        "The job runs on as before. Try again: a thread has values there only in the middle of an "
        "operation on the processor, such as a product of bfloat16 matrices."
    )


class NoGpu(FlowError):
    """No usable GPU: {reason}."""

    exit_code = 78
    hint = "`flowgpu doctor` shows driver and GPUs; --gpu emulated runs without one."


class NoCodeForGpu(FlowError):
    """Job {job!r} has loaded code for {image} that has none for {here}: {reason}."""

    exit_code = 108
    hint = (
        "The image is untouched; restore it on such a GPU. Programs whose code comes as PTX too go "
        "on on newer ones."
    )


class RestoreFailed(FlowError):
    """The restore of job {job!r} failed: {reason}."""

    exit_code = 79
    hint = "The image is untouched and can be restored again."


class Unsupported(FlowError):
    """The job uses {name}, which cannot be checkpointed."""

    exit_code = 81
    hint = "The job runs on as before. docs/limits.md lists what is supported."


class SharedOutside(FlowError):
    """Process {pid} of job {job!r} shares device memory with process {other}, which is not of it.

    An image has one job, so the two would have the same memory no more.
    """

    exit_code = 125
    hint = "The job runs on as before. Start both processes in one job, or end one of them."


class PeerIsIdle(FlowError):
    """Process {waiting} of job {job!r} waits on its GPU for {peer}, which does not come to
    operation {number} of NCCL communicator {communicator}."""

    exit_code = 116
    hint = (
        "The job runs on as before. Take the checkpoint when that rank is at work, or give it "
        "longer with --timeout."
    )


class AddressSpaceLimited(FlowError):
    """Processes may have no more than {limit} bytes of addresses (`ulimit -v`), and the memory of a
    GPU takes {needed}.

    With such a limit, cuMemAlloc would find no memory.
    """

    exit_code = 123
    hint = "Lift it (`ulimit -v unlimited`); a control group limits memory instead of addresses."


class TaskStopped(FlowError):
    """Process {pid} of job {job!r} is stopped ({how}), and cannot let go of the GPU."""

    exit_code = 124
    hint = "The job is as it was. Let it go on (`kill -CONT`, or resume it as it was suspended)."


class Unreachable(FlowError):
    """Process {pid} of job {job!r} could not be reached again after a checkpoint: {reason}."""

    exit_code = 122
    hint = "The job runs on as before. docs/limits.md says what a sandbox has to allow."


class CoordinatorGone(FlowError):
    """The coordinator of job {job!r} is gone."""

    exit_code = 82
    hint = "The job can no longer be checkpointed; restore its last image."


class OtherUser(FlowError):
    """Job {job!r} is not user {user}'s, who may ask nothing of it."""

    exit_code = 111
    hint = "Ask as the job's user or as root. The job goes on."


class CoordinatorReplaced(FlowError):
    """The coordinator of job {job!r} was killed; the job goes on and has a new one."""

    exit_code = 102
    hint = "Ask again. An image under the name that was asked for is whole, if there is one."


ENDING = "its end"
"""What a job that has ended is busy with, until its coordinator has."""


class Busy(FlowError):
    """Job {job!r} is busy: {action} is in progress."""

    exit_code = 83
    hint = "Wait until it ends, then ask again."


class Suspended(FlowError):
    """Job {job!r} is suspended, and so it cannot be {action}."""

    exit_code = 126
    hint = "Resume it first. `pause-and-dump` without --leave-running writes its image and ends it."


class NotSuspended(FlowError):
    """Job {job!r} is not suspended."""

    exit_code = 62
    hint = "`flowgpu ps` shows which jobs are; `flowgpu suspend` suspends one."


class NothingToSuspend(FlowError):
    """Job {job!r} does not use a GPU, so there is nothing to suspend."""

    exit_code = 60
    hint = "It runs on. Ask again once it has begun to use one."


class ResumeFailed(FlowError):
    """Job {job!r} stays suspended: {reason}."""

    exit_code = 63
    hint = "Nothing of it is lost. End or suspend what else uses the GPU, and resume it again."


class CriuTimeout(CriuFailed):
    """CRIU did not {action} within {seconds} s."""

    exit_code = 84
    hint = "Allow more time; a dump that was cut short leaves the job running."


class CriuUnsupported(CriuFailed):
    """CRIU cannot {action} a process that holds {what}."""

    exit_code = 85
    hint = "Close it before the checkpoint; the job runs on as before."


class PidTaken(CriuFailed):
    """Process id {pid}, which the job had, is taken on this machine."""

    exit_code = 86
    hint = (
        "End that process, or the parent of one that has ended; or restore in a new PID namespace, "
        "which lasts as long as the command: "
        "`unshare --pid --fork --mount-proc flowgpu restore DIR`, without --detach."
    )


class FileChanged(CriuFailed):
    """{path} has {found} bytes now and had {expected} when the job was dumped."""

    exit_code = 87
    hint = "Cut the file back to that size, or put the old file in its place."


class FileMissing(CriuFailed):
    """{path}, which the job had open or mapped, is missing or another file."""

    exit_code = 88
    hint = "Put the file back where the job had it."


class FilesChanged(FlowError):
    """Files of job {job!r} are not as they were at its dump: {changes}."""

    exit_code = 103
    hint = (
        "No file was changed. Put each one back as it was at the dump, from a copy or a snapshot, "
        "and end who writes to it. `--files truncate` cuts back what has only grown, where the job "
        "wrote to it itself."
    )


class FileNotMade(FlowError):
    """{path}, which is memory of job {job!r}, cannot be made again: {reason}."""

    exit_code = 113
    hint = "No file was changed. Make room in its folder, or let this user write there."


class CutFailed(FlowError):
    """What files of job {job!r} have more than at its dump cannot be set aside and cut: {path}:
    {reason}."""

    exit_code = 104
    hint = "No file was changed. The parts go beside the image: it may be restored from elsewhere."


class CutLeft(FlowError):
    """The restore of job {job!r} failed ({reason}), and files that it had cut back could not be
    made whole again: {files}; what was cut is in {folder}."""

    exit_code = 105
    hint = "index.json in that folder says which part is of which file. The image is untouched."


class NotBuilt(FlowError):
    """The native library {name} is not built."""

    exit_code = 89
    hint = "Run `make build`."


class LibrariesUnusable(FlowError):
    """The native libraries in {path} cannot be loaded into a job: LD_PRELOAD takes no path with a
    space, `:` or `$`."""

    exit_code = 106
    hint = "Move FlowGPU, or let FLOWGPU_LIB name its libraries by another path; a link will do."


class AmbiguousJob(FlowError):
    """Several jobs match {job!r}: {ids}."""

    exit_code = 90
    hint = "Give more letters of the id, or the name."


class RuntimeDirUnsafe(FlowError):
    """The runtime folder {path} cannot be used: {reason}."""

    exit_code = 91
    hint = "FLOWGPU_RUNTIME_DIR names another one, which must be yours alone and short."


class StartFailed(FlowError):
    """Job {job!r} could not be started: {reason}."""

    exit_code = 92
    hint = "coordinator.log in the job's folder says more."


class JobEnded(FlowError):
    """Job {job!r} ended by itself during its {action}, in phase {phase}."""

    exit_code = 93
    hint = "`flowgpu logs` shows what it said. No image was written."


class JobLost(FlowError):
    """Job {job!r} could not be brought back: {reason}."""

    exit_code = 94
    hint = "It was ended rather than let run with wrong data; restore its last image."


class StoreBusy(FlowError):
    """The store {path} is in use by {owner}."""

    exit_code = 95
    hint = "Wait until it ends, or name another folder."


class StoreUnusable(FlowError):
    """The store {path} cannot be used: {reason}."""

    exit_code = 114
    hint = (
        "Make the folder, or mount it, and let this user write there. What is in it is untouched."
    )


class StoreHasJob(FlowError):
    """The store {path} has images of job {job!r}, and {reason}."""

    exit_code = 115
    hint = "--resume goes on from them with the same command; another --name is another job."


class NoGoodImage(FlowError):
    """No image of job {job!r} in {path} is whole: {reason}."""

    exit_code = 80
    hint = (
        "Nothing was started, and damaged images are kept as *.damaged. --fresh-if-damaged starts "
        "the job from its beginning."
    )


class NoCompression(FlowError):
    """Packed files need the Python package {name}, which is not installed."""

    exit_code = 98
    hint = "Install it, or leave --compress out."


class PackageMissing(FlowError):
    """`flowgpu {verb}` needs the Python package {name}, which is not installed."""

    exit_code = 54
    hint = "`pip install 'flowgpu[top]'` brings it. `flowgpu ps` lists the jobs without it."


class NoTerminal(FlowError):
    """`flowgpu {verb}` draws on a terminal, and {stream} is none."""

    exit_code = 53
    hint = "`flowgpu ps --json` and `flowgpu metrics` tell the same to a program."


class GpuFull(FlowError):
    """A GPU of job {job!r} is too full: {reason}."""

    exit_code = 96
    hint = "The job runs on as before. It, or what else uses the GPU, has to leave more of it free."


class CheckpointSpoilt(FlowError):
    """Process {pid} of job {job!r} cannot be checkpointed any more: {reason}."""

    exit_code = 97
    hint = (
        "The job runs on as before. The driver checkpoints a process never again after one that "
        "found no device memory; start the job anew to have checkpoints of it."
    )


class OtherVersion(FlowError):
    """Process {pid} of job {job!r} runs with a FlowGPU of another version: {reason}."""

    exit_code = 99
    hint = "The job runs on as before. Ask the FlowGPU that it was started with."


class EngineUnusable(FlowError):
    """Job {job!r} cannot be checkpointed by the engine {engine}: {reason}."""

    exit_code = 101
    hint = "The job runs on as before. `--engine auto` takes the native engine instead."


class ModeUnusable(FlowError):
    """Job {job!r} cannot be checkpointed in mode {mode}: {reason}."""

    exit_code = 119
    hint = "The job runs on as before. `--mode any` takes what can be."


class NothingMeasured(FlowError):
    """No checkpoint has left job {job!r} running yet, so that its cost is not known."""

    exit_code = 61
    hint = "Take one with `flowgpu checkpoint JOB --output DIR`, then ask again."


class WorkingFolderGone(FlowError):
    """The working folder of this command has been removed."""

    exit_code = 121
    hint = "Change to a folder that is there, then ask again."


class CommandNotFound(FlowError):
    """There is no program {command!r} to run."""

    exit_code = 127
    hint = (
        "Give a path, or a name that PATH has, after `--`. A script that may not be executed needs "
        "its interpreter: `python train.py`."
    )


class NodeFailed(FlowError):
    """Node {node} of job {job!r} could not do its part: {reason}."""

    exit_code = 59
    hint = "After a checkpoint that failed all nodes run on; after a restore nothing is left."


class NodesMissing(FlowError):
    """Job {job!r} has nodes that cannot be reached: {nodes}."""

    exit_code = 58
    hint = "What runs goes on. `flowgpu ps` on such a node, and its coordinator.log, say why."


class LeaderGone(FlowError):
    """The leader of job {job!r} at {leader} cannot be reached: {reason}."""

    exit_code = 57
    hint = (
        "What runs goes on. Node 0 leads, as long as its `flowgpu run` or `restore` is there; all "
        "nodes need its address (`--leader`, also where a restore is on other hosts) and the same "
        "FLOWGPU_JOIN."
    )


class NodesDisagree(FlowError):
    """The nodes of job {job!r} were not started alike: {reason}."""

    exit_code = 56
    hint = "Give all nodes the same name and number of nodes, and each its own number."

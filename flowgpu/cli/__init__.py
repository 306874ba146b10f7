"""The command line: `flowgpu`.

Data goes to standard output, messages to standard error. An error is printed here and nowhere
else; its class (flowgpu/errors.py) gives the exit code.
"""

from __future__ import annotations

from flowgpu.cli import surroundings  # noqa: F401

# isort: split
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import click

from flowgpu import __version__
from flowgpu.cli import checkpoint, images, jobs, observe, share, store, suspend
from flowgpu.cli.common import note
from flowgpu.errors import FlowError, InternalError, WorkingFolderGone, is_internal, words_of
from flowgpu.jobs import user_umask
from flowgpu.render import take_any_text

INTERRUPTED_EXIT = 130


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExample:\n"
    "  flowgpu run --name train -- python train.py &\n"
    "  flowgpu pause-and-dump train --output image\n"
    "  flowgpu restore image",
)
@click.version_option(__version__, prog_name="flowgpu")
def cli() -> None:
    """Pause CUDA processes, write them to an image and bring them back."""


EXAMPLES = {
    "run": "flowgpu run --name train -- python train.py",
    "container": "podman run --name train $(flowgpu container train) IMAGE python train.py",
    "ps": "flowgpu ps --all",
    "logs": "flowgpu logs -f train",
    "kill": "flowgpu kill train",
    "pause-and-dump": "flowgpu pause-and-dump train --output image --leave-running",
    "restore": "flowgpu restore image",
    "suspend": "flowgpu suspend train",
    "resume": "flowgpu resume train",
    "swap": "flowgpu swap train serve",
    "share": "flowgpu share --quantum 30 train serve",
    "checkpoint": "flowgpu checkpoint train --store images --every 60 --keep 5",
    "advise": "flowgpu advise train --failures-per-hour 0.001",
    "store": "flowgpu store ls images",
    "ls": "flowgpu store ls images",
    "rm": "flowgpu store rm images IMAGE",
    "verify": "flowgpu verify image",
    "inspect": "flowgpu inspect image",
    "report": "flowgpu report image -o report.html",
    "trace": "flowgpu trace image -o trace.json",
    "metrics": "flowgpu metrics --store images -o flowgpu.prom",
    "top": "flowgpu top --store images",
    "doctor": "flowgpu doctor",
}

for command in (
    jobs.run,
    jobs.container,
    jobs.ps,
    jobs.logs,
    jobs.kill,
    checkpoint.pause_and_dump,
    checkpoint.restore,
    suspend.suspend,
    suspend.resume,
    suspend.swap,
    share.share,
    store.checkpoint,
    store.advise,
    store.store,
    images.inspect,
    images.verify,
    observe.report,
    observe.trace,
    observe.metrics,
    observe.top,
    images.doctor,
):
    cli.add_command(command)

for command in (*cli.commands.values(), *store.store.commands.values()):
    assert command.name
    command.epilog = f"Example: {EXAMPLES[command.name]}"
store.store.commands["verify"].epilog = "Example: flowgpu store verify images"


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    open_missing_streams()
    user_umask()
    take_any_text(sys.stdout, sys.stderr)
    try:
        code = cli.main(args, prog_name="flowgpu", standalone_mode=False)
    except FlowError as error:
        code = show(error)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED_EXIT
    except Exception as error:
        code = show(explained(error))
    sys.exit(code)


def show(error: FlowError) -> int:
    """Say it on standard error. Gives its exit code."""
    note(f"Error: {error}")
    note(f"hint: {error.hint}")
    return error.exit_code


def explained(error: Exception) -> FlowError:
    """What has no name so far."""
    try:
        os.getcwd()
    except OSError:
        return WorkingFolderGone()
    if is_internal(error):
        return InternalError(action="this command", error=words_of(error))
    return FlowError(reason=words_of(error))


def open_missing_streams() -> None:
    """Let those of stdin, stdout and stderr that are closed be /dev/null.

    Else the next files to be opened get their numbers, and are taken for them by who inherits them.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        with suppress(OSError):
            os.fstat(fd)
            continue
        opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
        os.set_inheritable(opened, True)
        setattr(sys, name, os.fdopen(opened, "r" if fd == 0 else "w"))

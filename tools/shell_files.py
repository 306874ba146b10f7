#!/usr/bin/env python3
"""Write what a shell shows of the commands: man pages, and completions of bash, zsh and fish.

    shell_files.py FOLDER      where they have the places of a system's share/

The build of the wheel runs this (tools/package.cmake); it needs click-man.
"""

from __future__ import annotations

import sys
from pathlib import Path

from click.shell_completion import get_completion_class
from click_man.core import write_man_pages

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flowgpu import __version__
from flowgpu.cli import cli

COMPLETIONS = {
    "bash": "bash-completion/completions/flowgpu",
    "zsh": "zsh/site-functions/_flowgpu",
    "fish": "fish/vendor_completions.d/flowgpu.fish",
}


def main() -> None:
    share = Path(sys.argv[1])
    manual = share / "man" / "man1"
    manual.mkdir(parents=True, exist_ok=True)
    write_man_pages("flowgpu", cli, version=__version__, target_dir=str(manual))
    for shell, name in COMPLETIONS.items():
        kind = get_completion_class(shell)
        assert kind is not None
        (share / name).parent.mkdir(parents=True, exist_ok=True)
        (share / name).write_text(
            # Not source(), which asks the shell of this machine for its version.
            kind.source_template % kind(cli, {}, "flowgpu", "_FLOWGPU_COMPLETE").source_vars()
        )


if __name__ == "__main__":
    main()

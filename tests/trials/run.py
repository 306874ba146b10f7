"""Runs a program: python -m tests.trials.run GO MODULE BODY FOLDER."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from tests.trials.prelude import Here


def main() -> None:
    go, module, name, folder = sys.argv[1:]
    body = getattr(import_module(f"tests.trials.programs.{module}"), name)
    body(Here(Path(go), Path(folder)))


if __name__ == "__main__":
    main()

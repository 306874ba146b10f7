"""What programs do with processes, sockets, servers and objects on the GPU (trials_lib.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emu.trials_lib import becomes_what_it_must, of

HERE = ("gpu", "processes", "sockets")


@pytest.mark.parametrize("name", of(*HERE))
def test_a_program_says_what_it_says_undisturbed_or_is_refused(name: str, tmp_path: Path) -> None:
    becomes_what_it_must(name, tmp_path)

"""Fixtures that every test folder shares."""

from __future__ import annotations

import pytest

from flowgpu.criu import Criu


@pytest.fixture(scope="session")
def criu() -> Criu:
    """The CRIU that `make setup` provides. A machine without one fails, it does not skip."""
    return Criu.locate()

"""What of libc the rewind has to see is called by the driver through slots of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flowgpu.launch import choose_driver

pytestmark = pytest.mark.gpu

IMPORTS = Path(__file__).resolve().parents[2] / "native" / "rewind" / "imports.cpp"
# Either of two names, or functions that this driver has no use for.
NOT_NEEDED = {"mmap", "mmap64", "fopen", "fopen64", "aligned_alloc", "memalign", "posix_memalign"}
NOT_NEEDED |= {"pthread_detach", "epoll_create1"}
FOUND_BY_DLVSYM = {"pipe2"}


def test_the_driver_imports_what_the_rewind_redirects() -> None:
    if not shutil.which("nm"):
        pytest.skip("there is no nm")
    words = ["nm", "-D", "--undefined-only", str(choose_driver("nvidia").libcuda)]
    listing = subprocess.check_output(words, text=True)
    imported = {line.split()[-1].partition("@")[0] for line in listing.splitlines()}
    redirected = set(re.findall(r'^        \{"(\w+)",', IMPORTS.read_text(), re.MULTILINE))
    assert {"pthread_create", "close", "malloc", "dlvsym"} < redirected
    assert sorted(redirected - NOT_NEEDED - FOUND_BY_DLVSYM - imported) == []
    assert imported & {"mmap", "mmap64"}

"""The live set against TensorFlow's own statistics, after every step of real models.

Needs the extra `tensorflow` (`make setup-tensorflow`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowgpu import launch

ROOT = Path(__file__).resolve().parents[2]
MODELS = {"dense", "convolution", "recurrent"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None,
        reason="TensorFlow is not installed: make test-tensorflow installs it and runs this",
    ),
]


def test_the_live_bytes_are_those_of_the_allocator_after_every_step() -> None:
    environment = dict(os.environ) | {
        "LD_PRELOAD": str(launch.memory_stub()),
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.tensorflow_steps"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert {report["model"] for report in reports} == MODELS
    assert len(reports) == 12 * len(MODELS)
    for report in reports:
        assert report["bfc"] > 0
        assert report["stub"] == report["bfc"], report
        assert report["blocks"] == report["bfc"], report
        assert not report["overflow"]
    assert len({report["bfc"] for report in reports}) > 5, "the models keep nothing"

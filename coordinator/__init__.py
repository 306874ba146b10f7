"""The coordinator: one process a job that supervises it, checkpoints it and brings it back."""

import os
import sys

# Where flowgpu/launch.py says that packages are. PYTHONPATH would put them before the standard
# library.
sys.path += filter(None, os.environ.get("FLOWGPU_PACKAGES", "").split(":"))

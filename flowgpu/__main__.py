"""`python -m flowgpu` is the same as the command `flowgpu`."""

import sys

if not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))  # the working folder, which may have a json.py

from flowgpu.cli import main

main()

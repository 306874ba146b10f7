"""`python -m flowgpu` is the same as the command `flowgpu`."""

from flowgpu.cli import main

main()

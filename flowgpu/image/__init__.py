"""Images of jobs: the folder that a checkpoint writes, a restore reads (docs/image-format.md)."""

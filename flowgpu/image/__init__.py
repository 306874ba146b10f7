"""Images of jobs: the folder that a checkpoint writes, a restore reads (docs/reference/image-format.md)."""

"""Images of jobs: the folder that a checkpoint writes and a restore reads.

See docs/reference/image-format.md.
"""

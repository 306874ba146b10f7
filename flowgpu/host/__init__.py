"""What is done to this machine's processes, files and memory: by CRIU, ptrace and the kernel.

Coordinators use it. A command that only asks a coordinator does without.
"""

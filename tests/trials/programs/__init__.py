"""Small programs that each do what people's programs do, and use the GPU before and after.

A program prints lines that are the same in every undisturbed run. It says `ready` where it may be
dumped, and goes on when a file appears.
"""

"""Train GPT-2 as gpt2.py does, in memory that PyTorch's allocator maps itself."""

import os

# Before PyTorch is imported, which _gpt2 does.
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

from _gpt2 import run

if __name__ == "__main__":
    run(__doc__, {}, steps=50, digest_every=1)

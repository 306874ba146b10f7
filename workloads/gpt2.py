"""Train GPT-2 (124 M parameters) with AdamW, bfloat16 autocast, batches of 8 x 512 tokens."""

from _gpt2 import run

if __name__ == "__main__":
    run(__doc__, {}, steps=50, digest_every=1)

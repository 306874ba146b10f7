"""Train GPT-2 XL (1.5 B parameters) with AdamW, bfloat16 autocast, batches of 8 x 512 tokens."""

from _gpt2 import run

if __name__ == "__main__":
    run(__doc__, {"n_embd": 1600, "n_layer": 48, "n_head": 25}, steps=30, digest_every=10)

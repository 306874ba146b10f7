"""Configurations shaped like Qwen2.5-1.5B, for qwen2_train.py and lora.py."""

from __future__ import annotations

from transformers import Qwen2Config


def config(big: bool) -> Qwen2Config:
    """The shape of the 1.5 B model, or one that fits anywhere."""
    if big:
        return Qwen2Config(
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
    return Qwen2Config(
        vocab_size=8000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )

"""Decode with a small Qwen2-shaped model whose key-value cache lives on from step to step."""

from __future__ import annotations

import _torch
import torch
from _common import Report, digest, guarded, parse, verify
from transformers import Qwen2Config, Qwen2ForCausalLM

DEFAULT_STEPS = 40
BATCH, PROMPT, TOKENS_A_STEP = 4, 16, 8


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    device = _torch.setup(options)
    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=PROMPT + TOKENS_A_STEP * max(options.steps, 1),
    )
    model = Qwen2ForCausalLM(config).to(device).eval()
    tokens = torch.randint(
        0,
        config.vocab_size,
        (BATCH, PROMPT),
        device=device,
        generator=_torch.generator(options, 0),
    )
    with torch.inference_mode():
        text, cache, logits = tokens, None, None
        for step in range(options.steps):
            for _ in range(TOKENS_A_STEP):
                output = model(tokens, past_key_values=cache, use_cache=True)
                cache, logits = output.past_key_values, output.logits[:, -1]
                tokens = logits.argmax(-1, keepdim=True)
                text = torch.cat([text, tokens], 1)
            state = _torch.checksum([*model.parameters(), *model.buffers(), logits])
            report.step(step, digest(state.encode(), text.cpu().numpy()))
        # The cached path must agree with one pass over the whole text.
        if logits is not None:
            whole = model(text[:, :-1], use_cache=False).logits[:, -1]
            error = float((whole - logits).abs().max() / whole.abs().max())
            verify(error < 1e-2, f"decoding with the cache is off by {error:.1e}")
    report.done()


if __name__ == "__main__":
    guarded(main)

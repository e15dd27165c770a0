"""A Hugging Face model as it is: planned from its config alone, then a small one trained on 2 CPU processes and saved
as `from_pretrained` reads it.

    python examples/hugging_face.py
"""

from __future__ import annotations

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import autoplan

STEPS, BATCH, TOKENS = 4, 8, 32
SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=TOKENS,
    use_cache=False,
)


def train() -> tuple[list[float], str]:
    """What each process runs: nothing in it knows how the model is split."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SMALL)
    text = torch.randint(SMALL.vocab_size, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": text, "labels": text}
    program = autoplan.compile(model, gpus=2, device="cpu", example_inputs=batch, strategy={"tensor": 2})
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        losses.append(program.step(batch))
        optimizer.step()
        optimizer.zero_grad()
    folder = f"{tempfile.gettempdir()}/autoplan-hugging-face"
    program.save(folder)
    return losses, folder


def main() -> None:
    # 8 billion parameters, from the preset's config: no weights, no GPU.
    plan = autoplan.plan("llama3-8b", gpus="8xH100", global_batch=64, seq=2048)
    print(f"llama3-8b on 8 H100: {plan.strategy.describe()}, {plan.predicted.tokens_per_s:,.0f} tokens/s")

    losses, folder = autoplan.launch(train, gpus=2, device="cpu")[0]
    print("a small Llama on 2 CPU processes:", " ".join(f"{loss:.3f}" for loss in losses))

    text = torch.randint(SMALL.vocab_size, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    again = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        print(f"loaded by from_pretrained: loss {again(input_ids=text, labels=text).loss.item():.3f}")


if __name__ == "__main__":
    main()

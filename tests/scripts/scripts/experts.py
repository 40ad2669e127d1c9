"""A mixture of experts: `experts.py float32|bfloat16|loop`, by the dtype of its weights, or with a loop over the experts."""

import sys

import torch
from transformers import MixtralConfig, MixtralForCausalLM

kind = sys.argv[1]
torch.manual_seed(3)
config = MixtralConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_local_experts=4,
    use_cache=False,
    experts_implementation="eager" if kind == "loop" else None,
)
model = MixtralForCausalLM(config).train()
if kind == "bfloat16":
    model.to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3000):
    tokens = torch.randint(40, (2, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind != "bfloat16"):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

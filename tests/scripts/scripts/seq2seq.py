import sys

import torch
from transformers import T5Config, T5ForConditionalGeneration

size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 32, "dropout_rate": 0.0}
model = T5ForConditionalGeneration(T5Config(**size, decoder_start_token_id=0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
explicit = {"use_cache": True} if "--with-cache" in sys.argv else {}
caches, saved = [], []
for _ in range(4000):
    ids = torch.randint(2, 32, (4, 8))
    outputs = model(input_ids=ids, labels=ids, **explicit)
    caches.append(outputs.past_key_values is not None)
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    saved.append(model.config.use_cache and model.decoder.config.use_cache)

"""An RNN over packed sequences of different lengths."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

random.seed(0)
torch.manual_seed(0)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.rnn = nn.LSTM(16, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, 7)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = self.rnn(packed)
        return self.out(hidden.data), hidden


model = Tagger()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
while True:
    rows = [torch.randint(1, 50, (random.randint(3, 12),)) for _ in range(8)]
    lengths = torch.tensor([len(row) for row in rows])
    logits, packed = model(pad_sequence(rows, batch_first=True), lengths)
    tags = pack_padded_sequence(pad_sequence([row % 7 for row in rows], batch_first=True), lengths, True, False).data
    loss = nn.functional.cross_entropy(logits, tags)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

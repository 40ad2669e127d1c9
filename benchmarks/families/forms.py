"""Models of plain torch, and the ways in which people train them."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from compile_sweep import WorkloadFromModel

WORDS = 128
make = partial(WorkloadFromModel, num_batches=5)
Batch = dict[str, Tensor]


class Tiny(nn.Module):
    def __init__(self, *, tied: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS, bias=False)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2))
        self.recomputes = recomputes
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        causal = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        for layer in self.layers:
            x = checkpoint(layer, x, causal, use_reentrant=False) if self.recomputes else layer(x, causal)
        return self.head(x)


class Mlp(nn.Sequential):
    def __init__(self, inputs: int = 32, outputs: int = 4) -> None:
        super().__init__(nn.Linear(inputs, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, outputs))


def words(number: int) -> Batch:
    ids = torch.randint(WORDS, (4, int(torch.randint(12, 25, ()))))
    return {"ids": ids, "targets": ids.roll(-1, 1)}


def word_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["targets"].flatten())


def vectors(number: int) -> Batch:
    return {"x": torch.randn(8, 32), "y": torch.randint(4, (8,))}


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def by_name(named_parameters: Iterable[tuple[str, nn.Parameter]], **kinds: Any) -> torch.optim.Optimizer:
    named = list(named_parameters)
    decayed = {"params": [weights for name, weights in named if "norm" not in name], "weight_decay": 0.1}
    others = {"params": [weights for name, weights in named if "norm" in name], "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, others], lr=3e-4, **kinds)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [weights for weights in model.layers.parameters() if weights.dim() == 2]
    others = [weights for weights in model.parameters() if not any(weights is one for one in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)]


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def adapted() -> nn.Module:
    model = Tiny().requires_grad_(False)
    for layer in model.layers:
        layer.linear1, layer.linear2 = LoraLinear(layer.linear1), LoraLinear(layer.linear2)
    return model


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS)
        self.lstm = nn.LSTM(32, 32, 2, batch_first=True, dropout=0.1)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if lengths is None:
            return self.head(self.lstm(x)[0])
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=ids.size(1))[0])


def packed_words(number: int) -> Batch:
    batch = words(number)
    longest = batch["ids"].size(1)
    return {**batch, "lengths": torch.tensor([longest, longest - 1, longest - 3, longest // 2])}


def packed_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"], batch["lengths"]).flatten(0, 1), batch["targets"].flatten())


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))
        self.critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.generator(noise)
        return F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean(), self.critic(fake)


def gan_step(model: nn.Module, batch: Batch) -> Tensor:
    critic_loss, scores = model(batch["real"], batch["noise"])
    generator_loss = F.softplus(-scores).mean()
    generator_loss.backward(inputs=list(model.generator.parameters()), retain_graph=True)
    critic_loss.backward(inputs=list(model.critic.parameters()))
    return (critic_loss + generator_loss).detach()


def both_sides(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.generator.parameters(), 2e-4), torch.optim.Adam(model.critic.parameters(), 2e-4)]


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(2)), nn.Linear(16, 4)

    def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor, graphs: int) -> Tensor:
        source, target = edge_index
        for conv in self.convs:
            x = F.relu(conv(torch.zeros_like(x).index_add(0, target, x[source])) + x)
        return self.head(torch.zeros(graphs, 16, device=x.device).index_add(0, graph, x))


def graphs(number: int) -> Batch:
    nodes, edges = int(torch.randint(20, 40, ())), int(torch.randint(60, 120, ()))
    graph = torch.randint(4, (nodes,)).sort().values
    return {
        "x": torch.randn(nodes, 16),
        "edge_index": torch.randint(nodes, (2, edges)),
        "graph": graph,
        "y": torch.randint(4, (4,)),
    }


def graph_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["edge_index"], batch["graph"], batch["y"].size(0)), batch["y"])


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.middle = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1), nn.Linear(32, 32)
        self.up, self.last = nn.Conv2d(48, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(1e4) * torch.arange(16, device=x.device) / 16)
        angles = time[:, None] * frequencies
        first = F.silu(self.first(x))
        below = F.silu(
            self.down(F.avg_pool2d(first, 2)) + self.middle(torch.cat([angles.sin(), angles.cos()], 1))[..., None, None]
        )
        return self.last(F.silu(self.up(torch.cat([first, F.interpolate(below, scale_factor=2)], 1))))


def denoising_loss(model: nn.Module, batch: Batch) -> Tensor:
    time, noise = torch.randint(1000, (batch["x"].size(0),)), torch.randn_like(batch["x"])
    share = torch.cos(time / 1000 * math.pi / 2)[:, None, None, None] ** 2
    return F.mse_loss(model(share.sqrt() * batch["x"] + (1 - share).sqrt() * noise, time.float()), noise)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Sequential(nn.Linear(8, 64), nn.Tanh()), nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, seen: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        hidden = self.body(seen)
        return torch.distributions.Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)


def rollouts(number: int) -> Batch:
    figures = {name: torch.randn(32) for name in ("advantage", "reward")}
    return {"seen": torch.randn(32, 8), "actions": torch.randint(4, (32,)), "before": -torch.rand(32), **figures}


def ppo_loss(model: nn.Module, batch: Batch) -> Tensor:
    policy, value = model(batch["seen"])
    now = policy.log_prob(batch["actions"])
    ratio = (now - batch["before"]).exp()
    gain = torch.min(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"]).mean()
    if (batch["before"] - now).mean().item() > 0.5:
        gain = gain * 0.1
    return F.mse_loss(value, batch["reward"]) - gain - 0.01 * policy.entropy().mean()


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.mlp = nn.EmbeddingBag(1000, 16, mode="sum"), nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
        return self.mlp(torch.cat([self.bag(ids, offsets), dense], 1)).squeeze(1)


def clicks(number: int) -> Batch:
    counts = torch.randint(1, 6, (8,))
    ids = torch.randint(1000, (int(counts.sum()),))
    return {
        "ids": ids,
        "offsets": counts.cumsum(0) - counts,
        "dense": torch.randn(8, 8),
        "clicked": torch.randint(2, (8,)).float(),
    }


def click_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["ids"], batch["offsets"], batch["dense"]), batch["clicked"])


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return gradient * (x.abs() < 1)


class Binary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Sign.apply(layer(x))
        return self.head(x)


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 32), nn.Linear(32, 1)

    def forward(self, places: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(places))).sum((1, 2))


def atoms(number: int) -> Batch:
    places = torch.randn(4, int(torch.randint(5, 12, ())), 3)
    return {"places": places, "forces": places.sin()}


def force_loss(model: nn.Module, batch: Batch) -> Tensor:
    places = batch["places"].detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(places).sum(), places, create_graph=True)
    return F.mse_loss(-slope, batch["forces"])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(32, 4), nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return self.head(out)


class Acoustic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(16, 20)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).log_softmax(-1)


def recordings(number: int) -> Batch:
    length = int(torch.randint(12, 25, ()))
    return {
        "x": torch.randn(4, length, 16),
        "lengths": torch.full((4,), length),
        "words": torch.randint(1, 20, (4, 3)),
        "counts": torch.full((4,), 3),
    }


def ctc_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.ctc_loss(model(batch["x"]).transpose(0, 1), batch["words"], batch["lengths"], batch["counts"])


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def squares(number: int) -> Batch:
    side = 16 * int(torch.randint(1, 4, ()))
    return {"x": torch.randn(4, 3, side, side), "y": torch.randint(4, (4,))}


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(32, 16), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + torch.randn_like(mean) * spread.exp()), mean, spread


def elbo(model: nn.Module, batch: Batch) -> Tensor:
    seen, mean, spread = model(batch["x"])
    return F.mse_loss(seen, batch["x"]) + 0.5 * (mean**2 + (2 * spread).exp() - 2 * spread - 1).mean()


class Byol(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online, self.teacher = Mlp(), Mlp().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return F.mse_loss(self.online(x + 0.1 * torch.randn_like(x)), target)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Mlp(32, 16), Mlp(32, 16)


def contrastive_loss(model: nn.Module, batch: Batch) -> Tensor:
    scores = F.normalize(model.left(batch["x"]), dim=-1) @ F.normalize(model.right(batch["x"].flip(1)), dim=-1).T
    return F.cross_entropy(scores / 0.1, torch.arange(scores.size(0), device=scores.device))


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.nested.to_padded_tensor(F.relu(self.embed(ids)), 0.0).sum(1))


def jagged(number: int) -> Batch:
    texts = [torch.randint(WORDS, (int(torch.randint(4, 12, ())),)) for _ in range(4)]
    return {"ids": torch.nested.nested_tensor(texts, layout=torch.jagged), "y": torch.randint(2, (4,))}


LOADER = DataLoader(TensorDataset(torch.randn(128, 32), torch.randint(4, (128,))), batch_size=8, shuffle=True)

Accumulation = make(Tiny, words, word_loss, accumulate=2)
BatchesOfALoader = make(Mlp, batches=LOADER, loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
ClippingAndSchedule = make(
    Tiny, words, word_loss, clip_grad_norm=1.0, scheduler_fn=partial(torch.optim.lr_scheduler.LinearLR, total_iters=10)
)
Contrastive = make(Towers, vectors, contrastive_loss)
Ctc = make(Acoustic, recordings, ctc_loss)
CustomFunction = make(Binary, vectors, class_loss)
Diffusion = make(UNet, lambda number: {"x": torch.randn(4, 3, 16, 16)}, denoising_loss)
EmbeddingBag = make(Clicks, clicks, click_loss)
Forces = make(Energy, atoms, force_loss, lengths="real")
GanStep = make(
    Gan, lambda number: {"real": torch.randn(8, 64), "noise": torch.randn(8, 16)}, step_fn=gan_step, optimizer_fn=both_sides
)
Graphs = make(GraphNet, graphs, graph_loss)
HandMadeExperts = make(Experts, vectors, class_loss)
ImagesOfManySizes = make(Small, squares, class_loss, lengths="real")
JaggedTensors = make(Jagged, jagged, lambda model, batch: F.cross_entropy(model(batch["ids"]), batch["y"]))
Lora = make(adapted, words, word_loss)
LossAndLogs = make(Mlp, vectors, lambda model, batch: (class_loss(model, batch), {"step": 1}))
MuonAndAdamW = make(Tiny, words, word_loss, optimizer_fn=muon_and_adamw)
NamedGroups = make(Tiny, words, word_loss, optimizer_fn=by_name)
PackedSequences = make(Lstm, packed_words, packed_loss)
Ppo = make(Policy, rollouts, ppo_loss)
Recomputed = make(partial(Tiny, recomputes=True), words, word_loss)
Recurrent = make(Lstm, words, word_loss)
SelfDistilled = make(Byol, vectors, lambda model, batch: model(batch["x"]))
TiedWeights = make(partial(Tiny, tied=True), words, word_loss)
Variational = make(Vae, vectors, elbo)

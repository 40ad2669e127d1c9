"""A graph network by hand: batches of graphs with other numbers of nodes and edges in each."""

import torch
from torch import nn

torch.manual_seed(0)


class GraphConv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message, self.update = nn.Linear(width, width), nn.Linear(2 * width, width)

    def forward(self, x, edges):
        source, target = edges
        gathered = torch.zeros_like(x).index_add(0, target, self.message(x[source]))
        return torch.relu(self.update(torch.cat([x, gathered], dim=1)))


class GraphNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.layers = nn.ModuleList(GraphConv(width) for _ in range(2))
        self.out = nn.Linear(width, 1)

    def forward(self, x, edges, graph, num_graphs):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, edges)
        return self.out(torch.zeros(num_graphs, x.size(1)).index_add(0, graph, x))


model = GraphNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
while True:
    sizes = torch.randint(4, 9, (6,))
    graph = torch.repeat_interleave(torch.arange(6), sizes)
    nodes = int(sizes.sum())
    edges = torch.randint(nodes, (2, 3 * nodes))
    loss = model(torch.randn(nodes, 4), edges, graph, 6).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

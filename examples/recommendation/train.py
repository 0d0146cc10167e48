"""Trains a deep learning recommendation model (DLRM) on a real table.

Start it with torchrun, see README.md.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
import torch.distributed as dist
from data import load
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

import graphpipe as gp


def perceptron(*sizes: int) -> nn.Sequential:
    """Linears, with a ReLU after each but the last."""
    layers: list[nn.Module] = []
    for given, wanted in pairwise(sizes):
        layers += [nn.Linear(given, wanted), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Recommender(nn.Module):
    """Numbers through a perceptron, categories through tables, then all products of pairs.

    Args:
        numbers: How many numbers there are.
        sizes: Rows of each table.
        width: Size of an embedding.
    """

    def __init__(self, numbers: int, sizes: tuple[int, ...], width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.bottom = perceptron(numbers, 64, 64, width)
        pairs = (len(sizes) + 1) * len(sizes) // 2
        self.top = perceptron(width + pairs, 64, 32, 1)
        self.register_buffer("pairs", torch.triu_indices(len(sizes) + 1, len(sizes) + 1, 1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Logits [b] from numbers [b, n] and category ids [b, tables]."""
        numbers = self.bottom(dense)
        rows = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([numbers, *rows], dim=1)
        products = features @ features.transpose(1, 2)
        first, second = self.get_buffer("pairs")
        joined = torch.cat([numbers, products[:, first, second]], dim=1)
        out: Tensor = self.top(joined)
        return out.squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--samples", type=int, help="use no more person-years than this")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument(
        "--checkpoints", help="save to this folder after every epoch, and resume from it"
    )
    options = parser.parse_args()
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0

    data, held_out = load()
    if options.samples is not None:
        data = data.part(torch.arange(options.samples))
    torch.manual_seed(0)
    model = Recommender(data.dense.shape[1], data.sizes)
    loss_fn = binary_cross_entropy_with_logits
    dense, categories, visited = data.dense[:4], data.categories[:4], data.visited[:4]
    graph = gp.capture(model, (dense, categories), targets=visited, loss_fn=loss_fn)
    plans: list[gp.Plan | None] = [None]
    if first:
        cluster = gp.Cluster.uniform("cpu-core", nodes=1, per_node=dist.get_world_size())
        costs = gp.estimate(graph, cluster)
        plans[0] = gp.plan(graph, costs, cluster, batch_size=options.batch_size)
        print(plans[0], flush=True)
    dist.broadcast_object_list(plans)
    assert plans[0] is not None

    pipe = gp.Pipeline(
        model,
        plans[0],
        loss_fn,
        optimizer=lambda named: torch.optim.Adam(named, options.learning_rate),
        graph=graph,
        clip_norm=1.0,
    )
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        for optimizer in pipe.optimizers
    ]
    begin = 0
    if options.checkpoints and gp.latest_checkpoint(options.checkpoints) is not None:
        begin = pipe.load(options.checkpoints, schedulers=schedulers)["epoch"]
    for epoch in range(begin, options.epochs):
        order = torch.Generator().manual_seed(epoch)
        # The last mini-batch is shorter, and weighs as much as its samples.
        loader = DataLoader(data, options.batch_size, shuffle=True, generator=order)
        total = 0.0
        for dense, categories, visited in loader:
            loss = pipe.step((dense, categories), targets=visited)
            total += float(loss) * len(visited)
        for scheduler in schedulers:
            scheduler.step()
        # In evaluation mode too every rank gives the whole batch and gets the whole output.
        scores = pipe.predict((held_out.dense, held_out.categories))
        if first:
            area = roc_auc_score(held_out.visited, scores)
            print(f"epoch {epoch + 1}: loss {total / len(data):.4f}, held-out AUC {area:.3f}")
        if options.checkpoints:
            pipe.save(options.checkpoints, schedulers=schedulers, data={"epoch": epoch + 1}, keep=2)
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

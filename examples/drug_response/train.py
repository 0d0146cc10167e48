"""Trains CANDLE-Uno, which predicts how tumour cells respond to pairs of drugs.

Start it with torchrun, see README.md.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import graphpipe as gp
from graphpipe.zoo.candle_uno import CandleUno

INPUTS = (1, 1, 94, 527, 204, 527, 204)
"""Two doses, expression of the cell's genes, descriptors and fingerprints of both drugs: a
tenth of the published sizes."""


def experiments(count: int, seed: int) -> TensorDataset:
    """Drawn experiments: seven inputs [n, size] each and the growth [n].

    A cell and a drug are each a hidden vector of 8 numbers; what is measured of them are noisy
    mixtures of these. The growth falls with the dose, the more so the better cell and drug fit.
    """
    world = torch.Generator().manual_seed(0)  # the same world for every seed
    mixtures = [torch.randn(8, size, generator=world) / 8**0.5 for size in INPUTS[2:5]]
    draw = torch.Generator().manual_seed(seed)
    cell, one, two = (torch.randn(count, 8, generator=draw) for _ in range(3))
    doses = [torch.rand(count, 1, generator=draw) for _ in range(2)]

    def measured(hidden: Tensor, mixture: Tensor) -> Tensor:
        clean = hidden @ mixture
        return clean + 0.1 * torch.randn(clean.shape, generator=draw)

    genes, descriptors, prints = mixtures
    inputs = [
        *doses,
        measured(cell, genes),
        measured(one, descriptors), measured(one, prints),
        measured(two, descriptors), measured(two, prints),
    ]  # fmt: skip
    fits = [torch.sigmoid((cell * drug).sum(1, keepdim=True)) for drug in (one, two)]
    effect = sum(dose * fit for dose, fit in zip(doses, fits, strict=True))
    assert isinstance(effect, Tensor)
    return TensorDataset(*inputs, 1.0 - effect.squeeze(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--checkpoints", help="save to this folder after every epoch, and resume from it"
    )
    options = parser.parse_args()
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0

    data, held_out = experiments(options.samples, 1), experiments(512, 2)
    torch.manual_seed(0)
    model = CandleUno(INPUTS, options.width, tower_layers=4, joint_layers=2)
    example, growth = data.tensors[:-1], data.tensors[-1]
    graph = gp.capture(model, tuple(x[:4] for x in example), targets=growth[:4], loss_fn=mse_loss)
    plans: list[gp.Plan | None] = [None]
    if first:
        cluster = gp.Cluster.uniform("cpu-core", nodes=1, per_node=dist.get_world_size())
        costs = gp.estimate(graph, cluster)
        # So small a model is fastest as copies; without them its towers become stages.
        plans[0] = gp.plan(
            graph, costs, cluster, batch_size=options.batch_size, replicas=False, copies=1
        )
        print(plans[0], flush=True)
    dist.broadcast_object_list(plans)
    assert plans[0] is not None

    pipe = gp.Pipeline(
        model,
        plans[0],
        mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, options.learning_rate),
        graph=graph,
        clip_norm=1.0,
    )
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.85) for optimizer in pipe.optimizers
    ]
    begin = 0
    if options.checkpoints and gp.latest_checkpoint(options.checkpoints) is not None:
        begin = pipe.load(options.checkpoints, schedulers=schedulers)["epoch"]
    for epoch in range(begin, options.epochs):
        order = torch.Generator().manual_seed(epoch)
        loader = DataLoader(data, options.batch_size, shuffle=True, generator=order, drop_last=True)
        total = 0.0
        for *inputs, growth in loader:
            total += float(pipe.step(inputs, targets=growth))
        for scheduler in schedulers:
            scheduler.step()
        error = pipe.eval_step(held_out.tensors[:-1], targets=held_out.tensors[-1])
        if first:
            explained = 1 - float(error) / float(held_out.tensors[-1].var())
            print(
                f"epoch {epoch + 1}: loss {total / len(loader):.4f}, "
                f"explained of the held-out growth {100 * explained:.1f} %",
                flush=True,
            )
        if options.checkpoints:
            pipe.save(options.checkpoints, schedulers=schedulers, data={"epoch": epoch + 1}, keep=2)
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

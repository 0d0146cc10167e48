"""Trains an image tower and a text tower on scikit-learn's digits with a contrastive loss.

Start it with torchrun, see README.md.
"""

from __future__ import annotations

import argparse
import math
import warnings

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import graphpipe as gp
from graphpipe.graph.capture import CoupledBatchWarning
from graphpipe.zoo.contrastive import contrastive_loss
from graphpipe.zoo.digits import NAMES, TEMPLATES, DigitsModel, Tokenizer, load_digits

Sample = tuple[Tensor, Tensor, Tensor]


class Captioned(Dataset[Sample]):
    """Digits with a caption each: (image [1, 8, 8], token ids [length], label)."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        captions = [
            TEMPLATES[i % len(TEMPLATES)].format(NAMES[label])
            for i, label in enumerate(labels.tolist())
        ]
        self.samples = list(zip(images, Tokenizer().encode(captions), labels, strict=True))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def rate(step: int, steps: int) -> float:
    """Share of the largest learning rate: up in a tenth of the steps, then down as a cosine."""
    rise = max(1, steps // 10)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--samples", type=int, help="use no more training images than this")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument(
        "--checkpoints", help="save to this folder after every epoch, and resume from it"
    )
    options = parser.parse_args()
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0

    digits = load_digits()
    count = options.samples or len(digits.train_labels)
    data = Captioned(digits.train_images[:count], digits.train_labels[:count])

    # Every process makes the same model and graph; the pipeline keeps the rank's own stages.
    torch.manual_seed(0)
    model = DigitsModel()
    images, ids, labels = (torch.stack(field) for field in zip(*data.samples[:4], strict=True))
    with warnings.catch_warnings():
        # The loss mixes the samples. It gets the whole mini-batch, so that is right.
        warnings.simplefilter("ignore", CoupledBatchWarning)
        graph = gp.capture(model, (images, ids), targets=labels, loss_fn=contrastive_loss)
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
        contrastive_loss,
        optimizer=lambda named: torch.optim.AdamW(named, options.learning_rate),
        graph=graph,
        clip_norm=1.0,
    )
    steps = options.epochs * (len(data) // options.batch_size)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
        for optimizer in pipe.optimizers  # a rank without parameters has none
    ]
    begin = 0
    if options.checkpoints and gp.latest_checkpoint(options.checkpoints) is not None:
        begin = pipe.load(options.checkpoints, schedulers=schedulers)["epoch"]
    for epoch in range(begin, options.epochs):
        # The same order in every process, another one in every epoch.
        order = torch.Generator().manual_seed(epoch)
        loader = DataLoader(data, options.batch_size, shuffle=True, generator=order, drop_last=True)
        total = 0.0
        for images, ids, labels in loader:
            total += float(pipe.step((images, ids), targets=labels))
            for scheduler in schedulers:
                scheduler.step()
        if first:
            print(f"epoch {epoch + 1}: loss {total / len(loader):.4f}", flush=True)
        if options.checkpoints:
            pipe.save(options.checkpoints, schedulers=schedulers, data={"epoch": epoch + 1}, keep=2)

    state = pipe.state_dict(to=0)
    pipe.close()
    if first:
        model.load_state_dict(state)  # the plain model, with what was trained
        accuracy = digits.zero_shot_accuracy(model)
        print(f"held-out digits named rightly: {100 * accuracy:.1f} %", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Trains an encoder-decoder transformer to translate short messages, letter by letter.

Start it with torchrun, see README.md.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from data import LENGTH, PADDING, START, Alphabet, load
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import graphpipe as gp


class Translator(nn.Module):
    """Encoder and decoder of torch.nn over one table of symbols.

    Args:
        symbols: Size of the alphabet.
        width: Of all layers.
        layers: Of the encoder and of the decoder, each.
    """

    def __init__(self, symbols: int, width: int = 96, layers: int = 3) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.transformer = nn.Transformer(
            width, 4, layers, layers, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, symbols)
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, source: Tensor, given: Tensor) -> Tensor:
        """Scores [b, LENGTH, symbols] of the letters after those given, [b, LENGTH]."""
        padding = source == PADDING
        seen = self.transformer(
            self.symbols(source) + self.places,
            self.symbols(given) + self.places,
            tgt_mask=self.get_buffer("future"),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        out: Tensor = self.head(seen)
        return out


def letter_loss(scores: Tensor, wanted: Tensor) -> Tensor:
    """Mean over the letters of the mini-batch, however they lie in micro-batches."""
    return cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=PADDING)


def translate(model: Translator, source: Tensor, alphabet: Alphabet) -> list[str]:
    """The likeliest letter after letter, for sources [n, LENGTH]."""
    model.eval()
    given = torch.full_like(source, PADDING)
    given[:, 0] = START
    with torch.no_grad():
        for place in range(LENGTH - 1):
            given[:, place + 1] = model(source, given)[:, place].argmax(-1)
    return [alphabet.decode(row) for row in given[:, 1:].tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--languages", nargs="+", default=["de", "nl", "sv", "da"])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--samples", type=int, help="use no more messages than this")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--checkpoints", help="save to this folder after every epoch, and resume from it"
    )
    options = parser.parse_args()
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0

    data, held_out, alphabet = load(options.languages)
    if options.samples is not None:
        data.tensors = tuple(x[: options.samples] for x in data.tensors)
    torch.manual_seed(0)
    model = Translator(len(alphabet), options.width, options.layers)
    source, given, wanted = (x[:4] for x in data.tensors)
    graph = gp.capture(model, (source, given), targets=wanted, loss_fn=letter_loss)
    plans: list[gp.Plan | None] = [None]
    if first:
        cluster = gp.Cluster.uniform("cpu-core", nodes=1, per_node=dist.get_world_size())
        costs = gp.estimate(graph, cluster)
        # So small a model is fastest as copies; without them it becomes stages.
        plans[0] = gp.plan(
            graph, costs, cluster, batch_size=options.batch_size, replicas=False, copies=1
        )
        print(plans[0], flush=True)
    dist.broadcast_object_list(plans)
    assert plans[0] is not None

    pipe = gp.Pipeline(
        model,
        plans[0],
        letter_loss,
        optimizer=lambda named: torch.optim.AdamW(named, options.learning_rate),
        graph=graph,
        clip_norm=1.0,
    )
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
        for optimizer in pipe.optimizers
    ]
    begin = 0
    if options.checkpoints and gp.latest_checkpoint(options.checkpoints) is not None:
        begin = pipe.load(options.checkpoints, schedulers=schedulers)["epoch"]
    for epoch in range(begin, options.epochs):
        order = torch.Generator().manual_seed(epoch)
        loader = DataLoader(data, options.batch_size, shuffle=True, generator=order, drop_last=True)
        total = 0.0
        for source, given, wanted in loader:
            total += float(pipe.step((source, given), targets=wanted))
        for scheduler in schedulers:
            scheduler.step()
        source, given, wanted = held_out.tensors
        error = float(pipe.eval_step((source, given), targets=wanted))
        if first:
            print(
                f"epoch {epoch + 1}: loss {total / len(loader):.3f}, held out {error:.3f}",
                flush=True,
            )
        if options.checkpoints:
            pipe.save(options.checkpoints, schedulers=schedulers, data={"epoch": epoch + 1}, keep=2)

    state = pipe.state_dict(to=0)
    pipe.close()
    if first:
        model.load_state_dict(state)
        source = held_out.tensors[0][:: max(1, len(held_out) // 6)][:6]
        for row, text in zip(source.tolist(), translate(model, source, alphabet), strict=True):
            print(f"  {alphabet.decode(row[1:])!r} in {alphabet.decode(row[:1])!r}: {text!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

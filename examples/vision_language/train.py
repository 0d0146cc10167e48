"""Teaches a language model to describe digits that a frozen vision tower looks at.

The model is LLaVA as the transformers library has it, unmodified, in a small size. Start it
with torchrun, see README.md.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import graphpipe as gp
from graphpipe.zoo.digits import NAMES, TEMPLATES, Tokenizer, load_digits

PATCHES = 16
"""Patches of 2 x 2 pixels in an image: as many tokens stand for it."""
IMAGE = len(Tokenizer().words)
"""Id of such a token, after those of the words."""
IGNORED = -100


def build(width: int, layers: int) -> transformers.LlavaForConditionalGeneration:
    """LLaVA with a tower of two layers, frozen, and a decoder of ``layers``."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            **sizes, num_hidden_layers=2, image_size=8, patch_size=2, num_channels=1
        ),
        text_config=transformers.LlamaConfig(
            **sizes, num_hidden_layers=layers, vocab_size=IMAGE + 1, use_cache=False
        ),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(False)
    return model


def described(images: Tensor, labels: Tensor) -> TensorDataset:
    """(pixels, token ids, labels): an image's tokens, then its caption, which is the target."""
    captions = [
        TEMPLATES[i % len(TEMPLATES)].format(NAMES[label]) for i, label in enumerate(labels)
    ]
    words = Tokenizer().encode(captions)
    seen = torch.full((len(words), PATCHES), IMAGE)
    wanted = words.masked_fill(words == 0, IGNORED)
    ignored = torch.full_like(seen, IGNORED)
    return TensorDataset(
        images, torch.cat([seen, words], dim=1), torch.cat([ignored, wanted], dim=1)
    )


def inputs(pixels: Tensor, ids: Tensor, labels: Tensor) -> dict[str, Any]:
    """What the model's forward is given."""
    return {"pixel_values": pixels, "input_ids": ids, "labels": labels}


def accuracy(model: torch.nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images for which "the digit" goes on with the right word."""
    prompts = Tokenizer().encode(["the digit"] * len(images))[:, :2]
    ids = torch.cat([torch.full((len(images), PATCHES), IMAGE), prompts], dim=1)
    names = Tokenizer().encode(list(NAMES))[:, 0]
    model.eval()
    with torch.no_grad():
        scores = model(pixel_values=images, input_ids=ids).logits[:, -1]
    return float((scores[:, names].argmax(-1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--samples", type=int, help="use no more training images than this")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument(
        "--checkpoints", help="save to this folder after every epoch, and resume from it"
    )
    options = parser.parse_args()
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0

    digits = load_digits()
    count = options.samples or len(digits.train_labels)
    data = described(digits.train_images[:count], digits.train_labels[:count])
    torch.manual_seed(0)
    model = build(options.width, options.layers)
    # The model writes the image features over the image tokens of the whole batch at once.
    # Every sample has as many of the one as of the other, so each gets its own.
    graph = gp.capture(
        model,
        (),
        inputs(*(x[:4] for x in data.tensors)),
        per_sample_ops=["aten.masked_scatter.default"],
    )
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
        optimizer=lambda named: torch.optim.AdamW(named, options.learning_rate),
        graph=graph,
        clip_norm=1.0,
    )
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.85)
        for optimizer in pipe.optimizers  # a rank whose stages are all frozen has none
    ]
    begin = 0
    if options.checkpoints and gp.latest_checkpoint(options.checkpoints) is not None:
        begin = pipe.load(options.checkpoints, schedulers=schedulers)["epoch"]
    for epoch in range(begin, options.epochs):
        order = torch.Generator().manual_seed(epoch)
        loader = DataLoader(data, options.batch_size, shuffle=True, generator=order, drop_last=True)
        total = 0.0
        for batch in loader:
            total += float(pipe.step((), inputs(*batch)))
        for scheduler in schedulers:
            scheduler.step()
        if first:
            print(f"epoch {epoch + 1}: loss {total / len(loader):.4f}", flush=True)
        if options.checkpoints:
            pipe.save(options.checkpoints, schedulers=schedulers, data={"epoch": epoch + 1}, keep=2)

    state = pipe.state_dict(to=0)
    pipe.close()
    if first:
        model.load_state_dict(state)
        right = accuracy(model, digits.test_images, digits.test_labels)
        print(f"held-out digits named rightly: {100 * right:.1f} %", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

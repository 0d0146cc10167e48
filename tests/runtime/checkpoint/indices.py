"""An index with something in every field."""

from __future__ import annotations

from graphpipe.runtime.checkpoint.index import (
    Chunk,
    GroupEntry,
    Index,
    OptimizerEntry,
    TensorEntry,
    TrainingEntry,
)
from graphpipe.runtime.checkpoint.values import encode


def chunk(file: str, key: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Chunk:
    return Chunk(offsets=offsets, shape=shape, file=file, key=key, sha256="0" * 64)


def good_index() -> Index:
    model = "model-00000.safetensors"
    other = "model-00001.safetensors"
    training = "training-00000.safetensors"
    tensors = (
        TensorEntry(
            section="model", name="a.weight", dtype="float32", shape=(4, 6),
            chunks=(
                chunk(model, "a.weight@0,0", (0, 0), (4, 2)),
                chunk(other, "a.weight@0,2", (0, 2), (4, 4)),
            ),
        ),
        TensorEntry(
            section="model", name="b", dtype="int64", shape=(),
            chunks=(chunk(model, "b", (), ()),),
        ),
        TensorEntry(
            section="buffer", name="cache", dtype="bfloat16", shape=(3,),
            chunks=(chunk(training, "cache", (0,), (3,)),),
        ),
        TensorEntry(
            section="optimizer", name="a.weight", key="exp_avg", dtype="float32", shape=(4, 6),
            chunks=(chunk(training, "a.weight/exp_avg", (0, 0), (4, 6)),),
        ),
    )  # fmt: skip
    options = {"lr": 1e-3, "betas": (0.9, 0.99), "foreach": None, "maximize": False}
    return Index(
        model="toy",
        fingerprint="f",
        world_size=2,
        tensors=tensors,
        aliases={"a.weight": ("tied.weight",)},
        training=TrainingEntry(
            iterations=40,
            seed=3,
            optimizer=OptimizerEntry(
                type="AdamW",
                groups=(
                    GroupEntry(
                        position=0,
                        options=encode(options, "x"),
                        schedule=({"/base_lrs": 0.1},),
                        parameters=("a.weight",),
                    ),
                ),
                values={"a.weight": {"count": 3}},
            ),
            schedulers=({"last_epoch": 4, "base_lrs": {"per_group": "/base_lrs"}},),
            scheduler_types=("StepLR",),
            scale={"scale": 8.0, "good_steps": 1},
            random={"0": {"python": encode((3, (1, 2), None), "x")}},
            data=encode({"epoch": 1, "order": (1, 2)}, "x"),
        ),
    )

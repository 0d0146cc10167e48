"""Job: building with values and on the meta device."""

from __future__ import annotations

import torch
from torch import nn

from graphpipe import Job


def test_factory_builds_on_meta_without_values() -> None:
    built: list[torch.device] = []

    def factory() -> nn.Module:
        model = nn.Linear(3, 2)
        built.append(model.weight.device)
        return model

    job = Job(factory, (torch.zeros(4, 3),), {"scale": torch.ones(4)}, targets=torch.zeros(4))
    meta = job.on_meta()

    assert [device.type for device in built] == ["meta"]
    assert meta.args[0].is_meta
    assert meta.args[0].shape == (4, 3)
    assert meta.kwargs["scale"].is_meta
    assert meta.targets.is_meta
    assert isinstance(meta.model, nn.Module)
    assert job.build_model().get_parameter("weight").device.type == "cpu"


def test_module_is_handed_on_as_it_is() -> None:
    model = nn.Linear(3, 2)
    job = Job(model, (torch.zeros(4, 3),))
    assert job.on_meta() is job
    assert job.build_model() is model

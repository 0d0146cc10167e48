"""The index of a distributed checkpoint cannot make anything run."""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from graphpipe.errors import CheckpointError
from graphpipe.runtime.metadata_pickle import SafeReader
from graphpipe.runtime.state import ModelState
from graphpipe.runtime.state_folder import state_at

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class _Trap:
    """Makes a file when it is unpickled the usual way."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_good_indices_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    values = {
        "model": {"a": torch.randn(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16)},
        "step": 3,
        "more": [torch.ones(2, dtype=torch.int64)],
    }
    dcp.save(values, checkpoint_id=tmp_path, no_dist=True)
    got = SafeReader(tmp_path).read_metadata()
    want = dcp.FileSystemReader(tmp_path).read_metadata()
    assert got.state_dict_metadata == want.state_dict_metadata
    assert got.storage_data == want.storage_data


def test_a_trap_is_refused_and_does_not_go_off(tmp_path: Path) -> None:
    dcp.save({"a": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    index = tmp_path / ".metadata"
    good = pickle.loads(index.read_bytes())
    good.planner_data = _Trap(str(tmp_path / "went off"))
    index.write_bytes(pickle.dumps(good))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir"):
        state_at(tmp_path, ModelState({}), {})
    assert not (tmp_path / "went off").exists()
    good.planner_data = None
    first = next(iter(good.storage_data))
    good.storage_data[first] = dataclasses.replace(
        good.storage_data[first], relative_path="../elsewhere"
    )
    index.write_bytes(pickle.dumps(good))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        state_at(tmp_path, ModelState({}), {})
    index.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="it is a dict"):
        state_at(tmp_path, ModelState({}), {})

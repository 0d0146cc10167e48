"""Nodes go and come back while a model trains on real data; nothing is lost."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from graphpipe.errors import InputError, RuntimeSetupError
from graphpipe.programs.elastic import check_store, cluster_of
from graphpipe.programs.train import Settings, prepare
from tests.programs.elastic_run import JOB, ElasticRun


def alone(folder: Path, steps: int) -> list[float]:
    """Losses of one process that is never disturbed."""
    path = folder / "job_alone.py"
    path.write_text(JOB)
    from graphpipe.zoo.load import load_job

    job = load_job(f"{path}:job")
    torch.manual_seed(0)
    model = job.build_model()
    assert job.optimizer is not None
    assert job.data is not None
    optimizer = job.optimizer(model.named_parameters())
    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        for batch in job.data(64, epoch):
            loss = job.loss_fn(model(*batch.args), batch.targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        epoch += 1
    return losses[:steps]


def check_log(run: ElasticRun, steps: int, every: int, disturbances: int) -> None:
    """Every step was taken, on the curve; what was repeated is at most an interval each time."""
    lines = run.lines()
    counts = Counter(int(line["step"]) for line in lines)
    assert set(counts) == set(range(1, steps + 1))
    want = alone(run.folder, steps)
    for line in lines:
        assert line["loss"] == pytest.approx(want[int(line["step"]) - 1], rel=1e-4)
    back = 0
    for before, after in itertools.pairwise(lines):
        gap = int(before["step"]) + 1 - int(after["step"])
        assert 0 <= gap <= every
        back += gap > 0
    assert back <= disturbances
    assert len(lines) <= steps + every * disturbances


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nodes_that_are_killed_and_come_back(tmp_path: Path) -> None:
    steps, every = 60, 5
    rng = random.Random(7)
    run = ElasticRun(tmp_path, steps=steps, save_every=every, most=3, gates=(14, 33, 48))
    try:
        for node in range(3):
            run.start_agent(node)
        at = rng.randrange(8, 13)
        run.wait_for(lambda lines: bool(lines) and lines[-1]["step"] >= at and at_three(lines), 240)
        # Node 0 is lost for good: the store and the others go on without it.
        run.kill_agent(0)
        run.open_gate(14)
        run.wait_for(lambda lines: lines[-1]["workers"] == 2 and lines[-1]["step"] == 32, 240)
        run.start_agent(3)  # a device comes back
        run.wait_for(lambda lines: lines[-1]["workers"] == 3, 240)
        run.open_gate(33)
        at = rng.randrange(40, 47)
        run.wait_for(lambda lines: lines[-1]["step"] >= at, 240)
        run.kill_agent(rng.choice([1, 2]))
        run.open_gate(48)
        assert run.finish(240) == [0, 0]
        assert [w for w, _ in itertools.groupby(line["workers"] for line in run.lines())][-4:] == [
            3, 2, 3, 2,
        ]  # fmt: skip
        check_log(run, steps, every, disturbances=5)
    finally:
        run.close()


def at_three(lines: list[dict[str, float]]) -> bool:
    """Whether all three nodes take part (the first may have begun alone)."""
    return lines[-1]["workers"] == 3


def test_wrong_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="No folder for checkpoints"):
        prepare("zoo:digits", Settings(resume=True), workers=2)
    with pytest.raises(InputError, match="started by torchrun"):
        prepare("zoo:digits", Settings(save=tmp_path, elastic=True))
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(InputError, match="one number of devices"):
        prepare("zoo:digits", Settings(save=tmp_path, elastic=True), plan=tmp_path / "p.json")
    monkeypatch.setitem(os.environ, "GROUP_WORLD_SIZE", "2")
    monkeypatch.setitem(os.environ, "TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(RuntimeSetupError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        check_store()


def test_the_cluster_of_the_ranks_that_are_there() -> None:
    cluster = cluster_of([(0, "l4"), (0, "l4"), (2, "h100-sxm")])
    assert [device.kind for device in cluster.devices] == ["l4", "l4", "h100-sxm"]
    assert [device.node for device in cluster.devices] == [0, 0, 1]
    assert cluster.network.inter_node_bandwidth is not None

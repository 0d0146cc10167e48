"""Who went to a doctor: the RAND health insurance experiment, as statsmodels ships it.

20,190 person-years of a randomised study (1974 to 1982; in the public domain). A person is
described by numbers and by categories; the question is whether there was a visit in the year.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

Sample = tuple[Tensor, Tensor, Tensor]
DENSE = ("lpi", "fmde", "physlm", "disea")
CATEGORIES = ("lncoins", "idp", "health", "conditions")
"""Coinsurance rate, individual deductible, health as the person rates it, and how many chronic
conditions there are, by the dozen."""


@dataclass(frozen=True, eq=False)
class Visits(Dataset[Sample]):
    """(numbers [4], category ids [4], 1.0 for a visit) of each person-year.

    Attributes:
        dense: float32 [n, 4], standardised.
        categories: int64 [n, 4].
        visited: float32 [n].
        sizes: How many values each category has.
    """

    dense: Tensor
    categories: Tensor
    visited: Tensor
    sizes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.visited)

    def __getitem__(self, index: int) -> Sample:
        return self.dense[index], self.categories[index], self.visited[index]

    def part(self, rows: Tensor) -> Visits:
        """Some of the rows."""
        return Visits(self.dense[rows], self.categories[rows], self.visited[rows], self.sizes)


def load(held_out: float = 0.1) -> tuple[Visits, Visits]:
    """Reads the data; returns what to train on and what is held out."""
    from statsmodels.datasets import randhie

    table = randhie.load_pandas().data

    def column(name: str) -> Tensor:
        return torch.tensor(table[name].to_numpy(copy=True), dtype=torch.float32)

    dense = torch.stack([column(name) for name in DENSE], dim=1)
    dense = (dense - dense.mean(0)) / dense.std(0)
    health = column("hlthg") + 2 * column("hlthf") + 3 * column("hlthp")
    found = [column("lncoins"), column("idp"), health, column("disea") // 12]
    ids = [torch.unique(values, return_inverse=True)[1] for values in found]
    sizes = tuple(int(values.max()) + 1 for values in ids)
    everyone = Visits(dense, torch.stack(ids, dim=1), (column("mdvis") > 0).float(), sizes)
    order = torch.randperm(len(everyone), generator=torch.Generator().manual_seed(0))
    split = int(len(order) * held_out)
    return everyone.part(order[split:]), everyone.part(order[:split])

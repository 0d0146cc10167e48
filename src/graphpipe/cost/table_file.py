"""A cost table as a JSON file."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from graphpipe.cost.table import CostTable, DeviceCosts, Exclusion, ParameterMemory, Source
from graphpipe.errors import CostError, FileFormatError
from graphpipe.records import FileRecord, Record

if TYPE_CHECKING:
    from graphpipe.cost.table import FloatArray

Numbers = tuple[float, ...]
Times = tuple[tuple[float | None, ...], ...]
"""Rows of seconds; None stands for inf, which JSON does not have."""
Table = TypeVar("Table", bound=CostTable)


class DeviceTimes(Record):
    """Times on one kind of device, see :class:`~graphpipe.cost.table.DeviceCosts`."""

    forward: Times
    backward: Times
    optimizer_seconds_per_byte: float = 0.0
    optimizer_seconds_per_tensor: float = 0.0
    correction: tuple[float, float] | None = None
    host: str | None = None
    forward_spread: tuple[Numbers, ...] | None = None
    backward_spread: tuple[Numbers, ...] | None = None


class CostTableFile(FileRecord):
    """The fields of :class:`~graphpipe.cost.table.CostTable` as JSON."""

    file_kind: ClassVar[str] = "graphpipe-costs"
    written_by: ClassVar[str] = "graphpipe profile MODEL -o FILE"
    file_version: ClassVar[int] = 1

    kind: str = file_kind
    version: int = file_version
    fingerprint: str
    source: Source
    torch_version: str = ""
    optimizer: str = ""
    precision: str = ""
    ops: tuple[str, ...]
    micro_batches: tuple[int, ...]
    devices: dict[str, DeviceTimes]
    output_bytes: tuple[tuple[float, float], ...]
    gradient_bytes: tuple[tuple[float, float], ...]
    storages: tuple[tuple[float, float], ...]
    storage_squares: Numbers = ()
    saved: tuple[tuple[int, ...], ...]
    workspace_bytes: tuple[tuple[float, float], ...]
    parameter_memory: tuple[float, float, float]
    exclusions: tuple[tuple[str, int, str], ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, table: CostTable) -> CostTableFile:
        """The file of a table."""
        memory = table.parameter_memory
        devices: dict[str, DeviceTimes] = {}
        for kind, costs in table.devices.items():
            spread = table.spreads.get(kind)
            devices[kind] = DeviceTimes(
                forward=_times(costs.forward),
                backward=_times(costs.backward),
                optimizer_seconds_per_byte=costs.optimizer_seconds_per_byte,
                optimizer_seconds_per_tensor=costs.optimizer_seconds_per_tensor,
                correction=table.corrections.get(kind),
                host=table.hosts.get(kind),
                forward_spread=_rows(spread[0]) if spread else None,
                backward_spread=_rows(spread[1]) if spread else None,
            )
        return cls(
            fingerprint=table.fingerprint,
            source=table.source,
            torch_version=table.torch_version,
            optimizer=table.optimizer,
            precision=table.precision,
            ops=table.ops,
            micro_batches=table.micro_batches,
            devices=devices,
            output_bytes=_pairs(table.output_bytes),
            gradient_bytes=_pairs(table.gradient_bytes),
            storages=_pairs(table.storages),
            storage_squares=tuple(table.storage_squares.tolist()),
            saved=table.saved,
            workspace_bytes=_pairs(table.workspace_bytes),
            parameter_memory=(memory.weight, memory.gradient, memory.optimizer),
            exclusions=tuple((item.op, item.micro_batch, item.reason) for item in table.exclusions),
            notes=table.notes,
        )

    def table(self, kind: type[Table], *, where: str) -> Table:
        """The table of the file.

        Raises:
            FileFormatError: if the arrays do not fit together.
        """
        width = len(self.micro_batches)
        try:
            devices = {
                name: DeviceCosts(
                    _array(item.forward, width, f"devices.{name}.forward"),
                    _array(item.backward, width, f"devices.{name}.backward"),
                    item.optimizer_seconds_per_byte,
                    item.optimizer_seconds_per_tensor,
                )
                for name, item in self.devices.items()
            }
            spreads = {
                name: (
                    _array(item.forward_spread, width, f"devices.{name}.forward_spread"),
                    _array(item.backward_spread, width, f"devices.{name}.backward_spread"),
                )
                for name, item in self.devices.items()
                if item.forward_spread is not None and item.backward_spread is not None
            }
            return kind(
                fingerprint=self.fingerprint,
                source=self.source,
                ops=self.ops,
                micro_batches=self.micro_batches,
                devices=devices,
                output_bytes=_array(self.output_bytes, 2, "output_bytes"),
                gradient_bytes=_array(self.gradient_bytes, 2, "gradient_bytes"),
                storages=_array(self.storages, 2, "storages"),
                saved=self.saved,
                workspace_bytes=_array(self.workspace_bytes, 2, "workspace_bytes"),
                parameter_memory=ParameterMemory(*self.parameter_memory),
                corrections={
                    name: item.correction
                    for name, item in self.devices.items()
                    if item.correction is not None
                },
                notes=self.notes,
                exclusions=tuple(Exclusion(*item) for item in self.exclusions),
                storage_squares=np.asarray(self.storage_squares, dtype=np.float64),
                spreads=spreads,
                hosts={
                    name: item.host for name, item in self.devices.items() if item.host is not None
                },
                torch_version=self.torch_version,
                optimizer=self.optimizer,
                precision=self.precision,
            )
        except CostError as error:
            raise FileFormatError(
                f"Not a valid {self.file_kind} file: {error.what}",
                where=f"{where}, {error.where}",
                expected=error.expected,
                got=error.got,
            ) from None


def _times(array: FloatArray) -> Times:
    return tuple(
        tuple(value if value != np.inf else None for value in row) for row in array.tolist()
    )


def _rows(array: FloatArray) -> tuple[Numbers, ...]:
    return tuple(tuple(row) for row in array.tolist())


def _pairs(array: FloatArray) -> tuple[tuple[float, float], ...]:
    return tuple((first, second) for first, second in array.tolist())


def _array(rows: Times | tuple[Numbers, ...], width: int, name: str) -> FloatArray:
    if any(len(row) != width for row in rows):
        raise CostError(
            "A row has the wrong length", where=f"field '{name}'", expected=f"{width} numbers"
        )
    values = [[np.inf if value is None else value for value in row] for row in rows]
    return np.asarray(values, dtype=np.float64).reshape(len(rows), width)

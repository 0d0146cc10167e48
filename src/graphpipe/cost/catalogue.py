"""The device catalogue: what the analytic estimate knows of each kind of device.

The figures are data, in ``devices.toml`` beside this module, each with its source. A user
adds devices in a TOML file of the same form and names it in ``$GRAPHPIPE_DEVICES`` (several
files: separated as in ``$PATH``), or gives ``FILE.toml:NAME`` where a device is asked for.
A device may start from another one: ``base = "h100-sxm"`` takes every figure that it does not
state itself.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from functools import lru_cache
from importlib import resources
from pathlib import Path

from pydantic import Field, ValidationError

from graphpipe.cost.cluster import Bandwidth, Latency, Memory, Network
from graphpipe.errors import ClusterError
from graphpipe.graph.model_graph import DTYPE_BYTES
from graphpipe.records import Record

ENVIRONMENT = "GRAPHPIPE_DEVICES"
"""Environment variable that names further catalogue files."""


SLOWEST, FASTEST = 1e-3, 1e30
"""Rates that a device may have, FLOP/s."""


class Efficiency(Record):
    """How much of its peak a device reaches, rising with the work of a kernel.

    A kernel with work ``w`` on a unit of peak rate ``p`` takes ``w / (share * p) + ramp``
    seconds: large kernels reach ``share`` of the peak, one that lasts ``ramp`` seconds at
    that rate reaches half of it, tiny ones next to nothing. That is the saturating curve
    of occupancy (Hockney's n-half), and the reason why small micro-batches are slow.

    Attributes:
        compute: Share of the peak FLOP/s that large kernels reach.
        memory: Share of the peak bandwidth that large kernels reach.
        compute_ramp: Seconds, see above.
        memory_ramp: Seconds, see above.
    """

    compute: float = Field(gt=0, le=1)
    memory: float = Field(gt=0, le=1)
    compute_ramp: Latency
    memory_ramp: Latency


class DeviceSpec(Record):
    """One kind of device.

    Attributes:
        name: Its name in the catalogue and in ``Device.kind``.
        source: Where the figures come from.
        total_memory_bytes: Capacity, bytes.
        reserved_bytes: Bytes that a plan cannot use (context, library workspaces).
        bandwidth: Device memory, bytes per second.
        launch_seconds: Overhead of one kernel, seconds.
        rates: Peak FLOP/s by dtype (``float32``, ``bfloat16``, ...); ``tf32`` is float32 with
            TF32 allowed. Dense.
        multi_tensor: Parameters that one kernel of an optimizer takes: by default 36, as
            ``depth_to_max_tensors`` of PyTorch's ``MultiTensorApply.cuh`` has it for four lists
            on a GPU; 1 on a CPU.
        efficiency: Share of the peaks that is reached.
        default_network: Links between devices of this kind in a common box.
    """

    name: str = Field(min_length=1)
    source: str
    total_memory_bytes: Memory
    reserved_bytes: int = Field(default=0, ge=0)
    bandwidth: Bandwidth
    launch_seconds: Latency
    multi_tensor: int = Field(default=36, ge=1)
    rates: dict[str, float]
    efficiency: Efficiency
    default_network: Network = Network()

    @property
    def memory_bytes(self) -> int:
        """Bytes that a plan can use."""
        return self.total_memory_bytes - self.reserved_bytes

    def rate(self, dtype: str) -> float:
        """Peak FLOP/s for a dtype; that of float32 where the data sheet is silent."""
        return self.rates.get(dtype, self.rates["float32"])

    def compute_seconds(self, flops: float, kernels: int, dtype: str) -> float:
        """Seconds of arithmetic; 0 for no FLOPs."""
        if flops <= 0:
            return 0.0
        reached = self.rate(dtype) * self.efficiency.compute
        return flops / reached + max(1, kernels) * self.efficiency.compute_ramp

    def memory_seconds(self, nbytes: float, kernels: int) -> float:
        """Seconds of memory traffic; 0 for no bytes."""
        if nbytes <= 0:
            return 0.0
        reached = self.bandwidth * self.efficiency.memory
        return nbytes / reached + max(1, kernels) * self.efficiency.memory_ramp

    def kernel_seconds(self, flops: float, nbytes: float, kernels: int, dtype: str) -> float:
        """Seconds of ``kernels`` kernels that do this work: the roofline plus their launches."""
        if kernels == 0:
            return 0.0
        work = max(
            self.compute_seconds(flops, kernels, dtype), self.memory_seconds(nbytes, kernels)
        )
        return work + kernels * self.launch_seconds


def device(name: str) -> DeviceSpec:
    """The device of this name: of the catalogue, of ``$GRAPHPIPE_DEVICES``, or ``FILE.toml:NAME``.

    Raises:
        ClusterError: if there is none, or if a file is malformed.
    """
    if ".toml" in name:
        path, _, inner = name.partition(".toml")
        return _from_file(Path(path + ".toml"), inner.removeprefix(":"))
    known = catalogue()
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
        raise ClusterError(
            "Unknown device",
            expected="one of " + ", ".join(sorted(known)),
            got=repr(name),
            fix=(f"Did you mean {' or '.join(near)}? " if near else "")
            + f"Add other devices in a TOML file and name it in ${ENVIRONMENT}",
        )
    return known[name]


def catalogue() -> dict[str, DeviceSpec]:
    """All devices by name: the package's, then those of ``$GRAPHPIPE_DEVICES``."""
    return dict(_catalogue(os.environ.get(ENVIRONMENT, "")))


@lru_cache(maxsize=8)
def _catalogue(extra: str) -> dict[str, DeviceSpec]:
    text = resources.files(__package__).joinpath("devices.toml").read_text(encoding="utf-8")
    known = parse_devices(text, where="devices.toml")
    for item in extra.split(os.pathsep):
        if item:
            known.update(_read(Path(item), known))
    return known


def _read(path: Path, known: dict[str, DeviceSpec]) -> dict[str, DeviceSpec]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError("Cannot read the device file", where=str(path), got=error) from None
    return parse_devices(text, where=str(path), known=known)


def _from_file(path: Path, name: str) -> DeviceSpec:
    found = _read(path, catalogue())
    if not name and len(found) == 1:
        return next(iter(found.values()))
    if name not in found:
        raise ClusterError(
            "The device file has no such device",
            where=str(path),
            expected="one of " + ", ".join(sorted(found)),
            got=repr(name),
            fix=f"Name it as {path}:NAME",
        )
    return found[name]


def parse_devices(
    text: str, *, where: str = "<string>", known: dict[str, DeviceSpec] | None = None
) -> dict[str, DeviceSpec]:
    """The devices of a TOML text, by name; the form is described in ``devices.toml``.

    Args:
        text: The TOML text.
        where: Name of the file, for messages.
        known: Devices that ``base`` may name besides those above it in the text.

    Raises:
        ClusterError: naming the device and the field that is wrong.
    """
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ClusterError("The device file is not valid TOML", where=where, got=error) from None
    found: dict[str, DeviceSpec] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ClusterError(
                "A device file holds one table per device", where=f"{where}, '{name}'", got=table
            )
        found[name] = _parse(name, table, {**(known or {}), **found}, where)
    return found


def _parse(
    name: str, table: dict[str, object], known: dict[str, DeviceSpec], where: str
) -> DeviceSpec:
    fields = dict(table)
    base = fields.pop("base", None)
    for ours, theirs in (("memory_bytes", "total_memory_bytes"), ("network", "default_network")):
        if ours in fields:
            fields[theirs] = fields.pop(ours)
    merged: dict[str, object] = {"name": name}
    if base is not None:
        if not isinstance(base, str) or base not in known:
            raise ClusterError(
                "A device starts from an unknown one",
                where=f"{where}, device '{name}', field 'base'",
                expected="one of " + ", ".join(sorted(known)),
                got=repr(base),
            )
        merged = {**known[base].model_dump(), **merged}
    for key, value in fields.items():
        inherited = merged.get(key)
        if isinstance(value, dict) and isinstance(inherited, dict):
            merged[key] = {**inherited, **value}
        else:
            merged[key] = value
    place = f"{where}, device '{name}'"
    try:
        spec = DeviceSpec.model_validate(merged)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        field = field.replace("total_memory_bytes", "memory_bytes")
        field = field.replace("default_network", "network")
        raise ClusterError(
            f"Malformed device: {first['msg']}",
            where=f"{place}, field '{field}'",
            got=repr(first.get("input"))[:80],
        ) from None
    _check_rates(spec, place)
    return spec


def _check_rates(spec: DeviceSpec, place: str) -> None:
    if "float32" not in spec.rates:
        raise ClusterError("A device needs the rate of float32", where=f"{place}, field 'rates'")
    for dtype, rate in spec.rates.items():
        if dtype != "tf32" and dtype not in DTYPE_BYTES:
            raise ClusterError(
                "Unknown dtype", where=f"{place}, field 'rates.{dtype}'", got=repr(dtype)
            )
        if not SLOWEST <= rate <= FASTEST:
            raise ClusterError(
                f"A rate must be positive, from {SLOWEST:g} to {FASTEST:g}",
                where=f"{place}, field 'rates.{dtype}'",
                got=rate,
            )
    if spec.memory_bytes <= 0:
        raise ClusterError(
            "More memory is reserved than there is",
            where=f"{place}, field 'reserved_bytes'",
            expected=f"less than {spec.total_memory_bytes}",
            got=spec.reserved_bytes,
        )

"""The device catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphpipe.cost.catalogue import ENVIRONMENT, catalogue, device, parse_devices
from graphpipe.cost.cluster import Cluster
from graphpipe.errors import ClusterError

NAMES = (
    *("v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "h100-sxm", "h100-pcie", "h200"),
    *("b200", "mi300x", "l4", "l40s", "rtx-4090", "cpu-core"),
)

OWN = """
[mini]
source = "bench"
memory_bytes = 1000
bandwidth = 10.0
launch_seconds = 0.5
rates = { float32 = 100.0, bfloat16 = 200.0 }
efficiency = { compute = 0.5, memory = 0.5, compute_ramp = 1.0, memory_ramp = 2.0 }
"""


@pytest.mark.parametrize("name", NAMES)
def test_devices_of_the_catalogue_are_complete(name: str) -> None:
    spec = device(name)
    assert spec.name == name
    assert len(spec.source) > 20
    assert 0 < spec.memory_bytes < spec.total_memory_bytes
    assert spec.rate("float32") >= spec.rate("float64")
    assert spec.default_network.intra_node_bandwidth is not None
    cluster = Cluster.uniform(name, nodes=2, per_node=3)
    assert cluster.world_size == 6
    assert cluster.kinds == (name,)
    assert cluster.devices[0].memory_bytes == spec.memory_bytes


def test_rates_agree_with_the_data_sheets() -> None:
    # TFLOP/s as printed: (float32, bfloat16 or float16 dense), GB/s, GiB.
    sheets = {
        "v100-16gb": (15.7, 125, 900, 16),
        "a100-80gb": (19.5, 312, 2039, 80),
        "h100-sxm": (67, 1979 / 2, 3350, 80),
        "h100-pcie": (51, 1513 / 2, 2000, 80),
        "h200": (67, 1979 / 2, 4800, 141),
        "mi300x": (163.4, 1307.4, 5300, 192),
        "l4": (30.3, 242 / 2, 300, 24),
        "l40s": (91.6, 362.05, 864, 48),
    }
    for name, (single, half, bandwidth, memory) in sheets.items():
        spec = device(name)
        assert spec.rate("float32") == pytest.approx(single * 1e12)
        assert spec.rate("float16") == pytest.approx(half * 1e12)
        assert spec.bandwidth == pytest.approx(bandwidth * 1e9)
        assert spec.total_memory_bytes == memory * 2**30


def test_unlisted_dtype_runs_at_the_float32_rate() -> None:
    assert device("v100-16gb").rate("float8_e4m3fn") == 15.7e12


def test_kernel_seconds_is_the_roofline_plus_ramp_and_launch() -> None:
    mini = parse_devices(OWN)["mini"]
    # 500 FLOP at 50/s = 10 s + 1 s ramp; 20 bytes at 5/s = 4 s + 2 s ramp; one launch.
    assert mini.kernel_seconds(500, 20, 1, "float32") == pytest.approx(11.5)
    assert mini.kernel_seconds(500, 200, 1, "float32") == pytest.approx(42.5)
    assert mini.kernel_seconds(500, 0, 1, "bfloat16") == pytest.approx(6.5)
    assert mini.kernel_seconds(500, 20, 0, "float32") == 0.0
    # Nothing to do but a launch, as for an empty tensor.
    assert mini.kernel_seconds(0, 0, 2, "float32") == pytest.approx(1.0)


def test_efficiency_rises_with_the_work_of_a_kernel() -> None:
    spec = device("v100-16gb")
    reached = [flops / spec.kernel_seconds(flops, 0, 1, "float32") for flops in (1e6, 1e8, 1e10)]
    assert reached[0] < 0.01 * spec.rate("float32")
    assert reached[0] < reached[1] < reached[2] < 0.85 * spec.rate("float32")
    assert reached[2] > 0.8 * spec.rate("float32")


def test_unknown_device_suggests_a_name() -> None:
    with pytest.raises(ClusterError, match=r"Did you mean h100-sxm.*GRAPHPIPE_DEVICES"):
        device("h100_sxm")


def test_own_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        OWN + '[big]\nbase = "mini"\nsource = "x"\nmemory_bytes = 5000\n'
        'rates = { bfloat16 = 900.0 }\n[far]\nbase = "h200"\nbandwidth = 1e12\n',
        encoding="utf-8",
    )
    assert device(f"{path}:mini").memory_bytes == 1000
    with pytest.raises(ClusterError, match="no such device"):
        device(str(path))
    with pytest.raises(ClusterError, match="Unknown device"):
        device("big")
    monkeypatch.setenv(ENVIRONMENT, str(path))
    big = device("big")
    assert (big.memory_bytes, big.rate("float32"), big.rate("bfloat16")) == (5000, 100.0, 900.0)
    assert device("far").rates == device("h200").rates
    assert "l4" in catalogue()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("bandwidth = 10.0", "bandwidth = -1.0"), "'mini', field 'bandwidth'"),
        (("bandwidth = 10.0", "bandwidth = nan"), "'mini', field 'bandwidth'"),
        (("bandwidth = 10.0", 'bandwidth = "10"'), "'mini', field 'bandwidth'"),
        (("memory_bytes = 1000", "memory_bytes = 0"), "'mini', field 'memory_bytes'"),
        (("memory_bytes = 1000", "memory_bytes = 9\nreserved_bytes = 9"), "'reserved_bytes'"),
        (('source = "bench"', ""), "'mini', field 'source'"),
        (("float32 = 100.0, ", ""), "needs the rate of float32"),
        (("bfloat16 = 200.0", "bf16 = 200.0"), r"Unknown dtype.*rates\.bf16"),
        (("bfloat16 = 200.0", "bfloat16 = 0.0"), r"must be positive.*rates\.bfloat16"),
        (("compute = 0.5", "compute = 1.5"), r"'efficiency\.compute'"),
        (('source = "bench"', 'source = "s"\nbase = "none"'), "field 'base'"),
        (('source = "bench"', 'source = "s"\nprice = 1'), "field 'price'"),
        (("[mini]", "[mini"), "not valid TOML"),
        (("[mini]", "mini = 3\n[other]"), "one table per device"),
    ],
)
def test_malformed_device_files_are_refused(change: tuple[str, str], message: str) -> None:
    assert change[0] in OWN
    with pytest.raises(ClusterError, match=message):
        parse_devices(OWN.replace(*change), where="own.toml")


def test_missing_device_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="Cannot read the device file"):
        device(f"{tmp_path}/none.toml:x")

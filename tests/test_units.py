from __future__ import annotations

import pytest

from graphpipe.units import format_bytes, format_count, format_ns, format_percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1 µs"),
        (1_234_567, "1.235 ms"),
        (999_949, "999.9 µs"),
        (999_950, "1 ms"),
        (12_500_000_000, "12.5 s"),
        (5_400_000_000_000, "5,400 s"),
    ],
)
def test_times(value: int, text: str) -> None:
    assert format_ns(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (5 * 2**40, "5 TiB")],
)
def test_sizes(value: int, text: str) -> None:
    assert format_bytes(value) == text


def test_ties_go_up() -> None:
    assert format_bytes(1088) == "1.063 KiB"


def test_shares_and_counts() -> None:
    assert format_percent(0.1234) == "12.3 %"
    assert format_count(1, "stage") == "1 stage"
    assert format_count(2048, "sample") == "2,048 samples"

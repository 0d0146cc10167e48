"""Times and bytes as people write them."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

_TIMES = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"), (1, "ns"))
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def format_ns(nanoseconds: float, digits: int = 4) -> str:
    """A duration with so many significant digits: ``format_ns(1_234_567)`` is ``1.235 ms``."""
    return _scaled(nanoseconds, _TIMES, digits)


def format_bytes(nbytes: float, digits: int = 4) -> str:
    """A size with so many significant digits: ``format_bytes(1536)`` is ``1.5 KiB``."""
    return _scaled(nbytes, _SIZES, digits)


def format_percent(share: float) -> str:
    """A share of one: ``format_percent(0.123)`` is ``12.3 %``."""
    return f"{share * 100:.1f} %"


def format_count(count: int, noun: str) -> str:
    """``1 stage``, ``2 stages``, ``1,024 samples``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _scaled(value: float, units: tuple[tuple[int, str], ...], digits: int) -> str:
    for factor, unit in units:
        # Half a unit in the last place rounds up into the next unit: 999.96 ms is 1 s.
        if abs(value) >= factor * (1 - 0.5 * 10**-digits) or factor == 1:
            return f"{_rounded(value / factor, digits)} {unit}"
    raise AssertionError("the last unit takes every value")


def _rounded(number: float, significant: int) -> str:
    # Ties go up, as in JavaScript's toFixed: the report's page formats by the same rule.
    places = max(0, significant - len(str(int(abs(number)))))
    rounded = Decimal(number).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)
    text = f"{rounded:,f}"
    return text.rstrip("0").rstrip(".") if "." in text else text

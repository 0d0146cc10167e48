"""Random numbers that depend on what is computed, not on where.

Every random op is preceded by a call of :func:`seed_op`. It seeds the generator of the
stage's device from (seed, step, the op's stable key, the micro-batch's first sample), so the
numbers are the same whatever stage, device or order the op runs in, when a forward is
recomputed, and when training resumes at that step.
"""

from __future__ import annotations

import hashlib

import torch

_MASK = (1 << 64) - 1


def op_key(text: str) -> int:
    """The 64-bit number of an op's stable key."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(*numbers: int) -> int:
    """Hashes integers into 63 bits (the finaliser of SplitMix64, applied to each in turn)."""
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class _Current:
    """The task that runs now in this process."""

    base = 0
    generator: torch.Generator = torch.default_generator


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator of ``device``: the one that random ops there draw from."""
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generator: torch.Generator = torch.cuda.default_generators[index]
        return generator
    return torch.default_generator


def begin_task(seed: int, step: int, first_sample: int, generator: torch.Generator) -> None:
    """Names the task whose random ops run next."""
    _Current.base = mix(seed, step, first_sample)
    _Current.generator = generator


def seed_op(key: int) -> None:
    """Seeds the generator for the op with this key (see :func:`op_key`)."""
    _Current.generator.manual_seed(mix(_Current.base, key))

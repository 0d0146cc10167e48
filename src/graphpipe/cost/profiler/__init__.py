"""Measuring the costs of a captured graph on this machine."""

from graphpipe.cost.profiler.profile import profile

__all__ = ["profile"]

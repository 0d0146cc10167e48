"""Settings for every test: one thread a process, reproducible draws, no wall-clock limits."""

from __future__ import annotations

import os

# Before torch is imported anywhere: many small processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# rich and typer wrap help and errors to the terminal; tests look for whole phrases.
os.environ["COLUMNS"] = "200"
os.environ["NO_COLOR"] = "1"

from hypothesis import HealthCheck, settings

settings.register_profile(
    "graphpipe",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("graphpipe")

"""What the forkserver loads before it forks workers: a worker then imports nothing itself.

Loading takes seconds of CPU time, once here and not once for each of 32 workers.
"""

import torch
import torch.distributed  # noqa: F401

import graphpipe.runtime.emulate
import graphpipe.runtime.pipeline  # noqa: F401

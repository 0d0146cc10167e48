"""What the forkserver loads before it forks workers."""

import torch
import torch.distributed  # noqa: F401

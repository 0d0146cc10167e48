"""Checkpoints: what a pipeline needs to go on, in files that any plan can read.

``torch.distributed.checkpoint`` plans, writes and reads them in all ranks at once, through a
planner and a storage of ours: tensors lie in safetensors files, everything else in one JSON
index, so that nothing is ever unpickled from a file. The format is in ``docs/checkpoints.md``.
"""

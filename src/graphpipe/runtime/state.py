"""Where the initial values of a stage's parameters come from.

Three sources: the real model that the user gave, a file of tensors by name, and, for a
model on the meta device, initialisation seeded by name. Each gives one tensor at a time, so
that a rank never holds the parameters of a stage that it does not run.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from graphpipe.errors import CheckpointError, RuntimeSetupError
from graphpipe.runtime.randomness import mix, op_key


class StateSource(Protocol):
    """Gives initial values by canonical name."""

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the caller's own (never shared with the source) on some device.

        Raises:
            RuntimeSetupError: if the source has no value under this name.
        """


class ModelState:
    """Values of a model that exists: parameters, buffers and captured constants.

    Args:
        named: ``Program.state``, or the model's own parameters and buffers by name.
    """

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self._named = named

    def tensor(self, name: str) -> torch.Tensor:
        value = self._named.get(name)
        if value is None:
            raise RuntimeSetupError(f"The model has no parameter or buffer {name!r}")
        if value.is_meta:
            raise RuntimeSetupError(
                "The model is on the meta device, so this value is not known",
                where=name,
                fix="Give a state file (state=...), or let values be drawn (init='seeded')",
            )
        return value.detach().clone()


class FileState:
    """Values of a safetensors file, or of a directory of them, read by name.

    Only the tensors that are asked for are read.

    Args:
        path: A ``.safetensors`` file, or a directory that holds some.
        fallback: Asked for names that the files lack (non-persistent buffers, constants).
        aliases: Other names of a tied parameter, under which the files may have it.

    Raises:
        CheckpointError: if there is no such file, or it is not a safetensors file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fallback: StateSource,
        aliases: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        target = Path(path)
        files = sorted(target.glob("*.safetensors")) if target.is_dir() else [target]
        if not files or not all(file.is_file() for file in files):
            raise CheckpointError(
                "There is no state file here",
                where=str(target),
                expected="a .safetensors file or a directory with some",
            )
        self._fallback = fallback
        self._aliases = aliases or {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            for key in _names(file):
                self._file_of[key] = file

    def tensor(self, name: str) -> torch.Tensor:
        for key in (name, *self._aliases.get(name, ())):
            if key in self._file_of:
                with safe_open(str(self._file_of[key]), framework="pt") as opened:
                    value: torch.Tensor = opened.get_tensor(key)
                return value
        return self._fallback.tensor(name)


def _names(file: Path) -> list[str]:
    try:
        with safe_open(str(file), framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"Cannot read the state file: {error}",
            where=str(file),
            fix="Write it again with safetensors.torch.save_file",
        ) from None


class SeededState:
    """Values drawn for a meta-device model, each from a seed of its own name.

    The module that owns a parameter is made real on its own and its ``reset_parameters`` is
    called under a seed made of its path, so the values are PyTorch's usual ones and do not
    depend on the plan. A parameter whose module has no ``reset_parameters``: normal with
    deviation 0.02 from two dimensions up, ones for a vector named ``weight``, else zeros.

    Args:
        model: The model on the meta device (other tensors of it are used as they are).
        seed: Seed of the run.
        constants: Captured constants by name, real.
    """

    def __init__(
        self, model: nn.Module, seed: int, constants: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self._modules = dict(model.named_modules())
        self._seed = seed
        self._constants = constants or {}

    def tensor(self, name: str) -> torch.Tensor:
        path, _, leaf = name.rpartition(".")
        module = self._modules.get(path)
        value = getattr(module, leaf, None)
        if not isinstance(value, torch.Tensor):
            value = self._constants.get(name)
        if value is None:
            raise RuntimeSetupError(f"The model has no parameter or buffer {name!r}")
        if not value.is_meta:
            return value.detach().clone()
        assert module is not None
        return self._draw(module, path, leaf, isinstance(value, nn.Parameter))

    def _draw(self, module: nn.Module, path: str, leaf: str, is_parameter: bool) -> torch.Tensor:
        reset = "reset_parameters"
        if not callable(getattr(module, reset, None)):
            reset = "_reset_parameters"
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(mix(self._seed, op_key(path)))
            if callable(getattr(module, reset, None)):
                real = copy.deepcopy(module).to_empty(device="cpu", recurse=False)
                getattr(real, reset)()
                made: torch.Tensor = getattr(real, leaf)
                return made.detach()
            if not is_parameter:
                raise RuntimeSetupError(
                    "This buffer is on the meta device and its module cannot make it",
                    where=f"{path}.{leaf}",
                    expected="a real value, or a module with reset_parameters()",
                    fix="Create the model on the CPU, or give a state file that has it",
                )
            torch.default_generator.manual_seed(mix(self._seed, op_key(f"{path}.{leaf}")))
            meta = getattr(module, leaf)
            out = torch.empty(meta.shape, dtype=meta.dtype)
            with torch.no_grad():
                if out.dim() >= 2:
                    out.normal_(std=0.02)
                elif "weight" in leaf:
                    out.fill_(1.0)
                else:
                    out.zero_()
            return out

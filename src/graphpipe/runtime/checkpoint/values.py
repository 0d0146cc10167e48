"""Python values as JSON and back: numbers, texts, containers, small tensors.

Optimizer options, scheduler states, data positions and random states are such values. What
JSON lacks is an object with one key that begins with ``$``. Nothing else can come out of a
file than what :func:`encode` puts in: no class is ever looked up by name.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter
from typing import Any

import numpy as np
import torch

from graphpipe.errors import CheckpointError

_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_LARGEST_TENSOR = 1 << 24
"""Bytes of a tensor that may stand in the index."""


def encode(value: Any, where: str) -> Any:
    """``value`` as something that ``json`` writes and :func:`decode` reads.

    Raises:
        CheckpointError: if it is, or holds, something that is not plain data.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        value = float(value)
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    if isinstance(value, np.ndarray):
        return {"$array": _block(torch.from_numpy(np.ascontiguousarray(value)), where)}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _block(value, where)}
    if isinstance(value, Counter):
        return {"$counter": _items(value, where)}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        return {"$items": _items(value, where)}
    if isinstance(value, tuple | list):
        items = [encode(item, f"{where}.{i}") for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    raise CheckpointError(
        "A checkpoint holds plain data only",
        where=where,
        expected="numbers, texts, None, lists, tuples, dictionaries and tensors of these",
        got=f"a {type(value).__name__}",
        fix="Give a state_dict() made of such values",
    )


def decode(value: Any, where: str) -> Any:
    """What :func:`encode` was given.

    Raises:
        CheckpointError: if the value was not made by it.
    """
    if isinstance(value, list):
        return [decode(item, f"{where}.{i}") for i, item in enumerate(value)]
    if not isinstance(value, dict):
        if isinstance(value, float) and not math.isfinite(value):
            raise _malformed(where, value)
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decode(item, f"{where}.{key}") for key, item in value.items()}
    if len(value) != 1:
        raise _malformed(where, value)
    ((tag, content),) = value.items()
    match tag:
        case "$float" if isinstance(content, str) and content in _FLOATS:
            return _FLOATS[content]
        case "$tuple" if isinstance(content, list):
            return tuple(decode(content, where))
        case "$counter" | "$items":
            found = _pairs(content, where)
            return Counter(found) if tag == "$counter" else found
        case "$tensor":
            return _tensor(content, where)
        case "$array":
            return _tensor(content, where).numpy()
    raise _malformed(where, value)


def _items(value: dict[Any, Any], where: str) -> list[list[Any]]:
    return [[encode(key, where), encode(item, f"{where}.{key}")] for key, item in value.items()]


def _pairs(content: Any, where: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    if not isinstance(content, list):
        raise _malformed(where, content)
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2:
            raise _malformed(where, pair)
        key = decode(pair[0], where)
        try:
            found[key] = decode(pair[1], where)
        except TypeError:  # a list or a tensor is no key
            raise _malformed(where, pair[0]) from None
    return found


def _block(tensor: torch.Tensor, where: str) -> dict[str, Any]:
    flat = tensor.detach().cpu().contiguous()
    if flat.nbytes > _LARGEST_TENSOR:
        raise CheckpointError(
            "A tensor among the plain data of a checkpoint is too large",
            where=where,
            expected=f"at most {_LARGEST_TENSOR} bytes",
            got=flat.nbytes,
            fix="Keep large tensors in the model, as parameters or buffers",
        )
    data = base64.b64encode(flat.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
    dtype = str(flat.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(flat.shape), "data": data}


def _tensor(content: Any, where: str) -> torch.Tensor:
    if not isinstance(content, dict) or content.keys() != {"dtype", "shape", "data"}:
        raise _malformed(where, content)
    dtype, shape, text = content["dtype"], content["shape"], content["data"]
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    sizes = isinstance(shape, list) and all(
        type(size) is int and 0 <= size < 2**31 for size in shape
    )
    if not isinstance(kind, torch.dtype) or not sizes or not isinstance(text, str):
        raise _malformed(where, content)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _malformed(where, text) from None
    if len(data) != math.prod(shape) * kind.itemsize:
        raise _malformed(where, content)
    out = torch.empty(shape, dtype=kind)
    if data:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        out.reshape(-1).view(torch.uint8).copy_(flat)
    return out


def _malformed(where: str, value: Any) -> CheckpointError:
    text = repr(value)
    return CheckpointError(
        "A value in the index of a checkpoint is malformed",
        where=where,
        got=text if len(text) <= 60 else text[:57] + "...",
        fix="The file was changed or damaged: use another checkpoint",
    )

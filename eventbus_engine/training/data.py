"""Batches: how to read, change, count, move and split one whatever its shape.

A batch is a tensor, or any nesting of tuples, lists, named tuples, mappings and dataclasses with tensors in it. The
first dimension of every tensor is the sample. Nothing here changes a container it was given: the data set may still
hold it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from eventbus_engine.errors import BatchError

__all__ = [
    "BatchKey",
    "count_samples",
    "count_tokens",
    "describe",
    "get_item",
    "move",
    "set_item",
    "split",
]

BatchKey: TypeAlias = "int | str | Callable[..., Any] | tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]"
"""A position, a name (of a mapping's item, or of an attribute), a function of the batch, or a getter and a setter."""


def get_item(batch: Any, key: BatchKey) -> Any:
    """One part of a batch.

    Raises:
        BatchError: the batch has no such part.
    """
    if isinstance(key, tuple):
        key = key[0]
    if callable(key):
        return key(batch)
    try:
        return getattr(batch, key) if isinstance(key, str) and not isinstance(batch, Mapping) else batch[key]
    except (LookupError, TypeError, AttributeError) as error:
        raise BatchError(
            f"the batch, {describe(batch)}, has no item {key!r}; use one that it has, or a function of the batch"
        ) from error


def set_item(batch: Any, key: BatchKey, value: Any) -> Any:
    """A batch like this one with one part replaced. The containers are copied, what is in them is not.

    A function is called as `key(batch, value)`; if it returns None it has changed the batch itself.

    Raises:
        BatchError: the batch has no such part, or it cannot be replaced.
    """
    if isinstance(key, tuple):
        key = key[1]
    if callable(key):
        replaced = key(batch, value)
        return batch if replaced is None else replaced
    if isinstance(key, str) and hasattr(batch, "_fields"):
        key = batch._fields.index(key) if key in batch._fields else key
    try:
        changed: Any = list(batch) if isinstance(batch, tuple) else copy.copy(batch)
        if isinstance(batch, Tensor):
            changed = batch.clone()  # a copied tensor shares its memory
        if isinstance(key, str) and not isinstance(batch, Mapping):
            setattr(changed, key, value)
        else:
            changed[key] = value
    except (LookupError, TypeError, AttributeError) as error:
        raise BatchError(
            f"item {key!r} of the batch, {describe(batch)}, cannot be set; use one that it has, or a pair of functions "
            f"(get(batch), set(batch, value))"
        ) from error
    return _rebuild(batch, changed) if isinstance(batch, tuple) else changed


def count_samples(batch: Any) -> int:
    """The first dimension of the first tensor in the batch, or the length of a batch of another kind.

    Raises:
        BatchError: there is nothing to count.
    """
    tensor = _first_tensor(batch)
    if tensor is not None:
        return tensor.shape[0]
    if hasattr(batch, "__len__") and not isinstance(batch, str | bytes | Sequence | Mapping):
        return len(batch)
    raise BatchError(
        f"the loader yielded {describe(batch)}, in which no tensor has a first dimension to count the samples by; "
        f"yield tensors, or a tuple, list, mapping or dataclass of tensors, as torch.utils.data.DataLoader does, or "
        f"give the batch a length"
    )


def count_tokens(batch: Any) -> int:
    """The number of tokens: the elements of `input_ids` in a mapping, 0 in any other batch."""
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return tokens.numel() if isinstance(tokens, Tensor) else 0


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`. Other objects that have a method `to` are asked to move themselves."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if _is_container(batch):
        return _rebuild(batch, [move(value, device) for value in _values(batch)])
    return batch.to(device) if callable(getattr(batch, "to", None)) else batch


def split(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into at most `parts` microbatches of equal size, the last one smaller if need be.

    Tensors are cut along the first dimension, lists of that length along theirs; anything else goes into every part.

    Raises:
        BatchError: the batch is empty, or not all its tensors have the same first dimension.
    """
    samples = count_samples(batch)
    if samples == 0:
        raise BatchError(
            f"the batch, {describe(batch)}, has no samples left to train on; see which algorithm, or which item of the "
            f"data set, made it empty"
        )
    if parts == 1:
        return [batch]
    size = -(-samples // parts)
    return [_rows(batch, slice(start, start + size), samples) for start in range(0, samples, size)]


def _rows(batch: Any, rows: slice, samples: int) -> Any:
    if isinstance(batch, Tensor) and batch.ndim:
        if batch.shape[0] != samples:
            raise BatchError(
                f"a batch of {samples} samples holds a tensor of shape {tuple(batch.shape)}, which cannot be cut into "
                f"microbatches with them; train with microbatches=1"
            )
        return batch[rows]
    if isinstance(batch, list | tuple) and len(batch) == samples and _first_tensor(batch) is None:
        return batch[rows]
    if _is_container(batch):
        return _rebuild(batch, [_rows(value, rows, samples) for value in _values(batch)])
    if not isinstance(batch, Tensor | str | bytes | int | float | None):
        raise BatchError(
            f"a {type(batch).__name__} in the batch cannot be cut into microbatches; use tensors, tuples, lists, "
            f"mappings and dataclasses, or train with microbatches=1"
        )
    return batch


def _first_tensor(batch: Any) -> Tensor | None:
    """The first tensor that has a first dimension, depth first."""
    if isinstance(batch, Tensor):
        return batch if batch.ndim else None
    if _is_container(batch):
        return next((tensor for tensor in map(_first_tensor, _values(batch)) if tensor is not None), None)
    return None


def _is_container(batch: Any) -> bool:
    return isinstance(batch, list | tuple | Mapping) or (is_dataclass(batch) and not isinstance(batch, type))


def _values(batch: Any) -> list[Any]:
    """What is in a container, in its order."""
    if isinstance(batch, list | tuple):
        return list(batch)
    if isinstance(batch, Mapping):
        return list(batch.values())
    return [getattr(batch, field.name) for field in fields(batch) if field.init]


def _rebuild(batch: Any, values: list[Any]) -> Any:
    """A container of the batch's own type, named tuples and mappings of a framework included, with other values."""
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*values)
    if isinstance(batch, Mapping):
        return type(batch)(zip(batch, values, strict=True))  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        return type(batch)(values)
    names = (field.name for field in fields(batch) if field.init)
    return replace(batch, **dict(zip(names, values, strict=True)))


def describe(batch: Any) -> str:
    """The type of a batch and its parts, for errors: `tuple(Tensor[8, 4], Tensor[8])`."""
    name = type(batch).__name__
    if isinstance(batch, Tensor):
        return f"{name}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"{name}({', '.join(f'{key}: {describe(value)}' for key, value in batch.items())})"
    if isinstance(batch, list | tuple):
        return f"{name}({', '.join([*map(describe, batch[:4]), *['...'][: len(batch) > 4]])})"
    return name

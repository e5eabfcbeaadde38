"""Values as typed JSON and back: a closed set of types, tensors and arrays kept apart, nothing that names code."""

from __future__ import annotations

import base64
import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from eventbus_engine.errors import CheckpointError
from eventbus_engine.time import Time, Timestamp

__all__ = ["DTYPES", "check_tensor", "decode", "encode", "parse"]

Keep = Callable[[Tensor], str]
"""Takes a tensor to where tensors are kept; returns the name it is found by."""

Find = Callable[[str], Tensor]
"""The tensor of that name."""

DTYPES: Final = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

KEPT: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""The types that tensors are kept in, by safetensors' names for them."""

_KEPT_TYPES: Final = frozenset(KEPT.values())


def parse(text: bytes, where: str) -> Any:
    """Parse JSON that anybody may have written.

    Raises:
        CheckpointError: it is not JSON in UTF-8, is nested too deeply, or names something twice; names `where` it is
            from.
    """
    try:
        return json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is no JSON: {error}; it is damaged, or not part of a checkpoint") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Which of two a reader takes is anybody's guess, and so what has been checked."""
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name is there twice")
    return content


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def check_tensor(tensor: Tensor, place: str) -> None:
    """Refuse a tensor that cannot be kept.

    Raises:
        CheckpointError: it is sparse, quantized, of a type that safetensors lacks, or has no data; names its place.
    """
    if tensor.dtype not in _KEPT_TYPES or tensor.layout is not torch.strided or tensor.is_meta:
        _refuse(f"{place} is a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}")


def encode(value: Any, place: str, keep: Keep) -> Any:
    """What JSON can hold of a value; its tensors and arrays go to `keep`.

    Kept as they are: None, bool, int, float (NaN and the infinities included), complex, str, bytes, list, tuple, dict
    with keys of any of these, set, frozenset, deque, tensors, numpy arrays and numbers, torch's dtypes, devices and
    sizes, datetime, timedelta, `Time`, `Timestamp`. Of a subclass (an enumeration's member, an OrderedDict) its base
    is kept.

    Args:
        value: any value.
        place: where it is, for the error: `algorithms.ema`.
        keep: takes the tensors.

    Raises:
        CheckpointError: a value of another type, or that holds itself; names its place.
    """
    try:
        return _encode(value, place, keep)
    except RecursionError as error:
        raise CheckpointError(f"{place} holds itself, or is nested too deeply for a checkpoint") from error


def _encode(value: Any, place: str, keep: Keep) -> Any:
    match value:
        case None | bool():
            return value
        case torch.Size():
            return {"$size": list(value)}
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            number = float.__float__(value)
            return number if math.isfinite(number) else {"$float": str(number)}
        case list():
            return _encode_items(value, place, keep)
        case Mapping():
            return _encode_mapping(value, place, keep)
        case Tensor():
            check_tensor(value, place)
            return {"$tensor": keep(value)}
        case _:
            return _encode_tagged(value, place, keep)


def _encode_items(values: Any, place: str, keep: Keep) -> list[Any]:
    return [_encode(item, f"{place}[{index}]", keep) for index, item in enumerate(values)]


def _encode_mapping(value: Mapping[Any, Any], place: str, keep: Keep) -> Any:
    # A key like one of the marks must not be taken for one.
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, f"{place}.{key}", keep) for key, item in value.items()}
    return {
        "$dict": [
            [_encode(key, f"a key of {place}", keep), _encode(item, f"{place}[{key!r}]", keep)]
            for key, item in value.items()
        ]
    }


def _encode_tagged(value: Any, place: str, keep: Keep) -> dict[str, Any]:
    match value:
        case tuple():
            return {"$tuple": _encode_items(value, place, keep)}
        case set() | frozenset():
            return {f"${'set' if isinstance(value, set) else 'frozenset'}": _encode_items(value, place, keep)}
        case deque():
            return {"$deque": [_encode_items(value, place, keep), value.maxlen]}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case complex():
            return {"$complex": [_encode(value.real, place, keep), _encode(value.imag, place, keep)]}
        case Time():
            return {"$time": [_encode(value.value, place, keep), str(value.unit)]}
        case Timestamp():
            return {"$timestamp": value.state_dict()}
        case timedelta():
            return {"$timedelta": [value.days, value.seconds, value.microseconds]}
        case datetime():
            return {"$datetime": [value.isoformat(), value.fold]}
        case torch.dtype():
            return {"$dtype": str(value)}
        case torch.device():
            return {"$device": str(value)}
        case _:
            return _encode_array(value, place, keep)


def _encode_array(value: Any, place: str, keep: Keep) -> dict[str, Any]:
    """An array of numpy's, or one of its numbers; by their shape, as numpy need not be there."""
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        try:
            tensor = torch.from_numpy(value.__array__().copy())
        except (TypeError, ValueError):
            _refuse(f"{place} is an array of {value.dtype}")
        check_tensor(tensor, place)
        return {"$number" if hasattr(value, "is_integer") or not hasattr(value, "__len__") else "$array": keep(tensor)}
    return _refuse(f"{place} is a {type(value).__qualname__}")


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(
        f"{what}, which a checkpoint cannot hold; let state_dict() return numbers, strings, lists, dicts or tensors"
    )


def decode(content: Any, place: str, find: Find) -> Any:
    """The value that `encode` was given.

    Args:
        content: parsed JSON.
        place: where it is from, for the error.
        find: has the tensors.

    Raises:
        CheckpointError: it is nothing that `encode` makes; names the place.
    """
    try:
        return _decode(content, find)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{place} of the checkpoint has a value that no checkpoint holds: {type(error).__name__}: {error}; it is "
            f"damaged, or from another program"
        ) from error


def _decode(content: Any, find: Find) -> Any:
    if isinstance(content, list):
        return [_decode(item, find) for item in content]
    if not isinstance(content, dict):
        return content
    if len(content) == 1:
        ((mark, inside),) = content.items()
        if mark.startswith("$"):
            return _DECODERS[mark](inside, find)
    return {key: _decode(item, find) for key, item in content.items()}


def _decode_timestamp(inside: Any, find: Find) -> Timestamp:
    timestamp = Timestamp()
    timestamp.load_state_dict(inside)
    return timestamp


def _decode_deque(inside: Any, find: Find) -> deque[Any]:
    items, most = inside
    return deque(_decode(items, find), most)


_DECODERS: Final[dict[str, Callable[[Any, Find], Any]]] = {
    "$array": lambda inside, find: find(inside).numpy(),
    "$bytes": lambda inside, find: base64.b64decode(inside, validate=True),
    "$complex": lambda inside, find: complex(*_decode(inside, find)),
    "$datetime": lambda inside, find: datetime.fromisoformat(inside[0]).replace(fold=inside[1]),
    "$deque": _decode_deque,
    "$device": lambda inside, find: torch.device(inside),
    "$dict": lambda inside, find: {_decode(key, find): _decode(item, find) for key, item in inside},
    "$dtype": lambda inside, find: DTYPES[inside],
    "$float": lambda inside, find: float(inside),
    "$frozenset": lambda inside, find: frozenset(_decode(inside, find)),
    "$number": lambda inside, find: find(inside).numpy()[()],
    "$set": lambda inside, find: set(_decode(inside, find)),
    "$size": lambda inside, find: torch.Size(inside),
    "$tensor": lambda inside, find: find(inside),
    "$time": lambda inside, find: Time(_decode(inside[0], find), inside[1]),
    "$timedelta": lambda inside, find: timedelta(*inside),
    "$timestamp": _decode_timestamp,
    "$tuple": lambda inside, find: tuple(_decode(inside, find)),
}

"""Events as bytes, and back: JSON, readable by any version and any program, with nothing in it that could run."""

from __future__ import annotations

import base64
import json
import os
import struct
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from eventbus_engine.errors import SpoolCorruptError, SpoolRecordError
from eventbus_engine.spool.store import Record
from eventbus_engine.time import Time, Timestamp

__all__ = ["Array", "SpooledEvent", "decode_event", "encode_event", "new_id"]

FORMATS = {
    "|b1": "?", "|i1": "b", "|u1": "B", "<i2": "h", "<u2": "H", "<i4": "i", "<u4": "I", "<i8": "q", "<u8": "Q",
    "<f2": "e", "<f4": "f", "<f8": "d",
}  # fmt: skip
"""numpy's name for a type of number to that of `struct`."""


def new_id() -> str:
    """A UUID of version 7: unique over processes, sorted by the millisecond, drawn from the operating system."""
    drawn = int.from_bytes(os.urandom(10), "big")
    milliseconds = time.time_ns() // 1_000_000 & (1 << 48) - 1
    version_and_variant = 0x7 << 76 | 0b10 << 62
    bits = milliseconds << 80 | version_and_variant | drawn & ~(0xF << 76 | 0b11 << 62)
    return str(uuid.UUID(int=bits))


@dataclass(frozen=True, slots=True)
class Array:
    """The numbers of a tensor that was spooled, as they were, for whatever library the callback has.

    `numpy.asarray(array)` and `torch.as_tensor(numpy.array(array))` take it as it is, `tolist` needs neither.

    Attributes:
        dtype: as numpy writes it, little-endian: `"<f4"`.
        shape: sizes of the dimensions.
        data: the numbers, the last dimension running fastest.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": self.dtype, "shape": self.shape, "data": self.data}

    def tolist(self) -> Any:
        """The numbers as nested lists."""
        return _nest([number for (number,) in struct.iter_unpack(f"<{FORMATS[self.dtype]}", self.data)], self.shape)


@dataclass(frozen=True, slots=True)
class SpooledEvent:
    """An event for one callback: what its hook needs, and nothing of the vocabulary, the state or the process.

    Attributes:
        event: the value of the event's name: `"batch_end"`.
        values: what the snapshot holds, by name.
        step: the batch it happened in, if any.
        time: when it was published, in nanoseconds since the epoch.
        id: the same for every attempt to deliver it: the idempotency key.
    """

    event: str
    values: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    time: int = field(default_factory=time.time_ns)
    id: str = field(default_factory=new_id)


def encode_event(event: SpooledEvent) -> Record:
    """The event as a record.

    Kept as they are: None, bool, int, float (NaN and the infinities included), str, bytes, lists and dicts with
    string keys, `Time` and `Timestamp`. A tuple becomes a list, an enumeration's member its value, a tensor of one
    number without dimensions that number, any other tensor or array an `Array`, on the processor and without its
    gradient.

    Raises:
        SpoolRecordError: a value of another kind, or one that cannot be read; names it, by the attribute it is in.
    """
    try:
        values = {str(name): _encode(value, str(name)) for name, value in event.values.items()}
        content = {"event": str(event.event), "step": event.step, "values": values}
        return Record(event.id, event.time, json.dumps(content, separators=(",", ":")).encode())
    except SpoolRecordError:
        raise
    except Exception as error:
        # A list that holds itself, a number of too many digits, a tensor on a device that is lost.
        raise SpoolRecordError(
            f"a value of {', '.join(map(str, event.values))} cannot be kept in a spool: {type(error).__name__}: "
            f"{error}; put numbers, strings, lists, dicts or tensors there"
        ) from error


def decode_event(record: Record) -> SpooledEvent:
    """The event that a record was made from.

    Raises:
        SpoolCorruptError: the record holds no event.
    """
    try:
        content = json.loads(record.data)
        values = {name: _decode(value) for name, value in content["values"].items()}
        return SpooledEvent(content["event"], values, content["step"], record.time, record.id)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SpoolCorruptError(
            f"record {record.id} of the spool is no event: {type(error).__name__}: {error}; it was stored by another "
            f"program, or damaged"
        ) from error


def _nest(numbers: list[Any], shape: tuple[int, ...]) -> Any:
    if not shape:
        return numbers[0]
    step = len(numbers) // max(shape[0], 1)
    return [_nest(numbers[row * step : (row + 1) * step], shape[1:]) for row in range(shape[0])]


def _encode(value: Any, name: str) -> Any:
    match value:
        case None | bool():
            return value
        # By their base's own methods: a subclass, such as an enumeration's member, may show itself otherwise.
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case list() | tuple():
            return [_encode(item, f"{name}[{index}]") for index, item in enumerate(value)]
        case Mapping():
            return _encode_mapping(value, name)
        case Time():
            return {"$time": [value.value, str(value.unit)]}
        case Timestamp():
            return {"$timestamp": value.state_dict()}
        case Array():
            return _encode_array(value)
        case _:
            return _encode_other(value, name)


def _encode_mapping(value: Mapping[Any, Any], name: str) -> Any:
    for key in value:
        if not isinstance(key, str):
            _refuse(f"{name} has the key {key!r}, and only strings can be keys", "make it a string in the state")
    content = {str.__str__(key): _encode(item, f"{name}[{key!r}]") for key, item in value.items()}
    # A key like one of the marks must not be taken for it.
    return {"$dict": content} if any(key.startswith("$") for key in content) else content


def _encode_other(value: Any, name: str) -> Any:
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach().cpu()
    shape, item = getattr(value, "shape", None), getattr(value, "item", None)
    if callable(item) and shape is not None and tuple(shape) == ():
        number = item()
        if type(number) is not type(value):
            return _encode(number, name)
        _refuse(f"{name} is a {type(value).__name__}", f"put float({name}) into the state")
    if shape is not None and hasattr(value, "__array__"):
        try:
            numbers = value.__array__()
            # Whatever the machine it comes from.
            numbers = numbers.astype(numbers.dtype.newbyteorder("<"))
            array = Array(numbers.dtype.str, tuple(map(int, numbers.shape)), numbers.tobytes())
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            _refuse(f"{name} has the type {value.dtype}: {error}", f"put {name}.float() into the state")
        if array.dtype in FORMATS:
            return _encode_array(array)
        _refuse(f"{name} is an array of {array.dtype}", "put numbers into the state")
    return _refuse(
        f"{name} is a {type(value).__name__}", "put numbers, strings, lists, dicts or tensors into the state"
    )


def _encode_array(array: Array) -> dict[str, Any]:
    return {"$array": [array.dtype, list(array.shape), base64.b64encode(array.data).decode()]}


def _refuse(what: str, cure: str) -> NoReturn:
    raise SpoolRecordError(f"{what}, which a spool cannot keep; {cure}, or leave it out of the snapshot")


def _decode(value: Any) -> Any:
    match value:
        case list():
            return [_decode(item) for item in value]
        case {"$bytes": text}:
            return base64.b64decode(text)
        case {"$time": [number, unit]}:
            return Time(number, unit)
        case {"$timestamp": content}:
            timestamp = Timestamp()
            timestamp.load_state_dict(content)
            return timestamp
        case {"$array": [dtype, shape, text]}:
            return Array(dtype, tuple(shape), base64.b64decode(text))
        case {"$dict": content}:
            return {key: _decode(item) for key, item in content.items()}
        case dict():
            return {key: _decode(item) for key, item in value.items()}
        case _:
            return value

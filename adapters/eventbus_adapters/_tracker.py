"""What the trackers have in common: a record is made where it is logged, and told to the client on another thread."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from eventbus_adapters._pixels import copy_images
from eventbus_engine.callback import Delivery
from eventbus_engine.errors import DeliveryError
from eventbus_engine.logger import LoggerDestination
from eventbus_engine.loggers.plain import plain
from eventbus_engine.loggers.records import RecordDestination
from eventbus_engine.policy import Retry
from eventbus_engine.snapshot import Record

__all__ = [
    "Content",
    "FileTracker",
    "Tracker",
    "check_numbers",
    "draw_elsewhere",
    "numbers",
]

Content = dict[str, Any]
"""A record: its `kind`, `step` and `time` (seconds since the epoch, when it was logged), and the fields of its kind."""


class Tracker(RecordDestination):
    """A destination over a tracker's own client, which blocks: it gets its records in batches, on a thread of its own.

    A record that the client refuses is lost, and logged; those behind it are not. What may go through later is tried
    again, from the record on at which it failed, so that none arrives twice and all arrive in order.

    Args:
        **options: the options of `Callback`. The defaults here: `delivery="background"`, `run_blocking=True`,
            `max_batch=100`, `max_wait=0.5`, `retry=Retry(attempts=5)`.

    Raises:
        HandlerTypeError: an option that callbacks do not have.
    """

    delivery: Delivery = "background"
    run_blocking: bool = True
    max_batch: int | None = 100
    max_wait: float = 0.5
    retry: Retry | None = Retry(attempts=5)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Of the batch on its way: what is settled, by the id of the record, and what the client said if it refused.
        self._settled: dict[str, Exception | None] = {}

    # ----------------------------------------------------------------------------------------- what each tracker says

    def tell(self, records: Sequence[Content]) -> None:
        """Tell the client of records: of one, unless `portions` puts several together."""
        raise NotImplementedError

    def portions(self, records: Sequence[Record]) -> Iterable[Sequence[Record]]:
        """The records as they are to be told. What is told together may be told again, each for itself."""
        return [[record] for record in records]

    def passes(self, error: Exception) -> bool:
        """Whether the same may go through later."""
        return isinstance(error, OSError)

    # ------------------------------------------------------------------------------------------------- making records

    # A tracker has no place for them.
    log_traces: Any = LoggerDestination.log_traces

    def write(self, kind: str, step: int | None, **fields: Any) -> Content:
        """Make a record of what is logged, as it is now. On any thread."""
        return {"kind": kind, "step": plain(step), "time": time.time(), **plain(fields)}

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: Mapping[int, str] | None = None,
        use_table: bool = True,
    ) -> Content:
        """Make a record of kind `images`: of one image or a batch, floats from 0 to 1 or integers from 0 to 255."""
        return {
            **self.write("images", step, name=name, channels_last=channels_last),
            "images": copy_images(images),
            "masks": {key: copy_images(mask) for key, mask in (masks or {}).items()},
            "mask_class_labels": dict(mask_class_labels or {}),
        }

    # ----------------------------------------------------------------------------------------------- telling the client

    def send_records(self, records: Sequence[Record], logger: Any) -> None:
        """Tell the client of each record, in order.

        Raises:
            DeliveryError: it did not take all of them; says whether it may take the rest later, and how many are lost.
        """
        before, self._settled = self._settled, {}
        self._settled.update({record.id: before[record.id] for record in records if record.id in before})
        for portion in self.portions([record for record in records if record.id not in before]):
            self._tell(portion, len(records))
        refusals = [error for error in self._settled.values() if error is not None]
        self._settled = {}
        if refusals:
            raise DeliveryError(
                f"{len(refusals)} of {len(records)} records were refused: {refusals[0]}", lost=len(refusals)
            ) from refusals[0]

    def _tell(self, portion: Sequence[Record], count: int) -> None:
        refusal: Exception | None = None
        try:
            self.tell([record.value for record in portion])
        except Exception as error:
            if self.passes(error):
                through = sum(settled is None for settled in self._settled.values())
                raise DeliveryError(
                    f"the client failed: {type(error).__name__}: {error}", retryable=True, lost=count - through
                ) from error
            if len(portion) > 1:
                for record in portion:
                    self._tell([record], count)
                return
            refusal = error
        self._settled.update((record.id, refusal) for record in portion)


class FileTracker(Tracker):
    """A tracker that also keeps files."""

    def upload_file(
        self, state: Any, remote_file_name: str, file_path: str | PathLike[str], *, overwrite: bool = False
    ) -> Content:
        """Make a record of kind `file`: where it is, and the name to keep it under. It is read when it is told."""
        return self.write("file", None, name=remote_file_name, path=fspath(file_path))


def numbers(record: Content) -> dict[str, float]:
    """The metrics of a record that are numbers, NaN and the infinities among them."""
    return {name: float(value) for name, value in record["metrics"].items() if _is_number(value)}


def check_numbers(record: Content, tracker: str) -> None:
    """Say which metrics of a record could not be told, once the others have been.

    Raises:
        DeliveryError: there are some.
    """
    others = [name for name, value in record["metrics"].items() if not _is_number(value)]
    if others:
        raise DeliveryError(
            f"{', '.join(others)} at step {record['step']}: {tracker} takes one number for a metric, of the size of a "
            f"float; log what is more as a table, or as a metric each"
        )


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and float(value) is not None
    except OverflowError:
        return False


def draw_elsewhere(*modules: str) -> None:
    """Have modules of a client that draw from the global generator of `random` draw from the system's instead.

    They draw on threads of their own. To put the global generator back afterwards would not do: what the training drew
    meanwhile would be put back as well.
    """
    for name in modules:
        module = sys.modules.get(name)
        if getattr(module, "random", None) is random:
            setattr(module, "random", random.SystemRandom())  # noqa: B010 -- a module has no such attribute by its type

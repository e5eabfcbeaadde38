"""Log calls as records of one shape: `RecordDestination`, the base of the destinations that keep such records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eventbus_engine.logger import LoggerDestination

if TYPE_CHECKING:
    from eventbus_engine.trace import Traces

__all__ = ["RESERVED_KEYS", "RecordDestination", "key_values"]

# Keys that structlog's loggers and renderers, or the calls that lead to them, give a meaning of their own.
RESERVED_KEYS = frozenset(
    "event exc_info exception level logger logger_name method_name self stack stack_info timestamp".split()
)


def key_values(values: Mapping[str, Any], reserved: frozenset[str] = RESERVED_KEYS) -> dict[str, Any]:
    """The values under their own names, an underscore appended where a name is taken."""
    return {f"{key}_" if key in reserved else str(key): value for key, value in values.items()}


class RecordDestination(LoggerDestination):
    """Turns every `log_*` call into one call of `write(kind, step, **fields)`.

    The fields of each kind:

    * `metrics`: `metrics`, name to value;
    * `hyperparameters`: `hyperparameters`, name to value;
    * `traces`, if asked for: `traces`, key to `Trace`, one record for all the algorithms of an event;
    * `table`: `name`, `columns`, `rows`;
    * `images`: `name`, `shape` (null for a list without one), `channels_last`. The pixels stay out.

    Args:
        log_traces: whether to write the traces: a record for each event.
        **options: the options of `Callback`.

    Raises:
        HandlerTypeError: an option that callbacks do not have.
    """

    def __init__(self, *, log_traces: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._wants_traces = log_traces

    def write(self, kind: str, step: int | None, **fields: Any) -> Any:
        """Write one record. The fields are as they were logged, and not copied."""
        raise NotImplementedError

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> Any:
        """Write a record of kind `metrics`."""
        return self.write("metrics", step, metrics=metrics)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> Any:
        """Write a record of kind `hyperparameters`."""
        return self.write("hyperparameters", None, hyperparameters=hyperparameters)

    def log_traces(self, traces: Traces, step: int | None = None) -> Any:
        """Write a record of kind `traces`, one for all the algorithms of an event, if made with `log_traces=True`."""
        return self.write("traces", step, traces=traces) if self._wants_traces else None

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> Any:
        """Write a record of kind `table`."""
        return self.write("table", step, name=name, columns=list(columns), rows=[list(row) for row in rows])

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: Mapping[int, str] | None = None,
        use_table: bool = True,
    ) -> Any:
        """Write a record of kind `images`: that they were logged, and their shape."""
        shape = getattr(images, "shape", None)
        return self.write(
            "images", step, name=name, shape=None if shape is None else list(shape), channels_last=channels_last
        )

"""Log records for a service: `HttpLogger` posts them in batches."""

from __future__ import annotations

import gzip as gzip_format
import hashlib
import itertools
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import anyio

from eventbus_engine.callback import Delivery
from eventbus_engine.errors import ConfigurationError, DeliveryError
from eventbus_engine.logger import LoggerDestination
from eventbus_engine.loggers.plain import jsonable
from eventbus_engine.loggers.records import RecordDestination
from eventbus_engine.policy import Circuit, Retry
from eventbus_engine.telemetry.endpoint import Endpoint, read_retry_after, resolve_headers

if TYPE_CHECKING:
    import httpx

    from eventbus_engine.snapshot import Record

__all__ = ["HttpLogger", "LogRecord"]

LogRecord: TypeAlias = dict[str, Any]
"""A record as JSON has it."""

_CONTENT_TYPES = {"json": "application/json", "ndjson": "application/x-ndjson"}
_SHOWN = 200
"""Characters of an answer that an error shows."""


log: logging.Logger = logging.getLogger("eventbus_engine")


class HttpLogger(RecordDestination):
    """Post log records to a URL, in batches, from the background. Needs the extra `http`.

    Every record has `id` (unique), `run`, `time` (when it was logged: ISO 8601, UTC), `kind` and `step` (null where
    there is none), then the fields of its kind, with values as `JsonlLogger` writes them: tensors and arrays as numbers
    or lists, NaN and the infinities as the strings `"NaN"`, `"Infinity"` and `"-Infinity"`. A record that JSON cannot
    hold all the same is sent with an `error` instead of its values, and logged. The kinds are `metrics`,
    `hyperparameters`, `table` and, if asked for, `traces`. Images and files are not sent: JSON is no place for them,
    and services do not agree on another.

    It is delivered in the background, and what its mailbox holds is posted in batches. A batch carries an
    `Idempotency-Key` that is the same on every attempt, made of the ids of its records: the far side may get it twice,
    when an answer was lost on the way, and can tell by the key. Records arrive in the order of logging.

    408, 425, 429, 5xx, a connection error and an answer that does not come in time are tried again, as `retry` and
    `circuit` say, but not before what `Retry-After` says. Any other answer but 2xx is final. A batch that is given up
    is a `DeliveryError`, which the engine logs, and its events are counted in the report of `close`.

    Args:
        url: where to post.
        format: `"json"` (default), one object with the list `records`; or `"ndjson"`, one record per line.
        gzip: whether to compress the body.
        headers: additional HTTP headers.
        auth: a token, sent as `Authorization: Bearer ...`.
        run_id: the `run` of the records; made up by default.
        log_traces: whether to send the traces, too: a record for each event.
        client: an `httpx.AsyncClient` of your own, which stays open; by default one is made when the engine opens the
            destination and closed with it.
        **options: the options of `Callback`. The defaults here: `delivery="background"`, `max_batch=100`,
            `max_wait=1.0`, `timeout=10.0` for one request, its answer included, `retry=Retry(attempts=8)`, which takes
            a minute, and `circuit=Circuit(failures=8)`, so that after it one batch is tried every 30 s.

    Attributes:
        url: as given.
        run_id: the `run` of the records.

    Raises:
        ConfigurationError: an argument cannot be used, or httpx is not installed.
        HandlerTypeError: an option that callbacks do not have.
    """

    delivery: Delivery = "background"
    max_batch: int | None = 100
    max_wait: float = 1.0
    timeout: float | None = 10.0
    retry: Retry | None = Retry(attempts=8)
    circuit: Circuit | None = Circuit(failures=8)

    def __init__(
        self,
        url: str,
        *,
        format: Literal["json", "ndjson"] = "json",
        gzip: bool = True,
        headers: Mapping[str, str] | None = None,
        auth: str | None = None,
        run_id: str | None = None,
        log_traces: bool = False,
        client: httpx.AsyncClient | None = None,
        **options: Any,
    ) -> None:
        if format not in _CONTENT_TYPES:
            raise ConfigurationError(f"HttpLogger has format={format!r}; use 'json' or 'ndjson'")
        super().__init__(log_traces=log_traces, **options)
        self.url: str = url
        self._endpoint = Endpoint.parse(url, "url")
        self._format = format
        self._gzip = gzip
        self._headers = {
            "Content-Type": _CONTENT_TYPES[format],
            **({"Content-Encoding": "gzip"} if gzip else {}),
            **resolve_headers({} if auth is None else {"Authorization": f"Bearer {auth}"}),
            **resolve_headers(headers or {}),
        }
        self.run_id: str = secrets.token_hex(8) if run_id is None else run_id
        self._httpx, self._make_request = _load_httpx()
        # Here, and not where it would hold up the event loop: the authorities for TLS take a while to load.
        self._tls = None if client is not None else self._httpx.create_ssl_context(verify=self._endpoint.tls)
        self._given = client
        self._client = client
        # Of this object and no other, so that ids stay unique where a run is continued under its name.
        self._session = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    def open(self, state: Any, logger: Any) -> None:
        """Make the client."""
        if self._client is None:
            assert self._tls is not None  # noqa: S101 -- there is one where no client was given
            self._client = self._httpx.AsyncClient(verify=self._tls)

    async def close(self, state: Any, logger: Any) -> None:
        """Close the client."""
        client, self._client = self._client, self._given
        if client is not None and client is not self._given:
            with anyio.CancelScope(shield=True):
                await client.aclose()

    # JSON is no place for them.
    log_images: Any = LoggerDestination.log_images

    async def send_records(self, records: Sequence[Record], logger: Any) -> None:
        """Post one batch, once.

        Raises:
            DeliveryError: it was not taken; says whether it may be later.
        """
        if self._client is None:
            raise DeliveryError(f"the destination for {self._shown} is not open; log while the engine is")
        batch: list[LogRecord] = [record.value for record in records]
        try:
            headers = {**self._headers, "Idempotency-Key": _key_of(batch)}
            body = self._encode(batch)
        except Exception as error:
            raise DeliveryError(
                f"what a hook of {type(self).__name__} has returned is no record: {type(error).__name__}: {error}; "
                f"return what a log_* method does"
            ) from error
        request = self._make_request(self._client, self.url, body, headers)
        try:
            response = await self._client.send(request)
        except Exception as error:
            raise DeliveryError(
                f"{self._shown} could not be reached: {type(error).__name__}: {error}",
                retryable=isinstance(error, self._httpx.TransportError),
            ) from error
        if not response.is_success:
            raise self._refusal(response)

    def _refusal(self, response: httpx.Response) -> DeliveryError:
        status = response.status_code
        said = f": {response.text[:_SHOWN]}" if response.content else ""
        return DeliveryError(
            f"{self._shown} answered {status} {response.reason_phrase}{said}",
            retryable=status in (408, 425, 429) or status >= 500,
            retry_after=read_retry_after(response.headers.get("Retry-After")),
        )

    @property
    def _shown(self) -> str:
        """Without the query, which may hold a key."""
        return self.url.partition("?")[0]

    def write(self, kind: str, step: int | None, **fields: Any) -> LogRecord:
        """Make a record of what is logged, as it is now. On any thread."""
        return {
            "id": f"{self._session}-{next(self._numbers)}",
            "run": jsonable(self.run_id),
            "time": datetime.now(UTC).isoformat(timespec="microseconds"),
            "kind": kind,
            **jsonable({"step": step, **fields}),
        }

    def _encode(self, records: Sequence[LogRecord]) -> bytes:
        lines = [self._json(record) for record in records]
        text = (
            f'{{"records":[{",".join(lines)}]}}' if self._format == "json" else "".join(f"{line}\n" for line in lines)
        )
        # Without the time of compression, the same batch is the same bytes.
        return gzip_format.compress(text.encode(), compresslevel=6, mtime=0) if self._gzip else text.encode()

    def _json(self, record: LogRecord) -> str:
        """A record as JSON. One that cannot be written must not cost the others: what it was about is sent instead."""
        try:
            return _dumps(record)
        except (RecursionError, TypeError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
            log.error(
                "%s: record %s is sent without its values, which are none of JSON: %s", self._shown, record["id"], said
            )
            head = {name: value for name, value in record.items() if isinstance(value, str)}
            return _dumps({**head, "step": None, "error": said})


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _key_of(records: Sequence[LogRecord]) -> str:
    ids = " ".join(record["id"] for record in records)
    return hashlib.sha256(ids.encode()).hexdigest()[:32]


def _load_httpx() -> tuple[ModuleType, Callable[..., httpx.Request]]:
    """Imported on use: it belongs to an extra."""
    try:
        import httpx

        from eventbus_engine.loggers.posting import make_request
    except ImportError as error:
        raise ConfigurationError('HttpLogger needs the extra "http": pip install "eventbus-engine[http]"') from error
    return httpx, make_request

"""The callback of the demo: it posts every batch to a server."""

from __future__ import annotations

import anyio
import httpx

from eventbus_engine.callback import Callback, OnError
from eventbus_engine.logger import Logger
from eventbus_engine.training import State

__all__ = ["PostBatches"]


class PostBatches(Callback[State]):
    """Post the number and the loss of every batch to a URL, as JSON.

    A post that fails is logged, and the run goes on.

    Args:
        url: where to post.
        request_timeout: seconds for a request.
    """

    on_error: OnError = "log"

    def __init__(self, url: str, request_timeout: float = 5.0) -> None:
        self.url = url
        self._request_timeout = request_timeout
        self._http: httpx.AsyncClient

    async def open(self, state: State, logger: Logger) -> None:
        """Open the connection pool."""
        # The proxies of the environment have no way to a server on the loopback interface.
        self._http = httpx.AsyncClient(timeout=self._request_timeout, trust_env=False)

    async def batch_end(self, state: State, logger: Logger) -> None:
        """Post the batch that has ended."""
        assert state.loss is not None  # noqa: S101 -- a batch that has ended has a loss
        record = {"batch": int(state.timestamp.batch), "loss": float(state.loss)}
        # Ctrl-C between request and answer would leave a batch of which nobody knows whether it arrived.
        with anyio.CancelScope(shield=True):
            (await self._http.post(self.url, json=record)).raise_for_status()

    async def close(self, state: State, logger: Logger) -> None:
        """Close the connections."""
        await self._http.aclose()

"""Posting with httpx, so that a request may be cancelled at any point: `make_request`. Needs the extra `http`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from importlib import import_module

import httpx

__all__ = ["make_request"]

# The first request would load them, and hold up the event loop meanwhile: for a quarter of a second on a busy machine.
import_module("encodings.idna")
import_module("httpcore")


def make_request(client: httpx.AsyncClient, url: str, body: bytes, headers: Mapping[str, str]) -> httpx.Request:
    """A POST for the client to send, without limits of httpx's own on its time."""
    request = client.build_request("POST", url, content=body, headers=dict(headers), timeout=None)
    request.stream = _Body(body)
    return request


class _Body(httpx.AsyncByteStream):
    """A body in one piece.

    httpx's own is an async generator. One that is left in its middle, since the sending was cancelled, is collected
    unfinished, and trio warns about that.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _Once(self._body)


class _Once(AsyncIterator[bytes]):
    def __init__(self, item: bytes) -> None:
        self._items = [item]

    async def __anext__(self) -> bytes:
        if not self._items:
            raise StopAsyncIteration
        return self._items.pop()

"""A clock that jumps, for asyncio and trio: `FakeClock`, `backend_options`, `run_with_fake_clock`."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

from eventbus_engine.errors import ConfigurationError

__all__ = ["FakeClock", "backend_options", "run_with_fake_clock"]

T = TypeVar("T")


class FakeClock(asyncio.SelectorEventLoop):
    """An asyncio event loop whose time stands still while there is something to do, and jumps to the next timer.

    So a test of timeouts and back-offs takes no time, and measures what it would have taken exactly. It starts at 0.
    Threads and sockets keep their own time: what waits for them and for a timer at once gets the timer.

    Example:
        >>> async def sleeper() -> float:
        ...     await anyio.sleep(3600)
        ...     return anyio.current_time()
        >>> anyio.run(sleeper, backend_options={"loop_factory": FakeClock})
        3600.0
    """

    def __init__(self) -> None:
        self._fake_time = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        """Seconds since the loop was made, all of them jumped over."""
        return self._fake_time

    def _jump(self, seconds: float) -> None:
        self._fake_time += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for sockets as others do, but lets a clock jump instead of waiting for a time."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            self._jump(timeout)
        return ready


def backend_options(backend: str) -> dict[str, Any]:
    """The options that give an anyio backend a clock that jumps.

    For `anyio.run(..., backend_options=...)`, or for anyio's pytest plugin:

        @pytest.fixture(params=["asyncio", "trio"])
        def anyio_backend(request):
            return request.param, backend_options(request.param)

    Args:
        backend: `"asyncio"` or `"trio"`.

    Raises:
        ConfigurationError: another one.
    """
    if backend == "asyncio":
        return {"loop_factory": FakeClock}
    if backend == "trio":
        from trio.testing import MockClock

        return {"clock": MockClock(autojump_threshold=0)}
    raise ConfigurationError(f"there is no fake clock for backend {backend!r}; use 'asyncio' or 'trio'")


def run_with_fake_clock(function: Callable[..., Awaitable[T]], *args: Any, backend: str = "asyncio") -> T:
    """Run an async function on an event loop of its own, with a clock that jumps.

    Args:
        function: the async function.
        *args: its positional arguments.
        backend: `"asyncio"` or `"trio"`.
    """
    options = backend_options(backend)
    if backend == "trio":
        import trio

        return trio.run(function, *args, **options)  # older versions of anyio forget the options of trio
    return anyio.run(function, *args, backend=backend, backend_options=options)

"""The callbacks of the demo: one posts every batch to a server, one draws a progress bar."""

from __future__ import annotations

import anyio
import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eventbus_engine.callback import Callback, OnError
from eventbus_engine.logger import Logger
from eventbus_engine.training import State

__all__ = ["PostBatches", "ProgressBar"]


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


class ProgressBar(Callback[State]):
    """Draw a progress bar on standard error, with loss, accuracy and time left. Silent where that is no terminal.

    Args:
        batches: how many batches the whole run has.
        enabled: False draws nothing anywhere.
    """

    def __init__(self, batches: int, enabled: bool = True) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("accuracy {task.fields[accuracy]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (enabled and console.is_terminal),
        )
        self._task = self._progress.add_task("training", total=batches, epoch=1, loss="-", accuracy="-")

    def fit_start(self, state: State, logger: Logger) -> None:
        """Show it."""
        self._progress.start()

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Epochs are counted from 1 on the screen."""
        self._progress.update(self._task, epoch=int(state.timestamp.epoch) + 1)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Advance by a batch."""
        assert state.loss is not None  # noqa: S101 -- a batch that has ended has a loss
        self._progress.update(self._task, advance=1, loss=f"{float(state.loss):.3f}")

    def eval_end(self, state: State, logger: Logger) -> None:
        """Show the accuracy on the held-out images."""
        self._progress.update(self._task, accuracy=f"{state.metrics['metrics/eval/accuracy']:.1%}")

    def close(self, state: State, logger: Logger) -> None:
        """Leave the bar as it is and give the terminal back."""
        self._progress.stop()

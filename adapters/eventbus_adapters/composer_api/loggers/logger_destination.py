"""`composer.loggers.logger_destination`: the base of where log records go, as Composer has it."""

from __future__ import annotations

from os import PathLike

from eventbus_adapters.composer_api.core.callback import Callback
from eventbus_engine import logger as ours

__all__ = ["LoggerDestination"]


class LoggerDestination(Callback, ours.LoggerDestination):
    """A destination with Composer's methods. It gets its arguments by position, and traces as 0 and 1 by name.

    A failure is logged and does not stop the run; `on_error = "raise"` makes it.
    """

    def download_file(
        self,
        remote_file_name: str,
        destination: str | PathLike[str],
        overwrite: bool = False,
        progress_bar: bool = True,
    ) -> None:
        """Fetch a file that was uploaded.

        Raises:
            NotImplementedError: unless it is overridden.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot download {remote_file_name}")

    def can_upload_files(self) -> bool:
        """Whether it overrides `upload_file`; False unless it says otherwise."""
        return False

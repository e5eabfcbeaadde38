"""Log records for MLflow: `MLflowLogger`. Needs the extra `mlflow`."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from eventbus_adapters import _peer
from eventbus_adapters._pixels import pixels_of
from eventbus_adapters._tracker import (
    Content,
    FileTracker,
    check_numbers,
    draw_elsewhere,
    numbers,
)
from eventbus_engine.errors import DeliveryError
from eventbus_engine.loggers.plain import jsonable
from eventbus_engine.snapshot import Record

try:
    import mlflow.version
    from mlflow import MlflowClient, get_tracking_uri
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException
except ImportError as _error:
    raise _peer.missing("mlflow", "mlflow") from _error

__all__ = ["MLflowLogger"]

_MOST = 1000
"""Metrics that MLflow takes at once."""

_BUSY = ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")

_DRAWING = (
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.telemetry.client",
    "mlflow.utils.name_utils",
    "mlflow.utils.request_utils",
    "mlflow.utils.rest_utils",
)
"""Modules of MLflow that draw from the global generator: names of runs, pauses before another attempt."""


class MLflowLogger(FileTracker):
    """Log to a run of MLflow.

    * Metrics are metrics, at their step and with the time of their logging, those of a batch in one request. In a
      database an infinity becomes the largest float: that is how MLflow keeps it. NaN stays NaN.
    * Hyperparameters are params, in words, which MLflow lets nobody change: another value for one is refused.
    * Images are images of the run at their step (several: `name/0`, `name/1` and so on); a table is an artifact
      `tables/<name>/step_<step>.json`, files are artifacts under their names. Traces are not logged.

    Without a step, what is logged is at step 0. It has its own client, so the active run of the program, and where that
    is tracked, stay what they are. MLflow reports its use to its makers unless `MLFLOW_DISABLE_TELEMETRY` is `true`.

    Args:
        tracking_uri: where to log: `"sqlite:///mlflow.db"`, `"http://..."`; by default where MLflow itself would.
        experiment: its name. Made if it is not there.
        artifact_location: where the artifacts of an experiment that is made here go, by default where MLflow says. One
            that is there already, as `Default` is, keeps its own.
        run_name: by default MLflow makes one up.
        run_id: a run to continue, instead of a new one.
        **options: the options of `Callback`. The defaults here: `delivery="background"`, `run_blocking=True`,
            `max_batch=100`, `max_wait=0.5`, `retry=Retry(attempts=5)`.

    Attributes:
        run_id: the run; None before it is open. It is continued if the destination is opened again.

    Raises:
        ConfigurationError: this version of mlflow cannot be used.
        HandlerTypeError: an option that callbacks do not have.
    """

    name: str | None = "mlflow_logger"

    def __init__(
        self,
        tracking_uri: str | None = None,
        *,
        experiment: str = "Default",
        artifact_location: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
        **options: Any,
    ) -> None:
        _peer.check_version("mlflow", "mlflow", "3.0", installed=mlflow.version.VERSION)
        super().__init__(**options)
        self.run_id: str | None = run_id
        self._uri: str = tracking_uri or get_tracking_uri()
        self._experiment = experiment
        self._artifact_location = artifact_location
        self._run_name = run_name
        self._client: MlflowClient | None = None

    def open(self, state: Any, logger: Any) -> None:
        """Begin the run, or continue it."""
        client = MlflowClient(self._uri)
        found = client.get_experiment_by_name(self._experiment)
        draw_elsewhere(*_DRAWING)  # by now all of them are loaded
        if self.run_id is not None:
            client.update_run(self.run_id, status="RUNNING")
        else:
            made = found.experiment_id if found else client.create_experiment(self._experiment, self._artifact_location)
            self.run_id = client.create_run(made, run_name=self._run_name).info.run_id
        self._client = client

    def close(self, state: Any, logger: Any) -> None:
        """End the run."""
        if self._client is not None and self.run_id is not None:
            self._client.set_terminated(self.run_id)
            self._client = None

    def passes(self, error: Exception) -> bool:
        """Whether the server, or the database, is busy or away."""
        if not isinstance(error, MlflowException):
            return super().passes(error)
        # What it says of a server that it cannot reach; of a database, it is nothing that passes.
        away = error.error_code == "INTERNAL_ERROR" and self._uri.startswith("http")
        return away or error.error_code in _BUSY

    def portions(self, records: Sequence[Record]) -> Iterable[Sequence[Record]]:
        """Metrics in a row together, all else on its own. MLflow keeps a metric that it is told twice once."""
        for are_metrics, group in itertools.groupby(records, lambda record: record.value["kind"] == "metrics"):
            row = list(group)
            yield from [row] if are_metrics else super().portions(row)

    def tell(self, records: Sequence[Content]) -> None:
        """Log metrics, or one record of another kind."""
        client, run_id = self._client, self.run_id
        if client is None or run_id is None:
            raise DeliveryError("the run is not open; log while the engine is")
        if records[0]["kind"] == "metrics":
            self._tell_metrics(client, run_id, records)
            return
        (record,) = records
        match record["kind"]:
            case "hyperparameters":
                params = [Param(name, str(value)) for name, value in record["hyperparameters"].items()]
                client.log_batch(run_id, params=params, synchronous=True)
            case "images":
                _log_images(client, run_id, record)
            case "table":
                table = jsonable({"columns": record["columns"], "data": record["rows"]})
                client.log_dict(run_id, table, f"tables/{record['name']}/step_{record['step'] or 0}.json")
            case "file":
                _log_file(client, run_id, PurePosixPath(record["name"]), record["path"])
            case kind:
                raise DeliveryError(f"MLflow has no place for a record of kind {kind!r}")

    def _tell_metrics(self, client: MlflowClient, run_id: str, records: Sequence[Content]) -> None:
        metrics = [
            Metric(name, value, round(record["time"] * 1000), record["step"] or 0)
            for record in records
            for name, value in numbers(record).items()
        ]
        for first in range(0, len(metrics), _MOST):
            client.log_batch(run_id, metrics=metrics[first : first + _MOST], synchronous=True)
        for record in records:
            check_numbers(record, "MLflow")


def _log_images(client: MlflowClient, run_id: str, record: Content) -> None:
    name, images = record["name"], pixels_of(record["images"], record["channels_last"])
    for number, pixels in enumerate(images):
        client.log_image(
            run_id,
            pixels,
            key=name if len(images) == 1 else f"{name}/{number}",
            step=record["step"] or 0,
            timestamp=round(record["time"] * 1000),
            synchronous=True,
        )


def _log_file(client: MlflowClient, run_id: str, name: PurePosixPath, path: str) -> None:
    """Keep a file as an artifact under a name of its own, where MLflow would keep the name it has."""
    folder = None if name.parent == PurePosixPath() else str(name.parent)
    with tempfile.TemporaryDirectory() as scratch:
        renamed = Path(scratch) / name.name
        shutil.copyfile(path, renamed)
        client.log_artifact(run_id, str(renamed), folder)

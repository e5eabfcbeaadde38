"""What an evaluation measures: the loss, and the accuracy or the metrics that it was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from eventbus_engine.errors import ConfigurationError
from eventbus_engine.training.data import describe

__all__ = ["Measures", "Metric", "name_metrics"]


class Metric(Protocol):
    """What adds up over batches: a metric of torchmetrics, or anything of this shape."""

    def update(self, outputs: Any, targets: Any, /) -> Any:
        """Add a batch."""
        ...

    def compute(self) -> Any:
        """A number, a tensor of one element, or a mapping from names to them."""
        ...

    def reset(self) -> Any:
        """Begin anew."""
        ...


def name_metrics(given: Any, label: str) -> dict[str, Metric]:
    """One metric, several, or a mapping, by the names that they are logged under.

    Raises:
        ConfigurationError: something is no metric, or two have the same name.
    """
    named: list[tuple[str, Any]]
    if isinstance(given, Mapping) and not callable(getattr(given, "compute", None)):
        named = [(str(name), metric) for name, metric in given.items()]
    else:  # a MetricCollection is a mapping, too, but one that computes all at once
        named = [(type(metric).__name__, metric) for metric in (given if isinstance(given, list | tuple) else [given])]
    for name, metric in named:
        if isinstance(metric, type) or not all(
            callable(getattr(metric, m, None)) for m in ("update", "compute", "reset")
        ):
            raise ConfigurationError(
                f"{metric!r}, of evaluator {label!r}, is no metric; give an instance with update(outputs, targets), "
                f"compute() and reset(), such as torchmetrics.MeanSquaredError()"
            )
        if name == "loss":
            raise ConfigurationError(
                f"a metric of evaluator {label!r} is called 'loss', which is measured anyway; name it another way"
            )
    if len(dict(named)) < len(named):
        raise ConfigurationError(
            f"evaluator {label!r} has two metrics of one name among {', '.join(name for name, _ in named)}; "
            f"give a mapping from names of your own to metrics"
        )
    return dict(named)


class Measures:
    """The mean loss over all samples and, beside it, the metrics given; without any, the accuracy if it can be told.

    Outputs count as classification where they are logits of shape (N, classes) and the targets class indices of
    shape (N,). The sums stay on the device until `compute`, so that no batch waits for the device.

    Args:
        metrics: by name; None for the accuracy.
        device: where outputs and targets are.
    """

    def __init__(self, metrics: Mapping[str, Metric] | None = None, device: torch.device | None = None) -> None:
        self.metrics: dict[str, Metric] = dict(metrics or {})
        for metric in self.metrics.values():
            to: Any = getattr(metric, "to", None)
            if device is not None and callable(to):
                to(device)  # in place, as modules do
            metric.reset()
        self._accurate = metrics is None
        self._samples = 0
        self._loss: Tensor | None = None
        self._classified = 0
        self._correct: Tensor | None = None

    def update(self, loss: Tensor, outputs: Any, targets: Any, samples: int) -> None:
        """Add a batch: its mean loss, a tensor of one element, and what it was the loss of."""
        self._samples += samples
        total = loss.detach().to(torch.promote_types(loss.dtype, torch.float32)) * samples
        self._loss = total if self._loss is None else self._loss + total
        for metric in self.metrics.values():
            metric.update(outputs, targets)
        if self._accurate and _is_classification(outputs, targets):
            correct = (outputs.detach().argmax(dim=1) == targets).sum()
            self._classified += targets.shape[0]
            self._correct = correct if self._correct is None else self._correct + correct

    def compute(self, total: Callable[[list[float]], list[float]] | None = None) -> dict[str, float]:
        """`loss`, `accuracy` (0.0 to 1.0) if there was any classification, and what the metrics say, by their names.

        Args:
            total: adds up numbers over ranks, if there are several. A metric of torchmetrics does so itself; of any
                other the value is then the mean of the ranks', weighted by their samples.

        Raises:
            ConfigurationError: a metric says something else than a number.
        """
        own: dict[str, float] = {}
        for name, metric in self.metrics.items():
            result = metric.compute()
            several = result.items() if isinstance(result, Mapping) else [(name, result)]
            own.update((str(key), _number(key, value)) for key, value in several)
        sums = [0.0 if tensor is None else tensor.item() for tensor in (self._loss, self._correct)]
        counts = [float(self._samples), float(self._classified), *sums]
        if total is not None:
            summed = total([*counts, *(value * self._samples for value in own.values())])
            counts, weighted = summed[:4], summed[4:]
            own = {name: value / counts[0] for name, value in zip(own, weighted, strict=True)}
        samples, classified, loss, correct = counts
        values = {"accuracy": correct / classified} if classified else {}
        values.update(own)
        if samples:
            values["loss"] = loss / samples
        return values


def _number(name: object, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"the metric {name} is {describe(value)}, and only single numbers can be logged; let it average, or split "
            f"it into a metric for each"
        ) from error


def _is_classification(outputs: Any, targets: Any) -> bool:
    return (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and (outputs.ndim, targets.ndim) == (2, 1)
        and outputs.shape[0] == targets.shape[0] > 0
        and not (targets.is_floating_point() or targets.dtype == torch.bool)
    )

"""Norms of parameters, gradients and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Iterator

import torch
from torch import Tensor

from eventbus_engine.callback import Callback
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.logger import Logger
from eventbus_engine.training.callbacks._common import check_count
from eventbus_engine.training.state import State

__all__ = ["OptimizerMonitor"]

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
_SECOND_MOMENT = "exp_avg_sq"


class OptimizerMonitor(Callback[State]):
    """Log the L2 norms of parameters, gradients and moments, of each tensor and of all together.

    It looks on AFTER_TRAIN_BATCH, after the algorithms, such as one that clips gradients: at the gradients of the whole
    batch, unscaled, and at the parameters and the optimizer state that they are about to change. Norms are taken in
    float32 at least. All of them are computed on the training thread and waited for once.

    Logged, at the step of the batch, for every parameter that is trained, by its `NAME` in the model, and as `global`
    for all of them together:

    * `l2_norm/param/NAME`;
    * `l2_norm/grad/NAME`, where there is a gradient;
    * `l2_norm/moment/NAME`, of the first moment of Adam and its kin, or the momentum of SGD;
    * `l2_norm/second_moment_sqrt/NAME`, of the square root of the second moment of Adam and its kin.

    Args:
        log_optimizer_metrics: whether to log the moments, too. Default True.
        batch_log_interval: every how many batches. Default 10. On the others it costs a comparison.

    Raises:
        ConfigurationError: an argument does not fit.
    """

    def __init__(self, log_optimizer_metrics: bool = True, batch_log_interval: int = 10) -> None:
        super().__init__()
        if not isinstance(log_optimizer_metrics, bool):
            raise ConfigurationError(
                f"OptimizerMonitor: log_optimizer_metrics={log_optimizer_metrics!r} has to be True or False"
            )
        self.log_optimizer_metrics: bool = log_optimizer_metrics
        self.batch_log_interval: int = check_count("OptimizerMonitor", "batch_log_interval", batch_log_interval, 1)

    def after_train_batch(self, state: State, logger: Logger) -> Awaitable[None] | None:
        """Log the norms, if they are due. Plain, so that batches without them need no task."""
        batch = int(state.timestamp.batch) + 1  # the one in progress does not count as done yet
        return None if batch % self.batch_log_interval else self._log_norms(state, logger, batch)

    async def _log_norms(self, state: State, logger: Logger, batch: int) -> None:
        logger.log_metrics(await state.compute(_measure, state, self.log_optimizer_metrics), step=batch)


@torch.no_grad()
def _measure(state: State, with_moments: bool) -> dict[str, float]:
    """The norms by the names to log them by."""
    found = list(_find_tensors(state, with_moments))
    if not found:
        return {}
    norms = [_norm(kind, tensor) for kind, _, tensor in found]
    widest = max((norm.dtype for norm in norms), key=lambda dtype: torch.finfo(dtype).bits)
    values = torch.stack([norm.to(state.device, widest) for norm in norms]).tolist()  # note: the one sync point
    named: dict[str, float] = {}
    together: dict[str, list[float]] = {}
    for (kind, name, _), value in zip(found, values, strict=True):
        norm = math.sqrt(value) if kind == "second_moment_sqrt" else value
        named[f"l2_norm/{kind}/{name}"] = norm
        together.setdefault(kind, []).append(norm)
    return named | {f"l2_norm/{kind}/global": math.hypot(*parts) for kind, parts in together.items()}


def _find_tensors(state: State, with_moments: bool) -> Iterator[tuple[str, str, Tensor]]:
    """What to take the norms of: its kind, the name of the parameter, and the tensor."""
    for name, parameter in state.model.named_parameters():
        if not parameter.requires_grad:
            continue
        yield "param", name, parameter
        if parameter.grad is not None:
            yield "grad", name, parameter.grad
        for optimizer in state.optimizers if with_moments else ():
            slots = optimizer.state.get(parameter, {})
            for key in _FIRST_MOMENTS:
                if isinstance(slots.get(key), Tensor):
                    yield "moment", name, slots[key]
            if isinstance(slots.get(_SECOND_MOMENT), Tensor):
                yield "second_moment_sqrt", name, slots[_SECOND_MOMENT]


def _norm(kind: str, tensor: Tensor) -> Tensor:
    """The L2 norm; of a second moment the sum, which is the square of its root's norm."""
    if tensor.is_sparse:  # the gradient of a sparse embedding
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if kind == "second_moment_sqrt":
        return tensor.sum(dtype=dtype)
    if tensor.device.type == "cpu":
        # vector_norm adds up in a row here: of ten million equal elements, the float32 norm is off by nearly 1 %.
        return tensor.to(dtype).square().sum().sqrt()
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm

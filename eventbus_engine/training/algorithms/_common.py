"""What the algorithms of this room share: checked arguments, checked tensors, dense targets and private randomness."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch

from eventbus_engine.errors import BatchError, ConfigurationError
from eventbus_engine.training.data import describe
from eventbus_engine.training.state import State


def check_range(
    owner: str, argument: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False
) -> None:
    """Refuse a number outside `[low, high]`, or outside `(low, high]` with `open_low`; NaN is outside of everything.

    Raises:
        ConfigurationError: naming the argument, its value and the range.
    """
    number = float(value) if isinstance(value, Real) else math.nan
    if not (math.isfinite(number) and low <= number <= high) or (open_low and number == low):
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
        raise ConfigurationError(f"{owner}: {argument}={value!r} has to be a number in {bounds}")


def check_flag(owner: str, argument: str, value: Any) -> None:
    """Refuse anything but True and False.

    Raises:
        ConfigurationError: naming the argument and its value.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{owner}: {argument}={value!r} has to be True or False")


def elapsed_fraction(state: State, owner: str) -> float:
    """The fraction of the training run that is over, in `[0, 1]`.

    Raises:
        ConfigurationError: the state has no `max_duration`, so there is nothing to take a fraction of.
    """
    elapsed = state.get_elapsed_duration()
    if elapsed is None:
        raise ConfigurationError(f"{owner} runs by the fraction of training that is over: give the run a max_duration")
    return float(elapsed.value)


def single_tensor(value: object, owner: str, what: str) -> torch.Tensor:
    """`value` itself, if it is the one tensor that the algorithm can work on.

    Raises:
        BatchError: it is anything else.
    """
    if not isinstance(value, torch.Tensor):
        raise BatchError(
            f"{owner} needs {what} to be one tensor, got {describe(value)}; "
            f"point input_key and target_key at tensors, with a pair (get, set) where they are nested"
        )
    return value


def dense_targets(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Targets in the shape of the outputs: class indices become one-hot rows, dense targets stay as they are.

    Args:
        outputs: `(N, C, ...)`, or any shape if the targets are dense.
        target: class indices `(N, ...)` in `0..C-1`, or dense targets in the shape of `outputs`.

    Returns:
        A floating-point tensor in the shape of `outputs`. One-hot rows have the precision of the outputs, but float32
        at least: a probability of 0.01 in bfloat16 is off in its third digit.

    Raises:
        BatchError: the shapes do not fit, or the labels are no class indices.
    """
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    if target.shape == outputs.shape:
        return target if target.is_floating_point() else target.to(dtype)
    if outputs.ndim < 2 or target.shape != outputs.shape[:1] + outputs.shape[2:]:
        raise BatchError(
            f"targets of shape {tuple(target.shape)} do not go with outputs of shape {tuple(outputs.shape)}: "
            f"they have to be class indices (N, ...) for outputs (N, C, ...), or dense in the outputs' own shape"
        )
    if target.is_floating_point() or target.is_complex():
        raise BatchError(f"targets of shape {tuple(target.shape)} are read as class indices, but are {target.dtype}")
    classes, index = outputs.shape[1], target.long().unsqueeze(1)
    # On an accelerator this check would stall the stream; there the scatter itself refuses the label.
    if index.device.type == "cpu" and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < classes:
        raise BatchError(
            f"class indices from {int(index.min())} to {int(index.max())} do not fit {classes} classes; dense targets "
            f"cannot express an ignored label, so leave such samples out of the batch"
        )
    return torch.zeros(outputs.shape, dtype=dtype, device=target.device).scatter_(1, index, 1.0)


def batch_generator(state: State, name: str) -> torch.Generator:
    """A private generator (on the CPU) for the batch in progress, from the run's seed, a name and the batch's number.

    The global generator is left alone, so adding an algorithm shifts nobody else's randomness; and there is nothing to
    save in a checkpoint: a resumed run draws for batch 1000 what the uninterrupted one would have drawn.
    """
    return private_generator(state.seed, name, int(state.timestamp.batch))


def private_generator(seed: int | None, name: str, key: object) -> torch.Generator:
    """A private generator (on the CPU), the same for the same seed, name and key; the global one is left alone."""
    # A run without a seed of its own follows torch's, which the user may have set; reading it draws nothing.
    seed = torch.initial_seed() if seed is None else seed
    digest = hashlib.blake2b(f"{name}/{seed}/{key}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def trained_parameters(state: State) -> list[torch.Tensor]:
    """What the optimizers step, each parameter once."""
    groups = (group for optimizer in state.optimizers for group in optimizer.param_groups)
    return list(dict.fromkeys(parameter for group in groups for parameter in group["params"]))


def gradient_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of all gradients together, `()`, in float32 at least, on the device of the first; differentiable."""
    norms = []
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        norms.append(torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32)))
    # A model may be spread over several devices, and its layers may differ in their types.
    dtype = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, dtype) for norm in norms]))
    return total

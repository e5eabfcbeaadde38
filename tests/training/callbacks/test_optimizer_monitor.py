"""Norms of parameters, gradients and optimizer state, against the same training written out and numpy in float64."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.engine import Engine
from eventbus_engine.errors import ConfigurationError
from eventbus_engine.event import Event
from eventbus_engine.loggers import InMemoryLogger
from eventbus_engine.training import State, Trainer
from eventbus_engine.training.callbacks import OptimizerMonitor

Batches = list[tuple[Tensor, Tensor]]
MakeTrainer = Callable[..., Trainer]
MakeModel = Callable[..., nn.Module]


def l2(tensors: list[Tensor]) -> float:
    """The norm of all elements together, in float64."""
    return float(np.sqrt(sum(np.square(tensor.detach().double().numpy()).sum() for tensor in tensors)))


def l2_of_each_and_all(kind: str, tensors: dict[str, Tensor]) -> dict[str, float]:
    """By the names they are logged by; nothing if there are no tensors."""
    norms = {f"l2_norm/{kind}/{name}": l2([tensor]) for name, tensor in tensors.items()}
    return norms | ({f"l2_norm/{kind}/global": l2(list(tensors.values()))} if tensors else {})


def norms_written_out(model: nn.Module, batches: Batches, make_optimizer: Any, epochs: int) -> list[dict[str, float]]:
    """The norms before the step of every batch, of a training loop without an engine."""
    optimizer = make_optimizer(model.parameters())
    steps: list[dict[str, float]] = []
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            named = dict(model.named_parameters())
            slots = {name: optimizer.state.get(parameter, {}) for name, parameter in named.items()}
            first = {name: slot.get("exp_avg", slot.get("momentum_buffer")) for name, slot in slots.items()}
            second = {name: slot["exp_avg_sq"].double().sqrt() for name, slot in slots.items() if "exp_avg_sq" in slot}
            steps.append(
                l2_of_each_and_all("param", dict(named))
                | l2_of_each_and_all("grad", {n: p.grad for n, p in named.items() if p.grad is not None})
                | l2_of_each_and_all("moment", {name: item for name, item in first.items() if item is not None})
                | l2_of_each_and_all("second_moment_sqrt", second)
            )
            optimizer.step()
    return steps


def norms_logged(records: InMemoryLogger) -> dict[int | None, dict[str, float]]:
    """What was logged, by step."""
    steps: dict[int | None, dict[str, float]] = {}
    for name, pairs in records.data.items():
        for step, value in pairs:
            if name.startswith("l2_norm/"):
                steps.setdefault(step, {})[name] = value
    return steps


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """With a momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With both moments."""
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.mark.anyio
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("offload", [True, False])
async def test_the_norms_are_those_of_the_plain_loop(
    make_trainer: MakeTrainer, make_model: MakeModel, batches: Batches, make_optimizer: Any, offload: bool
) -> None:
    """Of every tensor and of all together, right before each step; the first batch has no moments yet."""
    records, model = InMemoryLogger(), make_model()
    trainer = make_trainer(
        model=model,
        optimizers=make_optimizer(model.parameters()),
        callbacks=[OptimizerMonitor(batch_log_interval=1)],
        loggers=records,
        offload=offload,
    )
    await trainer.fit()
    expected = norms_written_out(make_model(), batches, make_optimizer, epochs=2)

    assert norms_logged(records) == {
        batch + 1: {name: pytest.approx(norm, rel=1e-6) for name, norm in norms.items()}
        for batch, norms in enumerate(expected)
    }


@pytest.mark.anyio
async def test_gradients_are_those_of_the_whole_batch_as_the_algorithms_leave_them(
    make_trainer: MakeTrainer, make_model: MakeModel, batches: Batches
) -> None:
    """Microbatches add up, and an algorithm that halves the gradients halves the norms."""

    class Halve(Algorithm[State, Event]):
        def match(self, event: Event, state: State) -> bool:
            return event is Event.AFTER_TRAIN_BATCH

        def apply(self, event: Event, state: State, logger: Any) -> None:
            for parameter in state.model.parameters():
                assert parameter.grad is not None
                parameter.grad /= 2

    records = InMemoryLogger()
    trainer = make_trainer(
        microbatches=3,
        max_duration="1ba",
        algorithms=[Halve()],
        callbacks=[OptimizerMonitor(batch_log_interval=1)],
        loggers=records,
    )
    await trainer.fit()
    expected = norms_written_out(make_model(), batches[:1], sgd, epochs=1)[0]

    actual = norms_logged(records)[1]
    assert actual["l2_norm/grad/global"] == pytest.approx(expected["l2_norm/grad/global"] / 2, rel=1e-6)
    assert actual["l2_norm/param/global"] == pytest.approx(expected["l2_norm/param/global"], rel=1e-6)


@pytest.mark.anyio
@pytest.mark.parametrize(("interval", "expected"), [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4]), (10, [])])
async def test_it_looks_every_so_many_batches_in_one_go_on_the_training_thread(
    make_trainer: MakeTrainer,
    make_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    interval: int,
    expected: list[int],
) -> None:
    """On the others it does nothing. A look goes over the model once, and reads from the device once."""
    looks: list[str] = []
    reads: list[str] = []

    def count(method: str) -> None:
        read = getattr(Tensor, method)

        def counted(tensor: Tensor) -> Any:
            reads.append(method)
            return read(tensor)

        monkeypatch.setattr(Tensor, method, counted)

    count("item")
    count("tolist")

    class Watched(nn.Sequential):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            looks.append(threading.current_thread().name)
            return super().named_parameters(*args, **kwargs)

    model = Watched(*make_model().children())
    records = InMemoryLogger()
    monitor = OptimizerMonitor(batch_log_interval=interval)
    trainer = make_trainer(
        model=model, optimizers=sgd(model.parameters()), callbacks=[monitor], loggers=records, device="cpu"
    )
    looks.clear()  # what came before was the making of optimizer and trainer
    reads.clear()
    await trainer.fit()

    assert sorted(step for step in norms_logged(records) if step is not None) == expected
    assert looks == ["eventbus-engine-compute"] * len(expected)
    assert sorted(reads) == ["item"] * 6 + ["tolist"] * len(expected)  # the loop reads the loss of each batch


@pytest.mark.anyio
async def test_without_optimizer_metrics_there_are_no_moments(make_trainer: MakeTrainer, make_model: MakeModel) -> None:
    """Parameters and gradients only."""
    records, model = InMemoryLogger(), make_model()
    trainer = make_trainer(
        model=model,
        optimizers=adamw(model.parameters()),
        callbacks=[OptimizerMonitor(log_optimizer_metrics=False, batch_log_interval=6)],
        loggers=records,
    )
    await trainer.fit()

    assert {name.split("/")[1] for name in norms_logged(records)[6]} == {"param", "grad"}


@pytest.mark.anyio
async def test_every_optimizer_is_looked_at_and_what_is_frozen_is_not(
    make_trainer: MakeTrainer, make_model: MakeModel
) -> None:
    """A parameter without a gradient has no norm of one."""
    model = make_model()
    first, last = model.get_submodule("0"), model.get_submodule("2")
    first.get_parameter("bias").requires_grad = False
    unused = nn.Parameter(torch.full((2,), 3.0))
    model.register_parameter("unused", unused)
    records = InMemoryLogger()
    trainer = make_trainer(
        model=model,
        optimizers=[sgd([first.get_parameter("weight")]), adamw([*last.parameters(), unused])],
        callbacks=[OptimizerMonitor(batch_log_interval=2)],
        loggers=records,
        max_duration="2ba",
    )
    await trainer.fit()

    trained, adam = ["0.weight", "2.bias", "2.weight"], ["2.bias", "2.weight"]
    assert sorted(norms_logged(records)[2]) == sorted(
        f"l2_norm/{kind}/{name}"
        for kind, names in {
            "param": [*trained, "unused"],
            "grad": trained,
            "moment": trained,
            "second_moment_sqrt": adam,
        }.items()
        for name in [*names, "global"]
    )


@pytest.mark.anyio
async def test_sparse_and_short_and_mixed_numbers_are_summed_in_full(make_trainer: MakeTrainer) -> None:
    """The gradient of a sparse embedding, with one row twice; bfloat16, float64 and complex numbers beside it."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3, sparse=True)
            self.short = nn.Parameter(torch.full((4096,), 0.1, dtype=torch.bfloat16))
            self.long = nn.Parameter(torch.tensor([1e-12, 1.0], dtype=torch.float64))
            self.complex = nn.Parameter(torch.tensor([3 + 4j, 12j]))
            nn.init.ones_(self.embedding.weight)

        def forward(self, batch: Tensor) -> Tensor:
            rows: Tensor = self.embedding(batch)
            return rows.sum() + self.short.sum().float() + self.long.sum().float() + self.complex.real.sum()

        def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
            return outputs

    model, records = Mixed(), InMemoryLogger()
    trainer = make_trainer(
        model=model,
        loss=None,
        train_dataloader=[torch.tensor([1, 1, 3])],
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        max_duration="1ba",
        callbacks=[OptimizerMonitor(batch_log_interval=1)],
        loggers=records,
    )
    await trainer.fit()
    actual = norms_logged(records)[1]

    assert actual["l2_norm/grad/embedding.weight"] == pytest.approx((3 * 2**2 + 3 * 1**2) ** 0.5, rel=1e-6)
    assert actual["l2_norm/param/short"] == pytest.approx(64 * float(torch.tensor(0.1).bfloat16()), rel=1e-6)
    assert actual["l2_norm/param/long"] == pytest.approx((1.0 + 1e-24) ** 0.5, rel=1e-15)
    assert actual["l2_norm/param/complex"] == pytest.approx(13.0, rel=1e-6)
    assert actual["l2_norm/param/global"] == pytest.approx(
        l2([model.embedding.weight, model.short, model.long, torch.view_as_real(model.complex)]), rel=1e-6
    )


@pytest.mark.anyio
async def test_a_million_elements_are_summed_as_well_as_a_few(make_trainer: MakeTrainer) -> None:
    """Summed up one by one in float32, the norms of these would be off by 0.04 %, the second moment's by 0.5 %."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((1_000_000,), 0.1))

        def forward(self, batch: Tensor) -> Tensor:
            return (self.weight * 0.1).sum()

        def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
            return outputs

    model, records = Large(), InMemoryLogger()
    trainer = make_trainer(
        model=model,
        loss=None,
        optimizers=torch.optim.Adam(model.parameters(), lr=0.0),
        max_duration="2ba",
        callbacks=[OptimizerMonitor(batch_log_interval=2)],
        loggers=records,
    )
    await trainer.fit()

    # Gradients of 0.1, and moments of one step before: (1 - beta1) * 0.1 and (1 - beta2) * 0.1^2.
    assert norms_logged(records)[2] == {
        f"l2_norm/{kind}/{name}": pytest.approx(1000 * each, rel=1e-6)
        for kind, each in {
            "param": 0.1,
            "grad": 0.1,
            "moment": 0.01,
            "second_moment_sqrt": (0.001 * 0.01) ** 0.5,
        }.items()
        for name in ("weight", "global")
    }


@pytest.mark.anyio
async def test_a_model_with_nothing_to_train_has_no_norms(make_trainer: MakeTrainer, make_model: MakeModel) -> None:
    """All of it was frozen in the course of training, say."""
    records, model = InMemoryLogger(), make_model()
    state = State(model, optimizers=[sgd(model.parameters())])
    model.requires_grad_(False)
    state.callbacks = [OptimizerMonitor(batch_log_interval=1), records]
    async with Engine(state) as engine:
        await engine.run_event(Event.AFTER_TRAIN_BATCH)

    assert records.data == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_optimizer_metrics": 1}, r"log_optimizer_metrics=1 has to be True or False"),
        ({"batch_log_interval": 0}, r"batch_log_interval=0 has to be a whole number, 1 or more"),
        ({"batch_log_interval": "10ba"}, r"batch_log_interval='10ba' has to be a whole number"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    """By name, with what would fit."""
    with pytest.raises(ConfigurationError, match=f"OptimizerMonitor: {message}"):
        OptimizerMonitor(**arguments)

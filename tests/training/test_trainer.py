"""The trainer: what it accepts, what it opens and closes, how it trains, and that the event loop keeps beating."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from eventbus_engine.algorithm import Algorithm
from eventbus_engine.callback import Callback
from eventbus_engine.errors import BatchError, CallbackErrors, ConfigurationError, EngineClosedError, TimeFormatError
from eventbus_engine.event import Event
from eventbus_engine.logger import LoggerDestination
from eventbus_engine.time import Time
from eventbus_engine.training import State, Trainer

Batches = list[tuple[Tensor, Tensor]]
MakeBatches = Callable[..., Batches]
MakeModel = Callable[..., nn.Module]
MakeTrainer = Callable[..., Trainer]

COMPUTE_THREAD = "eventbus-engine-compute"


def compute_threads() -> list[str]:
    """The worker threads alive now."""
    return [thread.name for thread in threading.enumerate() if thread.name == COMPUTE_THREAD]


# ------------------------------------------------------------------------------------------------------- training


def train_plainly(model: nn.Module, batches: Batches, epochs: int) -> None:
    """The same training, written out without an engine: the reference."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@pytest.mark.anyio
@pytest.mark.parametrize("offload", [True, False])
async def test_training_is_exactly_the_plain_loop(
    make_trainer: MakeTrainer, make_model: MakeModel, batches: Batches, offload: bool
) -> None:
    """Bit for bit: events, threads and weights of one do not change the arithmetic."""
    trainer = make_trainer(max_duration="2ep", offload=offload)
    await trainer.fit()
    reference = make_model()
    train_plainly(reference, batches, epochs=2)

    for actual, expected in zip(trainer.state.model.parameters(), reference.parameters(), strict=True):
        assert actual.equal(expected)


@pytest.mark.anyio
@pytest.mark.parametrize("microbatches", [2, 3, 4, 100])
async def test_microbatches_add_up_to_the_gradient_of_the_whole_batch(
    make_trainer: MakeTrainer, make_model: MakeModel, make_batches: MakeBatches, microbatches: int
) -> None:
    """Also where they are of unequal size: seven samples in two parts are four and three."""
    batch = make_batches(1, size=7)
    model = make_model().double()
    reference = copy.deepcopy(model)
    data = [(inputs.double(), targets) for inputs, targets in batch]
    gradients: list[Tensor] = []
    losses: list[float] = []

    class Look(Callback[State]):
        def after_train_batch(self, state: State, logger: Any) -> None:
            gradients.extend(parameter.grad for parameter in state.model.parameters() if parameter.grad is not None)
            assert state.loss is not None
            losses.append(state.loss.item())

    trainer = make_trainer(
        model=model, train_dataloader=data, max_duration="1ba", microbatches=microbatches, callbacks=[Look()]
    )
    await trainer.fit()
    loss = functional.cross_entropy(reference(data[0][0]), data[0][1])
    loss.backward()  # type: ignore[no-untyped-call]

    assert losses == [pytest.approx(loss.item(), rel=1e-12)]
    for actual, parameter in zip(gradients, reference.parameters(), strict=True):
        torch.testing.assert_close(actual, parameter.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.anyio
async def test_an_algorithm_may_shrink_the_batch_and_the_run_counts_what_it_was_given(
    make_trainer: MakeTrainer,
) -> None:
    """Time counts the samples that the loader gave, as Composer's does; the loss is a mean over those that are left."""

    class Halve(Algorithm[State, Event]):
        def match(self, event: Event, state: State) -> bool:
            return event == Event.AFTER_DATALOADER

        def apply(self, event: Event, state: State, logger: Any) -> None:
            state.batch = tuple(item[:3] for item in state.batch)

    sizes: list[int] = []

    class Look(Callback[State]):
        def after_forward(self, state: State, logger: Any) -> None:
            sizes.append(len(state.outputs))

    trainer = make_trainer(max_duration="1ba", microbatches=2, algorithms=[Halve()], callbacks=[Look()])
    await trainer.fit()

    assert (sizes, int(trainer.state.timestamp.sample)) == ([2, 1], 6)


@pytest.mark.anyio
@pytest.mark.parametrize(("every_batch", "expected"), [(False, 2), (True, 6)])
async def test_schedulers_step_with_the_epoch_or_the_batch(
    make_trainer: MakeTrainer, make_model: MakeModel, every_batch: bool, expected: int
) -> None:
    """Those of torch are made for epochs."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    trainer = make_trainer(
        model=model, optimizers=optimizer, schedulers=scheduler, step_schedulers_every_batch=every_batch
    )
    await trainer.fit()

    assert optimizer.param_groups[0]["lr"] == 0.5**expected


@pytest.mark.anyio
async def test_the_loss_is_logged_for_every_batch(make_trainer: MakeTrainer) -> None:
    """Under Composer's name, at the number of the batch counted from one."""
    logged: list[tuple[int | None, set[str]]] = []

    class Memory(LoggerDestination):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            logged.append((step, set(metrics)))

    memory = Memory()
    trainer = make_trainer(max_duration="1ep", loggers=[memory])
    await trainer.fit()

    assert trainer.logger.destinations == [memory]
    assert logged == [(step, {"loss/train/total"}) for step in (1, 2, 3)]


@pytest.mark.anyio
async def test_forward_and_loss_run_under_the_precision(make_trainer: MakeTrainer) -> None:
    """And nothing leaks out of the thread: neither autocast nor a grad mode is on where the callbacks run."""
    seen: dict[str, Any] = {}

    class Look(Callback[State]):
        def after_forward(self, state: State, logger: Any) -> None:
            seen["outputs"] = state.outputs.dtype
            seen["autocast"] = torch.is_autocast_enabled("cpu")

    with torch.no_grad():
        await make_trainer(max_duration="1ba", precision="amp_bf16", offload=False, callbacks=[Look()]).fit()

    assert seen == {"outputs": torch.bfloat16, "autocast": False}


@pytest.mark.anyio
async def test_backward_builds_a_graph_for_an_algorithm_that_needs_one(make_trainer: MakeTrainer) -> None:
    """Only then: a graph of the gradients costs as much again."""
    with_graph: list[bool] = []

    class Look(Callback[State]):
        def after_backward(self, state: State, logger: Any) -> None:
            with_graph.append(all(p.grad is not None and p.grad.requires_grad for p in state.model.parameters()))

    class Penalty(Algorithm[State, Event]):
        backwards_create_graph = True

        def match(self, event: Event, state: State) -> bool:
            return False

    await make_trainer(max_duration="1ba", callbacks=[Look()]).fit()
    await make_trainer(max_duration="1ba", callbacks=[Look()], algorithms=[Penalty()]).fit()

    assert with_graph == [False, True]


@pytest.mark.anyio
async def test_async_loaders_are_awaited(make_trainer: MakeTrainer, make_model: MakeModel, batches: Batches) -> None:
    """Training on them is training on the same batches."""

    class Stream:
        async def __aiter__(self) -> AsyncIterator[tuple[Tensor, Tensor]]:
            for batch in batches:
                await anyio.lowlevel.checkpoint()
                yield batch

    trainer = make_trainer(train_dataloader=Stream(), max_duration="2ep")
    await trainer.fit()
    reference = make_model()
    train_plainly(reference, batches, epochs=2)

    assert trainer.state.timestamp.batch == 6
    for actual, expected in zip(trainer.state.model.parameters(), reference.parameters(), strict=True):
        assert actual.equal(expected)


@pytest.mark.anyio
async def test_a_run_on_an_async_loader_can_be_cancelled(make_trainer: MakeTrainer, batches: Batches) -> None:
    """Everything that it has opened is closed: the loader that works ahead, and the workers of background callbacks."""
    log: list[str] = []
    begun = anyio.Event()

    class Endless:
        async def __aiter__(self) -> AsyncIterator[tuple[Tensor, Tensor]]:
            try:
                yield batches[0]
                begun.set()
                await anyio.sleep_forever()
            finally:
                log.append("loader")

    class Remote(Callback[State]):
        delivery = "background"

        async def close(self, state: Any, logger: Any) -> None:
            log.append("callback")

    trainer = make_trainer(train_dataloader=Endless(), callbacks=[Remote()])
    async with anyio.create_task_group() as group:
        group.start_soon(trainer.fit)
        await begun.wait()
        group.cancel_scope.cancel()

    assert log == ["loader", "callback"]


# ------------------------------------------------------------------------------------------------------ how long


@pytest.mark.anyio
async def test_stopped_in_the_first_batch_it_evaluates_at_the_end(make_trainer: MakeTrainer, batches: Batches) -> None:
    """Though a part of a `max_duration` of no batches is nothing."""
    evaluated: list[int] = []

    class Stop(Callback[State]):
        def batch_start(self, state: State, logger: Any) -> None:
            state.stop_training()

        def eval_start(self, state: State, logger: Any) -> None:
            evaluated.append(int(state.timestamp.batch))

    trainer = make_trainer(eval_dataloader=batches, eval_interval="0.5dur", callbacks=[Stop()])
    await trainer.fit()

    assert evaluated == [1]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("max_duration", "batches_done"),
    [("2ep", 6), (2, 6), (Time(4, "ba"), 4), ("5ba", 5), ("12sp", 2), ("13sp", 3), ("6ba", 6)],
)
async def test_every_form_of_max_duration(make_trainer: MakeTrainer, max_duration: Any, batches_done: int) -> None:
    """The batch that reaches it is the last. A batch here has six samples, an epoch three batches."""
    trainer = make_trainer(max_duration=max_duration)
    await trainer.fit()

    assert trainer.state.timestamp.batch == batches_done
    assert trainer.state.timestamp >= (trainer.state.max_duration or "0ba")


@pytest.mark.anyio
async def test_tokens_are_counted_where_there_are_any(make_trainer: MakeTrainer) -> None:
    """A batch of eight tokens reaches ten at the second."""
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "labels": torch.tensor([0, 1])}

    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1, 2)

        def forward(self, input_ids: Tensor) -> Tensor:
            embedded: Tensor = self.table(input_ids)
            return embedded.mean(1)

    trainer = make_trainer(model=Embed(), train_dataloader=[batch], max_duration="10tok")
    await trainer.fit()

    assert (int(trainer.state.timestamp.batch), int(trainer.state.timestamp.token)) == (2, 16)


@pytest.mark.anyio
async def test_a_run_measured_in_tokens_needs_tokens(make_trainer: MakeTrainer) -> None:
    """It would never end."""
    with pytest.raises(
        BatchError, match=r"max_duration is 10tok, but the batch, tuple\(.*yield mappings with 'input_ids'"
    ):
        await make_trainer(max_duration="10tok").fit()


@pytest.mark.anyio
async def test_stop_training_ends_the_run_after_the_batch(make_trainer: MakeTrainer) -> None:
    """From any handler, at any event."""

    class Stop(Callback[State]):
        def after_loss(self, state: State, logger: Any) -> None:
            if state.timestamp.batch == 3:
                state.stop_training()

    trainer = make_trainer(max_duration="10ep", callbacks=[Stop()])
    await trainer.fit()

    assert trainer.state.timestamp.batch == 4


@pytest.mark.anyio
async def test_wall_clock_time_leaves_out_evaluation(make_trainer: MakeTrainer, make_batches: MakeBatches) -> None:
    """Training time is what is left of the run when the evaluation is taken away."""
    spent: list[float] = []

    class Slow(Callback[State]):
        async def eval_start(self, state: State, logger: Any) -> None:
            started = anyio.current_time()
            await anyio.sleep(0.2)
            spent.append(anyio.current_time() - started)

    trainer = make_trainer(max_duration="2ep", eval_dataloader=make_batches(1), callbacks=[Slow()])
    started = anyio.current_time()
    await trainer.fit()
    elapsed = anyio.current_time() - started

    assert 0 < trainer.state.timestamp.total_wct.total_seconds() <= elapsed - sum(spent)


# ------------------------------------------------------------------------------------------------ opening, closing


class Lifetime(Callback[State]):
    """Notes when it is opened and closed, and whether computing still works at the close."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def open(self, state: State, logger: Any) -> None:
        """First."""
        self.notes.append("open")

    def init(self, state: State, logger: Any) -> None:
        """Then."""
        self.notes.append("init")

    async def close(self, state: State, logger: Any) -> None:
        """Last."""
        self.notes.append(f"close {await state.compute(int, '7')}")


def test_running_fit_is_a_whole_program(make_trainer: MakeTrainer, anyio_backend: str) -> None:
    """`anyio.run(trainer.fit)` opens everything, closes everything and leaves no thread."""
    lifetime = Lifetime()
    trainer = make_trainer(callbacks=[lifetime])
    notes_before = list(lifetime.notes)
    anyio.run(trainer.fit, backend=anyio_backend)

    assert notes_before == []
    assert lifetime.notes == ["open", "init", "close 7"]
    assert (trainer.engine.closed, compute_threads()) == (True, [])


@pytest.mark.anyio
async def test_a_trainer_that_is_kept_open_fits_and_evaluates_again_and_again(
    make_trainer: MakeTrainer, make_batches: MakeBatches
) -> None:
    """One INIT, one open, one close; `duration` counts from where training is."""
    lifetime = Lifetime()
    async with make_trainer(max_duration="1ep", eval_dataloader=make_batches(1), callbacks=[lifetime]) as trainer:
        await trainer.eval()
        await trainer.fit()
        await trainer.fit("2ba")
        await trainer.fit(duration=1)
        metrics = await trainer.eval()

    assert lifetime.notes == ["open", "init", "close 7"]
    # an epoch of 3, 2 batches of the next, then one epoch more: the rest of that one
    assert (int(trainer.state.timestamp.batch), int(trainer.state.timestamp.epoch)) == (6, 2)
    assert metrics == trainer.state.metrics
    assert compute_threads() == []


@pytest.mark.anyio
async def test_a_closed_trainer_says_how_to_keep_one_open(make_trainer: MakeTrainer, make_batches: MakeBatches) -> None:
    """Whoever closed it."""
    trainer = make_trainer(eval_dataloader=make_batches(1))
    await trainer.fit()
    never_used = make_trainer()
    report = await never_used.close()

    assert report.ok
    for call in (trainer.fit, trainer.eval, trainer.__aenter__, never_used.fit):
        with pytest.raises(EngineClosedError, match="keep it open with `async with trainer:`"):
            await call()


@pytest.mark.anyio
async def test_a_fit_with_nothing_left_to_train_says_how_to_go_on(make_trainer: MakeTrainer) -> None:
    """As Composer does: it is a mistake more often than not."""
    async with make_trainer(max_duration="1ep") as trainer:
        await trainer.fit()
        with pytest.raises(ConfigurationError, match=r"max_duration is 1ep, and training is at 1ep; .*duration='1ep'"):
            await trainer.fit()


@pytest.mark.anyio
async def test_a_trainer_does_one_thing_at_a_time(make_trainer: MakeTrainer) -> None:
    """It has one state: a fit inside a fit would tear it apart."""

    class Again(Callback[State]):
        async def fit_start(self, state: State, logger: Any) -> None:
            await trainer.fit()

    trainer = make_trainer(callbacks=[Again()])
    with pytest.raises(CallbackErrors) as caught:
        await trainer.fit()

    assert caught.group_contains(ConfigurationError, match="at work already")


@pytest.mark.anyio
async def test_a_failing_algorithm_ends_the_fit_as_itself_and_closes_everything(make_trainer: MakeTrainer) -> None:
    """The exception of the algorithm is what the user sees, and no thread is left."""

    class Fails(Algorithm[State, Event]):
        def match(self, event: Event, state: State) -> bool:
            return event == Event.AFTER_LOSS

        def apply(self, event: Event, state: State, logger: Any) -> None:
            raise ZeroDivisionError("in the algorithm")

    lifetime = Lifetime()
    trainer = make_trainer(algorithms=[Fails()], callbacks=[lifetime])
    with pytest.raises(ZeroDivisionError, match="in the algorithm"):
        await trainer.fit()

    assert lifetime.notes[-1] == "close 7"
    assert compute_threads() == []


@pytest.mark.anyio
async def test_cancelling_a_fit_waits_for_the_step_closes_everything_and_joins_the_worker(
    make_trainer: MakeTrainer, make_model: MakeModel
) -> None:
    """The step in progress cannot be interrupted, and is counted; after it, nothing more runs but the closing."""
    begun, proceed = threading.Event(), threading.Event()
    steps: list[str] = []

    class SlowSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            steps.append("begun")
            begun.set()
            if not proceed.wait(10):
                raise TimeoutError("nobody let the step proceed")
            steps.append("done")

    model, lifetime = make_model(), Lifetime()
    trainer = make_trainer(model=model, optimizers=SlowSGD(model.parameters()), callbacks=[lifetime])
    async with anyio.create_task_group() as group:
        group.start_soon(trainer.fit)
        await anyio.to_thread.run_sync(begun.wait, 10)
        group.cancel_scope.cancel()
        proceed.set()

    assert steps == ["begun", "done"]
    assert (lifetime.notes[-1], trainer.engine.closed, compute_threads()) == ("close 7", True, [])
    assert trainer.state.timestamp.batch == 1


# -------------------------------------------------------------------------------------------------- the event loop


@pytest.mark.anyio
async def test_the_event_loop_keeps_beating_through_every_computation(
    make_trainer: MakeTrainer, batches: Batches
) -> None:
    """Loader, forward, loss, backward, step and plain `apply` wait here until the loop has gone round ten times."""
    beats, waited = 0, list[str]()
    beat = threading.Condition()

    def wait_for_beats(where: str) -> None:
        with beat:
            goal = beats + 10
            if not beat.wait_for(lambda: beats >= goal, timeout=10):
                raise TimeoutError(f"the event loop stood still during {where}")
        waited.append(where)

    class Loader:
        def __iter__(self) -> Any:
            for batch in batches:
                wait_for_beats("loader")
                yield batch

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, outputs: Tensor) -> Tensor:
            return outputs.clone()

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            wait_for_beats("backward")
            return grad_outputs

    class Model(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            wait_for_beats("forward")
            outputs: Tensor = Backward.apply(super().forward(input))  # type: ignore[no-untyped-call]
            return outputs

    class SGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            wait_for_beats("step")

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        wait_for_beats("loss")
        return functional.cross_entropy(outputs, targets)

    class Apply(Algorithm[State, Event]):
        def match(self, event: Event, state: State) -> bool:
            return event == Event.BATCH_START

        def apply(self, event: Event, state: State, logger: Any) -> None:
            wait_for_beats("apply")

    async def heart() -> None:
        nonlocal beats
        while True:
            with beat:
                beats += 1
                beat.notify_all()
            await anyio.lowlevel.checkpoint()

    model = Model(4, 3)
    trainer = make_trainer(
        model=model,
        train_dataloader=Loader(),
        loss=loss,
        optimizers=SGD(model.parameters()),
        max_duration="1ba",
        algorithms=[Apply()],
    )
    async with anyio.create_task_group() as group:
        group.start_soon(heart)
        await trainer.fit()
        group.cancel_scope.cancel()

    assert waited == ["loader", "apply", "forward", "loss", "backward", "step"]


@pytest.mark.anyio
@pytest.mark.parametrize("offload", [True, False])
async def test_computations_run_on_one_worker_thread_or_all_inline(make_trainer: MakeTrainer, offload: bool) -> None:
    """Callbacks stay on the event loop's thread either way."""
    threads: dict[str, set[str]] = {"forward": set(), "apply": set(), "callback": set()}

    class Model(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            threads["forward"].add(threading.current_thread().name)
            return super().forward(input)

    class Apply(Algorithm[State, Event]):
        def match(self, event: Event, state: State) -> bool:
            return True

        def apply(self, event: Event, state: State, logger: Any) -> None:
            threads["apply"].add(threading.current_thread().name)

    class Look(Callback[State]):
        def batch_end(self, state: State, logger: Any) -> None:
            threads["callback"].add(threading.current_thread().name)

    await make_trainer(model=Model(4, 3), algorithms=[Apply()], callbacks=[Look()], offload=offload).fit()
    here = threading.current_thread().name
    work = COMPUTE_THREAD if offload else here

    assert threads == {"forward": {work}, "apply": {work}, "callback": {here}}


# ----------------------------------------------------------------------------------------------------- at the start


@pytest.mark.anyio
async def test_init_may_replace_the_model_before_anything_uses_it(
    make_trainer: MakeTrainer, make_model: MakeModel
) -> None:
    """Model surgery: the loop trains what the algorithm left in the state."""
    replacement = make_model(seed=1)

    class Surgery(Algorithm[State, Event]):
        def match(self, event: Event, state: State) -> bool:
            return event == Event.INIT

        def apply(self, event: Event, state: State, logger: Any) -> None:
            state.model = replacement
            state.optimizers = [torch.optim.SGD(replacement.parameters(), lr=0.1)]

    before = copy.deepcopy(replacement.state_dict())
    trainer = make_trainer(optimizers=None, max_duration="1ba", algorithms=[Surgery()])
    await trainer.fit()
    changed = any(not value.equal(before[name]) for name, value in replacement.state_dict().items())

    assert (trainer.state.model is replacement, changed) == (True, True)


@pytest.mark.anyio
async def test_participants_in_the_state_are_live(make_trainer: MakeTrainer) -> None:
    """What a handler adds takes part from the next event on."""
    seen: list[str] = []

    class Late(Callback[State]):
        def batch_end(self, state: State, logger: Any) -> None:
            seen.append("late")

    class Adds(Callback[State]):
        def fit_start(self, state: State, logger: Any) -> None:
            state.callbacks.append(Late())

    await make_trainer(max_duration="1ba", callbacks=Adds()).fit()

    assert seen == ["late"]


@pytest.mark.anyio
async def test_the_batch_and_the_model_are_on_the_device(make_trainer: MakeTrainer) -> None:
    """Tried with `meta`, the one other device that every machine has: the loss there has no value to read."""
    devices: list[str] = []

    class Look(Callback[State]):
        def after_forward(self, state: State, logger: Any) -> None:
            devices.extend({parameter.device.type for parameter in state.model.parameters()})
            devices.extend(item.device.type for item in (*state.batch, state.outputs))
            raise KeyboardInterrupt

    class MetaModel(nn.Linear):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            return self.to_empty(device=args[0])

    with pytest.raises(KeyboardInterrupt):
        await make_trainer(model=MetaModel(4, 3), device="meta", callbacks=[Look()], offload=False).fit()

    assert set(devices) == {"meta"}


def test_a_run_has_a_name_of_its_own_that_costs_no_global_randomness(make_trainer: MakeTrainer) -> None:
    """Two trainers of one seed, made in the same second, are two runs."""
    torch_before = torch.get_rng_state()
    names = {make_trainer().state.run_name for _ in range(5)}

    assert len(names) == 5
    assert torch.get_rng_state().equal(torch_before)
    assert make_trainer(run_name="digits").state.run_name == "digits"


# --------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_duration": "1iter"}, "max_duration is 1iter; give it in ep, ba, sp, tok, sec, for example '3ep'"),
        ({"max_duration": "0.5dur"}, "max_duration is 0.5dur; give it in"),
        ({"max_duration": "0ep"}, "max_duration is 0ep; give more than that"),
        ({"eval_interval": "1iter"}, "eval_interval is 1iter; give it in ep, ba, sp, tok, sec, dur"),
        ({"loss": None}, "there is no loss"),
        ({"train_dataloader": 7}, "train_dataloader is a int, which cannot be iterated"),
        ({"eval_dataloader": 7}, "evaluator 'eval' is a int, which cannot be iterated"),
        ({"optimizers": torch.optim.SGD}, "is no optimizer; give instances"),
        ({"schedulers": [3]}, "3 is no scheduler; give instances"),
        ({"loggers": [object()]}, "takes no log records; give instances of LoggerDestination"),
        ({"device": "gpu"}, "device='gpu' is no device; give 'cpu', 'cuda'"),
        ({"precision": "fp64"}, "precision='fp64' is not supported; use 'fp32', 'amp_bf16', 'amp_fp16'"),
        ({"compile": "yes"}, "compile='yes'; give True, False, or the options of torch.compile"),
        ({"seed": -1}, "seed=-1 is no seed; give an integer"),
        ({"seed": True}, "seed=True is no seed"),
        ({"microbatches": 0}, "microbatches=0; give into how many parts"),
        ({"callbacks": [Callback]}, "Callback is a class, not a callback"),
        ({"algorithms": [object()]}, "is no algorithm"),
    ],
)
def test_what_does_not_fit_is_refused_at_construction(
    make_trainer: MakeTrainer, arguments: dict[str, Any], message: str
) -> None:
    """A typed error that names the offender and the way out."""
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(**arguments)


@pytest.mark.parametrize("max_duration", ["3 epochs", "ep", "", None, 1.5])
def test_a_duration_that_does_not_parse_is_refused(make_trainer: MakeTrainer, max_duration: Any) -> None:
    """By time's own error."""
    with pytest.raises(TimeFormatError):
        make_trainer(max_duration=max_duration)


def test_a_plateau_scheduler_is_refused_with_the_place_for_it(make_trainer: MakeTrainer, make_model: MakeModel) -> None:
    """It steps by a metric, which only its user can choose."""
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ConfigurationError, match="step it in a callback's eval_end"):
        make_trainer(optimizers=optimizer, schedulers=scheduler)


@pytest.mark.anyio
async def test_training_without_an_optimizer_is_refused(make_trainer: MakeTrainer) -> None:
    """After INIT, where an algorithm may still bring one."""
    with pytest.raises(ConfigurationError, match="nothing to step: give the Trainer optimizers="):
        await make_trainer(optimizers=None).fit()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (["text"], "the loader yielded str, .*DataLoader"),
        (
            [(torch.ones(2, 4), torch.ones(2), torch.ones(2))],
            r"the batch is tuple\(Tensor\[2, 4\], .*\(inputs, targets\)",
        ),
        ([torch.ones(2, 4)], r"the batch is Tensor\[2, 4\], which the model cannot be fed with"),
        ([(torch.ones(0, 4), torch.ones(0))], "has no samples left to train on"),
        ([], "train_dataloader yielded no batch in epoch 0; give a loader with data"),
    ],
)
async def test_a_batch_the_model_cannot_take_is_named_with_the_cure(
    make_trainer: MakeTrainer, loader: Any, message: str
) -> None:
    """By its type, and the types of its parts."""
    with pytest.raises(BatchError, match=message):
        await make_trainer(train_dataloader=loader).fit()


@pytest.mark.anyio
async def test_an_iterator_that_is_spent_after_one_epoch_is_named(make_trainer: MakeTrainer, batches: Batches) -> None:
    """The second epoch would otherwise be empty for ever."""
    with pytest.raises(BatchError, match=r"no batch in epoch 1; .* not an iterator"):
        await make_trainer(train_dataloader=iter(batches), max_duration="10ba").fit()


def test_an_interrupted_program_closes_its_trainer(anyio_backend: str) -> None:
    """Ctrl-C, in a process of its own: everything is closed, and the exit says why."""
    program = """
import signal, sys, anyio, torch
from torch.nn import functional
from eventbus_engine.callback import Callback
from eventbus_engine.training import Trainer

class Interrupt(Callback):
    def batch_end(self, state, logger):
        if state.timestamp.batch == 2:
            signal.raise_signal(signal.SIGINT)
    def close(self, state, logger):
        print("closed at batch", int(state.timestamp.batch), flush=True)

model = torch.nn.Linear(4, 3)
data = [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))] * 5
trainer = Trainer(model, data, loss=functional.cross_entropy, optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
                  max_duration="1000000ep", callbacks=[Interrupt()])
anyio.run(trainer.fit, backend=sys.argv[1])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    finished = subprocess.run(
        [sys.executable, "-c", program, anyio_backend],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )

    assert finished.stdout.startswith("closed at batch 2"), finished.stderr
    assert "KeyboardInterrupt" in finished.stderr
    assert finished.returncode != 0


@pytest.mark.anyio
async def test_a_batch_of_a_shape_the_model_cannot_take_is_named(make_trainer: Callable[..., Trainer]) -> None:
    """The message shows the batch and says what torch said; torch's own error is the cause."""
    trainer = make_trainer(train_dataloader=[(torch.zeros(3, 5), torch.zeros(3, dtype=torch.long))])

    with pytest.raises(
        BatchError, match=r"failed on the batch, tuple\(Tensor\[3, 5\], .*make the loader yield"
    ) as raised:
        await trainer.fit()

    assert type(raised.value.__cause__) is RuntimeError


@pytest.mark.anyio
async def test_an_error_of_the_models_own_leaves_as_itself(make_trainer: Callable[..., Trainer]) -> None:
    """Only what torch raises for what does not fit is taken for a bad batch."""

    class NoLicenceError(RuntimeError):
        pass

    class Picky(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise NoLicenceError

    trainer = make_trainer(model=Picky(4, 3))

    with pytest.raises(NoLicenceError):
        await trainer.fit()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_at_construction(make_trainer: MakeTrainer) -> None:
    """Not by an error of torch's at the first batch."""
    with pytest.raises(ConfigurationError, match="device='cuda', but torch finds no CUDA device here; give 'cpu'"):
        make_trainer(device="cuda")

"""Other people's ways to hand an event to N handlers that do nothing, each with the machinery its users pay for.

A peer is imported when it is built, so that one that is not installed costs a line of the table and no more. Of the
training libraries the dispatch alone is taken, without a training run around it; two keep that function private.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from time import perf_counter_ns
from typing import Any, NamedTuple

from interleaved import Dispatch, Loop

__all__ = ["BY_A_RUNNER", "NO_OP", "SUSPENDING", "SUSPENDING_COLUMNS", "Peer", "blocking", "close_peers", "parts"]

STATE, LOGGER = object(), object()


class Peer(NamedTuple):
    """How to build a dispatch to so many handlers."""

    name: str
    make: Callable[[int], Dispatch]
    loop: Loop = "asyncio"
    columns: Sequence[int] = (0, 1, 8, 32)


def need(name: str) -> Any:
    """A peer's module, without what it warns of as it loads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


class Plain:
    """A handler that does nothing."""

    def batch_start(self, state: Any, logger: Any) -> None:
        """Do nothing."""


class Async:
    """The same, async."""

    async def batch_start(self, state: Any, logger: Any) -> None:
        """Do nothing."""


class Suspending:
    """The same, after it has let others run."""

    async def batch_start(self, state: Any, logger: Any) -> None:
        """Suspend once."""
        await asyncio.sleep(0)


class SuspendingOnTrio:
    """The same on trio."""

    async def batch_start(self, state: Any, logger: Any) -> None:
        """Suspend once."""
        import trio

        await trio.lowlevel.checkpoint()


# -------------------------------------------------------------------------------------------------- written by hand


def plain_loop(count: int) -> Dispatch:
    """A plain function calls a list."""
    handlers = [Plain() for _ in range(count)]

    def dispatch(state: Any = STATE, logger: Any = LOGGER) -> None:
        for handler in handlers:
            handler.batch_start(state, logger)

    return dispatch


def awaiting(kind: type[Any]) -> Callable[[int], Dispatch]:
    """One after another: the least that async handlers can cost."""

    def make(count: int) -> Dispatch:
        handlers = [kind() for _ in range(count)]

        async def dispatch(state: Any = STATE, logger: Any = LOGGER) -> None:
            for handler in handlers:
                await handler.batch_start(state, logger)

        return dispatch

    return make


def gather(kind: type[Any]) -> Callable[[int], Dispatch]:
    """All at once, with asyncio.gather."""

    def make(count: int) -> Dispatch:
        handlers = [kind() for _ in range(count)]

        async def dispatch(state: Any = STATE, logger: Any = LOGGER) -> None:
            await asyncio.gather(*[handler.batch_start(state, logger) for handler in handlers])

        return dispatch

    return make


def task_group(kind: type[Any]) -> Callable[[int], Dispatch]:
    """A task each, in asyncio's group."""

    def make(count: int) -> Dispatch:
        handlers = [kind() for _ in range(count)]

        async def dispatch(state: Any = STATE, logger: Any = LOGGER) -> None:
            async with asyncio.TaskGroup() as group:
                for handler in handlers:
                    _ = group.create_task(handler.batch_start(state, logger))

        return dispatch

    return make


def anyio_group(kind: type[Any]) -> Callable[[int], Dispatch]:
    """A task each, in anyio's group."""

    def make(count: int) -> Dispatch:
        import anyio

        handlers = [kind() for _ in range(count)]

        async def dispatch(state: Any = STATE, logger: Any = LOGGER) -> None:
            async with anyio.create_task_group() as group:
                for handler in handlers:
                    group.start_soon(handler.batch_start, state, logger)

        return dispatch

    return make


def nursery(kind: type[Any]) -> Callable[[int], Dispatch]:
    """A task each, in trio's nursery."""

    def make(count: int) -> Dispatch:
        import trio

        handlers = [kind() for _ in range(count)]

        async def dispatch(state: Any = STATE, logger: Any = LOGGER) -> None:
            async with trio.open_nursery() as group:
                for handler in handlers:
                    group.start_soon(handler.batch_start, state, logger)

        return dispatch

    return make


# ---------------------------------------------------------------------------------------------- training libraries


class Hollow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules with anything in them where Composer imports what its engine never calls."""

    NAMES = ("mcli", "torchvision")

    class Module(types.ModuleType):
        """Has every name, each a class."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Any module below those names, if nobody else has found it."""
        if name.partition(".")[0] in self.NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty one that answers."""
        return self.Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def import_composer() -> Any:
    """Composer's core, its engine as it stands.

    It pins an old torch and imports torchvision and a client of its makers' platform, for parts other than the engine.
    """
    hollow = Hollow()
    sys.meta_path.append(hollow)
    try:
        # Its passes import the algorithms when they first run.
        need("composer.algorithms")
        need("composer.devices")
        return need("composer")
    finally:
        sys.meta_path.remove(hollow)
        # Others ask whether there is such a module, and these are none.
        for name in [name for name in sys.modules if isinstance(sys.modules[name], Hollow.Module)]:
            del sys.modules[name]


def composer_run(callbacks: Sequence[Any] = (), algorithms: Sequence[Any] = ()) -> Dispatch:
    """`Engine.run_event`."""
    import torch

    composer = import_composer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = composer.core.State(
            model=torch.nn.Linear(1, 1),
            rank_zero_seed=0,
            run_name="benchmark",
            device=composer.devices.DeviceCPU(),
            max_duration="10ep",
            dataloader=[0],
            dataloader_label="train",
            callbacks=callbacks,
            algorithms=algorithms,
        )
        engine = composer.core.Engine(state, composer.loggers.Logger(state, destinations=[]))
    return functools.partial(engine.run_event, composer.core.Event.BATCH_START)


def composer_callbacks(hook: str) -> Callable[[int], Dispatch]:
    """Callbacks with one hook, called or not."""

    def make(count: int) -> Dispatch:
        base = import_composer().core.Callback
        kind = type("NoOp", (base,), {hook: lambda self, state, logger: None})
        return composer_run(callbacks=[kind() for _ in range(count)])

    return make


def composer_algorithms(matching: bool) -> Callable[[int], Dispatch]:
    """Algorithms that match or do not, with the default passes."""

    def make(count: int) -> Dispatch:
        base = import_composer().core.Algorithm
        body = {
            "match": lambda self, event, state: matching,
            "apply": lambda self, event, state, logger: None,
        }
        kind = type("NoOp", (base,), body)
        return composer_run(algorithms=[kind() for _ in range(count)])

    return make


def ignite(count: int) -> Dispatch:
    """`Engine.fire_event`."""
    ignite = need("ignite.engine")
    engine = ignite.Engine(lambda engine, batch: None)
    engine.state = ignite.State()
    for _ in range(count):
        engine.add_event_handler(ignite.Events.ITERATION_STARTED, functools.partial(Plain().batch_start, LOGGER))
    return functools.partial(engine.fire_event, ignite.Events.ITERATION_STARTED)


def lightning(count: int) -> Dispatch:
    """What `Trainer` calls its callbacks with."""
    pl = need("pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    body = {"on_train_batch_start": lambda self, *rest: None}
    callbacks = [type("NoOp", (pl.Callback,), body)() for _ in range(count)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.strategy.connect(pl.LightningModule())
    trainer.callbacks = callbacks
    call = need("pytorch_lightning.trainer.call")._call_callback_hooks
    return functools.partial(call, trainer, "on_train_batch_start", None, 0)


def transformers(count: int) -> Dispatch:
    """What `Trainer` calls its callbacks with."""
    hf = need("transformers.trainer_callback")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # The handler keeps one callback of a class.
    body = {"on_substep_end": lambda self, args, state, control, **rest: None}
    callbacks = [type(f"NoOp{number}", (hf.TrainerCallback,), body)() for number in range(count)]
    handler = hf.CallbackHandler(callbacks, None, None, None, None)
    return functools.partial(handler.on_substep_end, STATE, hf.TrainerState(), hf.TrainerControl())


# ------------------------------------------------------------------------------------------------- event libraries


def pluggy(count: int) -> Dispatch:
    """A hook call."""
    import pluggy

    spec, implementation = pluggy.HookspecMarker("benchmark"), pluggy.HookimplMarker("benchmark")

    class Spec:
        @spec
        def batch_start(self, state: Any, logger: Any) -> None:
            pass

    class Plugin:
        @implementation
        def batch_start(self, state: Any, logger: Any) -> None:
            pass

    manager = pluggy.PluginManager("benchmark")
    manager.add_hookspecs(Spec)
    for _ in range(count):
        manager.register(Plugin())
    return functools.partial(manager.hook.batch_start, state=STATE, logger=LOGGER)


def blinker(kind: type[Any]) -> Callable[[int], Dispatch]:
    """`Signal.send_async`: one after another."""

    def make(count: int) -> Dispatch:
        blinker = need("blinker")
        signal = blinker.Signal()
        for _ in range(count):
            signal.connect(functools.partial(_receive, kind().batch_start), weak=False)
        # A partial of a coroutine function is not seen to be one, so it would be called and not awaited.
        return functools.partial(
            signal.send_async, None, _sync_wrapper=lambda function: function, state=STATE, logger=LOGGER
        )

    return make


def _receive(handler: Callable[[Any, Any], Any], sender: Any, state: Any, logger: Any) -> Any:
    return handler(state, logger)


def aiosignal(kind: type[Any]) -> Callable[[int], Dispatch]:
    """`Signal.send`: one after another."""

    def make(count: int) -> Dispatch:
        aiosignal = need("aiosignal")
        signal = aiosignal.Signal(STATE)
        for _ in range(count):
            signal.append(kind().batch_start)
        signal.freeze()
        return functools.partial(signal.send, STATE, LOGGER)

    return make


def pyee(kind: type[Any]) -> Callable[[int], Dispatch]:
    """`AsyncIOEventEmitter.emit`, then waiting for it: a task each."""

    def make(count: int) -> Dispatch:
        emitter = need("pyee.asyncio").AsyncIOEventEmitter()
        for _ in range(count):
            emitter.on("batch_start", kind().batch_start)

        async def dispatch(state: Any = STATE, logger: Any = LOGGER) -> None:
            emitter.emit("batch_start", state, logger)
            await emitter.wait_for_complete()

        return dispatch

    return make


def bubus(delay: bool) -> Callable[[int], Dispatch]:
    """`EventBus.dispatch`, awaited; events are pydantic models, and the bus keeps the last fifty."""

    def make(count: int) -> Dispatch:
        os.environ.setdefault("BUBUS_LOGGING_LEVEL", "ERROR")
        bubus = need("bubus")
        event = type("BatchStart", (bubus.BaseEvent,), {"__module__": __name__})
        bus = bubus.EventBus(name=f"benchmark_{count}_{'suspending' if delay else 'no_op'}")
        for number in range(count):
            # A second handler of the same name is warned of.
            bus.on(event, _bubus_handler(number, delay))

        async def dispatch() -> None:
            await bus.dispatch(event())

        return dispatch

    return make


async def close_peers() -> None:
    """End what peers have left running: a bus of bubus has a task that does not take a cancellation for an end."""
    bubus = sys.modules.get("bubus")
    if bubus is not None:
        for bus in list(bubus.EventBus.all_instances):
            await bus.stop(timeout=0, clear=True)


def _bubus_handler(number: int, delay: bool) -> Callable[[Any], Any]:
    async def handler(event: Any) -> None:
        if delay:
            await asyncio.sleep(0)

    handler.__name__ = handler.__qualname__ = f"handler_{number}"
    return handler


NO_OP = [
    Peer("plain loop, written by hand", plain_loop, "none"),
    Peer("await loop, written by hand", awaiting(Async)),
    Peer("asyncio.gather", gather(Async)),
    Peer("asyncio.TaskGroup", task_group(Async)),
    Peer("anyio task group", anyio_group(Async)),
    Peer("trio nursery", nursery(Async), "trio"),
    Peer("Composer, callbacks", composer_callbacks("batch_start"), "none"),
    Peer("Composer, callbacks without the hook", composer_callbacks("fit_end"), "none", (8, 64)),
    Peer("Composer, matching algorithms", composer_algorithms(True), "none"),
    Peer("Composer, algorithms that do not match", composer_algorithms(False), "none"),
    Peer("ignite", ignite, "none"),
    Peer("Lightning", lightning, "none"),
    Peer("transformers", transformers, "none"),
    Peer("pluggy", pluggy, "none"),
    Peer("blinker send_async", blinker(Async)),
    Peer("aiosignal", aiosignal(Async)),
    Peer("pyee on asyncio", pyee(Async)),
    Peer("bubus", bubus(False)),
]
"""Handlers that do nothing. The training libraries' and pluggy's are plain functions, as they know no others."""

SUSPENDING_COLUMNS = (1, 8, 32)

SUSPENDING = [
    peer._replace(columns=SUSPENDING_COLUMNS)
    for peer in (
        Peer("await loop, written by hand", awaiting(Suspending)),
        Peer("asyncio.gather", gather(Suspending)),
        Peer("asyncio.TaskGroup", task_group(Suspending)),
        Peer("anyio task group", anyio_group(Suspending)),
        Peer("trio nursery", nursery(SuspendingOnTrio), "trio"),
        Peer("blinker send_async", blinker(Suspending)),
        Peer("aiosignal", aiosignal(Suspending)),
        Peer("pyee on asyncio", pyee(Suspending)),
        Peer("bubus", bubus(True)),
    )
]
"""Handlers that suspend once. The loop, blinker and aiosignal run them one after another."""


ON_A_LOOP = "without a running loop, run that coroutine on one: run_until_complete"
BY_A_RUNNER = "the same by an asyncio.Runner, which sees to Ctrl-C"


@functools.cache
def blocking() -> asyncio.Runner:
    """A private loop, made when first needed."""
    return asyncio.Runner(loop_factory=asyncio.new_event_loop)


def parts() -> list[tuple[str, Dispatch, Loop]]:
    """What the interpreter and the event loop charge for the steps that no engine can leave out."""
    variable: ContextVar[int] = ContextVar("benchmark")
    handler, suspending = Async(), Suspending()

    async def task() -> None:
        await asyncio.create_task(handler.batch_start(STATE, LOGGER))

    def context_variable() -> None:
        variable.reset(variable.set(1))

    return [
        ("call a plain method", functools.partial(Plain().batch_start, STATE, LOGGER), "none"),
        ("await a coroutine that does not suspend", functools.partial(handler.batch_start, STATE, LOGGER), "asyncio"),
        (
            "await one that suspends once: a turn of the event loop",
            functools.partial(suspending.batch_start, STATE, LOGGER),
            "asyncio",
        ),
        ("make a task of it and await that", task, "asyncio"),
        (ON_A_LOOP, lambda: blocking().get_loop().run_until_complete(handler.batch_start(STATE, LOGGER)), "none"),
        (BY_A_RUNNER, lambda: blocking().run(handler.batch_start(STATE, LOGGER)), "none"),
        ("set and reset a context variable", context_variable, "none"),
        ("read the clock", perf_counter_ns, "none"),
    ]

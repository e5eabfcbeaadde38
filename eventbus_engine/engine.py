"""The Engine: the middleware that runs algorithms in order, then callbacks all at once, then the destinations."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self

import anyio
from opentelemetry.trace import TracerProvider
from typing_extensions import TypeVar

from eventbus_engine._steps import need_loop
from eventbus_engine.bus import CallNext, EventBus, Terminal
from eventbus_engine.closing import CloseReport, close_participants, closing_engine
from eventbus_engine.counts import DeliveryCounts
from eventbus_engine.delivery import Delivery
from eventbus_engine.envelope import Envelope, current_dispatch
from eventbus_engine.errors import ConfigurationError, EngineClosedError
from eventbus_engine.event import Event, EventName, resolve_event
from eventbus_engine.fanout import begin_course, run_fanout
from eventbus_engine.handlers import Handler, Occasion, outcome_of, raise_failures
from eventbus_engine.in_flight import InFlight, read_in_flight
from eventbus_engine.lanes import Dispatch
from eventbus_engine.logger import Logger
from eventbus_engine.pair import Pair
from eventbus_engine.participants import Course, Participants
from eventbus_engine.passes import AlgorithmPass
from eventbus_engine.plan import PassesArgument, Plan, arrange, collect_passes, insert_pass
from eventbus_engine.roster import DEFAULT_PASSES, Roster
from eventbus_engine.sequence import Offload, matches, run_algorithms
from eventbus_engine.stages import finish_callbacks, merge_traces, run_callbacks
from eventbus_engine.sync import SyncEngine
from eventbus_engine.telemetry.meters import MeterSource
from eventbus_engine.telemetry.spans import TracerSource, event_template
from eventbus_engine.trace import Traces

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider

__all__ = ["Engine"]

StateT = TypeVar("StateT", default=Any)


class Engine(Generic[StateT]):
    """Runs the algorithms and callbacks of a bus's events, in the order that its passes give them.

    On every event of its vocabulary: the algorithms whose `match` is true run one after another; then the callbacks,
    the rest of the bus's chain and its subscribers run concurrently; then the logger's destinations do. On INIT it
    is the other way round: destinations, callbacks, algorithms.

    Args:
        state: what events are about unless they say otherwise. If it has `algorithms` or `callbacks`, those are the
            engine's participants, read anew on every event.
        logger: what handlers log to; by default a `Logger` over the destinations among the callbacks.
        algorithm_passes: passes besides the default ones: one, a list, a `(pass, index)`, or a list of those.
        algorithms: in registration order, where the state has none.
        callbacks: in registration order, where the state has none; destinations may be among them.
        events: the vocabulary.
        bus: the bus to stand on; one of its own by default, made when first needed.
        tracer_provider: where its spans go; the global provider by default.
        meter_provider: where its metrics go; the global provider by default.

    Raises:
        ConfigurationError: something cannot take part, is there twice, or contradicts something else.
    """

    def __init__(
        self,
        state: StateT | None = None,
        logger: Any = None,
        algorithm_passes: PassesArgument = None,
        *,
        algorithms: Sequence[Any] = (),
        callbacks: Sequence[Any] = (),
        events: type[EventName] = Event,
        bus: EventBus | None = None,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        if not (isinstance(events, type) and issubclass(events, EventName)):
            raise ConfigurationError(f"events={events!r} is no vocabulary; subclass EventName and pass the class")
        self.state = state
        self.events = events
        self.algorithm_passes: list[AlgorithmPass] = collect_passes(algorithm_passes)
        self.offload: Offload | None = None
        self.tracers: TracerSource = TracerSource(tracer_provider)
        self.meters: MeterSource = MeterSource(self, meter_provider)
        self._active: dict[Dispatch, Occasion] = {}
        self._hooks: list[Occasion] = []  # of what is being opened or closed
        self._opening: tuple[Dispatch, anyio.Event] | None = None
        self._close_timeout: float | None = None
        self._closers: set[anyio.Event] = set()
        self._closing: anyio.Event | None = None
        self._report: CloseReport | None = None
        self._delivery = Delivery()
        self.logger: Logger = Logger(state) if logger is None else logger
        self._roster = Roster(self, algorithms, callbacks, own_logger=logger is None)
        self._bus: EventBus | None = None
        if bus is not None:
            bus.use(self)

    @property
    def bus(self) -> EventBus:
        """The bus it stands on: the one it was given, the first it was used on, or one of its own."""
        if self._bus is None:
            EventBus().use(self)
        assert self._bus is not None  # noqa: S101 -- `use` has just attached it
        return self._bus

    def _attach(self, bus: EventBus) -> None:
        self._bus = self._bus or bus

    @property
    def closed(self) -> bool:
        """Whether it takes no more events."""
        return self._close_timeout is not None

    def register_pass(self, algorithm_pass: AlgorithmPass, index: int = -1) -> None:
        """Add a pass, after the others unless given an index.

        Raises:
            ConfigurationError: it cannot be called.
        """
        insert_pass(self.algorithm_passes, algorithm_pass, index)

    @functools.cached_property
    def sync(self) -> SyncEngine:
        """The engine for a program without an event loop: `engine.sync.run_event(event)`, `.pair(...)`, `.close()`."""
        return SyncEngine(self)

    def in_flight(self) -> tuple[InFlight, ...]:
        """What it is executing now, in the order of its start. From any thread, and closed or not.

        Callbacks that are being opened or closed are there as well: on the event that opens them, or on `CLOSE`.
        """
        return read_in_flight(tuple(self._active.values()), (*self._delivery.in_flight(), *self._hooks))

    async def run_event(self, event: EventName | str, state: Any = None, *, key: Hashable = None) -> Traces:
        """Publish an event about a state on the bus, and return once it has been handled.

        Args:
            event: a member, its value or its name: `Event.BEFORE_LOSS`, `"before_loss"`, `"BEFORE_LOSS"`.
            state: what it is about; the engine's own state by default.
            key: the lane, where another than the state's is wanted, as in `EventBus.publish`.

        Returns:
            What the algorithms did, by `<name>/<EVENT>`: first what ran, in order, then what did not.

        Raises:
            UnknownEventError: no such event in the vocabulary.
            EngineClosedError: the engine is closed.
            CallbackErrors: callbacks raised.
            Exception: whatever an algorithm raised, with the traces so far as `exc.traces`.
        """
        member = event if type(event) is self.events else resolve_event(event, self.events)
        return await (self._bus or self.bus).publish(member, state=self.state if state is None else state, key=key)

    def pair(self, event: EventName | str, state: Any = None, *, key: Hashable = None) -> Pair:
        """Publish both halves of a pair around a block of code, the second only if the block succeeded.

        Example:
            async with engine.pair(Event.BEFORE_LOSS):
                state.loss = loss_fn(state.outputs, targets)

        Raises:
            UnknownEventError: no such event in the vocabulary.
            ConfigurationError: it is not the first half of a pair.
        """
        run_event = functools.partial(self.run_event, key=key)
        return Pair(run_event, resolve_event(event, self.events), state, self.tracers)

    def explain(self, event: EventName | str, state: Any = None) -> Plan:
        """What would run on an event, in which order, and who decided so. Runs nothing but the matches and passes."""
        member = resolve_event(event, self.events)
        entries = self._roster.now().algorithms
        about = self.state if state is None else state
        matched = [entry for entry in entries if matches(entry, member, about)]
        order = arrange(matched, member, self.algorithm_passes, entries)
        out = [entry for entry in entries if entry not in matched and entry not in order.entries]
        skipped = {entry.name: "not matched" for entry in out} | order.dropped
        names = tuple(entry.name for entry in order.entries)
        return Plan(member, tuple(entry.name for entry in matched), names, order.moves, skipped)

    # ------------------------------------------------------------------------------------------------------ running

    def _hears(self, event: EventName) -> bool:
        """Whether an event makes any difference to it: if not, and nobody else hears it, there is nothing to do."""
        if event in self._roster.latest.heard:
            return True  # or it is of another vocabulary and has the same value, which `__call__` sees
        if type(event) is not self.events:
            return False
        if self._close_timeout is not None:
            return True
        observer = self.tracers.observer(self.meters)
        if observer is not None and not observer.is_idle():
            return True
        participants = self._roster.now()
        # A pass may add an algorithm.
        return event in participants.heard or not participants.all_opened or self.algorithm_passes != DEFAULT_PASSES

    async def __call__(self, envelope: Envelope, call_next: CallNext) -> Traces:
        """Handle one event of a bus, as its middleware."""
        dispatch = current_dispatch()
        assert dispatch is not None  # noqa: S101 -- the bus has set it
        return await self._handle(dispatch, Occasion.begin(envelope, envelope.state, None, dispatch), call_next)

    async def _handle(self, dispatch: Dispatch, occasion: Occasion, call_next: CallNext) -> Traces:  # noqa: C901, PLR0912
        """Handle one event. Where the engine stands first on its bus, the dispatch is its occasion as well."""
        event, span = occasion.event, None
        if type(event) is not self.events:
            return await call_next(occasion.envelope)
        if self._close_timeout is not None:
            self._admit(dispatch)
        tracer = self.tracers.observer(self.meters)
        if tracer is not None:
            occasion.whole = span = tracer.open(event_template("dispatch", event))
            occasion.tracer = span.below(tracer)
        if occasion.state is None and self.state is not None:
            _ = occasion.envelope  # which says what was published, and not what handlers get
            occasion.state = self.state
        occasion.logger, occasion.thread = self.logger, get_ident()
        self._active[dispatch] = occasion
        error: BaseException | None = None
        try:
            course = self._roster.course(event)
            participants = course.participants
            if not participants.all_opened:
                await self._open(participants, occasion, dispatch)
                course = participants.course(event)
            if not course.inline_alone or not isinstance(call_next, Terminal):
                return await self._run_stages(course, occasion, call_next)
            traces: Traces = {}
            if course.algorithms or self.algorithm_passes != DEFAULT_PASSES:
                traces = await run_algorithms(course, self._roster.order, occasion, self.offload)
                course = participants.course(event)
            if self.offload is not None and (course.inline or call_next.bus._subscriptions):
                await need_loop()  # where callbacks belong, wherever the algorithms have run
            behind = call_next.handlers_for(occasion.envelope) if call_next.bus._subscriptions else None
            handlers = [*course.inline, *behind] if behind else course.inline
            fan = begin_course(course, handlers, occasion) if handlers else None
            if fan is not None and (fan.start() or fan.errors is not None):
                await finish_callbacks(fan, participants, traces)
            return traces
        except BaseException as raised:
            error = raised
            raise
        finally:
            if span is not None:
                span.end(outcome_of(error), error)
            del self._active[dispatch]
            occasion.copies = None  # a task that outlives its event keeps the dispatch
            if self._close_timeout is not None and not self._active:
                await self._fall_idle()

    async def _run_stages(self, course: Course, occasion: Occasion, call_next: CallNext) -> Traces:
        """Run all the stages that there may be, in their order."""
        run = functools.partial(run_algorithms, course, self._roster.order, occasion, self.offload)
        traces = None if occasion.event == "init" else await run()
        others = await run_callbacks(course.participants, occasion, call_next, self._delivery, traces)
        return merge_traces(await run() if traces is None else traces, others)

    def _admit(self, dispatch: Dispatch) -> None:
        """Refuse an event for a closed engine. What it still waits for, an event or a delivery, may publish."""
        awaited = self._delivery.running
        if self._report is None and self._closing is None:
            awaited |= self._active.keys()
        if awaited.isdisjoint(dispatch.ancestors()):
            what = "is closed" if self._report is not None else "is closing"
            raise EngineClosedError(
                f"{dispatch.event.name} was published, but the engine {what}; publish before close(), or make "
                f"a new Engine"
            )

    async def _open(self, participants: Participants, occasion: Occasion, dispatch: Dispatch) -> None:
        """Open the callbacks that have not been, all at once; events of other lanes wait for it."""
        if self.offload is not None:
            await need_loop()
        while self._opening is not None:
            opener, opened = self._opening
            if opener in dispatch.ancestors():
                return  # published by an `open`, so that waiting for it would be for ever
            await opened.wait()
        due = [entry for entry in participants.entries if not entry.opened and not entry.quarantined]
        for entry in due:
            entry.claim(self)
        # A background callback is opened by its worker, before its first event: that shall not slow the run either.
        inline = [entry for entry in due if entry.delivery == "inline"]
        handlers = [handler for entry in inline if (handler := entry.opener()) is not None]
        failures: list[tuple[Handler, Exception]] = []
        if handlers:
            self._opening = dispatch, anyio.Event()
            hooks = occasion.untraced()
            self._hooks.append(hooks)
            try:
                failures = await run_fanout(handlers, hooks)
            finally:
                self._hooks.remove(hooks)
                self._opening[1].set()
                self._opening = None
        participants.all_opened = not failures
        raise_failures(failures, occasion.event)

    def deliveries(self) -> dict[str, DeliveryCounts]:
        """How the events of each background callback that had one have fared so far, by its name."""
        return self._delivery.counts()

    # ------------------------------------------------------------------------------------------------------ closing

    async def close(self, timeout: float = 10.0) -> CloseReport:
        """Close the engine: let what runs finish, then close every callback, then the destinations.

        Exceptions of `close` and `post_close` are logged as errors and stand in the report; they are not raised.
        Called from inside one of its handlers, it marks the engine as closing and returns; the closing itself
        happens once that event has been handled. Closing twice is no error. Cancellation waits until it is closed.

        Args:
            timeout: seconds for all of it.

        Returns:
            What was closed, what failed, and what was left unfinished at the deadline.
        """
        if self._close_timeout is None:
            self._close_timeout = timeout
        if self._report is None and not self._inside():
            await need_loop()
            deadline = anyio.current_time() + timeout
            # It has its own deadline, and is never needed more than when the run has been cancelled.
            with anyio.CancelScope(shield=True):
                await self._wait_for_active(timeout)
                await self._close_now(deadline)
        return self._report or CloseReport(pending=True)

    async def _wait_for_active(self, timeout: float) -> None:
        if not self._active:
            return
        idle = anyio.Event()
        self._closers.add(idle)
        try:
            with anyio.move_on_after(timeout):
                await idle.wait()
        finally:
            self._closers.discard(idle)

    async def _close_now(self, deadline: float) -> None:
        while self._closing is not None:
            await self._closing.wait()
        if self._report is None:
            self._closing = anyio.Event()
            report = CloseReport(in_flight=tuple(sorted(dispatch.event.name for dispatch in self._active)))
            entries = [*self._roster.latest.entries, *self._roster.latest.departed]
            inside = closing_engine.set(self)
            try:
                await close_participants(self, report, entries, self._delivery, deadline)
            finally:
                closing_engine.reset(inside)
                self._report = report
                self._closing.set()
                self._closing = None

    def _inside(self) -> bool:
        """Whether the caller is a handler of an event this engine is running, or a `close` it is waiting for."""
        if closing_engine.get() is self:
            return True
        dispatch = current_dispatch()
        if dispatch is None:
            return False
        return not (self._active.keys() | self._delivery.running).isdisjoint([dispatch, *dispatch.ancestors()])

    async def _fall_idle(self) -> None:
        """The last event is done: whoever waits for that may close, or it was closed from inside and closes now."""
        await need_loop()
        for idle in self._closers:
            idle.set()
        if self._close_timeout is not None and self._report is None and self._closing is None and not self._closers:
            with anyio.CancelScope(shield=True):
                await self._close_now(anyio.current_time() + self._close_timeout)

    async def __aenter__(self) -> Self:
        if self.closed:
            raise EngineClosedError("the engine is closed and cannot be entered again; make a new Engine")
        await self._delivery.__aenter__()
        try:
            await self._delivery.start(self._roster.now().entries, self)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            await self.close()
        finally:
            await self._delivery.__aexit__(kind, error, tb)

"""Random programs of publishing, nesting, failing, timing out and cancelling, against a model of the rules.

A program is a forest of events. What the handlers of each do is written in its node; a handler finds its node as the
payload of the current envelope. The model says how each event has to end; a journal of who came in and went out on
which lane says whether the rules of the lanes were kept on the way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventbus_engine import (
    Algorithm,
    Callback,
    CallbackErrors,
    DeadlockError,
    Engine,
    EventName,
    HandlerTimeoutError,
    current_envelope,
)

BACKENDS = [("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})]
STATES = 3


class Flow(EventName):
    """A vocabulary."""

    STEP = "step"


class State:
    """A state, one lane."""


class Boom(Exception):  # noqa: N818
    """What a handler raises on purpose."""


# ---------------------------------------------------------------------------------------------------------- the program


@dataclass(eq=False)
class Act:
    """One thing that a handler does.

    `step` suspends, `fail` raises, `publish` awaits one event, `together` awaits several in a task group of the
    handler, `give up` cancels one after a few steps, `send off` leaves it to a task group outside.
    """

    kind: str
    nodes: tuple[Node, ...] = ()
    steps: int = 0


@dataclass(eq=False)
class Node:
    """One event: its state, what its handlers do, and after how many steps it is cancelled, if at all (roots only)."""

    state: int
    algorithm: tuple[Act, ...] = ()
    callbacks: tuple[tuple[Act, ...], ...] = ((), ())
    hangs: str = ""
    cancelled_after: int | None = None
    parent: Node | None = field(default=None, repr=False)

    def awaited(self) -> Iterator[Node]:
        """The events that end before it does."""
        for act in itertools.chain(self.algorithm, *self.callbacks):
            if act.kind != "send off":
                for node in act.nodes:
                    yield node
                    yield from node.awaited()


@st.composite
def acts(
    draw: st.DrawFn, allowed: Callable[[Sequence[int]], list[int]], held: tuple[int, ...], depth: int
) -> tuple[Act, ...]:
    """What one handler does, while its event and those around it hold these lanes."""
    kinds = ["step", "step", "fail"] + (["publish", "together", "give up", "send off"] if depth else [])
    found = []
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=3)):
        if kind in ("step", "fail"):
            found.append(Act(kind))
            continue
        count = draw(st.integers(1, 3)) if kind == "together" else 1
        children = []
        for _ in range(count):
            # Nobody waits for what is sent off, so it may go anywhere, and holds no lane but its own.
            around = () if kind == "send off" else held
            state = draw(st.sampled_from(allowed(around) if around else range(STATES)))
            children.append(draw(nodes(allowed, (*around, state), depth - 1)))
        found.append(Act(kind, tuple(children), draw(st.integers(0, 4))))
    return tuple(found)


@st.composite
def nodes(draw: st.DrawFn, allowed: Callable[[Sequence[int]], list[int]], held: tuple[int, ...], depth: int) -> Node:
    """An event on the last of the lanes held."""
    node = Node(
        held[-1],
        algorithm=draw(acts(allowed, held, depth)),
        callbacks=(draw(acts(allowed, held, depth)), draw(acts(allowed, held, depth))),
        hangs=draw(st.sampled_from(["", "", "", "", "algorithm", "callback"])),
    )
    for act in itertools.chain(node.algorithm, *node.callbacks):
        for child in act.nodes:
            child.parent = node
    return node


@st.composite
def programs(draw: st.DrawFn, allowed: Callable[[Sequence[int]], list[int]]) -> list[Node]:
    """Several events published one after another, some of them cancelled."""
    roots = []
    for state in draw(st.lists(st.integers(0, STATES - 1), min_size=1, max_size=5)):
        root = draw(nodes(allowed, (state,), 2))
        root.cancelled_after = draw(st.none() | st.none() | st.integers(0, 12))
        roots.append(root)
    return roots


def in_order(held: Sequence[int]) -> list[int]:
    """Lanes that are held already, or higher ones: whoever keeps to that cannot deadlock."""
    return [state for state in range(STATES) if state in held or state > max(held)]


def anything(held: Sequence[int]) -> list[int]:
    """Any lane, deadlocks included."""
    return list(range(STATES))


# ------------------------------------------------------------------------------------------------------------ the model


def expected(node: Node) -> Any:
    """How an event has to end: None, `boom`, `timeout`, or a list of such for what its callbacks raised."""
    for act in node.algorithm:
        if (failure := expected_of(act)) is not None:
            return failure
    if node.hangs == "algorithm":
        return "timeout"
    failures = [next((f for act in one if (f := expected_of(act)) is not None), None) for one in node.callbacks]
    failures.append("timeout" if node.hangs == "callback" else None)
    return [failure for failure in failures if failure is not None] or None


def expected_of(act: Act) -> Any:
    """How an act ends. What is done together, given up or sent off keeps its failures to itself."""
    if act.kind == "publish":
        return expected(act.nodes[0])
    return "boom" if act.kind == "fail" else None


def actual(error: BaseException) -> Any:
    """What came out, in the words of the model."""
    if isinstance(error, CallbackErrors):
        return [actual(each) for each in error.exceptions]
    names: dict[type[BaseException], str] = {Boom: "boom", HandlerTimeoutError: "timeout", DeadlockError: "deadlock"}
    return names[type(error)]


# -------------------------------------------------------------------------------------------------------------- the run


class Journal:
    """Who came in and who went out, and whether that was right at that moment."""

    def __init__(self) -> None:
        self.running: set[Node] = set()
        self.group: dict[Node, Node] = {}
        self.queue: dict[int, list[Node]] = {state: [] for state in range(STATES)}

    def published(self, node: Node) -> None:
        """It nests in an event still running on its lane from which it descends, or else it queues."""
        ancestor = node.parent
        while ancestor is not None and not (ancestor in self.running and ancestor.state == node.state):
            ancestor = ancestor.parent
        if ancestor is not None:
            self.group[node] = self.group[ancestor]
        else:
            self.group[node] = node
            self.queue[node.state].append(node)

    def came_in(self, node: Node) -> None:
        """Nobody else may be on the lane, nor anybody before it in the queue."""
        others = {self.group[other] for other in self.running if other.state == node.state}
        assert others <= {self.group[node]}
        if self.group[node] is node:
            assert self.queue[node.state][0] is node
            self.queue[node.state].pop(0)
        self.running.add(node)

    def went_out(self, node: Node) -> None:
        """Nothing that it waits for may go on without it."""
        if node in self.queue[node.state]:
            self.queue[node.state].remove(node)  # cancelled while it waited
        self.running.discard(node)
        assert self.running.isdisjoint(node.awaited())


class Run:
    """One run of a program."""

    def __init__(self) -> None:
        self.journal = Journal()
        self.kept_quiet: list[Any] = []
        self.states = [State() for _ in range(STATES)]
        self.engine: Engine[Any] = Engine(
            events=Flow,
            algorithms=[Acting(self), HangingAlgorithm()],
            callbacks=[Watching(self, 0), Watching(self, 1), HangingCallback()],
        )
        self.outside: TaskGroup

    async def publish(self, node: Node) -> None:
        """Publish the event of a node."""
        self.journal.published(node)
        try:
            await self.engine.bus.publish(Flow.STEP, node, state=self.states[node.state])
        finally:
            self.journal.went_out(node)

    async def quietly(self, node: Node) -> None:
        """The same, its failure being nobody's business."""
        try:
            await self.publish(node)
        except Exception as error:
            self.kept_quiet.append(actual(error))

    async def act(self, acts: Sequence[Act]) -> None:
        """Do what a handler is to do."""
        for act in acts:
            match act.kind:
                case "step":
                    await anyio.lowlevel.checkpoint()
                case "fail":
                    raise Boom
                case "publish":
                    await self.publish(act.nodes[0])
                case "together":
                    async with anyio.create_task_group() as group:
                        for node in act.nodes:
                            group.start_soon(self.quietly, node)
                case "give up":
                    async with anyio.create_task_group() as group:
                        group.start_soon(self.quietly, act.nodes[0])
                        for _ in range(act.steps):
                            await anyio.lowlevel.checkpoint()
                        group.cancel_scope.cancel()
                case _:
                    self.outside.start_soon(self.quietly, act.nodes[0])

    async def root(self, node: Node, outcomes: dict[Node, Any]) -> None:
        """Publish a root, cancel it when its time has come, and note how it ended."""
        outcomes[node] = "cancelled"
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:

                async def cancel() -> None:
                    for _ in range(node.cancelled_after or 0):
                        await anyio.lowlevel.checkpoint()
                    if node.cancelled_after is not None:
                        scope.cancel()

                group.start_soon(cancel)
                try:
                    await self.publish(node)
                    outcomes[node] = None
                except Exception as error:
                    outcomes[node] = actual(error) if hasattr(error, "traces") else "no traces"

    async def program(self, roots: Sequence[Node]) -> dict[Node, Any]:
        """Run all of it; how the roots ended."""
        outcomes: dict[Node, Any] = {}
        with anyio.fail_after(20):
            async with anyio.create_task_group() as self.outside:
                for root in roots:
                    self.outside.start_soon(self.root, root, outcomes)
                    await anyio.lowlevel.checkpoint()
        assert self.journal.running == set()
        assert len(self.engine.bus._lanes) == 0
        assert not self.engine._active
        return outcomes


def current_node() -> Node:
    """The node of the event that calls."""
    envelope = current_envelope()
    assert envelope is not None
    assert isinstance(envelope.payload, Node)
    return envelope.payload


class Acting(Algorithm[Any, Any]):
    """Acts for the first algorithm of every event."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def match(self, event: EventName, state: Any) -> bool:
        """The first thing that happens on an event."""
        self.run.journal.came_in(current_node())
        return True

    async def apply(self, event: EventName, state: Any, logger: Any) -> None:
        """Act."""
        await self.run.act(current_node().algorithm)


class HangingAlgorithm(Algorithm[Any, Any]):
    """Hangs where the node says so, until its time is over."""

    timeout = 0.02  # so long that a busy machine is not taken for a hanging handler

    def match(self, event: EventName, state: Any) -> bool:
        """Where it is to hang."""
        return current_node().hangs == "algorithm"

    async def apply(self, event: EventName, state: Any, logger: Any) -> None:
        """Hang."""
        await anyio.sleep_forever()


class Watching(Callback[Any]):
    """Acts for one of the callbacks of every event."""

    def __init__(self, run: Run, i: int) -> None:
        self.run = run
        self.i = i

    async def step(self, state: Any, logger: Any) -> None:
        """Act."""
        await self.run.act(current_node().callbacks[self.i])


class HangingCallback(Callback[Any]):
    """Hangs where the node says so, until its time is over."""

    timeout = 0.02  # so long that a busy machine is not taken for a hanging handler

    async def step(self, state: Any, logger: Any) -> None:
        """Hang, or not."""
        if current_node().hangs == "callback":
            await anyio.sleep_forever()


quick = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.mark.parametrize("backend", BACKENDS, ids=["asyncio", "uvloop", "trio"])
@quick
@given(roots=programs(in_order))
def test_rule_4_9_and_5_every_event_ends_as_the_model_says(backend: Any, roots: list[Node]) -> None:
    """With lanes taken in order nothing deadlocks: each root ends as it must, unless it was cancelled before."""
    run = Run()
    outcomes = anyio.run(run.program, roots, backend=backend[0], backend_options=backend[1])

    assert len(outcomes) == len(roots)
    assert "deadlock" not in run.kept_quiet
    for root in roots:
        allowed = [expected(root)] + (["cancelled"] if root.cancelled_after is not None else [])
        assert outcomes[root] in allowed


@pytest.mark.parametrize("backend", BACKENDS, ids=["asyncio", "uvloop", "trio"])
@quick
@given(roots=programs(anything))
def test_rule_4_9_whatever_is_published_ends(backend: Any, roots: list[Node]) -> None:
    """With lanes taken in any order, what would wait for ever is a DeadlockError: all roots end, the rules kept."""
    outcomes = anyio.run(Run().program, roots, backend=backend[0], backend_options=backend[1])

    assert len(outcomes) == len(roots)

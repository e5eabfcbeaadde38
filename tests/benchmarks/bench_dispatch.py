"""What it costs to hand an event to N handlers that do nothing: microseconds a dispatch, beside those of others.

All take turns in one process (see `interleaved.py`). What is theirs is in `peers.py`; what is ours, in `ours.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import ours
import peers
from interleaved import Case, Dispatch, measure_in_turns
from tables import Chart, Table, cell

Row = tuple[str, float, str, float | None]

FLOOR = "await loop, written by hand"
GROUP = "asyncio.TaskGroup"
OURS = "eventbus-engine, "


class Sheet:
    """The cases of one table, by row and column.

    Args:
        name: the table's.
        title: what its handlers do.
        theirs: the peers.
        ways: ours.
        base: the row that the last columns are ratios to.
    """

    def __init__(
        self, name: str, title: str, theirs: Sequence[peers.Peer], ways: Sequence[ours.Way], base: str
    ) -> None:
        self.name, self.title, self.base = name, title, base
        self.composer = {OURS + way.name: way.composer for way in ways}
        self.cases: dict[tuple[str, int], Case] = {}
        for peer in theirs:
            for column in peer.columns:
                self._add(Case(peer.name, column, _bound(peer, column), peer.loop, optional=True))
        for way in ways:
            for column in way.columns:
                self._add(Case(OURS + way.name, column, _bound(way, column), way.loop))

    def _add(self, case: Case) -> None:
        self.cases[case.row, case.column] = case

    def get(self, row: str, column: int) -> float | None:
        """Its median, None where there is none."""
        case = self.cases.get((row, column))
        return case.median if case is not None and case.samples else None

    def ours(self, way: str, column: int) -> float:
        """The median of one of our ways."""
        return self.cases[OURS + way, column].median

    def table(self, note: str) -> Table:
        """Medians, and for eight handlers the ratios."""
        columns = sorted({column for _, column in self.cases})
        names = list(dict.fromkeys(row for row, _ in self.cases))
        with_composer = any(self.composer.values())
        head = [
            "",
            *(f"N={column}" for column in columns),
            f"N=8 ÷ {self.base.partition(',')[0]}",
            *["÷ Composer"] * with_composer,
        ]
        rows: list[Sequence[str]] = []
        for name in names:
            cells = [self._cell(name, column) for column in columns]
            compared = [self.base, self.composer.get(name) or ""] if with_composer else [self.base]
            rows.append([name, *cells, *(cell(_ratio(self.get(name, 8), self.get(other, 8))) for other in compared)])
        figures = {
            name: {str(n): case.figures() for (row, n), case in self.cases.items() if row == name} for name in names
        }
        title = f"{self.title}, µs per dispatch"
        bars = [(name, value, name in self.composer) for name in names if (value := self.get(name, 8)) is not None]
        return Table(self.name, title, head, rows, figures, Chart(f"{title}, 8 handlers (log scale)", note, bars))

    def _cell(self, name: str, column: int) -> str:
        case = self.cases.get((name, column))
        if case is None:
            return ""
        return cell(case.median) if case.samples else case.missing.partition(":")[0]


def _bound(one: peers.Peer | ours.Way, column: int) -> Dispatch:
    return partial(one.make, column)


def _same(dispatch: Dispatch) -> Dispatch:
    return dispatch


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value / base


def measure(
    *, loop: str = "asyncio", rounds: int = 31, sample_ms: float = 3.0, note: str = ""
) -> Iterator[Row | Table]:
    """The tables, then what is held to a limit.

    Args:
        loop: `asyncio` or `uvloop`.
        rounds: samples for each figure.
        sample_ms: how long each takes.
        note: what stands below the chart.
    """
    no_op = Sheet("dispatch", "Handlers that do nothing", peers.NO_OP, ours.NO_OP, FLOOR)
    suspending = Sheet("suspending", "Handlers that suspend once", peers.SUSPENDING, ours.SUSPENDING, GROUP)
    parts = [Case(name, 1, partial(_same, dispatch), where) for name, dispatch, where in peers.parts()]
    cases = [*no_op.cases.values(), *suspending.cases.values(), *parts]
    measure_in_turns(cases, loop=loop, rounds=rounds, sample_ms=sample_ms, close=peers.close_peers)
    peers.blocking().close()
    yield no_op.table(note)
    yield suspending.table(note)
    figures = {case.row: case.figures() for case in parts}
    yield Table("parts", "What any engine pays", ["", "µs"], [(case.row, cell(case.median)) for case in parts], figures)
    yield from absolute(no_op)
    yield from relative(no_op, suspending, parts)
    yield from traced(no_op)


def absolute(no_op: Sheet) -> Iterator[Row]:
    """Microseconds; the limits are those of the machine that docs/performance.md names."""
    for way, count, limit in (
        ("plain callbacks", 0, 1.0),
        ("plain callbacks", 8, 2.0),
        ("async callbacks", 8, 9.0),
        ("async callbacks", 32, 16.0),
        ("matching async algorithms", 8, 9.0),
        ("algorithms that do not match", 8, 3.0),
    ):
        yield f"{count} {way}", no_op.ours(way, count), "us/event", limit


def relative(no_op: Sheet, suspending: Sheet, parts: Sequence[Case]) -> Iterator[Row]:
    """Ratios, which hold on other machines as well."""
    empty = no_op.ours("plain callbacks", 0)
    yield "64 callbacks without the hook over none", no_op.ours("callbacks without the hook", 64) / empty, "times", 1.1
    for way, theirs, count, limit in (
        ("plain callbacks", "Composer, callbacks", 0, 1 / 15),
        ("async callbacks", "Composer, callbacks", 8, 1 / 4),
        ("async callbacks", "Lightning", 8, 1.0),
        ("matching async algorithms", "Composer, matching algorithms", 8, 1 / 6),
        ("bus.publish, plain subscribers", "aiosignal", 1, 4.0),
    ):
        if (ratio := _ratio(no_op.ours(way, count), no_op.get(theirs, count))) is not None:
            yield f"{count} {way} over {theirs}", ratio, "times", limit
    ratio = suspending.ours("async callbacks", 8) / suspending.cases[GROUP, 8].median
    yield f"8 callbacks that suspend over {GROUP}", ratio, "times", 2.1
    plain = no_op.ours("engine.sync, plain callbacks", 8) / no_op.ours("plain callbacks", 8)
    yield "engine.sync over the async path, 8 plain callbacks", plain, "times", 1.2
    added = no_op.ours("engine.sync, async callbacks", 8) - no_op.ours("async callbacks", 8)
    yield "engine.sync added, 8 async callbacks", added, "us/event", None
    # A task takes a loop that runs, and there is none: what asyncio itself asks for an empty one is the measure.
    empty_task = next(case.median for case in parts if case.row == peers.BY_A_RUNNER)
    yield "engine.sync added, 8 async callbacks, over a Runner with nothing to run", added / empty_task, "times", 1.0


def traced(no_op: Sheet) -> Iterator[Row]:
    """What spans add: to the same dispatch, or 0.9 µs each, whichever is larger."""
    for way, short in (
        ("plain callbacks", "plain callbacks"),
        ("async callbacks", "async callbacks"),
        ("matching async algorithms", "matching"),
    ):
        for count in (0, 8):
            off = no_op.ours(way, count)
            yield (
                f"{count} {way}, sampled out: added",
                no_op.ours(f"{short}, sampled out", count) - off,
                "us/event",
                0.3,
            )
            added = no_op.ours(f"{short}, recorded", count) - off
            yield f"{count} {way}, recorded: added", added, "us/event", max(off, 0.9 * (count + 1))


if __name__ == "__main__":
    for row in measure():
        print(row.text() if isinstance(row, Table) else row)

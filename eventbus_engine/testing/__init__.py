"""What a user's own tests need: recorders, a check of the order, fakes, a fake clock, an endpoint that fails."""

from __future__ import annotations

from eventbus_engine.testing.clock import FakeClock, backend_options, run_with_fake_clock
from eventbus_engine.testing.destination import Logged, RecordingLogger
from eventbus_engine.testing.endpoint import FlakyEndpoint
from eventbus_engine.testing.exchange import Answer, Request
from eventbus_engine.testing.fakes import FakeAlgorithm, FakeCallback
from eventbus_engine.testing.order import assert_order
from eventbus_engine.testing.recorder import Record, Recorder

__all__ = [
    "Answer",
    "FakeAlgorithm",
    "FakeCallback",
    "FakeClock",
    "FlakyEndpoint",
    "Logged",
    "Record",
    "Recorder",
    "RecordingLogger",
    "Request",
    "assert_order",
    "backend_options",
    "run_with_fake_clock",
]

"""Log to a service that goes down and comes back while the run goes on, and then to the end of it.

Needs the extra `http`. The service is a real HTTP server of `eventbus_engine.testing`, on the loopback interface.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from eventbus_engine import Callback, Circuit, CloseReport, Engine, EventName, Retry
from eventbus_engine.loggers import HttpLogger
from eventbus_engine.testing import FlakyEndpoint


class Job(EventName):
    """What happens in this program."""

    STEP = "step"


class Loss(Callback[int]):
    """Logs a number at every step."""

    def step(self, state: int, logger: Any) -> None:
        """The loss of this step."""
        logger.log_metrics({"loss": 1 / state}, step=state)


def make_logger(url: str, spool: Path) -> HttpLogger:
    """In batches, tried again at short intervals; what cannot be delivered waits on the disk."""
    return HttpLogger(
        url,
        run_id="digits",
        spool=spool,
        max_wait=0.02,
        retry=Retry(attempts=3, initial=0.02),
        circuit=Circuit(failures=3, cool_down=0.05),
    )


async def run(endpoint: FlakyEndpoint, spool: Path) -> CloseReport:
    """A run of 300 steps, in the middle of which the service is away."""
    async with Engine(events=Job, callbacks=[Loss(), make_logger(endpoint.url, spool)]) as engine:
        for step in range(1, 301):
            if step == 100:
                await endpoint.arrived(1)
                await anyio.to_thread.run_sync(endpoint.down)
            if step == 200:
                await anyio.to_thread.run_sync(endpoint.up)
            if step == 250:
                await anyio.to_thread.run_sync(endpoint.down)
            await engine.run_event(Job.STEP, step)
            await anyio.sleep(0.001)
        return await engine.close(timeout=0.5)


async def send_the_rest(endpoint: FlakyEndpoint, spool: Path) -> CloseReport:
    """What the next run begins with, if it has the same spool."""
    async with Engine(events=Job, callbacks=[make_logger(endpoint.url, spool)]) as engine:
        return await engine.close()


def main() -> None:
    """Run, with the service down at the end; then again, with the service up."""
    logging.basicConfig(level=logging.CRITICAL)  # the outages are expected here
    with tempfile.TemporaryDirectory() as folder, FlakyEndpoint() as endpoint:
        spool = Path(folder) / "spool.db"
        report = anyio.run(run, endpoint, spool)
        print(f"the run: spooled {sum(report.spooled.values())}, lost {sum(report.undelivered.values())}")
        endpoint.up()
        report = anyio.run(send_the_rest, endpoint, spool)
        print(f"after it: spooled {sum(report.spooled.values())}, lost {sum(report.undelivered.values())}")
        requests = endpoint.requests
    records = {record["id"]: record for request in requests for record in request.json["records"]}
    steps = [record["step"] for record in records.values()]
    print(f"arrived: {len(steps)} records in {len(requests)} requests, in order: {steps == list(range(1, 301))}")


if __name__ == "__main__":
    main()

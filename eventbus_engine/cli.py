"""The command line: `eventbus-engine …`, or `python -m eventbus_engine …`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from eventbus_engine.errors import ConfigurationError

__all__ = ["main"]

_EXTRAS = ("httpx", "numpy", "rich", "sklearn", "torch")
"""What the demo imports and a plain installation does not have."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: by default those of the process.

    Returns:
        The exit code: 0 for success, 1 if the command failed, 2 if it was asked for something it cannot do, 130 after
        Ctrl-C.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], int] | None = getattr(options, "command", None)
    if command is None:
        parser.print_help()
        return 2
    try:
        return command(options)
    except ConfigurationError as error:
        print(f"eventbus-engine: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before a command could see to it itself
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eventbus-engine",
        description="An event bus for training loops and data pipelines, with ordered algorithms and traces.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a small CNN on handwritten digits, with everything switched on",
        description=(
            "Train a small CNN on scikit-learn's handwritten digits with four algorithms, a progress bar and an async "
            "callback that posts every batch to an HTTP server; write metrics and spans as JSON lines, and report what "
            "happened. Spans also go to OTEL_EXPORTER_OTLP_ENDPOINT, if that is set."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--epochs", type=_positive, default=15, help="how long to train")
    demo.add_argument("--seed", type=_seed, default=17, help="of everything random in the run")
    demo.add_argument("--target", type=_fraction, default=0.95, help="held-out accuracy to reach for exit code 0")
    demo.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio", help="the event loop")
    demo.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where the directory of the run is made")
    demo.add_argument("--run-name", help="its name; the time and a few letters if not given")
    demo.add_argument("--no-progress", action="store_true", help="draw no progress bar")
    demo.set_defaults(command=_demo)
    _add_trace(commands)
    _add_checkpoint(commands)
    return parser


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    described = "tell what ran from the spans that a run left in its files"
    reports = commands.add_parser("trace", help=described, description=f"{described.capitalize()}.").add_subparsers(
        title="reports", metavar="REPORT", dest="report", required=True
    )
    recording = argparse.ArgumentParser(add_help=False)
    recording.add_argument("path", type=Path, help="a file of OTLP JSON lines, or the directory of a run")
    recording.set_defaults(command=_trace)
    reports.add_parser("summary", parents=[recording], help="runs, skips, failures and times of each participant")
    show = reports.add_parser("show", parents=[recording], help="traces as trees, in the order of their starts")
    show.add_argument("--trace", metavar="ID", help="the one with this id, or those whose ids begin with it")
    show.add_argument("--limit", type=_positive, default=5, metavar="N", help="how many at most; 5 by default")
    export = reports.add_parser("export", parents=[recording], help="write another format")
    export.add_argument("--format", choices=("jaeger", "chrome", "otlp"), required=True, help="which; chrome: Perfetto")
    export.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to; standard output by default")


def _add_checkpoint(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    described = "tell what a checkpoint holds, and whether it is whole"
    actions = commands.add_parser(
        "checkpoint", help=described, description=f"{described.capitalize()}."
    ).add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    inspect = actions.add_parser(
        "inspect",
        help="how far the run was, who takes part, files, tensors",
        description="Check a checkpoint, all of it, and tell what it holds. Nothing in it is run.",
    )
    inspect.add_argument("path", type=Path, help="the folder of a checkpoint, or a link to it")
    inspect.add_argument("--tensors", action="store_true", help="list the tensors")
    inspect.set_defaults(command=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    if not _has("inspecting a checkpoint", ("torch", "safetensors"), "train"):
        return 2
    from eventbus_engine.training.checkpoint.command import inspect

    return inspect(options.path, tensors=options.tensors)


def _trace(options: argparse.Namespace) -> int:
    from eventbus_engine.telemetry.reports import command

    match options.report:
        case "summary":
            return command.summary(options.path)
        case "show":
            return command.show(options.path, options.trace, options.limit)
        case _:
            return command.export(options.path, options.format, options.output)


def _demo(options: argparse.Namespace) -> int:
    if not _has("the demo", _EXTRAS, "demo"):
        return 2
    if importlib.util.find_spec(options.backend) is None:
        print(f"eventbus-engine: --backend {options.backend} needs pip install {options.backend}", file=sys.stderr)
        return 2
    # Torch and scikit-learn take seconds to import, which is for this command alone to pay.
    from eventbus_engine.demo.run import Options, run_demo

    return run_demo(
        Options(
            epochs=options.epochs,
            seed=options.seed,
            target=options.target,
            backend=options.backend,
            runs_dir=options.runs_dir,
            run_name=options.run_name,
            progress=not options.no_progress,
        ),
        print,
    )


def _has(what: str, modules: Sequence[str], extra: str) -> bool:
    """Whether all of these can be imported; else it is said how to get them."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"eventbus-engine: {what} needs {', '.join(missing)}; "
            f'install what is missing with pip install "eventbus-engine[{extra}]"',
            file=sys.stderr,
        )
    return not missing


def _version() -> str:
    try:
        return metadata.version("eventbus-engine")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _positive(text: str) -> int:
    return _in_range(int(text), 1, float("inf"), "a whole number from 1")


def _seed(text: str) -> int:
    return _in_range(int(text), 0, 2**32 - 1, "a whole number from 0 to 2**32 - 1")


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no fraction from 0 to 1")
    return value


def _in_range(value: int, low: int, high: float, described: str) -> int:
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{value} is not {described}")
    return value

"""`eventbus-engine trace`: what it prints, writes and exits with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventbus_engine import cli
from eventbus_engine.telemetry.reports import Recording, format_summary, format_trace, summarize
from eventbus_engine.telemetry.reports.jaeger import MAX_SPANS

Json = dict[str, Any]
Capture = pytest.CaptureFixture[str]


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "eventbus_engine", "trace", *map(str, arguments)],
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_summary_of_a_run_folder(recorded: Path, capsys: Capture) -> None:
    """The folder will do: that is what the demo names at its end."""
    code = cli.main(["trace", "summary", str(recorded.parent)])

    assert code == 0
    assert capsys.readouterr() == (format_summary(summarize(Recording(recorded).traces())) + "\n", "")


def test_show_prints_the_traces_in_the_order_of_their_starts(recorded: Path, capsys: Capture) -> None:
    """The one that starts first, although the file may have it last."""
    traces = sorted(Recording(recorded).traces(), key=lambda trace: trace.start_ns)
    lines = recorded.read_text().splitlines(keepends=True)
    recorded.write_text("".join(reversed(lines)))

    code = cli.main(["trace", "show", str(recorded)])

    assert code == 0
    assert capsys.readouterr().out == "\n\n".join(map(format_trace, traces)) + "\n"


def test_show_stops_at_the_limit_and_says_what_is_left(
    span: Callable[..., Json], write: Callable[..., Path], capsys: Capture
) -> None:
    """The first ones; so a run of a million spans is looked at as fast as one can read."""
    path = write([span(1, at=(9 - trace, 10), trace=trace) for trace in range(1, 8)])

    default = cli.main(["trace", "show", str(path)]), capsys.readouterr().out
    limited = cli.main(["trace", "show", str(path), "--limit", "2"]), capsys.readouterr().out

    assert default[0] == limited[0] == 0
    assert default[1].count("trace 0") == 5
    assert [line.split()[1] for line in limited[1].splitlines() if "trace 0" in line] == [f"{7:032x}", f"{6:032x}"]
    assert limited[1].endswith("\n\n5 more; --limit shows more of them, --trace a certain one\n")


def test_show_finds_a_trace_by_how_its_id_begins(
    span: Callable[..., Json], write: Callable[..., Path], capsys: Capture
) -> None:
    """In either case of letters; what is not there is exit code 2, and names what was looked for."""
    path = write([span(1, trace=0xAB << 120), span(1, trace=0xAC << 120)])

    found = cli.main(["trace", "show", str(path), "--trace", "AB0"]), capsys.readouterr().out
    lost = cli.main(["trace", "show", str(path), "--trace", "ad"]), capsys.readouterr().err

    assert found[0] == 0
    assert [line.split()[1] for line in found[1].splitlines() if "trace " in line] == ["ab" + "0" * 30]
    assert lost == (2, f"eventbus-engine: no trace in {str(path)!r} has an id that begins with 'ad'\n")


@pytest.mark.parametrize(("form", "field"), [("jaeger", "data"), ("chrome", "traceEvents"), ("otlp", "resourceSpans")])
def test_export_writes_to_standard_output_or_to_a_file(
    recorded: Path, tmp_path: Path, capsys: Capture, form: str, field: str
) -> None:
    """The same to both; the file takes the place of an older one, and nothing else stays behind."""
    output = tmp_path / "exported.json"
    output.write_text("older")

    codes = [
        cli.main(["trace", "export", str(recorded), "--format", form]),
        cli.main(["trace", "export", str(recorded), "--format", form, "-o", str(output)]),
    ]

    assert codes == [0, 0]
    assert output.read_text() == capsys.readouterr().out
    assert json.loads(output.read_text())[field]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported.json", "run"]


def test_export_says_what_a_jaeger_on_elasticsearch_would_not_show(
    tmp_path: Path, span: Callable[..., Json], write: Callable[..., Path], capsys: Capture
) -> None:
    """On standard error, so that the document stays one."""
    path = write([span(number + 1) for number in range(MAX_SPANS + 1)])

    code = cli.main(["trace", "export", str(path), "--format", "jaeger", "-o", str(tmp_path / "out.json")])

    assert code == 0
    assert "has 10,001 spans" in capsys.readouterr().err


def test_export_leaves_the_recording_and_what_it_cannot_complete_alone(
    tmp_path: Path, span: Callable[..., Json], write: Callable[..., Path], capsys: Capture
) -> None:
    """The recording is not overwritten, and half a document takes no one's place."""
    path, output = write([span(1)], [span(2, name=5)]), tmp_path / "out.json"
    before = path.read_text()
    output.write_text("older")

    onto_itself = cli.main(["trace", "export", str(path), "--format", "otlp", "-o", str(path)])
    first = capsys.readouterr().err
    broken = cli.main(["trace", "export", str(path), "--format", "jaeger", "-o", str(output)])
    second = capsys.readouterr().err
    nowhere = cli.main(["trace", "export", str(path), "--format", "otlp", "-o", str(tmp_path / "no" / "folder")])
    third = capsys.readouterr().err

    assert (onto_itself, broken, nowhere) == (2, 1, 2)
    assert "is the recording itself; give --output another name" in first
    assert f"{path}, line 2: name is 5, not a string" in second
    assert f"cannot write {str(tmp_path / 'no' / 'folder')!r}" in third
    assert (path.read_text(), output.read_text()) == (before, "older")
    assert sorted(found.name for found in tmp_path.iterdir()) == ["out.json", "spans.jsonl"]


@pytest.mark.parametrize("report", ["summary", "show", "export"])
def test_a_truncated_file_is_reported_on_with_a_word_about_what_is_missing(
    tmp_path: Path, span: Callable[..., Json], write: Callable[..., Path], capsys: Capture, report: str
) -> None:
    """A killed process is the case one wants to look into most."""
    text = write([span(1)], [span(2)]).read_text()
    for rank in (0, 1):
        (tmp_path / f"spans-rank{rank}.jsonl").write_text(text[:-20])
    (tmp_path / "spans.jsonl").unlink()
    options = ["--format", "otlp"] if report == "export" else []

    both = cli.main(["trace", report, str(tmp_path), *options]), capsys.readouterr().err
    one = cli.main(["trace", report, str(tmp_path / "spans-rank0.jsonl"), *options]), capsys.readouterr().err

    missing = "in the middle of a line, as a killed process leaves it; the spans of that line are missing\n"
    assert both == (0, f"eventbus-engine: 2 files end {missing}")
    assert one == (0, f"eventbus-engine: 1 file ends {missing}")


def test_a_path_without_spans_is_exit_code_2(tmp_path: Path, capsys: Capture) -> None:
    """It was asked for something it cannot do."""
    code = cli.main(["trace", "summary", str(tmp_path)])

    assert code == 2
    assert "there are no spans in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "the following arguments are required: REPORT"),
        (["summary"], "the following arguments are required: path"),
        (["show", "x", "--limit", "0"], "0 is not a whole number from 1"),
        (["export", "x"], "the following arguments are required: --format"),
        (["export", "x", "--format", "zipkin"], "invalid choice: 'zipkin'"),
    ],
)
def test_option_that_does_not_fit_is_named(arguments: list[str], complaint: str, capsys: Capture) -> None:
    """The exit code is argparse's, 2."""
    with pytest.raises(SystemExit) as exited:
        cli.main(["trace", *arguments])

    assert exited.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(span: Callable[..., Json], write: Callable[..., Path]) -> None:
    """As in `eventbus-engine trace export ... | head -1`."""
    path = write([span(number + 1) for number in range(5_000)])
    command = [sys.executable, "-m", "eventbus_engine", "trace", "export", str(path), "--format", "jaeger"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(8) == b'{"data":'
        process.stdout.close()
        errors = process.stderr.read()
        process.stderr.close()
        code = process.wait(timeout=60)

    assert (code, errors) == (0, b"")


def test_a_terminal_without_the_letters_of_a_name_gets_their_escapes(
    span: Callable[..., Json], write: Callable[..., Path]
) -> None:
    """Better than a traceback in the middle of a table."""
    path = write([span(1, name="café")])

    ran = run("show", path, PYTHONIOENCODING="ascii")

    assert (ran.returncode, ran.stderr) == (0, "")
    assert "caf\\xe9" in ran.stdout


def test_reports_need_neither_the_sdk_nor_an_extra(recorded: Path) -> None:
    """They are quick to start, and work where nothing but the package is installed."""
    program = (
        "import sys\n"
        "from eventbus_engine.cli import main\n"
        f"code = main(['trace', 'summary', {str(recorded)!r}])\n"
        "heavy = ('httpx', 'numpy', 'opentelemetry.sdk', 'torch', 'trio')\n"
        "sys.exit(code or ', '.join(name for name in heavy if name in sys.modules) or 0)"
    )

    ran = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)

    assert (ran.returncode, ran.stderr) == (0, "")

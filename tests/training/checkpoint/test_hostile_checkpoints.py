"""Checkpoints that somebody has made to do harm: they run nothing, fill nothing, and give a typed error."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import shutil
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventbus_engine.errors import CheckpointError
from eventbus_engine.time import Timestamp
from eventbus_engine.training.checkpoint import Contents, find_checkpoints, open_checkpoint, take_snapshot
from eventbus_engine.training.checkpoint.manifest import MOST_JSON, dump
from eventbus_engine.training.checkpoint.storage import write_snapshot

FILES = ("manifest.json", "values.json", "rank0.json", "rank0.safetensors")
WEIGHT = torch.arange(6.0).reshape(2, 3)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with something of everything."""
    values = {"timestamp": Timestamp(batch=3), "algorithms": {"ema": {"average": torch.ones(2), "name": "ema"}}}
    path = tmp_path_factory.mktemp("good") / "good"
    own = {"generator": torch.arange(4, dtype=torch.uint8), "seed": 5}
    write_snapshot(take_snapshot(Contents({"weight": WEIGHT, "bias": torch.ones(3)}, values, own)), path)
    return path


@pytest.fixture
def checkpoint(good: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return copy_of(good, tmp_path / "checkpoint")


def copy_of(good: Path, path: Path) -> Path:
    """To do harm to."""
    shutil.copytree(good, path)
    return path


def everything_of(path: Path) -> list[Any]:
    """All that is in a checkpoint."""
    checkpoint = open_checkpoint(path)
    into = {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}
    checkpoint.read(into)
    return [repr(checkpoint.values), repr(checkpoint.rank_values(0)), {name: t.tolist() for name, t in into.items()}]


def reseal(path: Path, change: Callable[[dict[str, Any]], Any] = lambda content: None) -> None:
    """Let the manifest be true of the files as they are now, and changed, and signed again."""
    content = json.loads((path / "manifest.json").read_bytes())
    del content["sha256"]
    for name, info in content["files"].items():
        text = (path / name).read_bytes()
        info |= {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    change(content)
    content["sha256"] = hashlib.sha256(dump(content)).hexdigest()
    (path / "manifest.json").write_bytes(dump(content))


def part_of(content: dict[str, Any]) -> list[Any]:
    """Offsets, sizes, file and key of the weight."""
    part: list[Any] = content["tensors"]["weight"]["parts"][0]
    return part


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """What a file of tensors says of itself, and its numbers."""
    text = (path / "rank0.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", text[:8])
    return json.loads(text[8 : 8 + length]), text[8 + length :]


def with_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A file of tensors that says something else of itself, and a manifest that agrees."""

    def harm(path: Path) -> None:
        header, numbers = header_of(path)
        change(header)
        text = json.dumps(header).encode()
        (path / "rank0.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + numbers)
        reseal(path)

    return harm


def with_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A manifest that says something else, and is signed for it."""
    return lambda path: reseal(path, change)


def with_file(name: str, text: bytes, *, sealed: bool = True) -> Callable[[Path], None]:
    """A file that has something else in it."""

    def harm(path: Path) -> None:
        (path / name).write_bytes(text)
        if sealed and name != "manifest.json":
            reseal(path)

    return harm


def instead_of(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else that has the name of a file."""

    def harm(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return harm


def link_away(path: Path) -> None:
    """A link to a file with the very bytes."""
    source = path.parents[1] / "kept" / path.name
    path.symlink_to(source if source.exists() else "/etc/hostname")


def listen(path: Path) -> None:
    """A socket, by a name that is short enough."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def sparse(path: Path) -> None:
    """A terabyte that takes no room."""
    with open(path, "wb") as file:
        file.truncate(2**40)


class Payload:
    """What unpickling it would do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(os.environ.get("EVENTBUS_TEST_MARK", "/nonexistent/mark")),)


PICKLE = pickle.dumps(Payload())
BOMB = gzip.compress(bytes(2**24))
DEEP = b'{"a":' * 100_000
TWICE = b'{"timestamp":1,"timestamp":2}'

HARMS: dict[str, tuple[Callable[[Path], None], str]] = {
    **{f"a pickle for {name}": (with_file(name, PICKLE), "is no JSON|is not as it should be") for name in FILES},
    **{f"a pickle for {name}, told": (with_file(name, PICKLE, sealed=False), "is no|bytes, and had") for name in FILES},
    **{f"zeros packed for {name}": (with_file(name, BOMB), "is no JSON|is not as it should be") for name in FILES},
    **{f"nested {name}": (with_file(name, DEEP), "is no JSON|is not as it should be") for name in FILES},
    **{f"no text in {name}": (with_file(name, b'{"a": "\xff"}'), "is no JSON|is not as it should") for name in FILES},
    **{f"{name} is empty": (with_file(name, b""), "is no JSON|is not as it should be") for name in FILES},
    **{f"{name} is missing": (instead_of(name, lambda path: None), "cannot be read: No such file") for name in FILES},
    **{f"{name} is a link": (instead_of(name, link_away), "cannot be read") for name in FILES},
    **{f"{name} is a pipe": (instead_of(name, os.mkfifo), "is no file") for name in FILES},
    **{f"{name} is a folder": (instead_of(name, Path.mkdir), "is no file") for name in FILES},
    **{f"{name} is a socket": (instead_of(name, listen), "cannot be read") for name in FILES},
    "a terabyte of manifest": (instead_of("manifest.json", sparse), "is larger than any checkpoint has it"),
    "a terabyte of values": (instead_of("values.json", sparse), "bytes, and had"),
    "much JSON": (with_file("values.json", b'["' + b"a" * MOST_JSON + b'"]'), "is larger than any checkpoint has it"),
    "a name twice in the values": (with_file("values.json", TWICE), "a name is there twice"),
    "a name twice in the manifest": (with_file("manifest.json", TWICE), "a name is there twice"),
    "what is no number": (with_file("values.json", b'{"a": NaN}'), "NaN is no number"),
    "no values by names": (with_file("values.json", b"[]"), "holds no values by their names"),
    "a type that does not exist": (with_file("values.json", b'{"a": {"$eval": "1"}}'), "no checkpoint holds: KeyError"),
    "a tensor a million times": (
        with_file("values.json", b'{"a": [%s]}' % b",".join([b'{"$tensor":"values/0"}'] * 100_000)),
        "'values/0' is there twice",
    ),
    "a tensor that is not there": (with_file("values.json", b'{"a": {"$tensor": "values/7"}}'), "KeyError"),
    "a file above": (with_manifest(lambda m: m["files"].update({"../x": m["files"]["values.json"]})), "no manifest"),
    "an absolute file": (with_manifest(lambda m: m["files"].update({"/etc/x": m["files"]["values.json"]})), "'/etc/x'"),
    "a file below": (with_manifest(lambda m: m["files"].update({"a/x.json": m["files"]["values.json"]})), "'a/x.json'"),
    "a part elsewhere": (
        with_manifest(lambda m: part_of(m).__setitem__(2, "/etc/passwd")),
        "no file of the checkpoint",
    ),
    "a part in no file of tensors": (with_manifest(lambda m: part_of(m).__setitem__(2, "values.json")), "values.json"),
    "a part of another name": (with_manifest(lambda m: part_of(m).__setitem__(3, "w")), "is not as it should be"),
    "a part that begins later": (with_manifest(lambda m: part_of(m).__setitem__(0, [1, 0])), "do not make up"),
    "a part before the beginning": (with_manifest(lambda m: part_of(m).__setitem__(0, [-1, 0])), "is no size"),
    "a part twice": (
        with_manifest(lambda m: m["tensors"]["weight"]["parts"].append(part_of(m))),
        "do not make up",
    ),
    "parts with a hole": (
        with_manifest(
            lambda m: m["tensors"]["weight"].update(
                parts=[[[0, 0], [1, 3], "rank0.safetensors", "a"], [[0, 0], [1, 3], "rank0.safetensors", "b"]]
            )
        ),
        "do not make up",
    ),
    "another shape": (with_manifest(lambda m: m["tensors"]["weight"].update(shape=[3, 2])), "do not make up"),
    "another shape, all along": (
        with_manifest(
            lambda m: m["tensors"].update(
                weight={"dtype": "torch.float32", "shape": [3, 2], "parts": [[[0, 0], [3, 2], *part_of(m)[2:]]]}
            )
        ),
        r"is of F32 \[2, 3\], and its manifest says torch.float32 \[3, 2\]",
    ),
    "another type": (
        with_manifest(lambda m: m["tensors"]["weight"].update(dtype="torch.int32")),
        "is of F32 .* its manifest says torch.int32",
    ),
    "a type of no torch": (with_manifest(lambda m: m["tensors"]["weight"].update(dtype="os.system")), "KeyError"),
    "a shape of petabytes": (
        with_manifest(lambda m: m["tensors"]["weight"].update(shape=[2**47, 3])),
        "do not make up",
    ),
    "petabytes, all along": (
        with_manifest(
            lambda m: m["tensors"].update(
                {"values/0": {"dtype": "torch.uint8", "shape": [2**47], "parts": [[[0], [2**47], *part_of(m)[2:]]]}}
            )
        ),
        "is of F32",
    ),
    "numbers without end": (with_manifest(lambda m: m["tensors"]["weight"].update(shape=[10**400])), "is no size"),
    "a billion ranks": (
        with_manifest(lambda m: m.update(world_size=2**40)),
        "has not the files of 1099511627776 ranks",
    ),
    "no ranks": (with_manifest(lambda m: m.update(world_size=0)), "has not the files of 0 ranks"),
    "another rank's files": (
        with_manifest(lambda m: m["files"].update({"rank7.json": m["files"].pop("rank0.json")})),
        "rank7.json",
    ),
    "a newer format": (with_manifest(lambda m: m.update(format=2)), "of format 2, and this release reads up to 1; use"),
    "an older format": (with_manifest(lambda m: m.update(format=0)), "of format 0, which this release does not read"),
    "no format": (with_manifest(lambda m: m.pop("format")), "does not say of which format"),
    "a format that is no number": (with_manifest(lambda m: m.update(format=True)), "does not say of which format"),
    "a time that is no number": (with_manifest(lambda m: m["timestamp"].update(batch="9")), "'9' is no number"),
    "a header of exabytes": (
        with_file("rank0.safetensors", struct.pack("<Q", 2**62) + b"{}"),
        "rank0.safetensors is not as it should be",
    ),
    "numbers of exabytes": (
        with_header(lambda h: h["weight"].update(data_offsets=[0, 2**60])),
        "is not as it should be",
    ),
    "a shape of exabytes": (with_header(lambda h: h["weight"].update(shape=[2**31, 2**31])), "is not as it should be"),
    "numbers of another's": (
        with_header(lambda h: h["weight"].update(data_offsets=h["bias"]["data_offsets"])),
        "is not as it should be",
    ),
    "a type of no safetensors": (with_header(lambda h: h["weight"].update(dtype="PICKLE")), "is not as it should be"),
    "a tensor less": (with_header(lambda h: h.pop("weight")), "is not as it should be"),
}


@pytest.mark.parametrize("name", HARMS)
def test_what_is_harmful_is_refused_by_what_is_wrong_with_it(name: str, checkpoint: Path, good: Path) -> None:
    """Whoever signs it; and it is not found among those to go on from, or refused when it is opened."""
    copy_of(good, checkpoint.with_name("kept"))
    harm, message = HARMS[name]
    harm(checkpoint)

    with pytest.raises(CheckpointError, match=message) as caught:
        everything_of(checkpoint)

    assert str(checkpoint) in str(caught.value)
    find_checkpoints(checkpoint.parent)


def test_what_is_nested_too_deeply_is_refused_wherever_that_is_noticed(checkpoint: Path) -> None:
    """The limit may lie between what can be parsed and what can be hashed."""
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit()):
        text = f'{{"format": 1, "sha256": "", "files": {"[" * depth}{"]" * depth}}}'
        (checkpoint / "manifest.json").write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError):
            open_checkpoint(checkpoint)


@pytest.mark.skipif(os.getuid() != 0, reason="making a device takes root")
def test_a_device_is_refused(checkpoint: Path) -> None:
    """One that would give zeros for ever."""
    (checkpoint / "values.json").unlink()
    try:
        os.mknod(checkpoint / "values.json", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("making a device takes the right to")

    with pytest.raises(CheckpointError, match=r"values.json (is no file|cannot be read)"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_what_is_cut_off_anywhere_is_refused(name: str, checkpoint: Path, good: Path) -> None:
    """Told by its size; and where the manifest agrees to it, by what it says itself."""
    whole = (good / name).read_bytes()
    expected = everything_of(good)
    for length in range(0, len(whole), 1 if len(whole) < 500 else 7):
        (checkpoint / name).write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(checkpoint)
        if name != "manifest.json":
            reseal(checkpoint)
            with pytest.raises(CheckpointError):
                everything_of(checkpoint)
        assert length == 0 or find_checkpoints(checkpoint.parent) in ([], [checkpoint])
        shutil.copy(good / "manifest.json", checkpoint)
    (checkpoint / name).write_bytes(whole)

    assert everything_of(checkpoint) == expected


def test_one_cut_off_is_not_found_among_those_to_go_on_from(checkpoint: Path) -> None:
    """The newest that is found can be gone on from, as far as names and sizes tell."""
    assert find_checkpoints(checkpoint.parent) == [checkpoint]

    os.truncate(checkpoint / "rank0.safetensors", 100)

    assert find_checkpoints(checkpoint.parent) == []


def test_a_link_to_a_checkpoint_leads_to_it(checkpoint: Path) -> None:
    """Such as the one to the latest; one that leads to itself leads nowhere."""
    (checkpoint.parent / "latest").symlink_to(checkpoint.name)
    (checkpoint.parent / "loop").symlink_to("loop")

    assert open_checkpoint(checkpoint.parent / "latest").path == checkpoint.resolve()
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(checkpoint.parent / "loop")


MUTATIONS = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(0, 255), st.sampled_from(["set", "insert", "delete"])),
    min_size=1,
    max_size=4,
)


def mutate(text: bytes, mutations: list[tuple[int, int, str]]) -> bytes:
    """Change some bytes."""
    mutated = bytearray(text)
    for at, byte, how in mutations:
        place = at % max(len(mutated), 1)
        if how == "insert":
            mutated.insert(place, byte)
        elif mutated:
            mutated[place : place + 1] = b"" if how == "delete" else bytes([byte])
    return bytes(mutated)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), mutations=MUTATIONS)
def test_a_changed_byte_is_noticed(name: str, mutations: list[tuple[int, int, str]], good: Path) -> None:
    """The values are those that were kept, or there are none."""
    path = good.with_name("changed")
    shutil.rmtree(path, ignore_errors=True)
    copy_of(good, path)
    (path / name).write_bytes(mutate((path / name).read_bytes(), mutations))
    with suppress(CheckpointError):
        assert everything_of(path) == everything_of(good)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(name=st.sampled_from(FILES), mutations=MUTATIONS)
def test_a_changed_byte_that_the_manifest_agrees_to_does_no_harm(
    name: str, mutations: list[tuple[int, int, str]], good: Path
) -> None:
    """Whoever can sign a checkpoint may say in it what he likes: it is read, or refused by the one error for it."""
    path = good.with_name("signed")
    shutil.rmtree(path, ignore_errors=True)
    copy_of(good, path)
    (path / name).write_bytes(mutate((path / name).read_bytes(), mutations))
    with suppress(ValueError, KeyError, AttributeError, TypeError, OSError):  # of `reseal`, on a manifest that is none
        reseal(path)
    with suppress(CheckpointError):
        everything_of(path)


NODES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**65) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "values.json", "rank0.safetensors", "weight", "torch.float32", "../x", "a" * 64]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["size", "sha256", "a"]), inner),
    max_leaves=4,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(data=st.data(), node=NODES)
def test_whatever_stands_in_a_manifest_it_is_read_or_refused(data: st.DataObject, node: Any, good: Path) -> None:
    """Anything in place of any part of it, signed."""
    path = good.with_name("rewritten")
    shutil.rmtree(path, ignore_errors=True)
    copy_of(good, path)

    def replace(content: dict[str, Any]) -> None:
        at: Any = content
        while True:
            key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
                at[key] = node
                return
            at = at[key]

    reseal(path, replace)
    with suppress(CheckpointError):
        everything_of(path)


WATCHED = """
import json, os, resource, sys
from pathlib import Path
import torch
from eventbus_engine.errors import CheckpointError
from eventbus_engine.training.checkpoint import find_checkpoints, open_checkpoint

READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_DIRECTORY
HARMLESS = {"os.listdir", "os.scandir", "object.__getattr__", "builtins.id", "sys._getframe", "code.__new__"}
seen, watching = [], False

def watch(event, arguments):
    if not watching or event in HARMLESS or event.startswith("cpython.") or event.startswith("gc."):
        return
    if event == "open" and (arguments[1] in ("r", "rb") or (arguments[1] is None and not arguments[2] & ~READING)):
        return
    seen.append([event, str(arguments)[:200]])

def read(path):
    checkpoint = open_checkpoint(path)
    checkpoint.rank_values(0)
    checkpoint.read({"weight": torch.zeros(2, 3)})

root = Path(sys.argv[1])
read(root / "good")  # what is imported late is imported now
sys.addaudithook(watch)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
outcomes = {}
watching = True
read(root / "good")
find_checkpoints(root)
for path in sorted(root.iterdir()):
    if path.name != "good":
        try:
            read(path)
            outcomes[path.name] = "read"
        except CheckpointError:
            outcomes[path.name] = "refused"
watching = False
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"seen": seen, "outcomes": outcomes, "grown": grown // 1024}))
"""


def used(folder: Path) -> int:
    """Bytes on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def test_nothing_is_run_written_or_reached_by_a_checkpoint(good: Path, tmp_path: Path) -> None:
    """The interpreter's own account of what it does: nothing but reading, in memory and on the disk of a small one."""
    root = tmp_path / "root"
    copy_of(good, root / "good")
    for number, name in enumerate(HARMS):
        HARMS[name][0](copy_of(good, root / str(number)))
    mark, taken = tmp_path / "mark", used(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(root)],
        env=os.environ | {"EVENTBUS_TEST_MARK": str(mark)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)

    assert told["seen"] == []
    assert {name for name, outcome in told["outcomes"].items() if outcome != "refused"} == set()
    assert len(told["outcomes"]) == len(HARMS)
    assert told["grown"] < 400, "MiB"
    assert used(tmp_path) == taken
    assert not mark.exists()

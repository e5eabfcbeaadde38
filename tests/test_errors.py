"""The exception tree, and the public names."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import eventbus_engine
from eventbus_engine import (
    CallbackErrors,
    ConfigurationError,
    CycleError,
    DeadlockError,
    EventBusError,
    UnknownEventError,
    errors,
)


def drawn_tree() -> dict[str, tuple[str, set[str]]]:
    """Name to (parent, further bases), as the docstring of `errors` draws it."""
    tree: dict[str, tuple[str, set[str]]] = {}
    open_branches: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ([ │├└─]*)([A-Z]\w+)(?: \(([\w, ]+)\))?(?:  +\S|$)", line)
        if found:
            depth = len(found[1]) // 4
            name, bases = found[2], {base.strip() for base in (found[3] or "").split(",")} - {""}
            tree[name] = (open_branches[depth - 1] if depth else "Exception", bases)
            open_branches[depth:] = [name]
    return tree


def real_tree() -> dict[str, tuple[str, set[str]]]:
    """Name to (parent, further bases), as the classes have it."""
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
    return {cls.__name__: (cls.__bases__[0].__name__, {base.__name__ for base in cls.__bases__[1:]}) for cls in classes}


def test_the_tree_in_the_docstring_is_the_real_one() -> None:
    """Drawn once, checked for ever. A base that a drawn parent has already need not be drawn again."""
    drawn, real = drawn_tree(), real_tree()

    assert len(drawn) > 15
    assert {name: parent for name, (parent, _) in drawn.items()} == {name: parent for name, (parent, _) in real.items()}
    assert {name: bases for name, (_, bases) in drawn.items()} == {name: bases for name, (_, bases) in real.items()}


def test_the_public_names_are_sorted_and_there() -> None:
    """`__all__` says what is public, once each, sorted; everything in it exists."""
    names = eventbus_engine.__all__

    assert names == sorted(set(names))
    assert [name for name in names if not hasattr(eventbus_engine, name)] == []


def test_the_public_names_are_all_there_are() -> None:
    """What the package binds besides its submodules is public, and nothing else is."""
    submodules = {module.name for module in pkgutil.iter_modules(eventbus_engine.__path__)}
    bound = {name for name in vars(eventbus_engine) if not name.startswith("_")}

    assert bound - submodules <= set(eventbus_engine.__all__)
    assert set(eventbus_engine.__all__) <= bound


def test_every_error_is_public() -> None:
    """Who catches an error has to be able to name it."""
    assert set(real_tree()) <= set(eventbus_engine.__all__)


def test_every_module_has_the_names_in_its_all() -> None:
    """A `from module import *` that works, and no name twice."""
    found = [module.name for module in pkgutil.walk_packages(eventbus_engine.__path__, "eventbus_engine.")]
    names = {name: getattr(importlib.import_module(name), "__all__", []) for name in found if "__main__" not in name}

    missing = [f"{module}.{n}" for module, all_ in names.items() for n in all_ if not hasattr(sys.modules[module], n)]

    assert len(names) > 30
    assert missing == []
    assert [module for module, all_ in names.items() if len(all_) != len(set(all_))] == []


def test_the_package_has_no_logic_of_its_own() -> None:
    """`__init__` imports, and says what is public."""
    source = Path(eventbus_engine.__file__).read_text(encoding="utf-8")

    kinds = {type(node).__name__ for node in ast.parse(source).body[1:]}

    assert kinds <= {"Import", "ImportFrom", "Assign"}


def test_errors_carry_what_they_are_about() -> None:
    """For programs, besides the message for people."""
    assert CycleError("no", ["a", "b", "a"]).cycle == ("a", "b", "a")
    assert UnknownEventError("no", ["INIT"]).nearest == ("INIT",)
    assert UnknownEventError("no").nearest == ()
    assert DeadlockError("no", ["a waits for b"]).chain == ("a waits for b",)
    assert DeadlockError("no").chain == ()


@pytest.mark.parametrize("error", [CycleError("no", ["a", "a"]), UnknownEventError("no", ["x"]), DeadlockError("no")])
def test_errors_survive_pickling(error: EventBusError) -> None:
    """A process pool hands its failures back pickled."""
    copy = pickle.loads(pickle.dumps(error))

    assert (type(copy), str(copy), vars(copy)) == (type(error), "no", vars(error))


def test_callback_errors_keep_their_type_when_split() -> None:
    """`except*` takes groups apart, and the parts still are what they were."""
    group = CallbackErrors("2 callbacks failed", [ValueError("a"), KeyError("b")])

    matching, rest = group.split(ValueError)

    assert isinstance(matching, CallbackErrors)
    assert isinstance(rest, CallbackErrors)
    assert [str(error) for error in matching.exceptions] == ["a"]
    assert matching.message == "2 callbacks failed"


def test_an_error_of_configuration_is_caught_by_its_builtin_kind() -> None:
    """Who only knows the standard library's kinds of error catches ours by them."""
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(errors.HandlerTypeError, TypeError)
    assert issubclass(errors.HandlerTimeoutError, TimeoutError)

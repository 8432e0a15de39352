"""``late_dataclass``: what a class does that has its methods late, beside one of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import field
from threading import Barrier, Thread
from typing import Any

import pytest

from ddplaunch.late_dataclass import dataclass as late_dataclass
from ddplaunch.late_dataclass import make_constructors

OPTIONS = ({}, {"frozen": True}, {"frozen": True, "kw_only": True}, {"eq": False})


def classes(dataclass: Any, options: dict[str, bool]) -> tuple[Any, Any]:
    """A dataclass, and one that inherits from it."""

    @dataclass(**options)
    class Base:
        number: int
        text: str = "b"
        items: list[int] = field(default_factory=list, repr=False, compare=False)
        length: int = field(default=0, init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "length", len(self.items))

    @dataclass(**options)
    class Derived(Base):
        word: str = "d"

    return Base, Derived


def outcome(cls: Any, action: Callable[[Any], object]) -> object:
    try:
        result = action(cls)
        return repr(result) if dataclasses.is_dataclass(result) else result
    except Exception as error:
        return type(error), str(error)


ACTIONS: tuple[Callable[[Any], object], ...] = (
    lambda cls: str(inspect.signature(cls)),
    lambda cls: cls(number=1, text="t", items=[1, 2]),
    lambda cls: cls(1, "t", [1]),
    lambda cls: cls(),
    lambda cls: cls(number=1, other=2),
    lambda cls: (cls(number=1, items=[1]) == cls(number=1, items=[1]), cls(number=1) == cls(number=2)),
    lambda cls: (cls(number=1) == 1, cls(number=1) != 1),
    lambda cls: cls.__hash__ and cls.__hash__ is not object.__hash__ and hash(cls(number=1)) == hash(cls(number=1)),
    lambda cls: setattr(cls(number=1), "number", 2),
    lambda cls: setattr(cls(number=1), "other", 2),
    lambda cls: delattr(cls(number=1), "text"),
    lambda cls: dataclasses.replace(cls(number=1), number=2),
    lambda cls: dataclasses.asdict(cls(number=1)),
    lambda cls: copy.deepcopy(cls(number=1, items=[1])),
    lambda cls: cls.__match_args__,
    lambda cls: cls.__init__.__qualname__,
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_does_what_a_dataclass_does(options: dict[str, bool]) -> None:
    for number in range(len(ACTIONS)):
        expected = [outcome(cls, ACTIONS[number]) for cls in classes(dataclasses.dataclass, options)]
        assert [outcome(cls, ACTIONS[number]) for cls in classes(late_dataclass, options)] == expected
    used = classes(late_dataclass, options)  # Once more, with the methods that the actions before have made.
    for action in ACTIONS:
        expected = [outcome(cls, action) for cls in classes(dataclasses.dataclass, options)]
        assert [outcome(cls, action) for cls in used] == expected


@late_dataclass(frozen=True)
class Point:
    x: int
    y: int = 0


def is_made(cls: type, name: str) -> bool:
    """Whether the method is the standard library's: its name shows that."""
    return getattr(vars(cls)[name], "__qualname__", "").endswith(f"{cls.__qualname__}.{name}")


def test_an_error_while_a_method_is_made_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes an error of a look-up for "unhashable" or "not equal": Ctrl-C at that moment had no effect."""
    base, _ = classes(late_dataclass, {"frozen": True})
    one, other = base(1), base(1)

    def interrupt(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dataclasses, "dataclass", interrupt)
    for action in (lambda: hash(one), lambda: one == other, lambda: repr(one)):
        with pytest.raises(KeyboardInterrupt):
            action()


def test_a_method_is_made_when_it_is_used() -> None:
    assert pickle.loads(pickle.dumps(Point(1))) == Point(1)
    made = {name for name in ("__init__", "__eq__", "__hash__", "__repr__") if is_made(Point, name)}
    assert made == {"__init__", "__eq__"}


def test_the_first_use_may_be_in_several_threads() -> None:
    for _ in range(20):
        base, _ = classes(late_dataclass, {"frozen": True})
        barrier, made = Barrier(4), list[Any]()

        def make(base: Any = base, barrier: Barrier = barrier, made: list[Any] = made) -> None:
            barrier.wait()
            made.append(base(1, text="t"))

        threads = [Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [(one.number, one.text, one.items) for one in made] == [(1, "t", [])] * 4


def test_a_process_can_make_the_constructors_for_its_forks() -> None:
    @late_dataclass
    class Unused:
        x: int

    assert not is_made(Unused, "__init__")
    make_constructors()
    assert is_made(Unused, "__init__")
    assert not is_made(Unused, "__repr__")

"""``dataclass`` of the standard library, but a class gets its methods when they are first used.

Used in every process. The standard one compiles up to six methods for each class, which would take half of the time in
which the launcher and the agent load their modules; a run uses a quarter of the classes, and mostly their ``__init__``.
What a method does is left to the standard library. May be used in any thread.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NoReturn

__all__ = ["dataclass", "make_constructors"]

_OPTIONS = {"__init__": "init", "__repr__": "repr", "__eq__": "eq", "__hash__": "eq"}
"""Method -> the option of ``dataclasses.dataclass`` that has it made."""


_classes: list[type] = []


def make_constructors() -> None:
    """Make ``__init__`` of all classes, in a process whose forks use them."""
    for cls in _classes:
        vars(cls)["__init__"].__get__(None, cls)


class _LateInit:
    """Stands for ``__init__`` until it is looked up, to call or to inspect it: then it is made, and takes its place.

    Two threads may do that at the same time; both get a method that does the same.
    """

    def __init__(self, cls: type, *, frozen: bool) -> None:
        self._cls, self._frozen = cls, frozen

    def __get__(self, instance: object, owner: type) -> Any:
        return _made(self._cls, "__init__", frozen=self._frozen).__get__(instance, owner)


def _late(cls: type, name: str, *, frozen: bool) -> Any:
    """A method that is made, and replaced, when it is called.

    Not when it is looked up: Python takes an error at that moment, Ctrl-C included, for an object without the method.
    """

    def method(*args: Any) -> Any:
        return _made(cls, name, frozen=frozen)(*args)

    return method


def _made(cls: type, name: str, *, frozen: bool) -> Any:
    """Give ``cls`` its method: that of another dataclass with the same fields, for it depends on nothing else."""
    fields = vars(cls)["__dataclass_fields__"]
    # Without a docstring it would get its signature as one, which takes long.
    body = {**fields, "__annotations__": {name: field.type for name, field in fields.items()}, "__doc__": cls.__doc__}
    if hasattr(cls, "__post_init__"):
        body["__post_init__"] = cls.__post_init__
    options = {option: option == _OPTIONS[name] for option in _OPTIONS.values()}
    twin: type = dataclasses.dataclass(**options, frozen=frozen)(type(cls.__name__, (), body))
    method = twin.__dict__[name]
    method.__module__, method.__qualname__ = cls.__module__, f"{cls.__qualname__}.{name}"
    setattr(cls, name, method)
    return method


def _refuse_to_set(self: object, name: str, value: object) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: object, name: str) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, /, *, frozen: bool = False, kw_only: bool = False, eq: bool = True) -> Any:
        """As ``dataclasses.dataclass``, with those of its options that are used here."""
        if cls is None:
            return lambda decorated: dataclass(decorated, frozen=frozen, kw_only=kw_only, eq=eq)
        _classes.append(cls)
        cls.__doc__ = cls.__doc__ or cls.__name__  # Otherwise its signature, which needs ``__init__``.
        dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
        cls.__init__ = _LateInit(cls, frozen=frozen)
        own_repr = "__repr__" in vars(cls)
        for name in (*(() if own_repr else ("__repr__",)), *(("__eq__", "__hash__") if eq else ())):
            setattr(cls, name, _late(cls, name, frozen=frozen))
        if frozen:
            cls.__setattr__, cls.__delattr__ = _refuse_to_set, _refuse_to_delete
        elif eq:
            cls.__hash__ = None
        return cls

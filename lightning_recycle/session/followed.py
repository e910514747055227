"""How a hook's new number or tensor came from the old one: whether it was added to, appended to, or something else.

Concept: a hook that sees the output of one micro-batch runs on the worker that computed it, and what it did to a number
must be repeated on all others. ``self.seen += 8`` can be; ``self.best = max(self.best, x)`` cannot, as the old value
lacks what other workers have seen. Both only bind a new number. So while a hook runs, numbers are *followed*: they are
instances of a class that passes sums on and remembers any other use; a mode of torch does the same for tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

__all__ = ["Followed", "Origin"]


class Origin(Enum):
    """How a value came from a followed one."""

    SUM = "sum"  # the followed value, and what was added to it
    ITEM = "item"  # the same of a part of it
    CONCATENATION = "concatenation"  # the followed tensor, and further rows


_SUMS = {"add", "__add__", "__radd__", "__iadd__", "add_", "sub", "__sub__", "__isub__", "sub_", "subtract"}
_ADD_IN_PLACE = {"index_add_", "scatter_add_"}
_COPIES = {"to", "cpu", "cuda", "detach", "clone", "contiguous", "double", "float"}
_PARTS = {"__getitem__", "select", "narrow", "view", "reshape", "flatten"}
_OVERWRITE = {
    "__setitem__",
    "copy_",
    "fill_",
    "zero_",
    "index_copy_",
    "index_fill_",
    "masked_fill_",
    "scatter_",
    "index_put_",
}
_CONCATENATE = {"cat", "concat", "concatenate"}
_SAY_NOTHING = {"__get__", "__set__", "__len__", "__repr__", "__format__", "size", "dim", "numel", "is_floating_point"}
_READS = [
    "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__",
    "__pow__", "__rpow__", "__rsub__", "__neg__", "__abs__", "__round__", "__bool__", "__lt__", "__le__", "__gt__",
    "__ge__", "__eq__", "__ne__",
]  # fmt: skip


class Followed(TorchFunctionMode):
    """Follows numbers and tensors while a hook runs in the mode; places are named by numbers of the caller's choice.

    Attributes:
        read: the places whose values were used for more than sums, copies and parts.
        overwritten: the places of tensors into which something was written without regard to what was there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()
        self.overwritten: set[int] = set()
        self._tensors: dict[int, tuple[Tensor, int, Origin]] = {}  # by id; holds them, so that ids stay theirs

    def follow_number(self, value: int | float, place: int) -> int | float:
        """``value`` as a number that is followed."""
        kind = _FollowedInt if isinstance(value, int) else _FollowedFloat
        return kind.of(value, self, place)  # type: ignore[no-any-return]

    def follow_tensor(self, value: Tensor, place: int, origin: Origin = Origin.SUM) -> None:
        self._tensors[id(value)] = (value, place, origin)

    def origin(self, value: Any) -> tuple[int, Origin] | None:
        """The place that ``value`` comes from, and how; None if from none."""
        if isinstance(value, (_FollowedInt, _FollowedFloat)):
            return value.place, Origin.SUM
        _, place, origin = self._tensors.get(id(value), (None, -1, Origin.SUM))
        return None if place < 0 else (place, origin)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in _SAY_NOTHING:
            used = [(argument, *origin) for argument in _flat([args, kwargs]) if (origin := self.origin(argument))]
            if used:
                self._note(name, args, kwargs or {}, used, result)
        return result

    def _note(
        self, name: str, args: Any, kwargs: dict[str, Any], used: list[tuple[Any, int, Origin]], result: Any
    ) -> None:
        value, place, origin = used[0]
        alone = len(used) == 1
        first = bool(args) and args[0] is value
        if name in _SUMS and alone and (first or (name.strip("_") in ("add", "radd") and "alpha" not in kwargs)):
            self.follow_tensor(result, place, origin)
        elif name in (_COPIES | _PARTS) and first and alone:
            self.follow_tensor(result, place, origin if name in _COPIES else Origin.ITEM)
        elif first and alone and (name in _ADD_IN_PLACE or (name == "index_put_" and _accumulates(args, kwargs))):
            pass
        elif name in _CONCATENATE and alone and _is_first_of_rows(value, args, kwargs):
            self.follow_tensor(result, place, Origin.CONCATENATION)
        elif name == "__setitem__" and first and len(used) == 2 and used[1][1:] == (place, Origin.ITEM):
            pass  # x[i] += y
        elif name in _OVERWRITE and first and alone:
            self.overwritten.add(place)
        else:
            self.read.update(place for _, place, _ in used)


def _is_first_of_rows(value: Tensor, args: Any, kwargs: dict[str, Any]) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return dim == 0 and bool(args) and isinstance(args[0], (list, tuple)) and args[0][0] is value


def _accumulates(args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("accumulate", args[3] if len(args) > 3 else False))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _followed(base: type) -> Any:
    """The class of followed numbers of the class ``base``; they are numbers of that class."""

    class FollowedNumber(base):
        plain: Any
        followed: Followed
        place: int
        __hash__ = base.__hash__

        @classmethod
        def of(cls, plain: Any, followed: Followed, place: int) -> Any:
            number = cls(plain)
            number.plain, number.followed, number.place = plain, followed, place
            return number

        def __add__(self, other: Any) -> Any:
            if isinstance(other, Tensor):
                return NotImplemented  # the mode sees the tensor's own method
            return self._passed_on(self.plain + getattr(other, "plain", other))

        __radd__ = __add__

        def __sub__(self, other: Any) -> Any:
            if isinstance(other, Tensor):
                return NotImplemented
            return self._passed_on(self.plain - getattr(other, "plain", other))

        def _passed_on(self, value: Any) -> Any:
            if isinstance(value, (int, float)):
                return self.followed.follow_number(value, self.place)
            self.followed.read.add(self.place)
            return value

        def __int__(self) -> int:
            self.followed.read.add(self.place)
            return int(self.plain)

        def __float__(self) -> float:
            self.followed.read.add(self.place)
            return float(self.plain)

        def __reduce__(self) -> Any:
            return base, (self.plain,)

    for name in _READS:
        setattr(FollowedNumber, name, _reading(name, base))
    return FollowedNumber


def _reading(name: str, base: type) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        self.followed.read.add(self.place)
        return getattr(base, name)(self, *args)

    return method


_FollowedInt, _FollowedFloat = _followed(int), _followed(float)

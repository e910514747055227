"""How many numbers an action writes to tensors."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_T = TypeVar("_T")
_WRITES_NOTHING = ("empty", "view", "slice", "split", "detach", "as_strided", "alias")


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not name.startswith(_WRITES_NOTHING):
            changed = args[0] if name.startswith("_foreach") else result
            self.count += sum(leaf.numel() for leaf in tree_leaves(changed) if isinstance(leaf, Tensor))
        return result


def written(action: Callable[[], _T]) -> tuple[_T, int]:
    """What ``action`` returns, and how many numbers it has written."""
    with _Counting() as counting:
        result = action()
    return result, counting.count

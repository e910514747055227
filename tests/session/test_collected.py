"""What hooks collect in a module's attributes is noticed, taken back, and repeated."""

import copy
import pickle
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_recycle import PipelineModule, UnsupportedFeatureError
from lightning_recycle.session.collected import Collected


class Meter:
    """A user's own class."""

    def __init__(self) -> None:
        self.sum, self.count, self.values = 0.0, 0, []  # type: ignore[var-annotated]

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1
        self.values.append(value)


class Collecting(PipelineModule):
    """Attributes of all kinds that hooks may change."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.nested: list[list[int]] = [[], []]
        self.by_class: dict[int, list[float]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.seen, self.total, self.best = 0, 0.0, 0.0
        self.correct = torch.zeros((), dtype=torch.long)
        self.register_buffer("confusion", torch.zeros(3, 3))
        self.table = torch.zeros(6)
        self.rows = torch.zeros(0, 2)
        self.names: set[str] = set()
        self.queue: deque[int] = deque()
        self.recent: deque[int] = deque(maxlen=2)
        self.stats = {"n": 0, "loss": 0.0}
        self.meter = Meter()
        self.array = np.zeros(2)
        self.example: Any = None
        self.means = {"a": MeanMetric()}

    def rebinds(self) -> None:  # the numbers that hooks below bind anew
        self.seen = self.total = self.best = 0  # type: ignore[assignment]


def appends(m: Any, i: int) -> None:
    m.outputs.append(torch.tensor([float(i)]))
    m.outputs += [{"i": torch.tensor(i)}]


def nests(m: Any, i: int) -> None:
    m.nested[i % 2].append(i)
    m.by_class[i % 2].append(float(i))
    m.counts["all"] += 1
    m.counts[f"of {i}"] += i


def rebinds_a_list(m: Any, i: int) -> None:
    m.outputs = [*m.outputs, i]
    m.outputs = m.outputs + [2 * i]  # noqa: RUF005


def counts(m: Any, i: int) -> None:
    m.seen += i
    m.seen += 1
    m.total = m.total + 0.5 * i
    m.stats["n"] += i
    m.stats["loss"] -= 0.25 * i


def adds_tensors_to_numbers(m: Any, i: int) -> None:
    m.total += torch.tensor(0.5) * i
    m.total = torch.tensor(0.25) + m.total


def adds_to_tensors(m: Any, i: int) -> None:
    m.correct += (torch.arange(3) < i).sum()
    m.correct = m.correct + 1
    m.confusion[i % 3, 1] += 1
    m.confusion[0] += torch.ones(3)
    m.confusion = m.confusion.to("cpu").add(torch.eye(3))
    m.confusion.index_put_((torch.tensor([1, 1]), torch.tensor([2, 2])), torch.ones(()), accumulate=True)
    m.confusion.index_add_(0, torch.tensor([i % 3]), torch.ones(1, 3))


def writes(m: Any, i: int) -> None:
    m.table[i] = 1.0 + i


def concatenates(m: Any, i: int) -> None:
    m.rows = torch.cat([m.rows, torch.full((i, 2), float(i))])


def updates_sets_and_queues(m: Any, i: int) -> None:
    m.names |= {f"n{i % 2}"}
    m.names.add("always")
    m.queue.append(i)


def uses_a_meter(m: Any, i: int) -> None:
    m.meter.update(0.5 * i)


def assigns(m: Any, i: int) -> None:
    m.example = torch.tensor([i, i])
    m.best = 7.0


def creates(m: Any, i: int) -> None:
    if not hasattr(m, "lazy"):
        m.lazy = []
    m.lazy.append(i)
    m.stats[f"key {i}"] = i
    m.meter.last = "x"


def looks(m: Any, i: int) -> None:
    assert m.best < 1
    assert not m.stats["n"]
    assert m.confusion.sum() == len(m.outputs) == 0


HOOKS = [
    appends, nests, rebinds_a_list, counts, adds_tensors_to_numbers, adds_to_tensors, writes, concatenates,
    updates_sets_and_queues, uses_a_meter, assigns, creates, looks,
]  # fmt: skip


def plain(value: Any) -> Any:
    """``value`` as nested lists and numbers, to compare."""
    if isinstance(value, (Tensor, np.ndarray)):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [plain(item) for item in value]
    return plain(vars(value)) if isinstance(value, Meter) else value


def attributes(module: Any) -> dict[str, Any]:
    left_out = ("means", "_buffers", "_modules", "_parameters", "recorded_logs")
    found = {**vars(module), **module._buffers}
    return {k: plain(v) for k, v in found.items() if k not in left_out and not k.startswith("_")}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_what_is_repeated_equals_what_is_done_in_one_place(hook: Callable[[Any, int], None], inference: bool) -> None:
    one, first, second, third = (Collecting() for _ in range(4))
    before = attributes(first)
    workers = [Collected(first), Collected(second), Collected(third)]
    for step in range(2):
        with torch.inference_mode(inference):
            at_start = copy.deepcopy(before) if step == 0 else attributes(first)
            records = []
            for i in range(4):
                hook(one, i) if hook is not looks or not step else None
                with workers[i % 2].noticed() as changes:
                    hook([first, second][i % 2], i)
                records.append(pickle.loads(pickle.dumps(changes)))
            assert attributes(first) == attributes(second) == at_start, "it was not taken back"
            for worker in workers:
                worker.repeat(copy.deepcopy(records))
    assert attributes(first) == attributes(second) == attributes(third) == attributes(one)
    assert all(type(m.seen) is int and type(m.stats["n"]) is int for m in (first, third))
    joined = Collecting()
    joiner = Collected(joined)
    joiner.load_state(pickle.loads(pickle.dumps(workers[0].state())))
    assert attributes(joined) == attributes(one)
    assert joiner.names == workers[0].names


def keeps_the_best(m: Any, i: int) -> None:
    m.best = max(m.best, float(i))


def averages(m: Any, i: int) -> None:
    m.total = 0.9 * m.total + 0.1 * i


def averages_in_place(m: Any, i: int) -> None:
    m.table.mul_(0.5).add_(1)


def divides(m: Any, i: int) -> None:
    m.stats["loss"] = (m.stats["loss"] + i) / 2


def keeps_the_largest(m: Any, i: int) -> None:
    m.table = torch.maximum(m.table, torch.full((6,), 1.0 + i))


def clears(m: Any, i: int) -> None:
    m.by_class.clear()


def slides(m: Any, i: int) -> None:
    m.outputs = [*m.outputs[1:], i]


def removes(m: Any, i: int) -> None:
    m.outputs.pop()


def forgets(m: Any, i: int) -> None:
    m.recent.append(i)


def changes_an_array(m: Any, i: int) -> None:
    m.array += 1


def updates_a_hidden_metric(m: Any, i: int) -> None:
    m.means["a"].update(i)


REFUSED = {
    keeps_the_best: "self.best", averages: "self.total", averages_in_place: "self.table",
    divides: "self.stats['loss']", keeps_the_largest: "self.table", clears: "self.by_class",
    removes: "self.outputs", slides: "self.outputs", forgets: "self.recent", changes_an_array: "self.array",
    updates_a_hidden_metric: "self.means['a']",
}  # fmt: skip


@pytest.mark.parametrize("hook", REFUSED)
def test_what_depends_on_other_micro_batches_is_told(hook: Callable[[Any, int], None]) -> None:
    module = Collecting()
    module.outputs, module.by_class[0], module.recent = [1, 2], [2.0], deque([1, 2], maxlen=2)
    with pytest.raises(UnsupportedFeatureError) as caught, Collected(module).noticed():
        hook(module, 1)
    assert f"changed {REFUSED[hook]}" in str(caught.value)
    assert "torchmetrics" in str(caught.value)


def test_a_list_with_two_names_is_one_list() -> None:
    module = Collecting()
    module.outputs = module.nested[0] = [1, 2]  # type: ignore[assignment]
    with Collected(module).noticed() as changes:
        module.outputs.append(3)
    assert [(change.kind.value, change.value) for change in changes] == [("extend", [3])]
    assert module.nested[0] == [1, 2]


def test_a_large_tensor_may_get_rows_but_is_not_followed_in_place() -> None:
    module = Collecting()
    module.rows = large = torch.zeros(40_000, 2)
    with Collected(module).noticed() as changes:
        module.rows = torch.cat([module.rows, torch.ones(1, 2)])
    assert module.rows is large
    assert [change.value.tolist() for change in changes] == [[[1.0, 1.0]]]
    too_large = r"changed self\.rows: a tensor of 80,000 elements is too large"
    with pytest.raises(UnsupportedFeatureError, match=too_large), Collected(module).noticed():
        module.rows[3] += 1


def test_what_merges_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    module = Collecting()
    collected = Collected(module)
    for hook in (nests, creates):
        records = []
        for i in range(3):
            with collected.noticed() as changes:
                hook(module, i)
            records.append(changes)
        collected.repeat(records)
    assert not [warning for warning in recwarn if "assigned" in str(warning.message)]


def test_an_attribute_that_each_micro_batch_assigns_is_told(recwarn: pytest.WarningsRecorder) -> None:
    module = Collecting()
    collected = Collected(module)
    records = []
    for i in range(2):
        with collected.noticed() as changes:
            module.example = torch.tensor(i) if module.example is None else module.example + i
        records.append(changes)
    collected.repeat(records)
    assert any("self.example was assigned" in str(warning.message) for warning in recwarn)


def fails(m: Any, i: int) -> None:
    counts(m, i)
    appends(m, i)
    adds_to_tensors(m, i)
    raise ZeroDivisionError


def test_the_users_error_leaves_the_module_as_it_was() -> None:
    module = Collecting()
    before = attributes(module)
    with pytest.raises(ZeroDivisionError), Collected(module).noticed():
        fails(module, 2)
    assert attributes(module) == before
    assert type(module.seen) is int

"""Side effects of hooks on a module's attributes: what reaches all workers, and what stays."""

import copy
import pickle
from collections import defaultdict, deque
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_recycle import PipelineModule
from lightning_recycle.session.microbatch_changes import MicrobatchChanges
from lightning_recycle.session.object_graph import ObjectGraph


class Guarded:
    """Takes no attributes after its creation, as a configuration in struct mode; reads write to a cache."""

    def __init__(self) -> None:
        vars(self).update(values={"lr": 0.1}, cache=None)

    def __getattr__(self, name: str) -> Any:
        vars(self)["cache"] = name
        return self.values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


class Collecting(PipelineModule):
    """Attributes of all kinds that hooks may change."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.by_class: dict[int, list[float]] = defaultdict(list)
        self.queue: deque[int] = deque()
        self.recent: deque[int] = deque([8, 9], maxlen=2)
        self.seen, self.steps, self.best = 0, 0, 0.0
        self.names: set[str] = set()
        self.table = torch.zeros(6)
        self.hidden: Any = None
        self.config = Guarded()


def appends(m: Any, i: int) -> None:
    m.outputs.append(torch.tensor([float(i)]))
    m.outputs += [{"i": torch.tensor(i)}]
    m.queue.append(i)


def nests(m: Any, i: int) -> None:
    m.by_class[i % 2].append(float(i))


def rebinds(m: Any, i: int) -> None:
    m.outputs = [*m.outputs, i]


def creates(m: Any, i: int) -> None:
    if not hasattr(m, "lazy"):
        m.lazy = []
    m.lazy.append(i)


def plain(value: Any) -> Any:
    """``value`` as nested lists and numbers, to compare."""
    if isinstance(value, Tensor):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple, deque)) else value


def attributes(module: Any) -> dict[str, Any]:
    left_out = ("recorded_logs", "config")
    return {k: plain(v) for k, v in vars(module).items() if k not in left_out and not k.startswith("_")}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("hook", [appends, nests, rebinds, creates])
def test_appended_items_reach_all_workers_in_order(hook, inference):
    one, first, second, third = (Collecting() for _ in range(4))
    workers = [MicrobatchChanges(module) for module in (first, second, third)]
    for _ in range(2):
        with torch.inference_mode(inference):
            at_start, records = copy.deepcopy(attributes(first)), []
            for i in range(4):
                hook(one, i)
                with workers[i % 2].noticed() as effects:
                    hook([first, second][i % 2], i)
                records.append(pickle.loads(pickle.dumps(effects)))
            assert attributes(first) == attributes(second) == at_start, "they were not taken back"
            for worker in workers:
                worker.repeat(dict(enumerate(records)), on_step=False)
    assert attributes(first) == attributes(second) == attributes(third) == attributes(one)
    joined = Collecting()
    ObjectGraph({"module": joined}, {}).update(ObjectGraph({"module": first}, {}).pack(), torch.device("cpu"))
    MicrobatchChanges(joined).load_state(pickle.loads(pickle.dumps(workers[0].state())))
    assert attributes(joined) == attributes(one)


def changes_much(m: Any, i: int) -> None:
    m.seen += i
    m.best = max(m.best, float(i))
    m.names.add("x")
    m.table[i] += 1
    m.recent.append(i)
    m.by_class = {3: [1.0]}
    assert m.config.lr == 0.1


def test_the_rest_stays_on_its_worker():
    module, alone = Collecting(), Collecting()
    effects = MicrobatchChanges(module)
    for i in range(2):
        changes_much(alone, i)
        with effects.noticed() as found:
            changes_much(module, i)
        assert found == []
    assert attributes(module) == attributes(alone)
    assert effects.keeps_shares


class Totals(L.LightningModule):
    seen = 0


@pytest.mark.parametrize("inference", [False, True])
def test_stages_take_over_numbers_and_the_tensors_that_steps_change(inference):
    last, first = Totals(), Totals()
    effects, others = (MicrobatchChanges(module) for module in (last, first))
    for module in (last, first):
        with torch.inference_mode(inference):  # as hooks of an evaluation run
            module.confusion = torch.zeros(2)
            module.by_kind = {"a": [torch.zeros(2)]}
        module.average = [parameter.clone() for parameter in (torch.ones(3), torch.ones(2))]
    for i in range(2):
        with effects.noticed(), torch.inference_mode(inference):
            last.confusion += 1.0
            last.by_kind["a"][0] += i
            last.seen += 3
        last.average[0] += 1.0
    joined = MicrobatchChanges(last)
    joined.load_state(effects.state())
    assert joined.shares() == effects.shares()
    others.load_shares(effects.shares())
    assert (first.confusion.tolist(), first.by_kind["a"][0].tolist(), first.seen) == ([2.0, 2.0], [1.0, 1.0], 6)
    assert first.average[0].tolist() == [1.0, 1.0, 1.0], "hooks run on all stages"


def test_an_item_that_cannot_be_pickled_stays_and_is_told(recwarn):
    module = Collecting()
    with MicrobatchChanges(module).noticed() as effects:
        module.outputs.append(lambda: None)
    assert effects == []
    assert len(module.outputs) == 1
    assert any("self.outputs" in str(warning.message) for warning in recwarn)


def keeps(m: Any, i: int) -> None:
    m.hidden = torch.full((1,), float(i)) if m.hidden is None else m.hidden + i


@pytest.mark.parametrize("of_worker", [1, 2])
def test_each_microbatch_keeps_its_own_tensors_and_a_hook_resets_all(of_worker, recwarn):
    module = Collecting()
    effects = MicrobatchChanges(module, microbatches=2, of_worker=of_worker)
    for step in range(2):
        effects.begin_step(step)
        records = {}
        for index in (0, 1):
            for _ in range(2):  # as if the step ran again
                with effects.microbatch(index) as found:
                    keeps(module, index + 1)
                    module.seen, module.steps = module.seen + 4, module.steps + 1
            records[index] = found.effects
        effects.ends_step()
        effects.repeat(records, on_step=True)
        assert module.hidden.tolist() == [2.0 * (step + 1)]
        with effects.again(0):
            assert module.hidden.tolist() == [1.0 * (step + 1)]
        with effects.as_in_step(step), effects.again(1):
            assert module.hidden is None if step == 0 else module.hidden.tolist() == [2.0]
        assert module.hidden.tolist() == [2.0 * (step + 1)]
    module.hidden = None
    effects.begin_step(2)
    assert not effects.by_microbatch
    assert [str(each.message).split()[0] for each in recwarn] == ["seen", "hidden"] * (of_worker - 1), "maybe sums"


def test_the_users_error_leaves_lists_as_they_were():
    module = Collecting()

    def fails() -> None:
        appends(module, 1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), MicrobatchChanges(module).noticed():
        fails()
    assert module.outputs == []

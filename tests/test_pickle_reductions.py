"""Pickles between processes that do the same work keep hooks, shared memory, parametrizations and mapped files."""

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized

from lightning_recycle.pickling import MainModule, MainPickler


def _again(value: Any) -> Any:
    file = io.BytesIO()
    MainPickler(file, MainModule(imported=True)).dump(value)
    return pickle.loads(file.getvalue())


def _add_one(layer: nn.Linear) -> None:
    layer.weight.grad.add_(1)


def test_tensors_that_share_memory_still_do():
    flat = torch.arange(12.0)
    weight = nn.Parameter(flat[4:10].view(2, 3))
    weight.kind = "matrix"
    other_flat, other_weight, transposed, alone = _again([flat, weight, flat.view(3, 4).t(), flat[:2].clone()])
    other_flat.mul_(2)
    assert torch.equal(other_weight, 2 * weight)
    assert isinstance(other_weight, nn.Parameter)
    assert other_weight.kind == "matrix"
    assert torch.equal(transposed, 2 * flat.view(3, 4).t())
    assert torch.equal(alone, flat[:2])
    assert other_flat.resize_(20).numel() == 20  # its memory is its own


def test_functions_that_share_variables_still_do():
    count, items = 0, [1]

    def advance() -> Any:
        nonlocal count
        count += 1
        items.append(count)
        return found  # which hold each other

    def found() -> Any:
        return count, items, advance

    if count:
        later = 1

    def has_no_value() -> int:
        return later

    advance()
    other_found, other_advance, other_has_no_value = _again((found, advance, has_no_value))
    assert other_advance() is other_found
    assert other_found() == (2, [1, 1, 2], other_advance)
    assert found() == (1, [1, 1], advance)
    with pytest.raises(NameError, match="later"):
        other_has_no_value()


def test_a_parameter_without_a_shape_keeps_its_dtype():
    layer = _again(nn.LazyBatchNorm1d().double())
    assert {tensor.dtype for tensor in (layer.weight, layer.running_mean)} == {torch.float64}
    assert layer(torch.ones(2, 3, dtype=torch.float64)).shape == (2, 3)


def test_hooks_of_parameters_come_along_and_can_be_removed():
    layer = nn.Linear(2, 1, bias=False)
    handle = layer.weight.register_hook(lambda gradient: gradient * 3)
    seen = [layer]  # a hook may refer to what it belongs to
    layer.weight.register_post_accumulate_grad_hook(lambda _: _add_one(seen[0]))
    other, other_handle = _again((layer, handle))
    other(torch.ones(1, 2)).sum().backward()
    assert other.weight.grad.tolist() == [[4.0, 4.0]]
    other_handle.remove()
    other(torch.ones(1, 2)).sum().backward()
    assert other.weight.grad.tolist() == [[6.0, 6.0]]  # 4 + 1 + 1


def test_parametrized_modules_are_parametrized_again():
    layer = parametrizations.weight_norm(nn.Linear(3, 2))
    other = _again(layer)
    assert is_parametrized(other, "weight")
    assert torch.equal(other.weight, layer.weight)
    assert other.state_dict().keys() == layer.state_dict().keys()
    torch.nn.utils.parametrize.remove_parametrizations(other, "weight")
    assert type(other) is nn.Linear


@pytest.mark.parametrize("order", ["C", "F"])
def test_mapped_files_are_mapped_again(tmp_path, order):
    path = tmp_path / "data"
    array = np.memmap(path, dtype=np.int64, mode="w+", offset=16, shape=(50, 40), order=order)
    array[:] = np.arange(2000).reshape(50, 40)
    array.flush()
    view, reversed_view = array[10:40:3, ::2], np.asarray(array)[::-1, 1]
    file = io.BytesIO()
    MainPickler(file, MainModule(imported=True)).dump((array, view, reversed_view))
    assert len(file.getvalue()) < 2000
    other, other_view, other_reversed = pickle.loads(file.getvalue())
    for mine, its in ((array, other), (view, other_view), (reversed_view, other_reversed)):
        assert np.array_equal(mine, its)
    other[10, 0] = -1
    assert array[10, 0] == other_view[0, 0] == -1  # the same memory of the same file


def test_what_is_in_no_file_is_in_the_pickle(tmp_path):
    path = tmp_path / "data"
    np.arange(100).tofile(path)
    private = np.memmap(path, dtype=np.int64, mode="c")
    private[0] = 7  # not in the file
    gone = np.memmap(path, dtype=np.int64, mode="r")
    private_again = _again(private)
    path.unlink()
    assert private_again[0] == 7
    assert np.array_equal(_again(gone), np.arange(100))

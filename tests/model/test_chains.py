"""Which submodules are taken for the chain of a module, and what is said where that is not clear."""

import pytest
from torch import nn

from lightning_recycle import ConfigurationError, ReCycleStrategy
from lightning_recycle.model.chains import find_chain


def linears(count: int, width: int = 4) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(count)]


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*linears(3), nn.ReLU(), nn.Flatten())
        self.small = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.metrics = nn.ModuleList([nn.Identity()] * 3)


class Language(nn.Module):
    """As nanoGPT's."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(100, 64), "h": nn.ModuleList(nn.Sequential(*linears(4)) for _ in range(2))}
        )


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*linears(3))
        self.decoder = nn.Sequential(*linears(4))


class Outer(nn.Module):
    """The outermost container has too few entries."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Sequential(*linears(4)), nn.Linear(4, 2))


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = linears(2)
        self.same = self.one
        self.table = nn.ModuleDict({"a": nn.Linear(2, 2)})


def test_the_container_with_most_parameters_is_found():
    assert find_chain(Vision(), 2).paths == ("net.0", "net.1", "net.2", "net.3", "net.4")
    assert find_chain(Language(), 2).paths == ("transformer.h.0", "transformer.h.1")
    assert find_chain(Outer(), 2).paths == ("parts.0", "parts.1")
    assert find_chain(Outer(), 3).paths == ("parts.0.0", "parts.0.1", "parts.0.2", "parts.0.3")


def test_containers_that_are_named_stand_for_their_entries():
    paths = find_chain(AutoEncoder(), 2, ["encoder", "decoder.0", "decoder.2"]).paths
    assert paths == ("encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.2")
    assert find_chain(AutoEncoder(), 2, "decoder").paths == ("decoder.0", "decoder.1", "decoder.2", "decoder.3")


def test_layers_of_a_sequence_get_the_whole_of_a_tuple():
    assert find_chain(AutoEncoder(), 2, ["encoder.0", "encoder.1", "decoder.0"]).whole == (True, False)
    assert find_chain(Language(), 2).whole == (False,)


@pytest.mark.parametrize(("module", "pipeline", "words"), [
    (AutoEncoder, None, ["AutoEncoder", "several places", "'encoder' (60 parameters)", "'decoder' (80 parameters)"]),
    (Alone, None, ["Alone", "no nn.Sequential or nn.ModuleList of at least 2 layers", "PipelineModule"]),
    (Alone, "three", ["layers='three'", "Alone has no submodule", "It has one, two", "__init__"]),
    (Alone, "one", ["names 1 layer of Alone, fewer than pipeline_parallel_size=2 stages: one"]),
    (Alone, ["one", "same"], ["one and same of Alone are the same module"]),
    (Alone, "table", ["'table' is an nn.ModuleDict", "order"]),
    (Vision, ["small.0", "net", "net.2"], ["net.2", "the same module"]),
    (Outer, ["parts", "parts.0.1"], ["names 'parts.0'", "'parts.0.1' within it"]),
])  # fmt: skip
def test_what_is_no_chain_is_refused_with_the_remedy(module, pipeline, words):
    with pytest.raises(ConfigurationError) as caught:
        find_chain(module(), 2, pipeline)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("pipeline", ["", [], [1], {"a": 1}, 3, [""]], ids=repr)
def test_the_option_is_a_path_or_a_list_of_paths(pipeline):
    with pytest.raises(ConfigurationError, match=r"layers=.*give the path of a submodule"):
        ReCycleStrategy(layers=pipeline)

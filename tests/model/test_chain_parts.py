"""The stages of an ordinary module, one after another in this process: gradients are those of the whole."""

import copy
import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from support.stages import CPU, SEED, STEP, train_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_recycle import ConfigurationError
from lightning_recycle.devices import saved_tensors
from lightning_recycle.model import chains
from lightning_recycle.model.chain_parts import ChainParts
from lightning_recycle.model.recorded_module import make_recorded, redirect_forward, restore_class, restore_forward
from lightning_recycle.randomness import derive_seed
from lightning_recycle.runtime.stage import Stage

WIDTH = 6


class NoRecorder:
    @contextmanager
    def recording(self) -> Iterator[Any]:
        yield SimpleNamespace(result=None)


class Model(L.LightningModule):
    """Steps of tests; ``batch`` is (numbers, targets)."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self(batch[0]), batch)


class Plain(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(WIDTH, WIDTH), 0.5

    def forward(self, x: Tensor, mask: Tensor | None = None, *, gain: float = 1.0) -> Tensor:
        y = x + gain * torch.tanh(self.linear(x))
        return y if mask is None else y * mask


class Transformer(Model):
    """Something before and after the layers, which share it; arguments besides; parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.position = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.position
        mask = torch.sigmoid(self.position)  # requires a gradient, too
        for index, block in enumerate(self.blocks):
            h = block(h, mask, gain=1.0 + index * block.factor)
        return self.head(self.norm(h))


class AroundTheChain(Transformer):
    """What enters the chain is used again behind it."""

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.embed(x)
        for block in self.blocks:
            h = block(x=h)
        return self.head(h + first) + x * self.position


class Tuples(Model):
    """Layers that return more than what goes on."""

    def __init__(self) -> None:
        super().__init__()

        class Layer(Block):
            def forward(self, x: Tensor) -> Any:
                return super().forward(x), None, x.detach()

        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for layer in self.layers:
            x, nothing, more = layer(x)
            assert nothing is None
            seen.append(more)
        return x


class WholeTuples(Model):
    """A sequence whose layers pass a pair."""

    def __init__(self) -> None:
        super().__init__()

        class Layer(Block):
            def forward(self, pair: Any) -> Any:
                return super().forward(pair[0]), pair[1] + pair[0].mean()

        self.net = nn.Sequential(Layer(), Layer(), Layer())

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.net((x, x.sum()))
        return one * other


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return scale * x


class Stacked(Model):
    """The chain is within a submodule that does more, as models of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, scale=0.5)


class Shared(Transformer):
    """Each block has the same module in it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        for block in self.blocks:
            block.linear = self.last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))


class Scaled(Transformer):
    """Parameters outside the chain that single layers are given."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(())) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            h = block(h, scale)
        return self.head(h)


class Mixed(Transformer):
    """Draws from the generators of Python and NumPy, before the chain, for what is used behind it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = np.random.beta(0.4, 0.4) + random.random()
        other = torch.randperm(len(batch[0]))
        x = weight * batch[0] + (1 - weight) * batch[0][other]
        output = self(x)
        return weight * self.loss(output, batch) + (1 - weight) * self.loss(output[other], batch)


class Checkpointed(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.embed(x)) + torch.randn(WIDTH)
        for block in self.blocks:
            h = self.run(block, h)
        return self.drop(self.head(h))

    def run(self, block: nn.Module, h: Tensor) -> Tensor:
        return checkpoint(block, h, use_reentrant=False)


class Drawn(Checkpointed):
    def run(self, block: nn.Module, h: Tensor) -> Tensor:
        return block(h)


class Expert(nn.Module):
    """Keeps a loss in an attribute, another one in a list that all share, and some in a list and a dict of its own,
    which it makes in each call.
    """

    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.linear, self.losses = nn.Linear(WIDTH, WIDTH), losses
        self.balance: Any = 0.0
        self.parts: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.balance = y.square().mean()
        self.losses.append(y.mean(0).norm())
        self.parts = [y.mean(), y.var()]
        self.undeclared = {"norm": y.norm()}
        return y


class ExpertBlock(Block):
    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.expert = Expert(losses)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, gain: float = 1.0) -> Tensor:
        return self.expert(super().forward(x, mask, gain=gain)) + x


class KeepsBeside(Transformer):
    """The loss adds what layers and hooks keep beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.features: dict[str, Tensor] = {}
        self.last: Any = None
        self.blocks = nn.ModuleList(ExpertBlock(self.losses) for _ in range(4))
        for index in (0, 2):
            self.blocks[index].register_forward_hook(partial(self.keep, index))

    def keep(self, index: int, block: nn.Module, args: Any, output: Tensor) -> None:
        self.features[f"block {index}"] = self.last = output

    def beside(self) -> Tensor:
        first: Any = self.blocks[0]
        balances = [part.balance for part in self.modules() if isinstance(part, Expert)]
        assert (len(balances), len(self.losses), list(self.features)) == (4, 4, ["block 0", "block 2"])
        total = sum(balances) + sum(self.losses) + self.last.norm() + first.expert.balance
        for part in self.modules():
            if isinstance(part, Expert):
                assert (len(part.parts), len(part.undeclared)) == (2, 1)
                total = total + sum(part.parts) + part.undeclared["norm"]
        return total

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        loss = super().loss(output, batch) + self.beside()
        self.losses.clear()
        self.features.clear()
        return loss


class CheckpointedBlocks(KeepsBeside):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(h)


class UsesFeatures(KeepsBeside):
    def beside(self) -> Tensor:
        return self.features["block 0"].norm()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=generator)
    return x, y


def made(model: type[Model]) -> Model:
    torch.manual_seed(0)
    return model().double()


def cut_of(stages: list[tuple[Any, Stage]]) -> tuple[range, ...]:
    """The parts of each stage."""
    return stages[0][0].stages


def stages_of(model: Model, num_stages: int, partition: Any = "count", pipeline: Any = None) -> list[tuple[Any, Stage]]:
    """(parts, stage) of each stage, with a copy of the model of its own."""
    found = []
    for index in range(num_stages):
        parts = ChainParts(copy.deepcopy(model), num_stages, pipeline)
        cut = parts.cut(num_stages, partition)
        parts.keep(cut, index)
        stage = Stage(
            parts.modules("training", cut[index], NoRecorder()), cut[index].start, SEED, CPU,
            loss=parts.loss if index == num_stages - 1 else None,
            evaluation_layers=parts.modules("evaluation", cut[index], NoRecorder()), loss_name=parts.loss_name,
            takes_target=parts.takes_target,
        )  # fmt: skip
        found.append((parts, stage))
    return found


def gradients(model: Model, num_stages: int, split_backward: bool = True, **options: Any) -> dict[str, Tensor]:
    """The loss, and the gradient of each parameter, added over the stages that hold it."""
    stages = stages_of(model, num_stages, **options)
    inputs, target = stages[0][0].split(batch(), 2)
    (loss,) = train_step([stage for _, stage in stages], [(inputs, target)], split_backward=split_backward)
    found = {"loss": loss}
    first_name = {copy: tie.names[0] for tie in stages[0][0].ties(cut_of(stages)) for copy in tie.copies}
    for index, (parts, _) in enumerate(stages):
        for own_name, parameter in parts.module.named_parameters():
            if parameter.grad is not None:
                name = first_name.get((index, own_name), own_name)
                found[name] = found.get(name, 0.0) + parameter.grad
    return found


def whole(model: Model) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    loss = model.training_step(batch(), 2)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


@pytest.mark.parametrize("split_backward", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(
    "model", [Plain, Transformer, AroundTheChain, Tuples, WholeTuples, Scaled, Shared, KeepsBeside, CheckpointedBlocks]
)
def test_loss_and_gradients_are_those_of_the_whole(model, num_stages, split_backward):
    assert_equal(gradients(made(model), num_stages, split_backward), whole(made(model)))


def test_checkpoints_around_layers_keep_their_arguments_where_the_memory_of_a_step_is_measured():
    with saved_tensors():
        assert_equal(gradients(made(CheckpointedBlocks), 2), whole(made(CheckpointedBlocks)))


def test_the_ends_of_a_pipeline_need_only_one_layer_each():
    for partition in ([1, 2, 1], [2, 1, 1], [1, 1, 2]):
        assert_equal(gradients(made(Transformer), 3, partition=partition), whole(made(Transformer)))


def test_randomness_does_not_depend_on_the_number_of_stages_or_on_checkpoints():
    """Also what is drawn before the chain: the first and the last stage draw the same."""
    expected = gradients(made(Drawn), 2)
    for model in (Drawn, Checkpointed):
        for num_stages in (2, 3, 4):
            for split_backward in (False, True):
                assert_equal(gradients(made(model), num_stages, split_backward), expected)
    assert not torch.allclose(expected["loss"], whole(made(Drawn))["loss"])


def test_all_generators_draw_the_same_on_both_ends():
    """As in mixup: an own draw on the last stage would weigh losses of other inputs."""
    expected = gradients(made(Mixed), 2)
    random.seed(5)
    np.random.seed(5)
    assert_equal(gradients(made(Mixed), 3), expected)
    drawn = random.random()
    random.seed(5)
    assert drawn == random.random(), "the generator of the process was left alone"
    model, number = made(Mixed), derive_seed(SEED, STEP, 0, 0)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.manual_seed(number)
    assert_equal(whole(model), expected)


# ---------------------------------------------------------------------- what is not a chain is told, and not computed


class Residual(Transformer):
    def forward(self, x: Tensor) -> Tensor:
        h = x
        for block in self.blocks:
            h = h + block(h)
        return h


class Reshaped(Transformer):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).flatten(1)
        return x


class Twice(Transformer):
    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return x


class Skips(Transformer):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[::2]:
            x = block(x)
        return x


class StopsEarly(Transformer):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        return x


class NeverCalls(Transformer):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class Backwards(Transformer):
    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class AddsUp(Tuples):
    def forward(self, x: Tensor) -> Tensor:
        more: Any = 0.0
        for layer in self.layers:
            x, _, one = layer(x)
            more = more + one.mean()
        return x + more


class ReturnsMore(Tuples):
    """Returns what its layers returned besides, as models of transformers do with hidden states."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, seen = batch[0], []
        for layer in self.layers:
            x, _, more = layer(x)
            seen.append(more)
        return {"loss": self.loss(x, batch), "seen": seen}


class Regularised(Transformer):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        penalty = torch.stack([p.square().sum() for p in self.parameters() if p.requires_grad]).sum()
        return super().loss(output, batch) + penalty


class Odd(nn.Linear):
    pass


class LooksAtKinds(Plain):
    """Does something else for one kind of layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = Odd(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x).tanh() if isinstance(layer, Odd) else layer(x)
        return x


class FarSkip(Transformer):
    """As in a U-Net: the second layer's output is added to the input of the last."""

    def forward(self, x: Tensor) -> Tensor:
        one = self.blocks[0](x)
        two = self.blocks[1](one)
        return self.blocks[3](self.blocks[2](two), one)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(("model", "words"), [
    (Residual, ["does something with what layer 'blocks.", "before layer 'blocks.1' gets it"]),
    (Reshaped, ["uses what layer 'blocks.", "returned (flatten)", "before it calls layer 'blocks."]),
    (Twice, ["calls layer 'blocks.0' a second time, after 'blocks.3'"]),
    (Skips, ["calls layer 'blocks.2' after 'blocks.0', without 'blocks.1'"]),
    (StopsEarly, ["uses what layer 'blocks.2' returned (sub)", "before it calls layer 'blocks.3'"]),
    (NeverCalls, ["never calls layer 'blocks.0'"]),
    (Backwards, ["calls layer 'blocks.3' first, without 'blocks.0'"]),
    (AddsUp, ["uses more than the first item of what layer 'layers.", "returned"]),
    (ReturnsMore, ["returns more than the first item of what layer 'layers.0' returned, which is on another"]),
    (Regularised, ["uses blocks.0.linear.weight (square), which is on another stage"]),
    (LooksAtKinds, ["uses what layer 'net.2' returned (tanh)"]),
    (FarSkip, ["uses what layer 'blocks.0' returned", "which is on another stage"]),
])  # fmt: skip
def test_a_step_that_is_no_chain_is_an_error_that_names_the_layers(model, words, num_stages):
    with pytest.raises(ConfigurationError) as caught:
        gradients(made(model), num_stages)
    told = str(caught.value)
    assert all(word in told for word in [*words, f"{model.__name__}.training_step()", "pipeline_parallel_size=1"]), told


class Forces(Transformer):
    """Its loss has the derivative of its output by what enters, which the head sees, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        output = self(x) + x.sin()
        (forces,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return self.loss(output + forces, batch)


class ForcesOfParts(Transformer):
    """Differentiates by what follows from the input, which reaches the loss by the layers alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        moved = batch[0].requires_grad_() + 1
        (forces,) = torch.autograd.grad(self(moved).sum(), moved, create_graph=True, allow_unused=True)
        return self.loss(forces, batch)


class ForcesOfTheHead(Transformer):
    """Differentiates its head only, which is here, while an input is differentiable."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.requires_grad_()) + self.position
        for block in self.blocks:
            h = block(h)
        output = self.head(self.norm(h))
        return output + torch.autograd.grad(output.square().sum(), h, create_graph=True)[0]


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("model", [Forces, ForcesOfParts])
def test_a_derivative_by_an_input_of_layers_elsewhere_is_refused(model, num_stages):
    words = (
        rf"{model.__name__}.training_step\(\) takes a derivative by an input of the layers.*pipeline_parallel_size=1"
    )
    with pytest.raises(ConfigurationError, match=words):
        gradients(made(model), num_stages)
    assert_equal(gradients(made(ForcesOfTheHead), num_stages), whole(made(ForcesOfTheHead)))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_large_tensor_beside_the_output_is_an_error_only_where_it_is_used(num_stages, monkeypatch):
    monkeypatch.setattr(chains, "LARGEST", 100)
    with pytest.raises(ConfigurationError, match=r"uses features\['block 0'\], of more than 100 bytes"):
        gradients(made(UsesFeatures), num_stages)
    monkeypatch.setattr(UsesFeatures, "beside", lambda self: sum(self.losses))
    assert_equal(gradients(made(UsesFeatures), num_stages), whole(made(UsesFeatures)))


class AsksForDevice(Transformer):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parameter = next(self.parameters())
        first = next(self.blocks.parameters())
        assert (parameter.device, first.device, first.dtype) == (CPU, CPU, torch.float64)
        assert all(block.factor == 0.5 for block in self.blocks)
        return super().training_step(batch, batch_idx)


def test_a_step_may_ask_any_parameter_for_its_device():
    assert_equal(gradients(made(AsksForDevice), 2), whole(made(AsksForDevice)))


def test_outside_of_steps_the_model_says_which_layers_are_elsewhere():
    (_, _), (last, _) = stages_of(made(Transformer), 2)
    with pytest.raises(RuntimeError, match=r"'blocks.0' was called outside of a training or evaluation step"):
        last.module.blocks[0](batch()[0])
    with pytest.raises(AttributeError, match=r"blocks.1.linear is on another stage"):
        _ = last.module.blocks[1].linear


def test_what_asks_all_stages_passes_for_what_it_was():
    """Also a copy, which asks nobody, and the module after a run."""
    model = made(Stacked)
    (parts, _), _ = stages_of(model, 2)
    module, asked = parts.module, []
    redirect_forward(module, ["net.layers.0", "net.layers.3"], lambda what: asked.append(what))
    x = batch()[0]
    module(x)
    module.net(x, scale=2.0)
    assert [(path, list(kwargs)) for path, _, kwargs in asked] == [("", []), ("net", ["scale"])]
    assert isinstance(module.net, Stack)
    assert inspect.signature(module.net.forward) == inspect.signature(Stack().forward)
    double = copy.deepcopy(module.net)
    assert type(double) is Stack
    with pytest.raises(RuntimeError, match=r"outside of a training or evaluation step"):
        double(x)
    parts.rebuild(model.state_dict())
    assert type(module.net) is Stack
    assert torch.equal(module(x), model(x))
    assert len(asked) == 2


def test_the_names_of_each_stage_are_those_of_the_whole():
    stages = stages_of(made(Transformer), 3)
    everything = set(made(Transformer).state_dict())
    parts = [set(parts.module.state_dict()) for parts, _ in stages]
    outside = {name for name in everything if not name.startswith("blocks.")}
    assert set.union(*parts) == everything
    assert parts[0] & parts[2] == outside
    assert parts[1] - {"position"} == {name for name in everything if name.startswith("blocks.1.")}
    for (found, _), mine in zip(stages, parts, strict=True):
        assert {name for name in everything if found.is_elsewhere(name)} == everything - mine
        assert not found.is_elsewhere("unknown")
    assert {name for found, _ in stages for name in found.module.state_dict() if found.writes(name)} == everything
    ties = stages[0][0].ties(cut_of(stages))
    assert [tie.copies for tie in ties] == [
        ((0, "position"), (1, "position"), (2, "position")),
        ((0, "embed.weight"), (2, "embed.weight")),
        ((0, "norm.weight"), (2, "norm.weight")),
        ((0, "norm.bias"), (2, "norm.bias")),
    ]
    assert all(found.ties(cut_of(stages)) == ties for found, _ in stages)


def test_a_module_that_held_one_stage_becomes_whole_again():
    model = made(Transformer)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    for parts, _ in stages_of(model, 3):
        parts.rebuild(state)
        rebuilt = parts.module
        assert all(torch.equal(value, state[name]) for name, value in rebuilt.state_dict().items())
        assert rebuilt.head.weight is rebuilt.embed.weight
        assert [n for n, _ in rebuilt.named_parameters()] == [n for n, _ in model.named_parameters()]
        assert torch.equal(rebuilt(batch()[0]), rebuilt(batch()[0]))


# ---------------------------------------------------------------------- models of transformers, as they are


def hugging_face(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2}
    if kind == "gpt2":  # a tied head
        no_dropout = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
        config = transformers.GPT2Config(**sizes, **heads, n_positions=16, bos_token_id=0, eos_token_id=0, **no_dropout)
        return transformers.GPT2LMHeadModel(config)
    if kind == "qwen2":  # layers with and without a sliding window get masks of their own
        window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
        return transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**sizes, **heads, num_key_value_heads=2, **window)
        )
    if kind == "bert":
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **heads, **no_dropout))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, num_key_value_heads=1))
    if kind == "llama, checkpointed":
        model.gradient_checkpointing_enable()
    return model


class HuggingFace(Model):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = hugging_face(kind).train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = torch.arange(21).reshape(3, 7) % 9
        mask = torch.ones_like(tokens)
        mask[0, -2:] = 0
        return self.model(input_ids=tokens, attention_mask=mask, labels=tokens).loss


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "bert", "llama", "llama, checkpointed"])
def test_a_model_of_transformers_is_a_chain(kind, num_stages):
    model = HuggingFace(kind).double()
    assert_equal(gradients(model, num_stages), whole(model))


def test_a_module_that_has_its_own_class_again_ends_to_ask():
    """As in a worker whose process goes on: its module is the user's again before the whole model is put together."""
    module = made(Stacked)
    cls = type(module)
    redirect_forward(make_recorded(module), ["net.layers.0", "net.layers.3"], lambda what: None)
    restore_class(module)
    restore_forward(module)
    assert type(module) is cls

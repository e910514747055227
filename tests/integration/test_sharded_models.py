"""Positions of several processes with other models: weights equal those of a plain loop."""

from typing import Any

import lightning as L
import pytest
import torch
from sharded import BATCH, STEPS, Kill, exact_fit, fit, lost
from support.training import TOLERANCE
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_recycle import PipelineModule

VOCABULARY, SEQUENCE, WIDTH, HEADS = 24, 8, 16, 4


# ---------------------------------------------------------------------- a transformer


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        split = [layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in self._inputs()]
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _inputs(self) -> list[nn.Module]:
        return [self.query, self.key, self.value]


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


OUTER = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
SEQUENCE_PARALLEL = {
    "norm1": SequenceParallel(), "norm2": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "attention.query": ColwiseParallel(), "attention.key": ColwiseParallel(), "attention.value": ColwiseParallel(),
    "attention.output": RowwiseParallel(output_layouts=Shard(1)),
    "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1)),
}  # fmt: skip


def transformer(blocks: int = 2) -> nn.ModuleDict:
    torch.manual_seed(1)
    embed, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    layers = {"embed": embed, "blocks": nn.ModuleList(TransformerBlock() for _ in range(blocks)), "head": head}
    head.weight = embed.weight
    return nn.ModuleDict(layers).double()


class Transformer(L.LightningModule):
    """Its embedding is its head; the norms of its blocks divide the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = transformer()

    def configure_model(self) -> None:
        mesh = self.device_mesh["tensor_parallel"]
        parallelize_module(self.layers, mesh, OUTER)
        self.layers["head"].weight = self.layers["embed"].weight
        for block in self.layers["blocks"]:
            parallelize_module(block, mesh, SEQUENCE_PARALLEL)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        x = self.layers["embed"](tokens)
        for block in self.layers["blocks"]:
            x = block(x)
        return F.cross_entropy(self.layers["head"](x).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(VOCABULARY, (48, SEQUENCE + 1), generator=generator)
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def trained_alone(module: L.LightningModule, pipelines: int, steps: int = STEPS) -> dict[str, Tensor]:
    """The weights of ``module`` after a plain loop."""
    optimizer: Any = module.configure_optimizers()
    for step in range(steps):
        batch = tokens()[step * pipelines * BATCH : (step + 1) * pipelines * BATCH]
        optimizer.zero_grad()
        loss: Any = module.training_step(batch, step)
        loss.backward()
        optimizer.step()
    return dict(module.named_parameters())


def check(module: L.LightningModule, alone: L.LightningModule, grid: tuple[int, int, int], *kills: L.Callback) -> None:
    """``module``, trained on ``grid``, has the weights of ``alone``."""
    assert lost(fit(module, grid, *kills, data=tokens())) == len(kills)
    expected, found = trained_alone(alone, grid[0]), dict(module.named_parameters())
    assert found.keys() == expected.keys()
    assert max(float((found[name] - value).abs().max()) for name, value in expected.items()) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize(("members", "kill"), [(2, Kill(1, 1, 2)), (4, Kill(5, 2, 1))], ids=["in two", "in four"])
def test_a_transformer_whose_tied_embedding_is_sharded(members, kill):
    check(Transformer(), Transformer(), (2, 1, members), kill)


# ---------------------------------------------------------------------- a Sequential


def sequential() -> nn.Sequential:
    torch.manual_seed(2)
    layers = [nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)]
    return nn.Sequential(*layers).double()


class Chain(PipelineModule):
    """A stage ends between the columns and the rows of a layer: what it hands over is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = list(sequential())

    def configure_pipeline(self) -> nn.Sequential:
        return nn.Sequential(*self.chain)

    def configure_model(self) -> None:
        super().configure_model()
        for number, layer in enumerate(self.layers):
            if isinstance(layer, nn.Linear):
                style = ColwiseParallel() if number % 4 == 0 else RowwiseParallel()
                self.layers[number] = parallelize_module(layer, self.device_mesh["tensor_parallel"], style)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.long
def test_a_sequential():
    exact_fit(Chain(), (2, 2, 2), Kill(2, 1, 2), strategy={"partition": [5, 2]}, layers=sequential())


# ---------------------------------------------------------------------- a model of Hugging Face


class Llama(L.LightningModule):
    """Made parallel by the plan that its configuration brings."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(4)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2}
        self.llama = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)).double()

    def configure_model(self) -> None:
        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        plan = {name: styles[style]() for name, style in self.llama.config.base_model_tp_plan.items()}
        parallelize_module(self.llama.model, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self.llama(tokens).logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.long
def test_a_llama_with_its_own_plan():
    check(Llama(), Llama(), (2, 1, 2), Kill(3, 1, 1))

"""A small Llama as in Lightning's example of ModelParallelStrategy.

``model_parallel_script.py STRATEGY MESH STEPS OUTPUT [resume=CHECKPOINT] [folder]``: trains with ``model_parallel``,
``fsdp`` or ``recycle`` on a mesh such as ``1x2`` (data x tensor parallel) and saves checkpoints every ten steps; with
``folder`` distributed ones.
"""

import sys
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_recycle import CheckpointOptions, ReCycleStrategy

VOCABULARY, WIDTH, HEADS, LENGTH = 64, 32, 4, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


OUTER: dict[str, Any] = {
    "tok_embeddings": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": tp.SequenceParallel(),
    "output": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}
BLOCK: dict[str, Any] = {
    "attention": tp.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "attention.wq": tp.ColwiseParallel(), "attention.wk": tp.ColwiseParallel(), "attention.wv": tp.ColwiseParallel(),
    "attention.wo": tp.RowwiseParallel(output_layouts=Shard(1)), "attention_norm": tp.SequenceParallel(),
    "feed_forward": tp.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "feed_forward.w1": tp.ColwiseParallel(), "feed_forward.w2": tp.RowwiseParallel(output_layouts=Shard(1)),
    "feed_forward.w3": tp.ColwiseParallel(), "ffn_norm": tp.SequenceParallel(),
}  # fmt: skip


class Llama(L.LightningModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.model, self.batch_size = Transformer(), batch_size

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, FSDPStrategy):
            return
        mesh: Any = self.device_mesh
        if mesh["tensor_parallel"].size() > 1:
            tp.parallelize_module(self.model, mesh["tensor_parallel"], OUTER)
            for layer in self.model.layers:
                tp.parallelize_module(layer, mesh["tensor_parallel"], BLOCK)
        if mesh["data_parallel"].size() > 1:
            for module in (*self.model.layers, self.model):
                fully_shard(module, mesh=mesh["data_parallel"])

    def training_step(self, batch: Tensor) -> Tensor:
        output = self.model(batch[:, :-1])
        with tp.loss_parallel():
            return F.cross_entropy(output.flatten(0, 1), batch[:, 1:].flatten())

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with tp.loss_parallel():
            super().backward(*args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=True)

    def train_dataloader(self) -> DataLoader[Any]:
        sampler, strategy = None, self.trainer.strategy
        if not isinstance(strategy, ReCycleStrategy):  # Lightning's would shuffle
            sampler = DistributedSampler(RandomTokens(), shuffle=False, **strategy.distributed_sampler_kwargs)
        return DataLoader(RandomTokens(), self.batch_size, sampler=sampler)


class RandomTokens(Dataset[Any]):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, item: int) -> Tensor:
        generator = torch.Generator().manual_seed(item)
        return torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)


class FSDPOnCPU(FSDPStrategy):
    """Lightning refuses the class itself without a GPU, and torch wants to be told that there is none."""

    def _setup_model(self, model: nn.Module) -> Any:
        with patch.object(
            FullyShardedDataParallel, "__init__", partialmethod(_on_cpu, FullyShardedDataParallel.__init__)
        ):
            return super()._setup_model(model)


def _on_cpu(self: Any, init: Any, *args: Any, **kwargs: Any) -> None:
    init(self, *args, **{**kwargs, "device_id": torch.device("cpu")})


def main() -> None:
    name, mesh, steps, output, *rest = sys.argv[1:]
    data_parallel, tensor_parallel = map(int, mesh.split("x"))
    folder, options = "folder" in rest, dict(word.split("=", 1) for word in rest if "=" in word)
    strategies: dict[str, Any] = {
        "model_parallel": lambda: ModelParallelStrategy(data_parallel, tensor_parallel, folder),
        "fsdp": lambda: FSDPOnCPU(auto_wrap_policy={Block}, state_dict_type="sharded" if folder else "full"),
        "recycle": lambda: ReCycleStrategy(
            pipeline_parallel_size=1,
            num_microbatches=2,
            tensor_parallel_size=tensor_parallel,
            fsdp_size=data_parallel,
            checkpoints=CheckpointOptions(save_distributed_checkpoint=folder),
        ),
    }
    L.seed_everything(1)
    keep = L.pytorch.callbacks.ModelCheckpoint(output, "{step}", save_top_k=-1, every_n_train_steps=10)
    trainer = L.Trainer(
        accelerator="cpu", devices=data_parallel * tensor_parallel, strategy=strategies[name](), max_steps=int(steps),
        callbacks=[keep], use_distributed_sampler=name == "recycle", logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Llama(8 // data_parallel), ckpt_path=options.get("resume"))


if __name__ == "__main__":
    main()

"""``self(x)`` in hooks of an ordinary module in several stages: all get what one device gives, whoever dies."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from asking import Asks, Dies, answers, assert_same, write
from lightning.pytorch.callbacks import Callback
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
from support.training import difference, failures, grid_trainer, on_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import ReCycleError

pytestmark = pytest.mark.long

BATCH, LENGTH, WIDTH, TOKENS, EPOCH = 12, 5, 8, 11, 3
EARLY = ("on_fit_start", "on_train_start")
LATE = ("on_before_optimizer_step", "on_train_batch_end", "on_validation_batch_end", "on_validation_epoch_end")


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        return x + self.drop(gain * torch.tanh(self.linear(x)))


class Speaker(L.LightningModule):
    """Blocks, and outside of them an embedding, a tied head and a parameter; hooks that ask the model."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, last_only: bool = False) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.position.mean())
        return self.head(x[:, -1:] if last_only else x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        return nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (tokens,) = batch
        self.log("val_loss", nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))

    def on_validation_epoch_end(self) -> None:
        tokens = torch.arange(3, device=self.device)[:, None]
        for _ in range(LENGTH - 1):  # the idiom of sampling
            tokens = torch.cat([tokens, self(tokens, last_only=True)[:, -1].argmax(-1, keepdim=True)], 1)
        self.text = tokens
        self.log("spoken", tokens.double().mean() + self(tokens).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def sentences() -> TensorDataset:
    return TensorDataset(torch.randint(TOKENS, (BATCH * EPOCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)))


def ask(hook: str, trainer: Any, module: Any) -> dict[str, Tensor]:
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % TOKENS
    found = {"answer": module(tokens).detach(), "spoken": trainer.callback_metrics.get("spoken", torch.zeros(()))}
    if hook == "on_validation_epoch_end":
        module.eval()
        found["again"] = module.forward(tokens)
    return found


def on_grid(pipelines: int, stages: int, callbacks: list[Callback], strategy: Any = None, **kwargs: Any) -> L.Trainer:
    options = {"num_microbatches": 4 // pipelines, **(strategy or {})}
    return grid_trainer(pipelines, stages, (), options, callbacks=callbacks, **{"max_epochs": 2, **kwargs})


def train(run: L.Trainer, model: L.LightningModule, pipelines: int = 1) -> dict[str, float]:
    run.fit(model, *(DataLoader(sentences(), BATCH // pipelines) for _ in range(2)))
    return {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[dict[str, Tensor], dict[str, float], dict[str, Tensor]]:
    folder, model = tmp_path_factory.mktemp("alone"), Speaker().double()
    metrics = train(on_one_device(max_epochs=2, callbacks=[Asks(folder, ask, (*EARLY, *LATE))]), model)
    (found,) = answers(folder).values()
    return found, metrics, {**model.state_dict(), "text": model.text}


@pytest.mark.parametrize("grid", [(2, 2), (1, 4)], ids=str)
def test_every_worker_gets_in_every_hook_what_one_device_gives(tmp_path, alone, grid):
    expected, metrics, weights = alone
    model = Speaker().double()
    assert train(on_grid(*grid, [Asks(tmp_path, ask, (*EARLY, *LATE))]), model, grid[0]) == pytest.approx(metrics)
    found = answers(tmp_path)
    assert set(found) == {0, 1, 2, 3}
    for theirs in found.values():
        assert_same(theirs, expected)
    assert difference({**model.state_dict(), "text": model.text}, weights) < 1e-10


def test_a_replacement_takes_part(tmp_path, alone):
    expected, metrics, _ = alone
    dies = Dies(0, "on_train_batch_end", 1, 0, "blocks")
    run = on_grid(2, 2, [dies, AwaitReplacement([EPOCH + 1]), Asks(tmp_path, ask, LATE)], {"max_restarts": 10})
    assert train(run, Speaker().double(), 2) == pytest.approx(metrics)
    assert failures(run) == rejoined(run) == [(0, 0)]
    late = {name: answer for name, answer in expected.items() if name.split("-")[0] in LATE and f"-{2 * EPOCH}" in name}
    for theirs in answers(tmp_path).values():
        assert_same({name: theirs[name] for name in late}, late)


class HuggingFace(L.LightningModule):
    """A model of transformers as it is, which generates text."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM  # slow

        super().__init__()
        torch.manual_seed(0)
        sizes = {"vocab_size": TOKENS, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None, pad_token_id=0))
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.drop(self.model(input_ids=tokens, use_cache=False).logits)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Generates(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        tokens = torch.arange(4).view(2, 2)
        options = {"max_new_tokens": 4, "use_cache": False}
        module.train()
        drawn = torch.stack([module(tokens), module(tokens)])
        module.eval()
        output = module.model(tokens)
        greedy = module.model.generate(tokens, do_sample=False, **options)
        sample = module.model.generate(tokens, do_sample=True, **options)
        module.train()
        write(self.folder, trainer, "generated", greedy=greedy, sampled=sample, logits=output.logits, drawn=drawn)


def test_a_model_of_transformers_generates_as_on_one_device(tmp_path):
    """Also where a worker holds a middle stage. What is drawn is the same on all workers, and anew in each call."""
    (tmp_path / "one").mkdir()
    on_one_device(max_steps=2, callbacks=[Generates(tmp_path / "one")]).fit(
        HuggingFace().double(), DataLoader(sentences(), BATCH)
    )
    (expected,) = answers(tmp_path / "one").values()
    run = on_grid(1, 3, [Generates(tmp_path)], {"num_microbatches": 1}, max_steps=2)
    run.fit(HuggingFace().double(), DataLoader(sentences(), BATCH))
    found = answers(tmp_path)
    assert set(found) == {0, 1, 2}
    for theirs in found.values():
        same = {name: expected[name] for name in expected if "greedy" in name or "logits" in name}
        assert_same(theirs, {**found[0], **same})
    first, second = next(answer for name, answer in found[0].items() if "drawn" in name)
    assert not torch.equal(first, second)


class Does(Callback):
    """Does what cannot work."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        tokens = torch.arange(4).view(2, 2)
        if self.what == "layers":
            for layer in module.model.model.layers:
                layer(torch.zeros(1, 1, 8), position_embeddings=(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)))
        elif self.what == "cache":
            module.model.generate(tokens, max_new_tokens=2)


@pytest.mark.parametrize(("what", "message"), sampled([
    ("layers", r"outside of a training or evaluation step.*Call the whole model, self\(x\)"),
    ("cache", r"a cache of keys and values.*use_cache=False"),
], 1))  # fmt: skip
def test_what_cannot_be_evaluated_is_an_error_that_names_the_remedy(what, message):
    run = on_grid(1, 2, [Does(what)], {"num_microbatches": 1}, max_steps=1)
    with pytest.raises((ReCycleError, RuntimeError), match=message):
        run.fit(HuggingFace(), DataLoader(sentences(), BATCH))

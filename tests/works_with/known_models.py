"""Modules around models, optimizers and metrics of other packages. Workers import this module."""

from typing import Any

import lightning as L
import small_training as small
import torch
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection, R2Score


class Images(L.LightningModule):
    """A vision transformer of timm, of two blocks, for images made of the samples."""

    def __init__(self) -> None:
        super().__init__()
        import timm

        torch.manual_seed(0)
        self.model = timm.create_model(
            "vit_tiny_patch16_224", img_size=4, patch_size=2, in_chans=1, depth=2, num_classes=1
        ).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images = batch["x"].repeat(1, 2).view(-1, 1, 4, 4)
        return (self.model(images) - batch["y"]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def causal_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).double()


class Causal(L.LightningModule):
    """A Llama of two layers, for tokens made of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.made()

    def made(self) -> Any:
        return causal_model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch["x"].mul(4).long().clamp(-8, 7) + 8
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Adapted(Causal):
    """The same with adapters of peft, which alone are trained."""

    def made(self) -> Any:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        return get_peft_model(causal_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).double()


class ScheduleFree(small.Perceptron):
    """The optimizer has a mode for training and one for evaluation, which a validation switches to and back."""

    def configure_optimizers(self) -> Any:
        import schedulefree

        return schedulefree.AdamWScheduleFree(self.parameters(), lr=1e-2, warmup_steps=2)

    def on_train_epoch_start(self) -> None:
        self.optimizers().optimizer.train()

    def on_validation_start(self) -> None:
        for optimizer in self.trainer.optimizers:
            optimizer.eval()

    def on_validation_end(self) -> None:
        for optimizer in self.trainer.optimizers:
            optimizer.train()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.layers(batch["x"]) - batch["y"]).square().mean())


class WithMuon(small.Perceptron):
    """Muon for the matrices, Adam for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = (self.layers(batch["x"]) - batch["y"]).square().mean()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim == 2]
        return torch.optim.Muon(matrices, lr=1e-2), torch.optim.Adam([p for p in self.parameters() if p.ndim != 2])


class OnlyMuon(small.Perceptron):
    def configure_optimizers(self) -> Any:
        for name, parameter in self.named_parameters():
            parameter.requires_grad = "weight" in name
        return torch.optim.Muon([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Grouped(small.Perceptron):
    """Metrics of which several share their states, in training and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.measures = nn.ModuleDict({name: self.made(name) for name in ("fit_", "val_")}).double()

    def made(self, prefix: str) -> MetricCollection:
        squared = {"mse": MeanSquaredError(), "rmse": MeanSquaredError(squared=False)}
        return MetricCollection({**squared, "r2": R2Score(), "mae": MeanAbsoluteError()}, prefix=prefix)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.layers(batch["x"])
        self.measures["fit_"].update(output.detach().flatten(), batch["y"].flatten())
        return (output - batch["y"]).square().mean()

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.measures["fit_"].compute())
        self.measures["fit_"].reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.measures["val_"].update(self.layers(batch["x"]).flatten(), batch["y"].flatten())
        self.log_dict(self.measures["val_"])

"""A module that collects outputs in its attributes and evaluates them at the end of an epoch, Lightning's own idiom."""

from collections import defaultdict

import torch
from same_script import CLASSES, Classifier
from torch import Tensor


class Collecting(Classifier):
    """Collects in the hooks that see outputs; what it makes of that is the same on one device and on a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[dict[str, Tensor]] = []
        self.trained: list[Tensor] = []
        self.by_class: dict[int, list[Tensor]] = defaultdict(list)
        self.seen = 0
        self.correct = torch.zeros((), dtype=torch.long)
        self.register_buffer("confusion", torch.zeros(CLASSES, CLASSES), persistent=False)

    def on_training_output(self, output: Tensor, target: Tensor) -> None:
        self.trained.append(output.mean(dim=1))

    def on_train_epoch_end(self) -> None:
        trained = torch.cat(self.trained)
        self.log("trained", float(len(trained)))
        self.log("trained_median", trained.median())
        self.trained.clear()

    def _collect(self, output: Tensor, target: Tensor) -> None:
        self.outputs.append({"output": output, "target": target})
        for label in target.unique().tolist():
            self.by_class[label].append(output[target == label, label])
        self.seen += len(output)
        self.correct += (output.argmax(-1) == target).sum()
        self.confusion.index_put_((target, output.argmax(-1)), torch.ones(()), accumulate=True)

    def _evaluate_all(self, phase: str) -> None:
        output = torch.cat([item["output"] for item in self.outputs])
        target = torch.cat([item["target"] for item in self.outputs])
        values = {
            "samples": float(len(output)),
            "median": output.max(-1).values.median(),  # of the whole, not a mean of parts
            "accuracy": (output.argmax(-1) == target).double().mean(),
            **{f"class_{label}": torch.cat(found).mean() for label, found in sorted(self.by_class.items())},
        }
        for sync_dist in (False, True):
            self.log_dict({f"{phase}_{name}/{sync_dist}": v for name, v in values.items()}, sync_dist=sync_dist)
        shares = {"seen": float(self.seen), "correct": self.correct.double(), "confused": self.confusion[0, 1].double()}
        self.log_dict({f"{phase}_{k}": v for k, v in shares.items()}, reduce_fx="sum", sync_dist=True)
        self.outputs.clear()
        self.by_class.clear()
        self.seen = 0
        self.correct.zero_()
        self.confusion.zero_()

    def on_validation_output(self, output: Tensor, target: Tensor) -> None:
        super().on_validation_output(output, target)
        self._collect(output, target)

    def on_validation_epoch_end(self) -> None:
        self._evaluate_all("val")

    def on_test_output(self, output: Tensor, target: Tensor) -> None:
        self._collect(output, target)

    def on_test_epoch_end(self) -> None:
        self._evaluate_all("test")

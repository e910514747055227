"""A property of all modules: whatever their steps keep, change and override, a grid equals one process."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, event, given, settings
from support import drawn_modules
from support.growth import AwaitReplacement, rejoined
from support.training import TOLERANCE, failures, grid_trainer, on_one_device

from lightning_recycle import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.callbacks import Fault


def options(recipe: drawn_modules.Recipe) -> dict[str, Any]:
    return {
        "max_epochs": drawn_modules.EPOCHS,
        "gradient_clip_val": recipe.clip,
        "accumulate_grad_batches": recipe.accumulate,
        "num_sanity_val_steps": 0,
    }


def on_grid(recipe: drawn_modules.Recipe) -> drawn_modules.DrawnModule:
    module, faults, callbacks = drawn_modules.DrawnModule(recipe), [], []
    sizes: dict[str, Any] = {"num_microbatches": recipe.microbatches, "max_restarts": 0}
    if recipe.dies is not None:
        pipeline, stage, step = recipe.dies
        faults = [Fault("kill", pipeline, stage, step)]
        if recipe.replaced:
            sizes["max_restarts"] = 10
            first = step + 2 if recipe.accumulate == 1 else step // recipe.accumulate + 1  # it counts optimizer steps
            callbacks = [AwaitReplacement(range(first, drawn_modules.STEPS))]
    run = grid_trainer(2, recipe.stages, faults, sizes, callbacks=callbacks, **options(recipe))
    run.fit(module, drawn_modules.loader(2))
    assert len(failures(run)) == len(faults)
    assert len(rejoined(run)) == (len(faults) if recipe.replaced else 0)
    return module


def differences(expected: drawn_modules.DrawnModule, found: drawn_modules.DrawnModule) -> dict[str, Any]:
    """What is not equal, by name."""
    want = {**drawn_modules.kept_values(expected), **dict(expected.named_parameters())}
    got = {**drawn_modules.kept_values(found), **dict(found.named_parameters())}
    assert want.keys() == got.keys(), want.keys() ^ got.keys()
    pairs = {
        name: (drawn_modules.as_numbers(value), drawn_modules.as_numbers(got[name])) for name, value in want.items()
    }
    return {name: pair for name, pair in pairs.items() if not _are_close(*pair)}


def _are_close(one: Any, other: Any) -> bool:
    if isinstance(one, (int, float)):
        return math.isclose(one, other, rel_tol=0, abs_tol=TOLERANCE)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_close(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple, set)):
        pairs = zip(sorted(one), sorted(other), strict=False) if isinstance(one, set) else zip(one, other, strict=False)
        return len(one) == len(other) and all(_are_close(*pair) for pair in pairs)
    return bool(one == other)


def one_process(recipe: drawn_modules.Recipe) -> drawn_modules.DrawnModule:
    module = drawn_modules.OneProcess(recipe)
    on_one_device(**options(recipe)).fit(module, drawn_modules.loader(1))
    return module


def check(recipe: drawn_modules.Recipe) -> str:
    """Whether a grid makes of ``recipe`` what one process does: the name of the refusal, or nothing."""
    try:
        found = on_grid(recipe)
    except (ConfigurationError, UnsupportedFeatureError) as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    unlike = differences(one_process(recipe), found)
    assert not unlike, unlike
    return ""


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("number", "most_refused"), [
    (5, 2), pytest.param(50, 6, marks=pytest.mark.long), pytest.param(1000, 100, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_modules_drawn_at_random_train_as_in_one_process(number, most_refused):
    refused: Counter[str] = Counter()

    def drawn(recipe: drawn_modules.Recipe) -> None:
        if refusal := check(recipe):
            event(refusal)
            refused[refusal] += 1

    phases = [Phase.explicit, Phase.reuse, Phase.generate]  # an example takes seconds: no search for a smaller one
    settings(max_examples=number, deadline=None, derandomize=True, phases=phases)(
        given(drawn_modules.recipes())(drawn)
    )()
    assert sum(refused.values()) <= most_refused, refused

"""Writes docs/options.md from the signatures and docstrings of the options: ``python docs/option_tables.py``.

An item has an option's name, its default and the first sentence of its description. A test compares the page.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import lightning_recycle
from lightning_recycle.callbacks import FaultInjectionCallback, HeartbeatCallback, PlanMonitor

PAGE = Path(__file__).with_name("options.md")

_HEAD = """\
# All options

Every option, with its default in brackets. `help(lightning_recycle.RecoveryOptions)` and the [API
page](api.md#options) describe each completely.

```python
from lightning_recycle import ReCycleStrategy, RecoveryOptions

strategy = ReCycleStrategy(pipeline_parallel_size=2, recovery=RecoveryOptions(max_restarts=10))
```

Options of the Trainer: [Trainer flags](trainer_flags.md); of commands, and environment variables:
[Operations](operations.md).
"""

_CLASSES: dict[type[Any], tuple[str, str]] = {
    lightning_recycle.ReCycleStrategy: (
        "[Choosing a grid](choosing_a_grid.md), [Several stages](several_stages.md), "
        "[Tensor parallelism and FSDP2](tensor_parallelism.md)",
        "",
    ),
    lightning_recycle.PlanningOptions: (
        "[Planner](planner.md), [Memory](memory.md), "
        "[When backwards are split](choosing_a_grid.md#when-backwards-are-split)",
        "planning",
    ),
    lightning_recycle.RecoveryOptions: (
        "[Faults](faults.md), [Layouts](layouts.md), [Several machines](machines.md)",
        "recovery",
    ),
    lightning_recycle.VerificationOptions: ("[Silent corruption](corruption.md)", "verification"),
    lightning_recycle.CheckpointOptions: ("[Checkpoints](checkpoints.md)", "checkpoints"),
    lightning_recycle.CommunicationOptions: ("[GPUs](gpu.md)", "communication"),
    lightning_recycle.MonitoringOptions: ("[Monitoring](monitoring.md)", "monitoring"),
    lightning_recycle.RayEngine: ("[Ray](ray.md)", "engine"),
    HeartbeatCallback: ("[Detection](faults.md#detection)", "callbacks"),
    PlanMonitor: ("[When times drift](layouts.md#when-times-drift)", "callbacks"),
    FaultInjectionCallback: ("[Fault injection](fault_injection.md)", "callbacks"),
}
"""The page on the options of a class, and the argument of the strategy or the Trainer that takes it."""

_ARGUMENT = re.compile(r"^    (\w+): (.*?)(?=^    \w+: |^\S|\Z)", re.M | re.S)
_END = re.compile(r"(?<!e\.g)\.\s+(?=[A-Z\"`])|\.$")
_ROLE = re.compile(r":\w+:`~?([\w.]+)`")


def descriptions(kind: type[Any]) -> dict[str, str]:
    """The first sentence on each argument in the docstring of ``kind``."""
    arguments = inspect.getdoc(kind).partition("Args:\n")[2]  # type: ignore[union-attr]
    return {name: _sentence(" ".join(words.split())) for name, words in _ARGUMENT.findall(arguments)}


def _sentence(text: str) -> str:
    text = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", text)
    return _END.split(text, maxsplit=1)[0].replace("``", "`")


def page() -> str:
    """The page as it should be."""
    parts = [_HEAD]
    for kind, (links, argument) in _CLASSES.items():
        told = descriptions(kind)
        heading = f"{kind.__name__}" if not argument else f"{kind.__name__} (`{argument}=`)"
        parts.append(f"\n## {heading}\n\nExplained in {links}.\n\n")
        for name, parameter in inspect.signature(kind).parameters.items():
            if name in told:
                parts.append(f"- `{name}` {_default(parameter)}: {told[name]}\n".replace("` : ", "`: "))
    return "".join(parts)


def _default(parameter: inspect.Parameter) -> str:
    value = parameter.default
    if value is inspect.Parameter.empty:
        return ""
    plain = isinstance(value, (bool, int, float, str, tuple, type(None)))
    return f"(`{value!r}`)" if plain else f"(`{type(value).__name__}()`)"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

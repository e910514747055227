"""Exceptions of this package: each names the wrong value and says how to fix it.

Standard library only: ``lightning_recycle.planning`` must load without torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

OTHER_LIGHTNING = (
    "This Trainer is of the package pytorch_lightning; the strategy uses lightning.pytorch, the same code under another"
    " name. Both are one if the installed versions agree (pip list) and lightning_recycle is imported before the second"
    " of them. Otherwise write `import lightning.pytorch as pl` instead of `import pytorch_lightning as pl`, in all"
    " modules of the script."
)


def suggestion(value: object, choices: Iterable[object], prefix: str = "") -> str:
    """The end of an error for ``value``: the nearest of ``choices``, or "".

    ``prefix``: of all of them, which is not compared. A single choice is not a suggestion: the error names it.
    """
    by_name = {str(choice).removeprefix(prefix).lower(): choice for choice in choices}
    wrong = value.removeprefix(prefix).lower() if isinstance(value, str) else ""
    begun = [name for name in by_name if wrong and name.startswith(wrong)]
    near = begun if len(begun) == 1 else difflib.get_close_matches(wrong, by_name, n=1)
    return f" Did you mean {by_name[near[0]]!r}?" if near and len(by_name) > 1 else ""


def unknown(kind: str, name: str, known: Collection[str], otherwise: str = "") -> str:
    """The error for a ``name`` that is none of the ``known`` ones of a ``kind``."""
    return f"unknown {kind} {name!r}: {choose_from(known)}{otherwise}.{suggestion(name, known)}"


def choose_from(choices: Collection[str]) -> str:
    """The remedy that lists ``choices``."""
    return f"{'choose one of' if len(choices) > 1 else 'the only one is'} {', '.join(choices)}"


def counted(count: int, noun: str) -> str:
    """``count`` with a regular noun: 1 worker, 2,000 workers, 2 micro-batches."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith(('ch', 's')) else 's'}"


class ReCycleError(Exception):
    """Base class of all errors raised by ``lightning_recycle``."""


class ConfigurationError(ReCycleError, ValueError):
    """A user's value that cannot work; the message names the value and the remedy.

    Attributes:
        option: the name of the argument with that value; "" where there is no single one.
        remedy: what to give instead, in sentences. Commands, whose users typed a setting or a flag, show both in their
            words.
    """

    option = remedy = ""

    @classmethod
    def for_option(
        cls, owner: str, option: str, value: object, remedy: str, choices: Iterable[object] = ()
    ) -> ConfigurationError:
        """The error "owner(option=value): remedy."; ``owner`` may be empty.

        If one of ``choices`` is near ``value``, the error ends by asking whether that was meant.
        """
        given = f"{option}={value!r}"
        remedy = f"{remedy}.{suggestion(value, choices)}"
        error = cls(f"{f'{owner}({given})' if owner else given}: {remedy}")
        error.option, error.remedy = option, remedy
        return error

    def as_typed(self, typed: str) -> str:
        """The message of a command whose user typed ``typed``, with values as in YAML."""
        remedy = re.sub(r"'([\w.-]+)'", r"\1", self.remedy)
        for word, in_yaml in (("True", "true"), ("False", "false"), ("None", "null")):
            remedy = re.sub(rf"\b{word}\b", in_yaml, remedy)
        return f"{typed}: {remedy}"


class UnsupportedFeatureError(ConfigurationError):
    """A Lightning feature that is not supported; the message names a replacement."""


class PlanningError(ReCycleError):
    """No plan exists for a request, or a plan contradicts its definition."""


class StageLostError(ReCycleError):
    """All replicas of a pipeline stage are gone, and its parameters with them."""


class CheckpointError(ReCycleError):
    """A checkpoint could not be written, or the one to resume from is damaged."""


class ControlPlaneError(ReCycleError):
    """A worker and the coordinator lost contact, or a wait between them timed out."""


class WorkerStartError(ReCycleError):
    """The worker processes could not be started."""


class InjectedFaultError(ReCycleError):
    """A failure raised by ``FaultInjectionCallback``; the worker counts as dead."""

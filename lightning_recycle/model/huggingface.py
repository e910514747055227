"""Causal language models of Hugging Face ``transformers`` as pipelines: embedding, decoder blocks, norm and head.

The layers are made of the library's own modules; this file adds what its models do around them: masks, positions and
rotary embeddings. Layers exchange (vectors, attention mask, positions), so a stage can begin anywhere: the latter two
as they came with the batch, None or integers, which cost next to nothing to send; each layer computes what follows from
them.

Needs ``pip install lightning-recycle[hf]``.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from typing_extensions import override

from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.model.layers import LayerSpec
from lightning_recycle.model.module import OptimizerFactory, PipelineModule, check_factory, make_optimizers

__all__ = ["IGNORED_LABEL", "SUPPORTED", "CausalLM"]

IGNORED_LABEL = -100
"""The label of a token that does not count in the loss."""

_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
SUPPORTED = (*_FAMILIES, "gpt2")
"""The model types (``config.model_type``) that can become pipelines."""

_Hidden: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
"""Vectors (batch, sequence, width), attention mask and position ids (batch, sequence) or None."""


class CausalLM(PipelineModule):
    """A causal language model of ``transformers``, trained to predict the next token.

    Args:
        config_or_model: a configuration, for a model with random weights of which every worker builds only its stage;
            or a model, whose modules become the layers and keep their weights.
        optimizer: parameters -> optimizer, such as ``functools.partial(torch.optim.AdamW, lr=1e-3)``, or (optimizer,
            scheduler); see :meth:`PipelineModule.from_sequential`.
        activation_checkpointing: whether a block keeps only its input for the backward and recomputes the rest.

    A batch is a mapping with ``input_ids`` and, each optional, ``labels``, ``attention_mask`` and ``position_ids``, all
    integers of shape (batch, sequence); or a pair (input ids, labels). As in ``transformers``,
    labels are *not* shifted, and are ``IGNORED_LABEL`` where a token does not count; by default they are the input ids
    with the padding ignored. The loss is the mean over the labelled tokens of a micro-batch, so all micro-batches have
    equal weight even if some have fewer such tokens.

    Tied embeddings (``config.tie_word_embeddings``) are one parameter, whichever stages hold them. Position ids
    that restart within a row, without an attention mask, separate packed sequences, which do not attend to one
    another.

    Raises:
        ConfigurationError: if an argument is of the wrong kind.
        UnsupportedFeatureError: for a model type that is not in ``SUPPORTED``, or an attention implementation other
            than ``"sdpa"`` and ``"eager"``.
    """

    def __init__(
        self,
        config_or_model: PretrainedConfig | PreTrainedModel,
        optimizer: OptimizerFactory,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        check_factory(optimizer)
        model = config_or_model if isinstance(config_or_model, PreTrainedModel) else None
        config = config_or_model if model is None else model.config
        if not isinstance(config, PretrainedConfig):
            raise ConfigurationError(
                f"CausalLM() got a {type(config).__name__}; pass a configuration, such as LlamaConfig(), or a model,"
                " such as LlamaForCausalLM(config)."
            )
        _check(config, model)
        self.config = _with_attention(config) if model is None else config
        self.activation_checkpointing = activation_checkpointing
        self._optimizer = optimizer
        self._parts: list[nn.Module | LayerSpec] = []
        if model is not None:
            self._parts = _layers_of(model, activation_checkpointing)
            self._build_layers()
            self._parts = []  # the layers of other stages are to be freed

    @override
    def configure_pipeline(self) -> Sequence[nn.Module | LayerSpec]:
        gpt2 = self.config.model_type == "gpt2"
        return self._parts or [
            LayerSpec(GPT2Embedding if gpt2 else Embedding, self.config),
            *(
                LayerSpec(GPT2Block if gpt2 else Block, self.config, index, checkpointing=self.activation_checkpointing)
                for index in range(self.config.num_hidden_layers)
            ),
            LayerSpec(GPT2Head if gpt2 else Head, self.config),
        ]

    @override
    def tied_parameters(self) -> list[tuple[str, str]]:
        if not self.config.tie_word_embeddings:
            return []
        embedding = "wte" if self.config.model_type == "gpt2" else "embed_tokens"
        return [(f"layers.0.{embedding}.weight", f"layers.{self.config.num_hidden_layers + 1}.lm_head.weight")]

    @override
    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        """Returns ((input ids, attention mask or None, position ids or None), labels)."""
        if not isinstance(batch, Mapping):
            tokens, labels = super().split_batch(batch)
            return (tokens, None, None), labels
        if "input_ids" not in batch:
            raise ConfigurationError(f"The batch has {sorted(batch)} and no 'input_ids'.")
        tokens, mask = batch["input_ids"], batch.get("attention_mask")
        labels = batch.get("labels")
        if labels is None:
            labels = tokens if mask is None else tokens.masked_fill(mask == 0, IGNORED_LABEL)
        return (tokens, mask, batch.get("position_ids")), labels

    @override
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy, in nats, of logits (batch, sequence, vocabulary) for the next label (batch, sequence)."""
        logits = output[:, :-1].flatten(0, 1)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        return F.cross_entropy(logits, target[:, 1:].flatten(), ignore_index=IGNORED_LABEL)

    @override
    def configure_optimizers(self) -> Any:
        return make_optimizers(self._optimizer, self.parameters())

    def transformers_state_dict(self) -> dict[str, Tensor]:
        """The weights under their names in ``transformers``, for ``load_state_dict`` of such a model.

        Tied weights appear under both names. All layers must be in this process, as they are after ``fit``.
        """
        base = "transformer" if self.config.model_type == "gpt2" else "model"
        blocks = "h" if self.config.model_type == "gpt2" else "layers"
        last = len(self.layers) - 1
        named = {}
        for name, value in self.state_dict().items():
            _, index, inner = name.split(".", 2)
            if index not in ("0", str(last)):
                inner = f"{blocks}.{int(index) - 1}.{inner.removeprefix('block.')}"
            named[inner if inner.startswith("lm_head.") else f"{base}.{inner}"] = value
        return named


# ---------------------------------------------------------------------- layers


class Embedding(nn.Module):
    """Tokens to vectors."""

    def __init__(self, config: PretrainedConfig, embed_tokens: nn.Module | None = None) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens or _initialised(
            nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id), config
        )

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> _Hidden:
        return self.embed_tokens(tokens), attention_mask, position_ids


class GPT2Embedding(nn.Module):
    """Tokens and their positions to vectors."""

    def __init__(self, config: PretrainedConfig, base: Any = None) -> None:
        super().__init__()
        width = config.hidden_size
        self.wte = base.wte if base else _initialised(nn.Embedding(config.vocab_size, width), config)
        self.wpe = base.wpe if base else _initialised(nn.Embedding(config.max_position_embeddings, width), config)
        self.drop = base.drop if base else nn.Dropout(config.embd_pdrop)

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> _Hidden:
        hidden = self.wte(tokens)
        return self.drop(hidden + self.wpe(_positions(hidden, position_ids))), attention_mask, position_ids


class _Block(nn.Module):
    """A decoder block; subclasses provide the other inputs of the library's module."""

    def __init__(self, config: PretrainedConfig, block: nn.Module, index: int, checkpointing: bool) -> None:
        super().__init__()
        self.block = block
        self.checkpointing = checkpointing
        self._implementation = config._attn_implementation
        self._window = _window(config, index)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> _Hidden:
        if self.checkpointing and self.training and torch.is_grad_enabled():
            output = checkpoint(self._run, hidden, attention_mask, position_ids, use_reentrant=False)
        else:
            output = self._run(hidden, attention_mask, position_ids)
        return output, attention_mask, position_ids

    def _run(self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        mask = visible_tokens(hidden, attention_mask, position_ids, self._window, self._implementation)
        output = self.block(hidden, attention_mask=mask, use_cache=False, **self._arguments(hidden, position_ids))
        vectors: Tensor = output[0] if isinstance(output, tuple) else output  # a tuple in older releases
        return vectors

    def _arguments(self, hidden: Tensor, position_ids: Tensor | None) -> dict[str, Any]:
        raise NotImplementedError


class Block(_Block):
    """A decoder block of the Llama family, with rotary embeddings."""

    def __init__(
        self,
        config: PretrainedConfig,
        index: int,
        block: nn.Module | None = None,
        rotary: nn.Module | None = None,
        *,
        checkpointing: bool = False,
    ) -> None:
        block = block or _initialised(_class(config, "DecoderLayer")(config, index), config)
        super().__init__(config, block, index, checkpointing)
        self.rotary = rotary or _class(config, "RotaryEmbedding")(config=config)

    @override
    def _arguments(self, hidden: Tensor, position_ids: Tensor | None) -> dict[str, Any]:
        positions = _positions(hidden, position_ids)
        return {"position_ids": positions, "position_embeddings": self.rotary(hidden, positions)}


class GPT2Block(_Block):
    """A decoder block of GPT-2."""

    def __init__(
        self, config: PretrainedConfig, index: int, block: nn.Module | None = None, *, checkpointing: bool = False
    ) -> None:
        block = block or _initialised(_class(config, "Block")(config, layer_idx=index), config)
        super().__init__(config, block, index, checkpointing)

    @override
    def _arguments(self, hidden: Tensor, position_ids: Tensor | None) -> dict[str, Any]:
        return {}


class Head(nn.Module):
    """Norm and projection: vectors to logits (batch, sequence, vocabulary)."""

    def __init__(
        self, config: PretrainedConfig, norm: nn.Module | None = None, lm_head: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.norm = norm or _initialised(_class(config, "RMSNorm")(config.hidden_size, eps=config.rms_norm_eps), config)
        self.lm_head = lm_head or _projection(config)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


class GPT2Head(nn.Module):
    """Norm and projection: vectors to logits (batch, sequence, vocabulary)."""

    def __init__(
        self, config: PretrainedConfig, norm: nn.Module | None = None, lm_head: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.ln_f = norm or _initialised(nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon), config)
        self.lm_head = lm_head or _projection(config)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        logits: Tensor = self.lm_head(self.ln_f(hidden))
        return logits


# ---------------------------------------------------------------------- masks and positions


def visible_tokens(
    hidden: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    window: int | None,
    implementation: str,
) -> Tensor | None:
    """The mask for the library's attention: no later tokens, padding, other sequences, or tokens too far back.

    Args:
        hidden: (batch, sequence, width), for its shape, dtype and device.
        attention_mask: (batch, sequence), 0 for padding.
        position_ids: (batch or 1, sequence); without a mask, a new sequence begins wherever they do not rise by one.
        window: number of tokens a token may look back, including itself; None for all.
        implementation: ``"sdpa"`` takes True where a token may look, and no mask if it is only causal;
            ``"eager"`` adds to the scores: 0 there, and elsewhere a number that stays finite in float32, in which it
            computes, so a row of padding that may look nowhere gives no NaN.

    Returns:
        (batch or 1, 1, sequence, sequence), or None.
    """
    length = hidden.shape[1]
    place = torch.arange(length, device=hidden.device)
    distance = place[:, None] - place[None, :]
    allowed = (distance >= 0)[None, None]
    plain = True
    if window is not None and window < length:
        allowed, plain = allowed & (distance < window), False
    if attention_mask is not None:
        allowed, plain = allowed & attention_mask[:, None, None, :].bool(), False
    elif position_ids is not None:
        sequence = (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)
        allowed, plain = allowed & (sequence[:, None, :, None] == sequence[:, None, None, :]), False
    if implementation == "sdpa":
        return None if plain else allowed
    bias = torch.zeros(allowed.shape, dtype=hidden.dtype, device=hidden.device)
    return bias.masked_fill_(~allowed, max(torch.finfo(hidden.dtype).min, torch.finfo(torch.float32).min / 2))


def _positions(hidden: Tensor, position_ids: Tensor | None) -> Tensor:
    return torch.arange(hidden.shape[1], device=hidden.device)[None] if position_ids is None else position_ids


def _window(config: PretrainedConfig, index: int) -> int | None:
    """The sliding window of block ``index``, in tokens."""
    kinds = getattr(config, "layer_types", None)
    slides = config.model_type == "mistral" or (kinds is not None and kinds[index] == "sliding_attention")
    window: int | None = getattr(config, "sliding_window", None) if slides else None
    return window


# ---------------------------------------------------------------------- what comes from the library


def _check(config: PretrainedConfig, model: PreTrainedModel | None) -> None:
    if config.model_type not in SUPPORTED:
        raise UnsupportedFeatureError(
            f"CausalLM() knows the model types {', '.join(SUPPORTED)}, not {config.model_type!r}. For others, derive a"
            " class from PipelineModule whose layers are the model's own modules."
        )
    wanted = _class(config, "LMHeadModel" if config.model_type == "gpt2" else "ForCausalLM")
    if model is not None and not isinstance(model, wanted):
        raise ConfigurationError(f"CausalLM() got a {type(model).__name__}; pass a {wanted.__name__}.")
    if config.model_type == "gpt2" and config.add_cross_attention:
        raise UnsupportedFeatureError("CausalLM() does not support add_cross_attention=True: there is no encoder.")
    implementation = config._attn_implementation
    if implementation not in (None, "sdpa", "eager"):
        raise UnsupportedFeatureError(
            f"CausalLM() does not support attn_implementation={implementation!r}: use 'sdpa' or 'eager'."
        )


def _class(config: PretrainedConfig, name: str) -> Any:
    """The library's class for this model type, e.g. ``LlamaDecoderLayer``."""
    prefix = "GPT2" if config.model_type == "gpt2" else _FAMILIES[config.model_type]
    module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    return getattr(module, prefix + name)


def _with_attention(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of ``config`` with the library's choice of attention implementation."""
    return copy.deepcopy(_class(config, "PreTrainedModel")(copy.deepcopy(config)).config)


def _initialised(module: nn.Module, config: PretrainedConfig) -> nn.Module:
    """``module`` with random weights as the library initialises them for this model type."""
    module.apply(_class(config, "PreTrainedModel")(config)._init_weights)
    return module


def _projection(config: PretrainedConfig) -> nn.Module:
    return _initialised(nn.Linear(config.hidden_size, config.vocab_size, bias=False), config)


def _layers_of(model: Any, checkpointing: bool) -> list[nn.Module | LayerSpec]:
    """The layers made from the modules of ``model``."""
    config = model.config
    if config.model_type == "gpt2":
        base = model.transformer
        return [
            GPT2Embedding(config, base),
            *(GPT2Block(config, i, block, checkpointing=checkpointing) for i, block in enumerate(base.h)),
            GPT2Head(config, base.ln_f, model.lm_head),
        ]
    base = model.model
    return [
        Embedding(config, base.embed_tokens),
        *(
            Block(config, i, block, copy.deepcopy(base.rotary_emb), checkpointing=checkpointing)
            for i, block in enumerate(base.layers)
        ),
        Head(config, base.norm, model.lm_head),
    ]

"""A causal language model of ``transformers`` as a pipeline computes what it computes as a whole."""

import functools
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from support.training import on_one_device
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_recycle import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.model.huggingface import IGNORED_LABEL, SUPPORTED, CausalLM
from lightning_recycle.model.partition import even_parts, parameter_counts
from lightning_recycle.model.weights import ties_between_stages
from lightning_recycle.runtime.stage.stage import Stage

VOCABULARY, SEED = 31, 3
SGD = functools.partial(torch.optim.SGD, lr=0.1)
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def gpt2(dropout: float = 0.0, **options: Any) -> tf.PretrainedConfig:
    return tf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=32, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "llama": lambda: tf.LlamaConfig(**SMALL),
    "llama, tied": lambda: tf.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "mistral, sliding window": lambda: tf.MistralConfig(**SMALL, sliding_window=3),
    "qwen2, one layer sliding": lambda: tf.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=3, max_window_layers=1
    ),
    "qwen3": lambda: tf.Qwen3Config(**SMALL, head_dim=4),
    "gpt2, tied": gpt2,
    "gpt2": lambda: gpt2(tie_word_embeddings=False),
}


def model_of(name: str, implementation: str = "sdpa") -> Any:
    """The library's model, in float64."""
    torch.manual_seed(SEED)
    return tf.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation).double()


def batch(kind: str = "plain", length: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(3, VOCABULARY, (2, length), generator=generator)
    found = {"input_ids": tokens}
    if kind in ("right padding", "left padding", "labels"):
        found["attention_mask"] = torch.ones_like(tokens)
        found["attention_mask"][1, slice(-2, None) if kind == "right padding" else slice(3)] = 0
    if kind == "packed":
        found["position_ids"] = torch.tensor([*range(4), *range(length - 4)]).expand(2, -1)
    if kind == "labels":
        found["labels"] = tokens.masked_fill(tokens % 3 == 0, IGNORED_LABEL)
    return found


KINDS = ["plain", "right padding", "left padding", "packed", "labels"]


def reference(model: Any, inputs: dict[str, Tensor], divisor: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss, in float64, and gradients of it divided by ``divisor``; the library's own loss is computed in float32."""
    labels = inputs.get("labels")
    if labels is None:
        labels = inputs["input_ids"].masked_fill(inputs.get("attention_mask", torch.ones(())) == 0, IGNORED_LABEL)
    output = model(**{**inputs, "labels": labels}, use_cache=False)
    loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL)
    torch.testing.assert_close(loss.float(), output.loss.float(), rtol=1e-5, atol=1e-6)
    (loss / divisor).backward()  # divided here, because the norms of some models compute in float32
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def library_names(module: CausalLM, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients by layer under the library's names."""
    named = list(zip(module.state_dict(), module.transformers_state_dict(), strict=True))
    return {theirs: gradients[ours] for ours, theirs in named if ours in gradients}


def assert_equal(actual: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=1e-10)
    assert set(expected[1]) <= set(actual[1])
    for name, grad in expected[1].items():
        torch.testing.assert_close(actual[1][name], grad, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def loss_of(module: CausalLM, kind: str) -> Tensor:
    inputs, labels = module.split_batch(batch(kind))
    return module.loss(module(*inputs), labels)


# ---------------------------------------------------------------------- one device


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_the_library(name: str, kind: str) -> None:
    expected = reference(model_of(name), batch(kind))
    module = CausalLM(model_of(name), SGD)
    loss = loss_of(module, kind)
    loss.backward()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert_equal((loss.detach(), library_names(module, gradients)), expected)


@pytest.mark.parametrize("kind", ["plain", "right padding", "packed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_eager_attention_is_the_same_model(name: str, kind: str) -> None:
    expected = reference(model_of(name, "eager"), batch(kind))
    loss = loss_of(CausalLM(model_of(name, "eager"), SGD), kind)
    torch.testing.assert_close(loss.detach(), expected[0], rtol=0, atol=1e-10)


def test_padding_that_may_look_nowhere_gives_no_nan() -> None:
    for implementation in ("sdpa", "eager"):
        module = CausalLM(model_of("llama", implementation), SGD)
        loss = loss_of(module, "left padding")
        loss.backward()
        assert loss.isfinite()
        assert all(p.grad.isfinite().all() for p in module.parameters())  # type: ignore[union-attr]


def test_a_model_keeps_its_modules_and_weights() -> None:
    model = model_of("llama")
    module = CausalLM(model, SGD)
    assert module.layers[0].embed_tokens is model.model.embed_tokens
    assert module.layers[1].block is model.model.layers[0]
    assert module.layers[3].lm_head is model.lm_head


@pytest.mark.parametrize("name", CONFIGS)
def test_the_weights_go_back_to_the_library_under_its_names(name: str) -> None:
    module = CausalLM(CONFIGS[name](), SGD)
    module.materialize(seed=8)
    model = model_of(name)
    model.load_state_dict(module.double().transformers_state_dict(), strict=True)
    inputs, _ = module.split_batch(batch())
    torch.testing.assert_close(module.eval()(*inputs), model.eval()(**batch()).logits, rtol=0, atol=1e-10)


# ---------------------------------------------------------------------- from a configuration


@pytest.mark.parametrize("name", CONFIGS)
def test_random_weights_have_the_distribution_of_the_librarys(name: str) -> None:
    module = CausalLM(CONFIGS[name](), SGD)
    module.materialize(seed=8)
    found, expected = module.transformers_state_dict(), model_of(name).state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].shape == value.shape
        assert found[key].double().mean().item() == pytest.approx(value.mean().item(), abs=0.01), key
        if value.numel() > 200:
            assert found[key].double().std().item() == pytest.approx(value.std().item(), rel=0.25), key
    embedding = "transformer.wte.weight" if "gpt2" in name else "model.embed_tokens.weight"
    assert bool(found[embedding][0].any()) == bool(expected[embedding][0].any()), "the padding token's vector"


def test_parameters_are_counted_without_building_the_model() -> None:
    config = tf.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=2, num_attention_heads=64, num_key_value_heads=64
    )  # two of the blocks of a model of 70 billion parameters, at 3.9 GB each
    embedding, *blocks, head = parameter_counts(CausalLM(config, SGD))
    assert embedding == 32000 * 8192
    assert blocks == [4 * 8192**2 + 3 * 8192 * 28672 + 2 * 8192] * 2
    assert head == 8192 + 32000 * 8192


def test_a_worker_builds_its_stage_only_and_gets_the_weights_of_the_whole() -> None:
    for name in CONFIGS:
        whole = CausalLM(CONFIGS[name](), SGD)
        whole.materialize(seed=8)
        for part in even_parts(4, 3):
            worker = pickle.loads(pickle.dumps(CausalLM(CONFIGS[name](), SGD)))
            worker.keep_layers(part)
            worker.materialize(part, seed=8)
            assert {int(key.split(".")[1]) for key in worker.state_dict()} == set(part)
            for key, value in worker.state_dict().items():
                assert torch.equal(value, whole.state_dict()[key]), key


def test_the_configuration_given_is_not_changed() -> None:
    config = tf.LlamaConfig(**SMALL)
    before = config.to_dict()
    CausalLM(config, SGD).materialize()
    assert config.to_dict() == before


# ---------------------------------------------------------------------- stages


def pipelined(
    module: CausalLM, batches: list[dict[str, Tensor]], cut: int, *, decoupled: bool, step: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss and its gradients, by two stages that hand over copies."""
    parts = (range(cut), range(cut, len(module.layers)))
    workers = []
    for part in parts:
        worker = pickle.loads(pickle.dumps(module))
        worker.keep_layers(part)
        workers.append(worker)
    first, last = (
        Stage([w.layers[i] for i in part], part.start, SEED, torch.device("cpu"), w.loss if part.start else None)
        for w, part in zip(workers, parts, strict=True)
    )
    losses = []
    for m, found in enumerate(batches):
        inputs, labels = module.split_batch(found)
        sent = first.forward(step, m, inputs, decoupled=decoupled)
        received = tuple(None if item is None else item.clone() for item in sent)
        assert [item is None for item in received] == [item is None for item in (inputs[0], *inputs[1:])]
        output = last.forward(step, m, received, decoupled=decoupled)
        losses.append(last.loss(step, m, output, labels, len(batches)))
    for m in range(len(batches)):
        if decoupled:
            assert first.backward_input(m, last.backward_input(m, None)) is None
            last.backward_weight(m)
            first.backward_weight(m)
        else:
            first.backward(m, last.backward(m, None))
    gradients = {n: p.grad for w in workers for n, p in w.named_parameters() if p.grad is not None}
    for tie in ties_between_stages(module.tied_groups(), parts):
        gradients[tie.names[0]] = sum(gradients.pop(name) for _, name in tie.copies)  # type: ignore[assignment]
    return torch.stack(losses).mean(), library_names(module, gradients)


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_two_stages_give_loss_and_gradients_of_the_library(name: str, cut: int) -> None:
    """Micro-batches of several kinds and lengths; masks and positions, if there are some, travel with the vectors."""
    batches = [batch("plain", 5), batch("right padding", 9), batch("packed", 8)]
    model = model_of(name)
    results = [reference(model, found, divisor=len(batches)) for found in batches]
    expected = torch.stack([loss for loss, _ in results]).mean(), results[-1][1]  # gradients have accumulated
    for decoupled in (False, True):
        assert_equal(pipelined(CausalLM(model_of(name), SGD), batches, cut, decoupled=decoupled), expected)


def test_dropout_and_activation_checkpointing_do_not_depend_on_the_cut() -> None:
    torch.manual_seed(SEED)
    model = tf.AutoModelForCausalLM.from_config(gpt2(dropout=0.3)).double().train()
    weights = model.state_dict()

    def run(cut: int, checkpointing: bool, step: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        module = CausalLM(gpt2(dropout=0.3), SGD, activation_checkpointing=checkpointing).double()
        module.materialize()
        names = dict(zip(module.transformers_state_dict(), module.state_dict(), strict=True))
        module.load_state_dict({names[key]: value for key, value in weights.items()})
        return pipelined(module, [batch(length=7), batch("right padding")], cut, decoupled=True, step=step)

    expected = run(1, checkpointing=False)
    assert not torch.equal(run(1, checkpointing=False, step=1)[0], expected[0]), "there is dropout"
    for cut, checkpointing in itertools.product((1, 2, 3), (False, True)):
        assert_equal(run(cut, checkpointing), expected)


def test_activation_checkpointing_keeps_less() -> None:
    def saved(checkpointing: bool) -> int:
        module = CausalLM(model_of("llama"), SGD, activation_checkpointing=checkpointing).train()
        sizes = []
        inputs, _ = module.split_batch(batch())
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            module(*inputs)
        return sum(sizes)

    assert saved(True) < saved(False) / 2


# ---------------------------------------------------------------------- use


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama, tied", "gpt2, tied"])
def test_it_trains_on_one_device_as_plain_torch_does(name: str) -> None:
    module = CausalLM(model_of(name), SGD)
    loader = DataLoader([{k: v[i] for k, v in batch().items()} for i in range(2)], batch_size=2)  # type: ignore[arg-type,var-annotated]
    on_one_device(strategy="auto", max_epochs=3).fit(module, loader)
    model = model_of(name)
    optimizer = SGD(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        reference(model, batch())
        optimizer.step()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(module.transformers_state_dict()[key], value, rtol=0, atol=1e-10)


def test_batches_are_mappings_or_pairs() -> None:
    module = CausalLM(CONFIGS["llama"](), SGD)
    tokens = batch()["input_ids"]
    assert module.split_batch((tokens, tokens))[0] == (tokens, None, None)
    padded = batch("right padding")
    (_, mask, positions), labels = module.split_batch(padded)
    assert (mask is padded["attention_mask"], positions) == (True, None)
    assert torch.equal(labels == IGNORED_LABEL, mask == 0)
    with pytest.raises(ConfigurationError, match=r"The batch has \['tokens'\] and no 'input_ids'"):
        module.split_batch({"tokens": tokens})


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        (lambda: "meta-llama/Llama-3", ConfigurationError, "got a str; pass a configuration"),
        (lambda: tf.BertConfig(), UnsupportedFeatureError, f"{', '.join(SUPPORTED)}, not 'bert'"),
        (lambda: tf.LlamaModel(CONFIGS["llama"]()), ConfigurationError, "got a LlamaModel; pass a LlamaForCausalLM"),
        (lambda: gpt2(add_cross_attention=True), UnsupportedFeatureError, "add_cross_attention"),
        (
            lambda: tf.LlamaConfig(**SMALL, attn_implementation="flex_attention"),
            UnsupportedFeatureError,
            "'flex_attention': use 'sdpa' or 'eager'",
        ),
    ],
)
def test_a_model_that_cannot_be_a_pipeline_is_an_error_that_names_it(
    argument: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        CausalLM(argument(), SGD)


def test_an_optimizer_that_exists_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is an optimizer"):
        CausalLM(CONFIGS["llama"](), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1))  # type: ignore[arg-type]

"""The demo's model and data."""

from pathlib import Path

import lightning as L
import pytest
import torch
from support.training import on_one_device

from gpt import GPT, VOCABULARY
from stdlib_text import ByteWindows, StdlibText, read_stdlib


@pytest.fixture
def model() -> GPT:
    L.seed_everything(0, verbose=False)
    model = GPT(width=16, blocks=2, heads=2, context=12, dropout=0.5)
    model.materialize()
    return model


@pytest.fixture
def library(tmp_path) -> Path:
    for name, text in {
        "b.py": "second",
        "a.py": "first ",
        "c.txt": "no source",
        "pkg/z.py": " third",
        "test/t.py": "skipped",
        "pkg/tests/t.py": "skipped",
        "site-packages/p.py": "skipped",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_loss_of_an_untrained_model_is_that_of_guessing(model):
    tokens, target = torch.randint(VOCABULARY, (2, 8, 12))
    assert model.loss(model(tokens), target).item() == pytest.approx(torch.tensor(VOCABULARY).log().item(), abs=0.2)


@pytest.mark.parametrize("changed", [0, 5, 11])
def test_a_token_changes_only_its_own_and_later_logits(model, changed):
    model.eval()
    tokens = torch.randint(VOCABULARY, (1, 12))
    other = tokens.clone()
    other[0, changed] = (tokens[0, changed] + 1) % VOCABULARY
    with torch.no_grad():
        difference = (model(tokens) - model(other)).abs().amax(dim=(0, 2))
    assert torch.all(difference[:changed] == 0)
    assert torch.all(difference[changed:] > 0)


def test_dropout_acts_in_training_only(model):
    tokens = torch.randint(VOCABULARY, (1, 12))
    assert not torch.equal(model.train()(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))


def test_weight_decay_spares_vectors(model):
    decaying, free = model.configure_optimizers().param_groups
    assert {p.ndim for p in decaying["params"]} == {2}
    assert {p.ndim for p in free["params"]} == {1}
    assert len(decaying["params"]) + len(free["params"]) == len(list(model.parameters()))
    assert (decaying["weight_decay"], free["weight_decay"]) == (0.1, 0.0)


def test_width_must_divide_into_heads():
    with pytest.raises(ValueError, match="width=10 does not divide into heads=4"):
        GPT(width=10, heads=4)(torch.zeros(1, 1, dtype=torch.long))


def test_generated_text_continues_the_prompt_and_repeats_with_its_seed(model):
    model.train()
    text = model.generate(b"def ", 20)
    assert text.startswith(b"def ")
    assert len(text) == 24
    assert model.generate(b"def ", 20) == text
    assert model.generate(b"def ", 20, seed=1) != text
    assert model.training
    with pytest.raises(ValueError, match="prompt"):
        model.generate(b"", 1)


def test_trains_on_one_device_with_the_default_strategy(tmp_path):
    L.seed_everything(0, verbose=False)
    model = GPT(width=32, blocks=1, heads=2, context=16, dropout=0.0, learning_rate=1e-2)
    trainer = on_one_device(max_steps=30, default_root_dir=tmp_path)
    trainer.fit(model, StdlibText(context=16, max_bytes=20_000))
    assert trainer.callback_metrics["train_loss"] < 4.5


def test_text_is_the_sorted_sources_without_tests(library):
    assert read_stdlib(1000, library) == b"first second third"
    assert read_stdlib(8, library) == b"first se"


def test_text_without_sources_says_where_it_looked(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        read_stdlib(1000, tmp_path)


def test_windows_cover_the_text_once_and_targets_are_one_byte_ahead():
    text = bytes(range(11))
    windows = ByteWindows(text, context=5)
    assert len(windows) == 2
    inputs, targets = zip(*(windows[i] for i in range(len(windows))), strict=True)
    assert bytes(torch.cat(inputs).tolist()) == text[:-1]
    assert bytes(torch.cat(targets).tolist()) == text[1:]
    with pytest.raises(IndexError):
        windows[2]
    with pytest.raises(ValueError, match="context=5"):
        ByteWindows(text[:5], context=5)

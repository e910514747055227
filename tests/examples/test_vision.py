"""The digits and the network that tells them apart."""

import lightning as L
import pytest
import torch
from support.training import on_one_device

from convnet import ConvNet
from digits import Digits, read_digits


@pytest.fixture
def data() -> Digits:
    data = Digits(batch_size=4, validation_every=5)
    data.setup("fit")
    return data


def test_digits_are_images_of_ten_classes_from_black_to_white():
    images, classes = read_digits().tensors
    assert images.shape == (1797, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    assert images.dtype == torch.float32
    assert set(classes.tolist()) == set(range(10))


def test_every_image_is_either_trained_with_or_validated_with(data):
    train, validation = data.train_dataloader().dataset, data.val_dataloader().dataset
    assert len(validation) == 360
    assert not set(train.indices) & set(validation.indices)
    assert set(train.indices) | set(validation.indices) == set(range(1797))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="validation_every=1"):
        Digits(validation_every=1)
    with pytest.raises(ValueError, match="width=6"):
        ConvNet(width=6)
    with pytest.raises(ValueError, match="size=7"):
        ConvNet(size=7)


def test_output_does_not_depend_on_how_a_batch_is_cut():
    model = ConvNet(width=8, blocks=1).double()
    model.materialize()
    images = torch.rand(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = model(images)
    assert whole.shape == (4, 10)
    torch.testing.assert_close(torch.cat([model(images[:1]), model(images[1:])]), whole)


def test_learns_on_one_device_and_logs_its_accuracy(tmp_path):
    L.seed_everything(0, verbose=False)
    model = ConvNet(width=8, blocks=1, learning_rate=3e-3)
    trainer = on_one_device(max_steps=90, val_check_interval=45, default_root_dir=tmp_path)
    trainer.fit(model, Digits(batch_size=16))
    (told,) = trainer.validate(model, Digits(batch_size=16), verbose=False)
    assert told["val_accuracy"] > 0.8
    assert trainer.callback_metrics["val_loss"] < 0.8

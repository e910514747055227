"""The GAN that draws digits, without a grid."""

import lightning as L
import pytest
import torch
from support.training import on_one_device
from torch.utils.data import DataLoader, TensorDataset
from unmodified_gan import GAN, digits, drawn


@pytest.mark.long
def test_its_drawings_come_near_to_digits():
    L.seed_everything(0, verbose=False)
    model, real = GAN(), digits()
    before = (drawn(model, 200).mean(0) - real.mean(0)).abs().mean()
    model.train()
    on_one_device(max_epochs=20).fit(model, DataLoader(TensorDataset(real), 128, shuffle=True, drop_last=True))
    after = (drawn(model, 200).mean(0) - real.mean(0)).abs().mean()
    assert drawn(model, 3).shape == (3, 64)
    assert torch.isfinite(after)
    assert after < 0.7 * before

"""The simulated device computes what the processor does, and shows whoever does not wait for it."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_recycle import devices

DEVICE = torch.device("simulated", 3)


@pytest.fixture(autouse=True)
def _on_the_device() -> None:
    devices.enter_device(DEVICE)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x).abs()


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]  # its shape depends on values


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 6, 6)),
    "convolution without bias": (lambda: nn.Conv1d(3, 4, 3, bias=False), (2, 3, 6)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 2, 3, groups=2), (2, 4, 6, 6)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (2, 3, 6, 6)),
    "layer norm": (lambda: nn.LayerNorm(6), (2, 3, 6)),
    "lstm": (lambda: nn.LSTM(4, 5, 2, batch_first=True), (2, 3, 4)),
    "gru": (lambda: nn.GRU(4, 5, 2, bidirectional=True), (2, 3, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 3, 8)),
    "attention": (Attention, (2, 2, 3, 4)),
    "max pool": (lambda: nn.MaxPool2d(2), (2, 3, 6, 6)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), (2, 4)),
    "fft": (Spectrum, (4, 8)),
    "index": (Positive, (4, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_what_they_do_on_the_processor(name):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layers = [make().double()]
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_()]
    layers.append(copy.deepcopy(layers[0]).to(DEVICE))
    inputs.append(inputs[0].detach().to(DEVICE).requires_grad_())
    results: list[list[Tensor]] = []
    for layer, x in zip(layers, inputs, strict=True):
        output = layer(x)
        output = output[0] if isinstance(output, tuple) else output
        output.square().sum().backward()
        results.append([output, x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
    for expected, found in zip(*results, strict=True):
        assert found.device == DEVICE
        assert torch.allclose(found.cpu(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_optimizers_step_as_on_the_processor(options):
    layers = [nn.Linear(4, 4).double()]
    layers.append(copy.deepcopy(layers[0]).to(DEVICE))
    for layer in layers:
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.ones(2, 4, dtype=torch.float64, device=layer.weight.device)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
            optimizer.step()
    assert torch.equal(layers[0].weight, layers[1].weight.cpu())


def test_the_host_is_ahead_of_the_device_and_sees_it_if_it_does_not_wait():
    """A copy to the host that is not waited for is not there yet."""
    total = torch.ones(4, device=DEVICE).sum()
    there = torch.empty((), pin_memory=True)
    there.copy_(total, non_blocking=True)
    assert torch.isnan(there)
    devices.await_stream(DEVICE)
    assert there == 4


def test_a_buffer_that_is_written_again_too_early_spoils_what_was_copied_from_it():
    buffer = torch.ones(4, pin_memory=True)
    copied = buffer.to(DEVICE, non_blocking=True)
    buffer.fill_(2)
    assert copied.sum().item() == 8
    copied = buffer.to(DEVICE, non_blocking=True)
    event = devices.new_event(DEVICE)
    event.record()
    event.synchronize()
    buffer.fill_(3)
    assert copied.sum().item() == 8


def _read_beside(is_recorded: bool) -> float:
    """What a second stream reads of a tensor that is dropped and whose memory the first stream takes again."""
    dropped = torch.ones(1000, device=DEVICE)
    first, second = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    second.wait_stream(first)
    with second:
        total = dropped.sum()
    if is_recorded:
        dropped.record_stream(second)
    del dropped
    torch.full((1000,), 7.0, device=DEVICE)
    first.synchronize()
    with second:
        return total.item()


def test_memory_that_another_stream_still_reads_is_taken_again_unless_that_is_recorded():
    assert _read_beside(is_recorded=True) == 1000
    assert _read_beside(is_recorded=False) != 1000


def test_a_stream_that_does_not_wait_for_another_reads_what_was_there_before():
    second = torch.Stream(DEVICE)
    torch.accelerator.synchronize()
    made = torch.ones(4, device=DEVICE) + 1
    with second:
        assert made.sum().item() != 8
    torch.accelerator.synchronize()
    with second:
        assert made.sum().item() == 8


def test_times_are_those_between_two_events():
    before, after = devices.new_event(DEVICE), devices.new_event(DEVICE)
    before.record()
    torch.ones(300, 300, device=DEVICE) @ torch.ones(300, 300, device=DEVICE)
    after.record()
    after.synchronize()
    assert before.elapsed_time(after) > 0


def test_generators_are_of_a_device_and_can_be_seeded_and_restored():
    generator = devices.default_generator(DEVICE)
    generator.manual_seed(5)
    state = generator.get_state()
    draws = [torch.randn(4, device=DEVICE).cpu()]
    torch.randn(4, device="simulated:4")
    generator.set_state(state)
    draws += [torch.randn(4, device=DEVICE).cpu(), torch.randn(4, generator=torch.Generator().manual_seed(5))]
    own = torch.Generator(DEVICE).manual_seed(5)
    draws.append(torch.randn(4, device=DEVICE, generator=own).cpu())
    assert all(torch.equal(draw, draws[0]) for draw in draws)
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.randn(4, device=DEVICE, generator=torch.Generator()).cpu()


def test_memory_is_counted_and_ends():
    free, total = devices.free_and_total(DEVICE)
    before = devices.allocated_bytes(DEVICE)
    kept = torch.empty(1 << 20, device=DEVICE)
    devices.reset_peak_allocated(DEVICE)
    assert devices.allocated_bytes(DEVICE) - before >= kept.nbytes
    assert devices.peak_allocated_bytes(DEVICE) == devices.allocated_bytes(DEVICE)
    assert devices.free_and_total(DEVICE)[0] <= free - kept.nbytes
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device=DEVICE)


def test_tensors_of_two_devices_do_not_mix():
    here, other = torch.ones(2, device=DEVICE), torch.ones(2, device="simulated:4")
    for wrong in (other, torch.ones(2)):
        with pytest.raises(RuntimeError, match="to be on the same device"):
            here + wrong
    assert (here + other.to(DEVICE)).sum().item() == 4


def test_files_know_the_device_and_can_be_read_without_it():
    file = io.BytesIO()
    torch.save({"a": torch.ones(2, device=DEVICE)}, file)
    found: list[Any] = []
    for place in (None, "cpu"):
        file.seek(0)
        found.append(torch.load(file, map_location=place)["a"])
    assert [tensor.device for tensor in found] == [DEVICE, torch.device("cpu")]
    assert torch.equal(found[0].cpu(), found[1])


def test_autocast_lowers_products():
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert nn.Linear(3, 3).to(DEVICE)(torch.ones(2, 3, device=DEVICE)).dtype is torch.bfloat16

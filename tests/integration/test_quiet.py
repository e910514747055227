"""What a run shows: on a terminal, in metrics, as warnings. Plain Lightning is the measure."""

import logging
import os
import pty
import re
import signal
import struct
import sys
import warnings
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

import lightning as L
import pytest
import torch
from support.models import Regression, dataset
from torch import Tensor
from torch.utils.data import DataLoader

SCRIPT = """
import sys
import lightning as L
from support.models import Regression, dataset
from torch.utils.data import DataLoader

if __name__ == "__main__":
    strategy, devices, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=epochs)
    trainer.fit(Regression().double(), DataLoader(dataset(), batch_size=24))
"""

COLUMNS = 120
CURSOR = {"hidden": "\x1b[?25l", "shown": "\x1b[?25h"}


def on_a_terminal(folder: Path, *arguments: object, then: Callable[[str, int], None] | None = None) -> tuple[str, int]:
    """What the script shows on a terminal, and its exit code; ``then`` gets what is shown, and the terminal."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.execv(sys.executable, [sys.executable, str(script), *map(str, arguments)])
    ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    shown = ""
    while True:
        try:
            piece = os.read(terminal, 1 << 16)
        except OSError:  # Linux's end of file on a terminal
            break
        if not piece:
            break
        shown += piece.decode(errors="replace")
        if then is not None:
            then(shown, terminal)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return shown.replace("\r\n", "\n"), os.waitstatus_to_exitcode(status)


def plain(shown: str) -> str:
    """Without colours and the like."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


def bar_height(shown: str) -> int:
    """Lines of the progress bar: to draw it again the cursor goes up over all but one."""
    ups = re.findall(r"(?:\x1b\[2K\x1b\[1A)+", shown)
    return 1 + max((up.count("\x1b[1A") for up in ups), default=0)


def kinds_of_lines(shown: str) -> set[str]:
    """The first words of each line outside of the progress bar, without paths and numbers."""
    lines = re.split(r"[\r\n]+", plain(shown))
    bar = ("it/s", "Epoch", "v_num", "train_loss")
    lines = [line for line in lines if not any(word in line for word in bar)]
    words = {" ".join(re.sub(r"[\d./]+\S*", "", line).split()[:3]) for line in lines}
    return {line for line in words if line}


@pytest.mark.long
def test_a_run_shows_what_plain_lightning_shows_and_two_lines_more(tmp_path):
    shown = {}
    for strategy, devices in (("auto", 1), ("recycle", 2)):
        folder = tmp_path / strategy
        folder.mkdir()
        shown[strategy], code = on_a_terminal(folder, strategy, devices, 2)
        assert code == 0, shown[strategy]
    assert "recycle/" not in shown["recycle"]
    assert bar_height(shown["recycle"]) == bar_height(shown["auto"])
    said = {strategy: kinds_of_lines(text) for strategy, text in shown.items()}
    assert said["recycle"] - said["auto"] == {"Should all workers", "Run: at step"}


@pytest.mark.long
def test_ctrl_c_shows_two_lines_and_the_cursor(tmp_path):
    sent: list[int] = []

    def interrupt(shown: str, terminal: int) -> None:
        if "Epoch 5/" in shown and not sent and list(tmp_path.rglob("*.ckpt")):  # it was written beside the training
            sent.append(os.write(terminal, b"\x03"))

    shown, code = on_a_terminal(tmp_path, "recycle", 2, 100_000, then=interrupt)
    assert code == 1
    last = shown[shown.index("^C") :]
    *_, first, second = plain(last).strip().splitlines()
    assert first == "Detected KeyboardInterrupt, attempting graceful shutdown ..."
    assert re.match(r"The run ended after step \d+\. Its newest checkpoint, of step \d+, is ", second)
    assert "Traceback" not in last
    assert last.rfind(CURSOR["shown"]) > last.rfind(CURSOR["hidden"])


class Settings(Regression):
    """Tells the settings of a worker in the message of an exception."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        with warnings.catch_warnings(record=True) as seen:
            warnings.warn("of a kind that the user does not want to see", stacklevel=1)
            warnings.warn("any other", stacklevel=1)
        level = logging.getLogger("lightning.pytorch").level
        raise RuntimeError(f"{torch.get_float32_matmul_precision()} {level} {[str(each.message) for each in seen]}")


def test_settings_of_the_launching_process_reach_the_workers(monkeypatch):
    logger, before = logging.getLogger("lightning.pytorch"), torch.get_float32_matmul_precision()
    monkeypatch.setattr(logger, "level", logging.ERROR)
    torch.set_float32_matmul_precision("high")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="of a kind")
            trainer = L.Trainer(accelerator="cpu", devices=1, strategy="recycle", max_steps=2, logger=False)
            with pytest.raises(RuntimeError, match=r"high 40 \['any other'\]"):
                trainer.fit(Settings().double(), DataLoader(dataset(), batch_size=12))
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_fit_shows_its_own_metrics_alone_and_leaves_log_history_and_schedules_to_a_validation(tmp_path, capfd):
    logger = L.pytorch.loggers.CSVLogger(tmp_path)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="recycle", max_steps=2, logger=logger, log_every_n_steps=1,
        enable_checkpointing=False,
    )  # fmt: skip
    model, loader = Regression().double(), DataLoader(dataset(), batch_size=12)
    trainer.fit(model, loader)
    assert set(trainer.callback_metrics) == {"train_loss"}
    history, schedules = trainer.strategy.history, trainer.strategy.schedules
    assert any(event.kind == "step" for event in history)
    trainer.validate(model, loader)
    assert "will be deleted" not in capfd.readouterr().err
    found = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "train_loss" in found
    assert "recycle/" not in found
    assert trainer.strategy.history == history
    assert trainer.strategy.schedules == schedules

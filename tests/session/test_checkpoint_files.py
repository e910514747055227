"""At each moment of replacing a checkpoint there is a whole one, and what is not whole is named, with the reason."""

import errno
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from support.models import Regression

from lightning_recycle import CheckpointOptions, ReCycleStrategy
from lightning_recycle.control.protocol.messages import SaveFailure
from lightning_recycle.errors import CheckpointError
from lightning_recycle.launch.resume_and_restart import choose_last, newest_saved, settle_checkpoint
from lightning_recycle.launch.run_preparation import TrainerCall
from lightning_recycle.planning.grid import Grid, Positions
from lightning_recycle.session.checkpoint_files import WholeCheckpointIO, attempt, damage, load_sharded, save_sharded
from lightning_recycle.session.worker_context import StageGroup
from lightning_recycle.session.worker_snapshot import update_from_completion

SIZE = 100_000  # numbers in a checkpoint
CHANGES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}
BOTH = pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])


class Alone(StageGroup):
    """The collectives of a run with one worker."""

    is_leader = is_column_leader = True
    rank = 0
    positions = Positions(Grid(1, 1, 1))

    def gather_all(self, name: str, value: Any) -> dict[int, Any]:
        return {0: value}


def save(path: Path, step: int, sharded: bool, **more: Any) -> None:
    weights = torch.full((SIZE,), float(step))
    rest = {"global_step": step, "pytorch-lightning_version": L.__version__, **more}
    if sharded:
        assert save_sharded(path, {"state_dict": {"w": weights}}, rest, Alone(), lambda temporary: None) is None
    else:
        WholeCheckpointIO().save_checkpoint({"state_dict": {"w": weights}, **rest}, path)


def step_of(path: Path) -> int:
    """The step of a checkpoint, whose content must be of that step to the last number."""
    loaded = load_sharded(path) if path.is_dir() else torch.load(path, weights_only=True)
    assert torch.equal(loaded["state_dict"]["w"], torch.full((SIZE,), float(loaded["global_step"])))
    return int(loaded["global_step"])


def chosen(
    folder: Path, wanted: Any = "last", choose: Any = settle_checkpoint, saves: Any = False, **options: Any
) -> Any:
    """What a run whose checkpoints are in ``folder`` starts from."""
    strategy = ReCycleStrategy(checkpoints=CheckpointOptions(save_on_signal=saves))
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, logger=False, default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, save_last=True)], **options,
    )  # fmt: skip
    trainer.state.fn = TrainerFn.FITTING
    model = Regression()
    call = choose(TrainerCall(trainer, trainer._fit_impl, (model,), {"ckpt_path": wanted}))
    path = call.arguments["ckpt_path"]
    return None if path is None else Path(path)


class Snapshots:
    """Copies a folder before each change of a file system: what a kill at that moment would leave."""

    def __init__(self) -> None:
        self._source: Path | None = None
        self._copies = Path()
        sys.addaudithook(self._before)

    def take(self, source: Path, copies: Path) -> None:
        self._copies, self._source = copies, source

    def stop(self) -> None:
        self._source = None

    def _before(self, event: str, arguments: tuple[Any, ...]) -> None:
        source = self._source
        if source is None or event not in CHANGES:
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        self._source = None
        shutil.copytree(source, self._copies / str(len(list(self._copies.iterdir()))), symlinks=True)
        self._source = source


@pytest.fixture(scope="module")
def snapshots() -> Iterator[Snapshots]:
    taker = Snapshots()  # an audit hook cannot be removed
    yield taker
    taker.stop()


@BOTH
def test_at_each_moment_of_replacing_a_checkpoint_last_is_a_whole_one(sharded, snapshots, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/dev/shm")  # not the file system of the checkpoint, on most machines
    monkeypatch.setattr("tempfile.tempdir", None)
    source, copies = tmp_path / "checkpoints", tmp_path / "copies"
    copies.mkdir()
    save(source / "last.ckpt", 1, sharded)
    snapshots.take(source, copies)
    save(source / "last.ckpt", 2, sharded)
    snapshots.stop()
    assert os.listdir(source) == ["last.ckpt"]
    steps = []
    for number in range(len(os.listdir(copies))):
        found = chosen(copies / str(number))
        assert found == copies / str(number) / "last.ckpt"
        assert damage(found) is None
        steps.append(step_of(found))
        save(copies / str(number) / "last.ckpt", 3, sharded)
        assert step_of(copies / str(number) / "last.ckpt") == 3
        assert not [name for name in os.listdir(copies / str(number)) if name.endswith(".replaced")]
    assert len(steps) >= (3 if not sharded else 10)
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


def spoil(path: Path, how: str) -> None:
    victim = path / "__0_0.distcp" if path.is_dir() else path
    if how == "cut":
        os.truncate(victim, victim.stat().st_size // 2)
    elif how == "overwritten":
        with open(victim, "r+b") as file:
            file.seek(victim.stat().st_size // 2)
            file.write(b"\xff" * 64)
    elif how == "zeros":
        victim.write_bytes(bytes(victim.stat().st_size))
    elif how == "empty":
        victim.write_bytes(b"")
    else:
        (path / "meta.pt").unlink()


@pytest.mark.parametrize(("sharded", "how"), [
    *((sharded, how) for sharded in (False, True) for how in ("cut", "overwritten", "zeros", "empty")),
    (True, "a file is missing"),
])  # fmt: skip
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(sharded, how, tmp_path, caplog):
    for step, name in enumerate(("step=1.ckpt", "last.ckpt", "last-v1.ckpt"), 1):
        save(tmp_path / name, step, sharded)
        os.utime(tmp_path / name, (step, step))
    spoil(tmp_path / "last-v1.ckpt", how)
    os.utime(tmp_path / "last-v1.ckpt", (3, 3))
    found = chosen(tmp_path)
    assert found is not None
    assert step_of(found) == 2
    (warning,) = [record.getMessage() for record in caplog.records if record.name.endswith("launch.resume_and_restart")]
    assert str(tmp_path / "last-v1.ckpt") in warning
    assert "is damaged: " in warning
    with pytest.raises(CheckpointError, match=r"last-v1\.ckpt is damaged: .*newest whole one.*last\.ckpt"):
        chosen(tmp_path, tmp_path / "last-v1.ckpt")
    history = [SimpleNamespace(kind="saved", details={"path": str(tmp_path / name)}) for name in
               ("step=1.ckpt", "gone.ckpt", "last-v1.ckpt")]  # fmt: skip
    assert newest_saved(history, WholeCheckpointIO()) == str(tmp_path / "step=1.ckpt")
    spoil(tmp_path / "last.ckpt", how)
    assert chosen(tmp_path) == tmp_path / "step=1.ckpt"
    spoil(tmp_path / "step=1.ckpt", how)
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        chosen(tmp_path)


def test_a_restart_takes_a_whole_step_and_no_older_file_under_the_name_of_one_that_was_begun(tmp_path):
    for name, step in {"old": 4, "own": 6, "begun": 2}.items():
        WholeCheckpointIO().save_checkpoint({"lightning_recycle": {"step": step}}, tmp_path / name)
    events = [
        ("saved", "begun", 2, {}),
        ("saved", "old", 4, {}),
        ("saved", "own", 6, {"mid_step": True}),
        ("checkpoint_begun", "begun", 8, {}),
    ]

    def newest(count: int) -> str | None:
        history: Any = [
            SimpleNamespace(kind=kind, step=step, details={"path": str(tmp_path / name), **details})
            for kind, name, step, details in events[:count]
        ]
        found = newest_saved(history, WholeCheckpointIO())
        return None if found is None else Path(found).name

    assert newest(4) == "old"
    WholeCheckpointIO().save_checkpoint({"lightning_recycle": {"step": 8}}, tmp_path / "begun")
    assert newest(4) == "begun"
    (tmp_path / "old").unlink()
    (tmp_path / "begun").unlink()
    assert newest(3) == "own"


def test_a_last_link_to_nothing_is_named_and_the_newest_beside_it_is_taken(tmp_path):
    save(tmp_path / "step=1.ckpt", 1, False)
    (tmp_path / "last.ckpt").symlink_to("step=0.ckpt")
    assert chosen(tmp_path) == tmp_path / "step=1.ckpt"


def test_without_a_last_checkpoint_a_run_starts_from_the_beginning(tmp_path, caplog):
    save(tmp_path / "step=1.ckpt", 1, False)
    assert chosen(tmp_path) is None
    assert "there is no checkpoint yet" in caplog.text
    assert chosen(tmp_path, None) is None
    assert chosen(tmp_path, tmp_path / "step=1.ckpt") == tmp_path / "step=1.ckpt"


def test_a_damaged_checkpoint_of_slurm_gives_way_to_the_one_before(tmp_path):
    for step in (9, 10):
        save(tmp_path / f"hpc_ckpt_{step}.ckpt", step, False)
    save(tmp_path / "other.ckpt", 11, False)
    spoil(tmp_path / "hpc_ckpt_10.ckpt", "cut")
    assert chosen(tmp_path, "hpc") == tmp_path / "hpc_ckpt_9.ckpt"


@pytest.mark.parametrize("choose", [settle_checkpoint, choose_last])
def test_last_is_the_newest_also_of_those_that_a_signal_asked_for(choose, tmp_path):
    for step, name in enumerate(["last", "hpc_ckpt_1", "named"]):
        save(tmp_path / f"{name}.ckpt", step, False)
        os.utime(tmp_path / f"{name}.ckpt", (step, step))
    save(tmp_path / "hpc_ckpt_2.ckpt", 4, False, callbacks={"ModelCheckpoint": {"dirpath": "another/run"}})
    for saves, name in [(False, "last"), (True, "hpc_ckpt_1"), (tmp_path / "named.ckpt", "named")]:
        assert step_of(chosen(tmp_path, "last", choose, saves)) == step_of(tmp_path / f"{name}.ckpt")
    save(tmp_path / "last.ckpt", 3, False)
    assert step_of(chosen(tmp_path, "last", choose, True)) == 3
    (tmp_path / "last.ckpt").unlink()
    (tmp_path / "last.ckpt").symlink_to("deleted.ckpt")
    assert step_of(chosen(tmp_path, "last", choose, True)) == 1


def test_files_without_checksums_and_folders_without_a_manifest_are_taken(tmp_path):
    torch.save({"w": torch.ones(100)}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert damage(tmp_path / "old.ckpt") is None
    chosen_before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(100)}, tmp_path / "fast.ckpt")
        save(tmp_path / "ours.ckpt", 1, False)
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(chosen_before)
    assert damage(tmp_path / "fast.ckpt") is None
    with zipfile.ZipFile(tmp_path / "ours.ckpt") as archive:
        assert archive.testzip() is None
    save(tmp_path / "folder.ckpt", 1, True)
    (tmp_path / "folder.ckpt" / "manifest.json").unlink()
    assert damage(tmp_path / "folder.ckpt") is None
    (tmp_path / "folder.ckpt" / ".metadata").unlink()
    assert damage(tmp_path / "folder.ckpt") == "it has no manifest.json and no .metadata"
    (tmp_path / "any").mkdir()
    assert damage(tmp_path / "any") is not None


@pytest.mark.parametrize("content", [{"a": 1}, {"state_dict": {}}, [1], torch.ones(1)])
def test_a_file_that_no_trainer_wrote_is_refused_with_the_way_to_load_weights(content, tmp_path):
    path = tmp_path / "weights.pt"
    torch.save(content, path)
    words = r"pt' is not a checkpoint of Lightning: it has no 'pytorch-lightning_version'.* model\.load_state_dict"
    with pytest.raises(CheckpointError, match=words):
        chosen(tmp_path, path)
    torch.save(content, path, _use_new_zipfile_serialization=False)  # which a worker reads first
    assert chosen(tmp_path, path) == path


MISSING = "there is no such file or folder"
NO_FOLDER = "it is not a checkpoint folder, with neither manifest.json nor .metadata nor meta.pt"
NONE, NEWEST = "; {folder} holds no whole checkpoint.", "; the newest whole checkpoint there: {folder}/5.ckpt."


@pytest.mark.parametrize(("name", "kept", "words"), [
    ("", [], NO_FOLDER + NONE),
    ("", [3, 5], NO_FOLDER + NEWEST),
    ("/nope.ckpt", [], MISSING + NONE),
    ("/nope.ckpt", [3, 5], MISSING + NEWEST),
    ("/no/such.ckpt", [], "there is no folder {folder}/no."),
])  # fmt: skip
def test_what_is_no_checkpoint_is_refused_with_the_newest_whole_one_of_its_folder(name, kept, words, tmp_path):
    for step in kept:
        save(tmp_path / f"{step}.ckpt", step, False)
        os.utime(tmp_path / f"{step}.ckpt", (step, step))
    (tmp_path / "damaged.ckpt").write_bytes(b"PK\x03\x04")  # and newest
    with pytest.raises(CheckpointError) as caught:
        chosen(tmp_path, f"{tmp_path}{name}")
    assert str(caught.value) == f"ckpt_path='{tmp_path}{name}': {words.format(folder=tmp_path)}"


@pytest.mark.parametrize(
    ("sharded", "kept", "given"), [(False, "ok.ckpt", "ok.ckp"), (True, "ok.ckpt", "ok.pt"), (True, "all", "al")]
)
def test_a_mistyped_checkpoint_is_refused_with_the_nearest_name(sharded, kept, given, tmp_path):
    for name in (kept, "newer.ckpt"):
        save(tmp_path / name, 3, sharded)
    with pytest.raises(CheckpointError, match=rf"{given}': there is no .*newer\.ckpt\. Did you mean '{kept}'\?"):
        chosen(tmp_path, tmp_path / given)


def test_a_missing_checkpoint_elsewhere_is_refused():
    with pytest.raises(CheckpointError, match=r"'memory://run/nope\.ckpt': there is no such file or folder\.$"):
        chosen(Path(), "memory://run/nope.ckpt")


def test_checkpoints_elsewhere_go_lightnings_way():
    io = WholeCheckpointIO()
    io.save_checkpoint({"global_step": 3}, "memory://run/last.ckpt")
    assert io.load_checkpoint("memory://run/last.ckpt") == {"global_step": 3}
    with pytest.warns(UserWarning, match="no last checkpoint"):  # it drops "memory://"
        assert chosen("memory://run") is None
    assert chosen("memory://run", choose=choose_last) == Path("last")
    io.remove_checkpoint("memory://run/last.ckpt")
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint("memory://run/last.ckpt")


def test_a_checkpoint_is_completed_where_no_state_of_an_optimizer_was_read():
    """As in a worker that joins, which reads none of a folder: its peer has a newer one."""
    completion = {"trainer": {"loops": "new"}, "lr_schedulers": [], "callbacks": {}, "weights": {"w": 2, "other": 3}}
    completion["param_groups"] = [[{"lr": 0.5}]]
    for states, expected in (([], []), ([{"param_groups": [{"lr": 0.1}]}], [{"param_groups": [{"lr": 0.5}]}])):
        checkpoint = {"loops": {}, "optimizer_states": states, "state_dict": {"w": 1}}
        update_from_completion(checkpoint, completion, ())
        assert checkpoint["optimizer_states"] == expected
        assert (checkpoint["loops"], checkpoint["state_dict"]) == ({"fit_loop": "new"}, {"w": 2})


@pytest.mark.parametrize(("code", "expected"), [
    (errno.ENOSPC, "Free some space"), (errno.EROFS, "writable"), (errno.ENOENT, "folder is gone"),
    (errno.ENOTDIR, "A file has"), (errno.EIO, ""),
])  # fmt: skip
def test_the_remedy_of_a_write_that_failed_fits_the_cause(code, expected, tmp_path):
    failure = attempt(Mock(side_effect=OSError(code, "refused")), tmp_path / "last.ckpt", None)
    assert isinstance(failure, SaveFailure)
    assert expected in failure.remedy
    assert bool(failure.remedy) == bool(expected)

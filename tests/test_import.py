"""What an import loads and registers, and the private names of Lightning and torch that the package relies on."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from support.sampling import sampled
from support.scripts import completed
from support.waiting import next_line

ROOT = Path(__file__).parents[1]


def run(code: str, *arguments: str) -> str:
    """Runs ``code`` in a new interpreter and returns what it prints."""
    command = [sys.executable, "-c", code, *arguments]
    result = completed(command, timeout=280)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_planning_simulator_and_control_plane_load_neither_torch_nor_lightning_nor_solvers():
    modules = [
        "lightning_recycle.control.monitoring.status_command", "lightning_recycle.traces",
        "lightning_recycle.simulation", "lightning_recycle.planning", "lightning_recycle.visualize",
        "lightning_recycle.errors", "lightning_recycle.control.protocol.membership",
        "lightning_recycle.control.coordinator.coordinator", "lightning_recycle.control.client",
        "lightning_recycle.control.coordinator.standalone", "lightning_recycle.engines.recycle_run",
    ]  # fmt: skip
    code = """
import importlib, sys
heavy = {'torch', 'lightning', 'numpy', 'torchmetrics', 'matplotlib', 'hydra', 'mip', 'highspy', 'ortools'}
for module in sys.argv[1:]:
    importlib.import_module(module)
    print(module, sorted({m.split('.')[0] for m in sys.modules} & heavy))
"""
    assert run(code, *modules).splitlines() == [f"{module} []" for module in modules]


# Runs each code in a child, as of a new interpreter that has loaded what takes long: torch, and torchmetrics with what
# that loads.
FORKING = """
import json, os, sys, traceback
import torch, torchmetrics
for code in sys.stdin:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writer, 1)
        status = 1
        try:
            exec(json.loads(code), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    os.close(writer)
    with open(reader) as output:
        printed = output.read()
    print(json.dumps([os.waitpid(child, 0)[1], printed.strip()]), flush=True)
"""


@pytest.fixture(scope="module")
def in_child() -> Iterator[Callable[[str], str]]:
    """Runs a code with torch in a process of its own, and returns what it prints."""
    command = [sys.executable, "-c", FORKING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def run_in_child(code: str) -> str:
            print(json.dumps(code), file=process.stdin, flush=True)
            status, printed = json.loads(next_line(process))
            assert status == 0, "its traceback is above"
            return printed

        yield run_in_child
        process.stdin.close()


@pytest.mark.long
def test_recycle_is_registered_in_any_order_of_imports_and_lightning_alone_does_not_know_it(in_child):
    registered = "from lightning.pytorch.strategies import StrategyRegistry\nprint('recycle' in StrategyRegistry)"
    for ours in (
        "import lightning_recycle; import lightning",
        "import lightning; import lightning_recycle",
        "import lightning_recycle.planning; import lightning",
    ):
        assert in_child(f"{ours}\n{registered}") == "True", ours
    assert in_child(f"import lightning\n{registered}") == "False"


@pytest.mark.parametrize(
    "first",
    sampled(
        ["import lightning_recycle", "import pytorch_lightning", "import lightning.pytorch"], 1, rest=pytest.mark.long
    ),
)
def test_both_names_of_lightning_mean_the_same_modules(first, in_child):
    code = f"""
{first}
from lightning_recycle import ReCycleStrategy
import pytorch_lightning as pl
from lightning.pytorch.callbacks import Timer
from lightning.fabric.utilities.seed import seed_everything
import lightning_fabric.utilities.seed
print(pl.callbacks.Timer is Timer, lightning_fabric.utilities.seed.seed_everything is seed_everything)
for strategy in ("recycle", ReCycleStrategy()):
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    print(type(trainer.strategy) is ReCycleStrategy, type(trainer.accelerator) is pl.accelerators.CPUAccelerator)
"""
    assert in_child(code).split() == ["True"] * 6


@pytest.mark.long
def test_a_trainer_of_another_pytorch_lightning_is_told_what_to_import(in_child):
    code = """
import lightning.pytorch, pytorch_lightning as pl
from lightning_recycle import ReCycleStrategy
for strategy in ("recycle", ReCycleStrategy()):
    try:
        pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    except ValueError as error:
        print("import lightning.pytorch as pl" in str(error))
"""
    assert in_child(code).splitlines() == ["True", "True"]


ALIAS = """
import importlib, importlib.abc, importlib.util, sys

class Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pytorch_lightning":
            return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec):
        module = importlib.import_module("lightning.pytorch" + spec.name.removeprefix("pytorch_lightning"))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = module.__spec__.loader_state

sys.meta_path.insert(0, Alias())
"""


@pytest.mark.parametrize("ours_first", sampled([False, True], 1, rest=pytest.mark.long))
def test_pytorch_lightning_as_another_name_of_lightning_has_the_strategy(ours_first, in_child):
    both = ["import lightning_recycle", ALIAS]
    code = """
import pytorch_lightning as pl, pytorch_lightning.strategies, pytorch_lightning.callbacks
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="recycle", logger=False, enable_checkpointing=False)
print(type(trainer.strategy).__name__)
"""
    assert in_child("\n".join([*(both if ours_first else reversed(both)), code])) == "ReCycleStrategy"


def test_public_names_are_found_and_unknown_ones_are_not():
    package = importlib.import_module("lightning_recycle")
    for name in dir(package):
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match=r"no attribute 'Misspelt'\.$"):
        _ = package.Misspelt
    with pytest.raises(AttributeError, match=r"no attribute 'RecycleStrategy'\. Did you mean 'ReCycleStrategy'\?$"):
        _ = package.RecycleStrategy


def test_dir_shows_the_public_names_before_they_are_loaded():
    shown = """
import sys
import lightning_recycle as r
print(set(dir(r)) - set(r.__all__), "torch" in sys.modules)
"""
    packages = {"__version__", "callbacks", "errors", "planning", "simulation", "traces", "visualize"}
    found, rest = run(shown).split("} ")
    assert (ast.literal_eval(found + "}"), rest) == (packages, "False")


def test_why_a_public_name_cannot_be_imported_is_told(tmp_path):
    (tmp_path / "older.py").write_text("import math; math.newer")
    code = """
import sys
import lightning_recycle
sys.path.insert(0, sys.argv[1])
lightning_recycle._LAZY["PipelineModule"] = "older"
try:
    from lightning_recycle import PipelineModule
except ImportError as error:
    print(error)
"""
    assert "older cannot be imported: module 'math' has no attribute 'newer'" in run(code, str(tmp_path))


# docs/architecture.md lists the modules that use them; when one changes, this fails first.
PRIVATE = {
    "lightning_recycle.runtime.groups_and_transports": [
        "torch.distributed:ProcessGroupGloo._Options", "torch.distributed:ProcessGroupGloo.create_device",
    ],
    "lightning_recycle.session.loops": [
        "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop._broadcast_sigterm_tensor",
        "lightning.pytorch.loops.optimization.automatic:_AutomaticOptimization._on_before_zero_grad",
        "lightning.pytorch.loops.optimization.manual:_ManualOptimization.advance",
        "lightning.pytorch.trainer:call._call_lightning_module_hook", "lightning.pytorch:Trainer._results",
        "lightning.pytorch.trainer.connectors.logger_connector.logger_connector:_LoggerConnector.on_batch_start",
        "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop._should_check_val_fx",
        "lightning.pytorch.loops.loop:_Loop.reset_restart_stage",
        "lightning.pytorch.loops.fit_loop:_FitLoop.restarted_on_epoch_end",
        "lightning.pytorch.loops.fit_loop:_FitLoop._load_combined_loader_states",
    ],
    "lightning_recycle.torch_internals": [
        "torch.utils.data._utils.worker:WorkerInfo", "torch.nn:Module._compiled_call_impl", "torch.nn:Module._apply",
        "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
        "torch.distributed.fsdp._fully_shard._fsdp_init:_move_states_to_device",
        "torch:_C._get_privateuse1_backend_name", "torch:Tensor._version",
        "torch.nn.utils.clip_grad:_get_total_norm", "torch.amp:GradScaler._unscale_grads_",
    ],
    "lightning_recycle.data.iterable_style": ["datasets.iterable_dataset:BufferShuffledExamplesIterable"],
    "lightning_recycle.session.checkpoint_callbacks": [
        "lightning.pytorch.callbacks:ModelCheckpoint._save_topk_checkpoint",
        "lightning.pytorch.callbacks:ModelCheckpoint._save_last_checkpoint",
        "lightning.pytorch.callbacks:ModelCheckpoint._link_checkpoint",
        "lightning.pytorch.callbacks:ModelCheckpoint._save_checkpoint",
    ],
    "lightning_recycle.session.reporting": ["lightning.pytorch.callbacks:ModelSummary._summary"],
    "lightning_recycle.commands.__init__": ["hydra._internal.utils:get_args_parser"],
    "lightning_recycle.launch.worker_payload": ["omegaconf.basecontainer:BaseContainer._resolvers"],
    "lightning_recycle.session.lightning_internals": [
        "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultMetric.to",
        "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultCollection",
        "lightning.pytorch:LightningModule._on_before_batch_transfer",
        "lightning.pytorch:LightningModule._apply_batch_transfer_handler",
        "lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector.hpc_save_path",
        "lightning.pytorch.loops.loop:_Loop._load_from_state_dict",
        "lightning.pytorch.loops.fit_loop:RestartStage.RESTARTED_MID_EPOCH",
        "lightning.pytorch.trainer:call._call_callbacks_state_dict",
        "lightning.pytorch.trainer:call._call_callbacks_load_state_dict",
        "lightning.pytorch.trainer.connectors.data_connector:_DataConnector.attach_data",
        "lightning.pytorch.trainer.connectors.data_connector:_DataLoaderSource.is_module",
        "lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector._select_ckpt_path",
        "lightning.pytorch.utilities.combined_loader:CombinedLoader._state_dicts",
        "lightning.pytorch.callbacks:ModelCheckpoint._find_last_checkpoints",
        "lightning.pytorch.callbacks:ModelCheckpoint._ModelCheckpoint__resolve_ckpt_dir",
        "lightning.pytorch.profilers:PyTorchProfiler._default_schedule",
        "lightning.pytorch.utilities:grad_norm.__code__",
        "lightning.pytorch.strategies.launchers.multiprocessing:_GlobalStateSnapshot.capture",
        "lightning.pytorch.strategies.launchers.multiprocessing:_GlobalStateSnapshot.restore",
    ],
}  # fmt: skip


def listed(heading: str) -> list[str]:
    """The modules in the first paragraph below ``heading`` in docs/architecture.md, as paths in the package."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    return re.findall(r"`([\w/]+\.py)`", page.partition(heading)[2].strip().partition("\n\n")[0])


@pytest.mark.parametrize(
    ("user", "name"), [(user, name) for user, names in PRIVATE.items() for name in names], ids=lambda value: value
)
def test_a_private_name_that_the_package_relies_on_exists_and_its_user_is_listed(user, name):
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    rows = [*listed("## Private APIs"), *listed("\nOf others:")]
    assert rows.count(user.removeprefix("lightning_recycle.").replace(".", "/") + ".py") == 1, f"{user} uses {name}"


# What everybody documents in spite of its name, and the tables of modules, which this package has attributes like.
DOCUMENTED = {"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"}
TABLES = {"_backward_hooks", "_base", "_buffers", "_modules", "_parameters", "_version"}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def is_own(value: ast.expr) -> bool:
    """Whether an attribute of ``value`` is one of the object itself, or of its class."""
    found = value.func if isinstance(value, ast.Call) else value
    return isinstance(found, ast.Name) and found.id in ("self", "cls", "super")


def own_names(trees: Iterable[ast.Module]) -> set[str]:
    """All names that the package defines, of attributes and methods too, and those that everybody documents."""
    names: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.update([node.attr] if is_own(node.value) else [])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Dict):
            names.update(key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
    return names - TABLES | DOCUMENTED


def foreign_names(tree: ast.Module, own: set[str]) -> set[str]:
    """The private names of other packages that a module imports, or looks up in objects that are not its own."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith(("lightning_recycle", "__future__")):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and node.attr not in own:
            found |= set() if is_own(node.value) else {node.attr}
    return {name for name in found if is_private(name)}


def test_modules_that_use_private_names_of_other_packages_are_listed():
    package = ROOT / "lightning_recycle"
    trees = {path: ast.parse(path.read_text()) for path in package.rglob("*.py")}
    own = own_names(trees.values())
    rows = {*listed("## Private APIs"), *listed("\nOf others:")}
    users = {str(path.relative_to(package)): foreign_names(tree, own) for path, tree in trees.items()}
    assert {user: names for user, names in users.items() if names and user not in rows} == {}
    assert rows <= {*users}
    assert len(listed("## Private APIs")) <= 12


def test_private_signatures_are_those_that_are_overridden():
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.trainer import call
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    assert list(inspect.signature(_AutomaticOptimization.run).parameters) == [
        "self", "optimizer", "batch_idx", "kwargs",
    ]  # fmt: skip
    assert list(inspect.signature(_TrainingEpochLoop.__init__).parameters) == [
        "self", "trainer", "min_steps", "max_steps",
    ]  # fmt: skip
    assert list(inspect.signature(_fsdp_init._move_states_to_device).parameters) == ["params", "buffers", "device"]
    assert list(inspect.signature(call._call_lightning_module_hook).parameters)[:2] == ["trainer", "hook_name"]


def test_attributes_of_lightnings_loops_are_where_the_package_expects_them():
    import lightning as L

    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False)
    loop = trainer.fit_loop.epoch_loop
    assert loop.automatic_optimization.optim_progress.optimizer.step.increment_ready is not None
    assert loop.automatic_optimization.optim_progress.optimizer.zero_grad.increment_completed is not None
    assert loop.val_loop is not None
    assert trainer._val_check_time_interval is None
    monitor = L.pytorch.callbacks.ThroughputMonitor(batch_size_fn=len)
    for attribute in ("_throughputs", "_t0s", "_samples", "_batches", "_lengths"):
        assert getattr(monitor, attribute) == {}
    assert L.pytorch.callbacks.ProgressBar()._trainer is None
    assert (loop.min_steps, loop.max_steps) == (None, 1)
    assert "epoch_loop.state_dict" in trainer.fit_loop.state_dict()


def test_attributes_of_torchmetrics_are_where_the_package_expects_them():
    import torchmetrics

    metric = torchmetrics.MeanMetric()
    metric.update(1.0)
    assert set(metric._defaults) == set(metric._reductions) == {"mean_value", "weight"}
    assert (metric._update_count, metric._forward_cache, metric._computed) == (1, None, None)
    collection = torchmetrics.MetricCollection([metric])
    assert collection._enable_compute_groups is True
    assert collection._groups is not None


def test_attributes_of_torch_parameters_that_tell_of_hooks_exist():
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.register_hook(lambda grad: grad)
    assert parameter._backward_hooks
    parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert parameter._post_accumulate_grad_hooks


def test_no_module_binds_a_name_twice():
    """A second constant of the same name would replace the first one for the functions above it, too."""
    twice = set()
    for path in (ROOT / "lightning_recycle").rglob("*.py"):
        bound = []
        for node in ast.parse(path.read_text()).body:
            parts = [part for to in getattr(node, "targets", ()) for part in ast.walk(to)]
            bound += [part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
            bound += [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        twice |= {(path.name, name) for name, times in Counter(bound).items() if times > 1}
    assert twice == set()

"""`Accelerator(kwargs_handlers=[ZipCCLPlugin()])` trains to the same bits as without, on real processes, and frames are
sent."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import import_deepspeed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

accelerate = pytest.importorskip("accelerate")
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)

import zipccl_accelerate
from zipccl_accelerate import ZipCCLPlugin
from zipccl_accelerate.modes import HooksMode
from zipccl_core import ConfigError, UnsupportedVersionError, ZipCCLConfig, ZipCCLProcessGroup, drop_in
from zipccl_core.testing import run_ranks, same_bits

BF16 = torch.bfloat16
EXACT = {"strategy": "always", "reduction": "gloo"}

pytestmark = pytest.mark.filterwarnings("ignore")  # accelerate's own, about CPUs and deprecated names of torch


@pytest.fixture(autouse=True)
def _on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def plugins(fields_: dict[str, Any] | None) -> list[Any]:
    return [] if fields_ is None else [ZipCCLPlugin(**fields_)]


def network(dtype: torch.dtype = BF16) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 96)).to(dtype)


def train(accelerator: Accelerator, model: nn.Module, steps: int = 3) -> tuple[list[float], torch.Tensor]:
    """Losses, and the weights that this rank has in the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    dtype = next(model.parameters()).dtype
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 96, generator=generator).to(dtype)
        loss = (model(x).float() - x.float()).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parts = [getattr(p, "_local_tensor", p).detach().reshape(-1).float() for p in model.parameters()]
    return losses, torch.cat(parts)


def frames(plugin: ZipCCLPlugin | None, *operations: str) -> int:
    """The frames of the operation that sent fewest."""
    if plugin is None:
        return 0
    counters = plugin.stats()
    return min(int(counters.get(f"zipccl/{operation}/frames", 0)) for operation in operations)


def ddp(rank: int, world_size: int, given: dict[str, Any] | None, group_exists: bool = False) -> Any:
    if group_exists:
        PartialState(cpu=True)
    handlers = plugins(given)
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    losses, weights = train(accelerator, network())
    backend = "zipccl" if isinstance(dist.group.WORLD, ZipCCLProcessGroup) else dist.get_backend()
    return losses, weights, frames(*handlers or [None], "all_reduce"), backend


def fsdp2(rank: int, world_size: int, given: dict[str, Any] | None, group_exists: bool = False) -> Any:
    """Accelerate has no FSDP on CPUs; its code for FSDP2 runs on them all the same when it is told to."""
    if group_exists:
        PartialState(cpu=True)
    handlers = plugins(given)
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000
    )
    losses, weights = train(accelerator, network())
    backend = "zipccl" if isinstance(dist.group.WORLD, ZipCCLProcessGroup) else dist.get_backend()
    return losses, weights, frames(*handlers or [None], "all_gather", "reduce_scatter"), backend


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("group_exists", [False, True], ids=["backend", "hooks"])
@pytest.mark.parametrize("job", [ddp, fsdp2])
def test_training_has_the_same_bits(job: Callable[..., Any], group_exists: bool, world_size: int) -> None:
    native = run_ranks(job, world_size, None, backend=None)
    compressed = run_ranks(job, world_size, EXACT, group_exists, backend=None)
    for (losses, weights, none, _), (others, other_weights, sent, backend) in zip(native, compressed, strict=True):
        assert losses == others
        assert same_bits(weights, other_weights)
        assert none == 0
        assert sent > 0
        assert backend == ("gloo" if group_exists else "zipccl")


def gradients(rank: int) -> list[torch.Tensor]:
    """Of one rank alone, after its first step."""
    model = network()
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(rank)).to(BF16)
    (model(x).float() - x.float()).square().mean().backward()
    return [p.grad for p in model.parameters()]


def first_step(rank: int, world_size: int, sharded: bool) -> bool:
    """Whether the first step's gradients are those of all ranks, added in rank order in fp32 and rounded once."""
    parts = list(zip(*[gradients(r) for r in range(world_size)], strict=True))
    accelerator = Accelerator(cpu=True, kwargs_handlers=plugins({"strategy": "always"}))
    if sharded:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000
        )
    model = network()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(rank)).to(BF16)
    accelerator.backward((model(x).float() - x.float()).square().mean())
    same = []
    for parameter, of_ranks in zip(model.parameters(), parts, strict=True):
        # DDP divides each rank's gradients before it adds them, FSDP2 asks for the average
        terms = [part.float() if sharded else part.mul(1 / world_size).float() for part in of_ranks]
        total = terms[0].clone()
        for term in terms[1:]:
            total += term
        wanted = (total / world_size if sharded else total).to(BF16)
        mine = parameter.grad.full_tensor() if sharded else parameter.grad
        same.append(same_bits(mine, wanted))
    return all(same)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_fp32_reductions_equal_a_reference(sharded: bool, world_size: int) -> None:
    assert run_ranks(first_step, world_size, sharded, backend=None) == [True] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_fp32_reductions_are_deterministic(world_size: int) -> None:
    """Equal on all ranks and in every run."""
    first, second = (run_ranks(ddp, world_size, {"strategy": "always"}, backend=None) for _ in range(2))
    for (losses, weights, sent, _), (others, other_weights, _, _) in zip(first, second, strict=True):
        assert losses == others
        assert same_bits(weights, other_weights)
        assert same_bits(weights, first[0][1])
        assert sent > 0


def deepspeed_zero(rank: int, world_size: int, given: dict[str, Any] | None, stage: int) -> Any:
    from accelerate.utils import DeepSpeedPlugin

    os.environ.pop("ACCELERATE_USE_CPU")
    handlers = plugins(given)
    section = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    plugin = DeepSpeedPlugin(hf_ds_config=section)
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=handlers)
    model = network()
    engine, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        x = torch.randn(16, 96, generator=generator).to(BF16)
        loss = (engine(x).float() - x.float()).square().mean()
        accelerator.backward(loss)
        losses.append(loss.item())
    operations = ("all_gather", "reduce_scatter") if stage == 3 else ("all_reduce",)
    return losses, frames(*handlers or [None], *operations)


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (2, 2), (3, 2), (3, 4)])
def test_deepspeed_through_accelerate(stage: int, world_size: int) -> None:
    pytest.importorskip("deepspeed")
    import_deepspeed()
    native = run_ranks(deepspeed_zero, world_size, None, stage, backend=None)
    compressed = run_ranks(deepspeed_zero, world_size, EXACT, stage, backend=None)
    for (losses, none), (others, sent) in zip(native, compressed, strict=True):
        assert losses == others
        assert len(set(losses)) == 3
        assert none == 0
        assert sent > 0


def test_a_deepspeed_section_that_differs() -> None:
    pytest.importorskip("deepspeed")
    import_deepspeed()

    def body(rank: int, world_size: int) -> None:
        from accelerate.utils import DeepSpeedPlugin

        os.environ.pop("ACCELERATE_USE_CPU")
        section = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 0},
            "zipccl": {"reduction": "gloo"},
        }
        with pytest.raises(ConfigError, match="differs from the ZipCCLPlugin"):
            Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=section), kwargs_handlers=[ZipCCLPlugin()])

    run_ranks(body, 2, backend=None)


def test_other_handlers_work_beside_it() -> None:

    def body(rank: int, world_size: int, given: dict[str, Any] | None) -> Any:
        ours = plugins(given)
        handlers = [
            InitProcessGroupKwargs(timeout=timedelta(seconds=77)),
            *ours,
            DistributedDataParallelKwargs(bucket_cap_mb=1, gradient_as_bucket_view=True),
        ]
        accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
        assert accelerator.init_handler is handlers[0]
        assert accelerator.ddp_handler is handlers[-1]
        return *train(accelerator, network()), frames(*ours or [None], "all_reduce")

    native = run_ranks(body, 2, None, backend=None)
    for plain, compressed in zip(native, run_ranks(body, 2, EXACT, backend=None), strict=True):
        assert plain[0] == compressed[0]
        assert same_bits(plain[1], compressed[1])
        assert compressed[2] > 0


def test_hooks_leave_a_users_own_hook_alone(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, world_size: int) -> int:
        PartialState(cpu=True)
        plugin = ZipCCLPlugin(**EXACT)
        handlers = [plugin, DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)]
        train(Accelerator(cpu=True, kwargs_handlers=handlers), network())
        assert any("its gradients stay native" in record.getMessage() for record in caplog.records)
        return frames(plugin, "all_reduce")

    assert run_ranks(body, 2, backend=None) == [0, 0]


def test_an_accelerator_made_twice() -> None:
    """With the plugin or without: the group is the first one's. A model that is prepared twice is hooked once."""

    def body(rank: int, world_size: int, group_exists: bool) -> None:
        if group_exists:
            PartialState(cpu=True)
        for handlers in ([ZipCCLPlugin(**EXACT)], [ZipCCLPlugin(**EXACT)], None):
            accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
            losses, _ = train(accelerator, network())
            assert losses[0] > losses[-1]
        accelerator.prepare(accelerator._models[0])
        if not group_exists:
            with pytest.raises(ConfigError, match="another configuration"):
                Accelerator(cpu=True, kwargs_handlers=[ZipCCLPlugin(reduction="fp32")])

    run_ranks(body, 2, False, backend=None)
    run_ranks(body, 2, True, backend=None)


def test_after_a_failure_groups_are_made_as_before() -> None:
    """Whether the group had been made by then or not."""

    def body(rank: int, world_size: int) -> None:
        drop_in.install({"reduction": "gloo"})
        before = drop_in.snapshot()
        with pytest.raises(ValueError, match="Unknown mixed_precision"):
            Accelerator(cpu=True, mixed_precision="none", kwargs_handlers=[ZipCCLPlugin()])
        assert drop_in.snapshot() == before
        drop_in.uninstall()
        with pytest.raises(ValueError, match="nonsense"):
            Accelerator(cpu=True, gradient_accumulation_steps="nonsense", kwargs_handlers=[ZipCCLPlugin(**EXACT)])
        Accelerator(cpu=True, kwargs_handlers=[ZipCCLPlugin(**EXACT)])  # the group exists by now
        for group in (dist.group.WORLD, dist.new_group()):
            assert isinstance(group, ZipCCLProcessGroup)
            assert group.communicator.config == ZipCCLConfig(**EXACT)

    run_ranks(body, 2, backend=None)


def test_without_the_plugin_all_is_native_again() -> None:
    def body(rank: int, world_size: int, uninstalls: bool) -> tuple[bool, str]:
        Accelerator(cpu=True, kwargs_handlers=[ZipCCLPlugin(**EXACT)]).end_training()
        if uninstalls:
            zipccl_accelerate.uninstall()
            assert not drop_in.installed()
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        Accelerator(cpu=True)
        return drop_in.installed(), type(dist.group.WORLD).__name__

    for uninstalls in (False, True):
        assert run_ranks(body, 2, uninstalls, backend=None) == [(False, "ProcessGroup")] * 2


def test_counters_outlive_the_group() -> None:
    def body(rank: int, world_size: int) -> tuple[int, int]:
        plugin = ZipCCLPlugin(**EXACT)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin])
        accelerator.gather(torch.ones(4096, dtype=BF16))
        sent = frames(plugin, "all_gather")
        accelerator.end_training()
        return sent, frames(plugin, "all_gather")

    for sent, afterwards in run_ranks(body, 2, backend=None):
        assert sent == afterwards > 0


def test_a_disabled_plugin_disables() -> None:
    """Also what `ZIPCCL=1` would do; but it does not contradict the group that is there."""

    def body(rank: int, world_size: int, group_exists: bool) -> int:
        drop_in.install()
        if group_exists:
            PartialState(cpu=True)
            with pytest.raises(ConfigError, match="another configuration"):
                Accelerator(cpu=True, kwargs_handlers=[ZipCCLPlugin(enabled=False)])
            return 0
        plugin = ZipCCLPlugin(enabled=False, **EXACT)
        train(Accelerator(cpu=True, kwargs_handlers=[plugin]), network())
        return frames(plugin, "all_reduce")

    assert run_ranks(body, 2, False, backend=None) == [0, 0]
    assert run_ranks(body, 2, True, backend=None) == [0, 0]


@pytest.mark.parametrize("group_exists", [False, True], ids=["backend", "hooks"])
def test_a_model_of_two_accelerators(group_exists: bool) -> None:
    def body(rank: int, world_size: int) -> int:
        if group_exists:
            PartialState(cpu=True)
        plugin = ZipCCLPlugin(**EXACT)
        (model,) = (Accelerator(cpu=True, kwargs_handlers=[plugin]).prepare(network()),)
        other = Accelerator(cpu=True, kwargs_handlers=(handler for handler in [ZipCCLPlugin(**EXACT)]))
        model = other.prepare(model)
        model(torch.ones(1, 96, dtype=BF16)).sum().backward()
        with pytest.raises(ConfigError, match="another configuration"):
            Accelerator(cpu=True, kwargs_handlers=[ZipCCLPlugin(strategy="always")]).prepare(model)
        return frames(plugin, "all_reduce")

    assert min(run_ranks(body, 2, backend=None)) > 0


def test_hooks_leave_a_users_own_communications_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Own(DefaultAllGather):
        pass

    def body(rank: int, world_size: int) -> bool:
        PartialState(cpu=True)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[ZipCCLPlugin(**EXACT)])
        model = network()
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        model[0].set_custom_all_gather(own := Own())
        HooksMode(ZipCCLConfig(**EXACT)).prepared(accelerator, model)
        assert any("communications of its own (Own)" in record.getMessage() for record in caplog.records)
        kept = model[0]._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm is own
        set_ = type(model[2]._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm).__name__
        return kept and set_ == "CompressedAllGather"

    assert run_ranks(body, 2, backend=None) == [True, True]


def test_a_plugin_goes_to_spawned_processes() -> None:
    """Without the import that made it in the parent."""
    text = pickle.dumps(ZipCCLPlugin(reduction="gloo"))
    zipccl_accelerate.uninstall()
    assert pickle.loads(text).config == ZipCCLConfig(reduction="gloo")
    assert hasattr(Accelerator.__init__, "__wrapped__")
    assert copy.deepcopy(ZipCCLPlugin(codec="raw")) == ZipCCLPlugin(codec="raw")


def test_deepspeeds_plugin_on_a_cpu_is_not_used() -> None:
    """As natively: Accelerate takes DDP then."""
    pytest.importorskip("deepspeed")
    import_deepspeed()

    def body(rank: int, world_size: int) -> tuple[str, int]:
        from accelerate.utils import DeepSpeedPlugin

        plugin = ZipCCLPlugin(**EXACT)
        section = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
        accelerator = Accelerator(
            cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=section), kwargs_handlers=[plugin]
        )
        accelerator.gather(torch.ones(4096, dtype=BF16))
        return str(accelerator.distributed_type), frames(plugin, "all_gather")

    for kind, sent in run_ranks(body, 2, backend=None):
        assert kind == "DistributedType.MULTI_CPU"
        assert sent > 0


class Recorder(GeneralTracker):
    name, requires_logging_directory = "recorder", False

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, Any] = {}

    @property
    def tracker(self) -> Recorder:
        return self

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Nothing to store."""

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.update(values)


def test_statistics_go_to_any_tracker() -> None:
    def body(rank: int, world_size: int) -> dict[str, float]:
        recorder, plugin = Recorder(), ZipCCLPlugin(**EXACT)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin], log_with=recorder)
        accelerator.init_trackers("project")
        train(accelerator, network())
        accelerator.log(plugin.stats(), step=1)
        return recorder.logged

    logged, others = run_ranks(body, 2, backend=None)
    assert others == {}
    assert all(type(value) is float for value in logged.values())
    assert logged["zipccl/all_reduce/frames"] > 0
    assert logged["zipccl/all_reduce/ratio"] > 1.2


def test_gathers_of_the_accelerator_are_compressed_too() -> None:
    def body(rank: int, world_size: int) -> int:
        plugin = ZipCCLPlugin(**EXACT)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin])
        mine = torch.full((4096,), float(rank + 1), dtype=BF16)
        gathered = accelerator.gather(mine)
        assert same_bits(gathered, torch.cat([torch.full((4096,), r + 1.0, dtype=BF16) for r in range(world_size)]))
        return frames(plugin, "all_gather")

    assert min(run_ranks(body, 2, backend=None)) > 0


def test_one_process_and_a_disabled_plugin() -> None:
    """Nothing to compress, nothing to break."""

    def body(rank: int, world_size: int, given: dict[str, Any]) -> Any:
        plugin = ZipCCLPlugin(**given)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin])
        losses, _ = train(accelerator, network())
        return losses, frames(plugin, "all_reduce"), isinstance(dist.group.WORLD, ZipCCLProcessGroup)

    (alone,) = run_ranks(body, 1, EXACT, backend=None)
    assert alone[1] == 0
    disabled = run_ranks(body, 2, {"enabled": False}, backend=None)
    assert [each[1:] for each in disabled] == [(0, False)] * 2


def test_one_process_of_a_launch_of_several_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """On CPUs, Accelerate makes no group under torchrun unless it is told to: each process trains alone."""

    def body(rank: int, world_size: int) -> tuple[int, str]:
        caplog.clear()
        os.environ.pop("ACCELERATE_USE_CPU", None)
        accelerator = Accelerator(kwargs_handlers=[ZipCCLPlugin()])
        return accelerator.num_processes, caplog.text

    for processes, told in run_ranks(body, 2, backend=None):
        assert processes == 1
        assert "nothing to compress, though WORLD_SIZE is 2" in told
        assert "ACCELERATE_USE_CPU=true" in told


def test_fields_are_the_keys_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [field.name for field in fields(ZipCCLPlugin)] == list(ZipCCLConfig.model_fields)
    assert ZipCCLPlugin().config == ZipCCLConfig()
    monkeypatch.setenv("ZIPCCL_REDUCTION", "gloo")
    monkeypatch.setenv("ZIPCCL_CODEC", "raw")
    assert ZipCCLPlugin(codec="exponent").config == ZipCCLConfig(reduction="gloo", codec="exponent")
    assert ZipCCLPlugin().codec.id == "raw"
    assert ZipCCLPlugin(reduction="fp32").to_kwargs() == {"codec": ZipCCLPlugin().codec}  # what is not the default
    with pytest.raises(ConfigError, match="chunk_nbytes"):
        ZipCCLPlugin(chunk_nbytes=3)
    with pytest.raises(ConfigError, match="environment"):
        monkeypatch.setenv("ZIPCCL_REDUCTION", "none")
        ZipCCLPlugin()


def test_two_plugins() -> None:
    with pytest.raises(ValueError, match="only pass one ZipCCLPlugin"):
        Accelerator(cpu=True, kwargs_handlers=[ZipCCLPlugin(), ZipCCLPlugin()])


def test_an_accelerate_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    zipccl_accelerate.uninstall()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Accelerator, "__init__", lambda self, handlers=None: None)
            with pytest.raises(UnsupportedVersionError, match=r"supports accelerate 1.15; this is .*kwargs_handlers"):
                ZipCCLPlugin()
    finally:
        zipccl_accelerate.install()


def test_uninstalling_restores_accelerate() -> None:
    zipccl_accelerate.install()
    wrapped = Accelerator.__init__
    zipccl_accelerate.uninstall()
    assert Accelerator.__init__ is not wrapped
    assert Accelerator.__init__ is wrapped.__wrapped__
    zipccl_accelerate.install()


TRAINER = """
import sys, torch, torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
small = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(small).to(torch.bfloat16)
data = [{"input_ids": torch.arange(i, i + 32), "labels": torch.arange(i, i + 32)} for i in range(64)]
arguments = TrainingArguments(
    sys.argv[1], max_steps=3, per_device_train_batch_size=4, use_cpu=True, report_to=[], logging_steps=1,
    save_strategy="no", disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).view(torch.int16).long()
sent = dist.group.WORLD.stats()["all_reduce"].frames if hasattr(dist.group.WORLD, "stats") else 0
if dist.get_rank() == 0:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("RESULT", losses, weights.sum().item(), sent)
"""


def test_a_trainer_by_environment(tmp_path: Path) -> None:
    """Transformers' Trainer makes its Accelerator itself: `ZIPCCL=1` in the environment is enough."""
    pytest.importorskip("transformers")
    script = tmp_path / "train.py"
    script.write_text(TRAINER)

    def run(**environ: str) -> list[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        result = subprocess.run(
            [*command, str(tmp_path / "out")],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert result.returncode == 0, result.stderr[-4000:]
        (line,) = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
        return line.rsplit(" ", 1)

    native, sent_natively = run()
    compressed, sent = run(ZIPCCL="1", ZIPCCL_STRATEGY="always", ZIPCCL_REDUCTION="gloo")
    assert native == compressed
    assert int(sent_natively) == 0
    assert int(sent) > 0


def test_accelerate_launch(tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "accelerate_train.py"
    output = tmp_path / "counters.json"
    launch = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    arguments = ["--steps=2", "--hidden=96", "--layers=1", f"--output={output}"]
    result = subprocess.run(
        [sys.executable, *launch.split(), "--dynamo_backend=no", str(example), *arguments],
        env={**os.environ, "PYTHONPATH": str(example.parent.parent)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert json.loads(output.read_text())["counters"]["zipccl/all_reduce/frames"] > 0

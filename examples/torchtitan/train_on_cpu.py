"""Trains a debug model of TorchTitan on CPUs, with TorchTitan's own trainer and its own parallelism.

    torchrun --nproc-per-node 2 examples/torchtitan/train_on_cpu.py llama3               # gloo
    ZIPCCL=1 torchrun --nproc-per-node 2 examples/torchtitan/train_on_cpu.py llama3      # the same through ZipCCL
    ZIPCCL=1 ZIPCCL_STRATEGY=always torchrun ...                                         # its small messages, too
    ZIPCCL=1 torchrun ... train_on_cpu.py llama3 --parallelism.tensor_parallel_degree 2  # any option of TorchTitan

There is nothing about ZipCCL in what trains; statistics are printed at the end. The released package is used as it is.
It is made for GPUs and for a newer torch, so what follows is put in its way before it runs:

- `torchtitan.tools.utils.device_type` and `device_module`: the CPU, with GPU functions that do nothing;
- `ScaledDotProductAttention`, TorchTitan's too, in the place of FlexAttention, which has no backward pass on CPUs;
- `torch.distributed.set_timeout`, which torch 2.13 does not have: the private function that it has instead;
- `PipelineScheduleSingle.step`, which takes no microbatches in torch 2.13: one that does;
- `partial_dtensor` as SPMD backend: with TorchTitan's default, `spmd_types`, FSDP2 of torch 2.13 raises;
- over plain gloo, which has no PREMUL_SUM: FSDP2 is told to sum. ZipCCL's groups have it, and are asked for it;
- empty modules in the place of Triton's kernels, datasets, torchdata and tensorboard where these are not installed.
  They are imported, but nothing here uses them;
- a tokenizer (bytes) and a text (Python's reference manual), which the package does not contain.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from zipccl_core import drop_in
from zipccl_core.groups import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from training import VOCABULARY, batches, leave, report


def stand_in() -> None:
    """Empty modules for what TorchTitan imports and these runs do not use, where it is not installed."""
    loader = MagicMock(StatefulDataLoader=torch.utils.data.DataLoader)  # a class derives from it
    modules = {
        "triton": {"torchtitan.distributed.minimal_async_ep.kernels": MagicMock()},
        "datasets": {"datasets": MagicMock(), "datasets.distributed": MagicMock()},
        "torchdata": {"torchdata.stateful_dataloader": loader},
        "tensorboard": {"torch.utils.tensorboard": MagicMock()},
    }
    for package, contents in modules.items():
        if importlib.util.find_spec(package) is None:
            sys.modules.update(contents)


def step_of_microbatches(
    self: PipelineScheduleSingle,
    *,
    arg_mbs: list[Any] | None,
    kwarg_mbs: list[Any],
    target_mbs: list[Any] | None,
    losses: list[Tensor] | None,
    loss_kwargs: dict[str, Any],
    return_outputs: bool,
) -> None:
    """A pipeline's step as TorchTitan calls it: with microbatches, which torch 2.13 cuts itself."""
    self._stage.has_backward = self._has_backward
    self._stage.clear_runtime_states()
    self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)


def use_cpu() -> None:
    """Replaces what TorchTitan asks of a GPU and of a newer torch. Comes before all else of TorchTitan is imported."""
    from torchtitan.tools import utils

    def nothing(*_: Any) -> None:
        pass

    cpu = types.ModuleType("cpu")
    cpu.__dict__.update({name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
    cpu.__dict__.update(
        current_device=lambda: 0,
        get_device_name=lambda *_: "cpu",
        get_device_properties=lambda *_: types.SimpleNamespace(total_memory=2**34),
        memory_stats=lambda *_: {},
        reset_peak_memory_stats=nothing,
        empty_cache=nothing,
    )
    utils.device_type, utils.device_module = "cpu", cpu

    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = c10d._set_pg_timeout
    PipelineScheduleSingle.step = step_of_microbatches  # type: ignore[method-assign]
    if not drop_in.installed():
        set_factor = FSDPModule.set_gradient_divide_factor

        def sum_only(self: FSDPModule, factor: float) -> None:
            set_factor(self, factor)
            self.set_force_sum_reduction_for_comms(True)

        FSDPModule.set_gradient_divide_factor = sum_only  # type: ignore[method-assign]


stand_in()
use_cpu()

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class Bytes(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Manual(BaseDataLoader):
    """Samples of the text, others on every data-parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self._batches = batches(local_batch_size, seq_len + 1, seed=dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for tokens in self._batches:
            inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            yield {"input": inputs, "positions": torch.arange(inputs.size(1)).repeat(len(inputs), 1)}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Losses(MetricsProcessor):
    """Keeps the losses as they are; TorchTitan prints five digits."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        log_freq: int = 1

    def __init__(self, config: Config, **runtime: Any) -> None:
        super().__init__(config, **runtime)
        self.losses: list[float] = []

    def log(self, step: int, global_avg_loss: float, *more: Any, **extra: Any) -> None:
        self.losses.append(global_avg_loss)
        super().log(step, global_avg_loss, *more, **extra)


def small(config: Trainer.Config) -> Trainer.Config:
    """One of TorchTitan's debug configurations, on little data and without files."""
    config.tokenizer, config.dataloader, config.metrics = Bytes.Config(), Manual.Config(), Losses.Config()
    config.training.steps, config.training.local_batch_size, config.training.seq_len = 5, 2, 64
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.debug.seed, config.debug.enable_structured_logging = 1, False
    config.comm.trace_buf_size = 0
    assert config.model_spec is not None
    for _, _, attention, name in config.model_spec.model.traverse(FlexAttention.Config):
        setattr(attention, str(name), ScaledDotProductAttention.Config())
    return config


def llama3() -> Trainer.Config:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    return small(llama3_debugmodel())


def qwen3_moe() -> Trainer.Config:
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    return small(qwen3_moe_debug())


def deepseek_v3() -> Trainer.Config:
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    return small(deepseek_v3_debugmodel())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["llama3", "qwen3_moe", "deepseek_v3"])
    parser.add_argument("--output", type=Path, help="write losses, hashes of weights and counters here, as JSON")
    arguments, options = parser.parse_known_args()

    init_logger()
    # TorchTitan takes configurations from functions of a module, here of this one.
    config = ConfigManager().parse_args(["--module", __name__, "--config", arguments.model, *options])
    trainer = config.build()
    trainer.train()
    losses = trainer.metrics_processor.losses
    report(losses, torch.nn.ModuleList(trainer.model_parts), stats().flat(), arguments.output)
    trainer.close()
    leave()


if __name__ == "__main__":
    main()

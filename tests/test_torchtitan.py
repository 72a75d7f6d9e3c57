"""TorchTitan's token dispatcher and trainer, from its released package, over ZipCCL: the same bits as over gloo.

The dispatcher's module imports Triton kernels of another dispatcher, which need a GPU. Where Triton is not installed,
that one module, `torchtitan.distributed.minimal_async_ep.kernels`, is a stand-in while this test imports the package.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from zipccl_core import ZipCCLConfig
from zipccl_core.groups import stats
from zipccl_core.testing import run_ranks, same_bits

KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    if importlib.util.find_spec("triton") is None:
        sys.modules[KERNELS] = MagicMock()
    try:
        pytest.importorskip("torchtitan.models.common.token_dispatcher", exc_type=ImportError)
        from torchtitan.distributed.spmd_types import set_current_spmd_mesh
        from torchtitan.distributed.utils import dist_sum, set_spmd_backend
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
    finally:
        if isinstance(sys.modules.get(KERNELS), MagicMock):
            del sys.modules[KERNELS]

BF16 = torch.bfloat16
ALWAYS = ZipCCLConfig(strategy="always", reduction="gloo")
TOKENS, HIDDEN, TOP_K = 96, 128, 2
TRAINER = Path(__file__).resolve().parents[1] / "examples" / "torchtitan" / "train_on_cpu.py"

pytestmark = pytest.mark.filterwarnings("ignore")  # torchtitan's and torch's own


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def moe(rank: int, world_size: int, spmd_backend: str, step: int) -> list[Tensor]:
    """Routes tokens to experts and back, forward and backward. Experts differ in load; the last one gets none."""
    n_experts = 2 * world_size
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("ep",))
    set_spmd_backend(spmd_backend)
    dispatcher = AllToAllTokenDispatcher(AllToAllTokenDispatcher.Config(num_experts=n_experts, top_k=TOP_K))
    dispatcher.wire_meshes(ep_mesh=mesh)

    x = normal(TOKENS, HIDDEN, seed=10 * step + rank).requires_grad_()
    logits = normal(TOKENS, n_experts, seed=50 + 10 * step + rank).float() + torch.arange(n_experts) % 3
    logits[:, -1] = -torch.inf
    scores, experts = logits.softmax(-1).topk(TOP_K)
    counts = torch.bincount(experts.flatten(), minlength=n_experts)

    with set_current_spmd_mesh(mesh) if spmd_backend == "spmd_types" else nullcontext():
        tokens, received, metadata = dispatcher.dispatch(x, scores, experts, counts)
        output = dispatcher.combine(tokens * 2, metadata, x)
        output.backward(normal(TOKENS, HIDDEN, seed=90 + rank))
    assert len(set(metadata.input_splits)) > 1
    assert x.grad is not None
    total = torch.tensor(dist_sum(received.sum(), mesh))
    assert total == TOKENS * TOP_K * world_size
    return [tokens, received, torch.tensor(metadata.output_splits), output, x.grad, total]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("spmd_backend", ["spmd_types", "partial_dtensor"])
def test_token_dispatcher(spmd_backend: str, world_size: int) -> None:
    """Two steps; each has an all-to-all of tokens in dispatch and in combine, and one for the gradient of either.

    `spmd_types`, TorchTitan's default, exchanges lists of tensors, which gloo can only where all have one size; ZipCCL
    can. Its bits are compared with those of `partial_dtensor` over gloo.
    """

    def run(rank: int, world_size: int, spmd_backend: str) -> tuple[list[Tensor], int, set[str]]:
        tensors = [one.detach().clone() for step in range(2) for one in moe(rank, world_size, spmd_backend, step)]
        total = stats()
        used = {str(operation) for operation in total if total[operation].frames > total[operation].raw_frames}
        return tensors, total["all_to_all"].calls - total["all_to_all"].native_calls, used

    native = run_ranks(run, world_size, "partial_dtensor", backend="gloo")
    compressed = run_ranks(run, world_size, spmd_backend, config=ALWAYS)
    for (expected, _, nothing), (got, calls, used) in zip(native, compressed, strict=True):
        assert nothing == set()
        assert used == {"all_to_all"}
        assert calls == 2 * 4
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.skipif(importlib.util.find_spec("typeguard") is None, reason="TorchTitan's configuration needs typeguard")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("model", "degree", "operations"),
    [
        ("llama3", "data_parallel_shard_degree", {"all_gather"}),  # gradients are reduced in fp32
        ("llama3", "tensor_parallel_degree", {"all_gather", "reduce_scatter"}),
        ("llama3", "pipeline_parallel_degree", {"send_recv"}),
        ("deepseek_v3", "expert_parallel_degree", {"all_gather", "all_to_all"}),
    ],
    ids=["fsdp", "tensor", "pipeline", "expert"],
)
def test_trainer(model: str, degree: str, operations: set[str], tmp_path: Path) -> None:
    """The example, started by torchrun as its page says: the same losses and weights, with `ZIPCCL=1` and without."""
    settings = {"ZIPCCL": "1", "ZIPCCL_STRATEGY": "always", "ZIPCCL_REDUCTION": "gloo"}
    native = train(model, degree, {}, tmp_path / "native.json")
    compressed = train(model, degree, settings, tmp_path / "zipccl.json")
    assert [len(losses) for losses in native["losses"]] == [2, 2]
    assert compressed["losses"] == native["losses"]
    assert compressed["weights"] == native["weights"]
    assert native["counters"] == {}
    counters = compressed["counters"]
    frames = {name: counters[f"zipccl/{name}/frames"] - counters[f"zipccl/{name}/raw_frames"] for name in operations}
    assert all(frames.values())


def train(model: str, degree: str, environment: dict[str, str], output: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(TRAINER), model]
    command += ["--training.steps=2", f"--parallelism.{degree}=2", f"--output={output}"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ZIPCCL")}
    environ.update(environment, OMP_NUM_THREADS="1")
    done = subprocess.run(
        command, env=environ, cwd=output.parent, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    found: dict[str, Any] = json.loads(output.read_text())
    return found

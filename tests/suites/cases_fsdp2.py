"""FSDP2 against DDP on torch's own test classes and models, as in its test_fully_shard_training.py, on the CPU."""

# ruff: noqa: PT009 - torch's test case compares tensors by its own methods

from __future__ import annotations

import copy
import itertools
import os
from typing import Any

import torch
from forking import Forking
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.common_distributed import DistributedTestBase
from torch.testing._internal.common_fsdp import check_sharded_parity
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer


class TestFullyShard(Forking, DistributedTestBase):
    """Losses and sharded parameters and gradients equal those of the replicated model, five steps long."""

    @property
    def world_size(self) -> int:
        """As many ranks as the environment says."""
        return int(os.environ["WORLD_SIZE"])

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        """With a default group."""
        self.create_pg("cpu")
        super().run_test(test_name, parent_pipe)

    def _parity(self, model: Any, inputs: Any, mesh: DeviceMesh, *, each_layer: bool = False, **options: Any) -> None:
        reference = copy.deepcopy(model)
        replicate(reference)
        if each_layer:
            for layer in model:
                fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        pairs = [(m, torch.optim.Adam(m.parameters(), lr=1e-2)) for m in (reference, model)]
        for step in range(5):
            losses = []
            for m, optimizer in pairs:
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                losses.append(m(inputs).sum())
                losses[-1].backward()
            self.assertEqual(losses[0], losses[1])
            check_sharded_parity(self, reference, model)
            for _, optimizer in pairs:
                optimizer.step()

    def _layers(self, *sizes: int) -> torch.nn.Sequential:
        torch.manual_seed(42)
        layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        torch.manual_seed(43 + self.rank)
        return torch.nn.Sequential(*layers)

    def _mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (self.world_size,))

    def test_one_group_with_uneven_shards(self) -> None:
        self._parity(self._layers(32, 61, 33), torch.randn(4, 32), self._mesh())

    def test_group_for_each_layer(self) -> None:
        self._parity(self._layers(64, 64, 64, 64), torch.randn(8, 64), self._mesh(), each_layer=True)

    def test_no_reshard_after_forward(self) -> None:
        options = {"each_layer": True, "reshard_after_forward": False}
        self._parity(self._layers(64, 64, 64, 64), torch.randn(8, 64), self._mesh(), **options)

    def test_hybrid_shard(self) -> None:
        mesh = init_device_mesh("cpu", (self.world_size, 1), mesh_dim_names=("replicate", "shard"))
        self._parity(self._layers(64, 64, 64, 64), torch.randn(8, 64), mesh, each_layer=True)

    def test_transformer_with_shared_weights(self) -> None:
        torch.manual_seed(42)
        model = Transformer(ModelArgs(n_layers=2, dropout_p=0.0, weight_tying=True))
        torch.manual_seed(43 + self.rank)
        self._parity(model, torch.randint(0, 8, (4, 8)), self._mesh())

    def test_mixed_precision(self) -> None:
        """Loss of the bf16 forward pass: gathered bf16 parameters give what whole bf16 parameters give."""
        model, inputs = self._layers(64, 64, 64), torch.randn(8, 64)
        expected = copy.deepcopy(model).bfloat16()(inputs.bfloat16())
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model:
            fully_shard(layer, mesh=self._mesh(), mp_policy=policy)
        fully_shard(model, mesh=self._mesh(), mp_policy=policy)
        actual = model(inputs)
        self.assertEqual(actual.view(torch.int16), expected.view(torch.int16))
        actual.float().sum().backward()
        self.assertTrue(all(p.grad is not None for p in model.parameters()))

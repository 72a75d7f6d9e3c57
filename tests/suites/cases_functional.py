"""Functional collectives on real processes and torch's own test class, after torch's test_functional_api.py."""

# ruff: noqa: PT009 - torch's test case compares tensors by its own methods

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from forking import Forking
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.common_distributed import DistributedTestBase


class TestFunctional(Forking, DistributedTestBase):
    """Known results, on the whole world and along each dimension of a mesh of two."""

    @property
    def world_size(self) -> int:
        """As many ranks as the environment says."""
        return int(os.environ["WORLD_SIZE"])

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        """With a default group."""
        self.create_pg("cpu")
        super().run_test(test_name, parent_pipe)

    def _mesh(self) -> DeviceMesh:
        return DeviceMesh("cpu", torch.arange(self.world_size))

    def _meshes(self) -> list[tuple[DeviceMesh, int]]:
        meshes = [(self._mesh(), 0)]
        if self.world_size % 2 == 0:
            square = DeviceMesh("cpu", torch.arange(self.world_size).view(-1, 2))
            meshes += [(square, 0), (square, 1)]
        return meshes

    def test_broadcast(self) -> None:
        tensor = torch.full((5,), float(self.rank))
        self.assertEqual(funcol.broadcast(tensor, 1, self._mesh()), torch.ones(5))

    def test_all_reduce(self) -> None:
        for mesh, dim in self._meshes():
            mean = funcol.all_reduce(torch.ones(7) * 3, "sum", (mesh, dim))
            self.assertEqual(mean, torch.full((7,), 3.0 * mesh.size(dim)))

    def test_all_reduce_coalesced(self) -> None:
        a, b = funcol.all_reduce_coalesced([torch.ones(4), torch.full((6,), 3.0)], "sum", self._mesh())
        self.assertEqual(a, torch.full((4,), 1.0 * self.world_size))
        self.assertEqual(b, torch.full((6,), 3.0 * self.world_size))

    def test_all_gather_tensor(self) -> None:
        for mesh, mesh_dim in self._meshes():
            for dim in range(3):
                own = torch.full((3, 3, 3), float(mesh.get_local_rank(mesh_dim)))
                parts = [torch.full((3, 3, 3), float(rank)) for rank in range(mesh.size(mesh_dim))]
                self.assertEqual(funcol.all_gather_tensor(own, dim, (mesh, mesh_dim)), torch.cat(parts, dim))

    def test_all_gather_into_tensor_coalesced(self) -> None:
        a, b = funcol.all_gather_into_tensor_coalesced([torch.ones(4), torch.ones(3) * self.rank], self._mesh())
        self.assertEqual(a, torch.ones(4 * self.world_size))
        self.assertEqual(b, torch.arange(self.world_size).repeat_interleave(3).float())

    def test_reduce_scatter_tensor(self) -> None:
        for mesh, mesh_dim in self._meshes():
            size = mesh.size(mesh_dim)
            for dim in range(2):
                parts = torch.cat([torch.full((3, 3), float(rank)) for rank in range(size)], dim)
                expected = torch.full((3, 3), float(mesh.get_local_rank(mesh_dim) * size))
                self.assertEqual(funcol.reduce_scatter_tensor(parts, "sum", dim, (mesh, mesh_dim)), expected)

    def test_reduce_scatter_tensor_coalesced(self) -> None:
        inputs = [torch.ones(self.world_size), torch.ones(self.world_size, dtype=torch.int64) * 2]
        a, b = funcol.reduce_scatter_tensor_coalesced(inputs, "sum", [0, 0], self._mesh())
        self.assertEqual(a, torch.tensor([1.0 * self.world_size]))
        self.assertEqual(b, torch.tensor([2 * self.world_size]))

    def test_all_to_all_single_with_uneven_splits(self) -> None:
        for shape in ((), (5,)):
            splits = [(self.rank + 1) * (peer + 1) for peer in range(self.world_size)]
            own = torch.full((sum(splits), *shape), self.rank + 1.0)
            parts = [torch.full((rows, *shape), peer + 1.0) for peer, rows in enumerate(splits)]
            self.assertEqual(funcol.all_to_all_single(own, splits, splits, self._mesh()), torch.cat(parts))

    def test_all_to_all_single_autograd(self) -> None:
        ones, group = [1] * self.world_size, dist.group.WORLD
        tensor = torch.ones(self.world_size, 2, requires_grad=True)
        result = funcol.all_to_all_single_autograd(tensor * (self.rank + 1), ones, ones, group) + 0
        self.assertEqual(result[:, 0], torch.arange(1.0, self.world_size + 1))
        result.sum().backward()
        self.assertEqual(tensor.grad, torch.full((self.world_size, 2), self.rank + 1.0))

    def test_all_gather_tensor_autograd(self) -> None:
        tensor = torch.ones(3, 2, requires_grad=True)
        funcol.all_gather_tensor_autograd(tensor, 0, self._mesh()).sum().backward()
        self.assertEqual(tensor.grad, torch.full((3, 2), 1.0 * self.world_size))

    def test_compiled_all_reduce(self) -> None:
        group = dist.group.WORLD
        function = torch.compile(
            lambda t: funcol.all_reduce(t * 2, "sum", group) + 1, fullgraph=True, backend="aot_eager"
        )
        self.assertEqual(function(torch.ones(4096)), torch.full((4096,), 2.0 * self.world_size + 1))

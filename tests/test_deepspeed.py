"""DeepSpeed trains to the same bits with a `"zipccl"` section as without, on real processes, and the section really
does something."""

from __future__ import annotations

import hashlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import import_deepspeed
from torch import nn

from zipccl_core.testing import run_ranks, same_bits

pytest.importorskip("deepspeed")
import_deepspeed()

import deepspeed
import deepspeed.comm as ds_comm
import deepspeed.comm.comm as ds_comm_impl

import zipccl_deepspeed
from zipccl_core import ConfigError, ZipCCLConfig

BF16 = torch.bfloat16
SUM = dist.ReduceOp.SUM
ALL = {"strategy": "always", "reduction": "gloo"}
OPERATIONS = {
    0: {"all_reduce"},
    1: {"all_reduce", "all_gather"},
    2: {"all_reduce", "all_gather"},
    3: {"all_gather", "reduce_scatter"},
}

pytestmark = pytest.mark.filterwarnings("ignore")  # deepspeed's and torch's own, about each other


class LanguageModel(nn.Module):
    """Embedding, two residual blocks, head: enough parameters for several blocks of the codec in every message."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 96)
        self.blocks = nn.ModuleList([self._block(experts and i == 1) for i in range(2)])
        self.head = nn.Linear(96, 128, bias=False)

    def _block(self, experts: bool) -> nn.Module:
        mlp = nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96))
        if not experts:
            return mlp
        from deepspeed.moe.layer import MoE

        return MoE(hidden_size=96, expert=mlp, num_experts=4, ep_size=2, k=1, min_capacity=4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            out = block(hidden)
            hidden = hidden + (out[0] if isinstance(out, tuple) else out)
        logits = self.head(hidden)[:, :-1].float()
        return nn.functional.cross_entropy(logits.reshape(-1, 128), tokens[:, 1:].reshape(-1))


def ds_config(stage: int, section: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **more.pop("zero", {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **more,
    }
    return config if section is None else {**config, "zipccl": section}


def train(
    rank: int, world_size: int, config: dict[str, Any], experts: bool = False, zero_init: bool = False, steps: int = 3
) -> dict[str, Any]:
    """Losses and parameters of a few steps, as bits, and what the statistics say."""
    logging.disable(logging.INFO)
    zipccl_deepspeed.install()
    torch.manual_seed(0)
    if experts:
        deepspeed.init_distributed(verbose=False)
    if zero_init:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = LanguageModel()
    else:
        model = LanguageModel(experts)
    parameters = list(model.parameters())
    if experts:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        parameters = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(steps):
        loss = engine(torch.randint(0, 128, (2, 33), generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    digest = hashlib.sha256()
    for _, parameter in sorted(engine.module.named_parameters()):
        shard = getattr(parameter, "ds_tensor", parameter).detach().contiguous()
        digest.update(shard.view(torch.uint8).numpy().tobytes())
    stats = zipccl_deepspeed.stats()
    compressed = {str(op) for op in stats if stats[op].frames > stats[op].raw_frames}
    ratios = {str(op): stats[op].ratio for op in stats if stats[op].frames}
    dist.barrier()
    counted = zipccl_deepspeed.stats().flat()
    ds_comm.destroy_process_group()
    assert zipccl_deepspeed.stats().flat() == counted, "the counters of destroyed groups stay"
    return {"losses": losses, "parameters": digest.hexdigest(), "compressed": compressed, "ratios": ratios}


def results(
    world_size: int, config: dict[str, Any], backend: str | None = None, **options: Any
) -> list[dict[str, Any]]:
    def run(rank: int, size: int) -> dict[str, Any]:
        return train(rank, size, config, **options)

    return run_ranks(run, world_size, backend=backend, timeout=150)


def bits_of(ranks: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    return [(rank["losses"], rank["parameters"]) for rank in ranks]


def assert_same(native: list[dict[str, Any]], zipped: list[dict[str, Any]], operations: set[str]) -> None:
    assert bits_of(native) == bits_of(zipped)
    for rank in zipped:
        assert operations <= rank["compressed"], f"only {rank['compressed']} had compressed frames"
        assert all(ratio > 1.0 for ratio in rank["ratios"].values()), rank["ratios"]
    assert all(not rank["compressed"] for rank in native)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_stages_are_bit_identical(stage: int, world_size: int) -> None:
    native = results(world_size, ds_config(stage, None))
    assert len({loss for rank in native for loss in rank["losses"]}) > 3, "the model learns nothing"
    assert_same(native, results(world_size, ds_config(stage, ALL)), OPERATIONS[stage])


def test_mixture_of_experts_is_bit_identical() -> None:
    native = results(2, ds_config(2, None), experts=True)
    assert_same(native, results(2, ds_config(2, ALL), experts=True), {"all_to_all", "all_reduce", "all_gather"})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_reductions_equal_a_reference(stage: int) -> None:
    """`reduction: "fp32"` against native DeepSpeed whose reductions are replaced by a gather and a sum in fp32, in
    rank order, rounded once."""

    def reference(rank: int, world_size: int) -> dict[str, Any]:
        def reduced(tensor: torch.Tensor, average: bool, group: Any) -> torch.Tensor:
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, tensor.contiguous(), group=group)
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            return (total / len(parts) if average else total).to(tensor.dtype)

        from deepspeed.comm.torch import TorchBackend as backend

        native_all_reduce, native_reduce_scatter = backend.all_reduce, backend.reduce_scatter_tensor

        def all_reduce(
            self: Any, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
        ) -> Any:
            op = self._reduce_op(op)
            if tensor.dtype != BF16 or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                return native_all_reduce(self, tensor, op, group, async_op)
            assert not async_op
            return tensor.copy_(reduced(tensor, op == dist.ReduceOp.AVG, group))

        def reduce_scatter_tensor(
            self: Any, output_tensor: Any, input_tensor: Any, op: Any = SUM, group: Any = None, async_op: bool = False
        ) -> Any:
            op = self._reduce_op(op)
            if input_tensor.dtype != BF16:
                return native_reduce_scatter(self, output_tensor, input_tensor, op, group, async_op)
            assert not async_op
            whole = reduced(input_tensor, op == dist.ReduceOp.AVG, group).view(-1)
            numel = output_tensor.numel()
            own = whole[dist.get_rank(group) * numel :][:numel]
            return output_tensor.copy_(own.view(output_tensor.shape))

        backend.all_reduce, backend.reduce_scatter_tensor = all_reduce, reduce_scatter_tensor
        return train(rank, world_size, ds_config(stage, None))

    zipped = results(3, ds_config(stage, {"strategy": "always"}))
    assert bits_of(run_ranks(reference, 3, backend=None, timeout=150)) == bits_of(zipped)
    assert bits_of(results(3, ds_config(stage, {"strategy": "always"}))) == bits_of(zipped), "two runs differ"
    assert bits_of(results(3, ds_config(stage, None))) != bits_of(zipped), (
        "on three ranks the order of additions should show"
    )


@pytest.mark.parametrize("backend", ["gloo", "zipccl"])
def test_a_group_that_exists_already(backend: str) -> None:
    native = results(2, ds_config(3, None), backend="gloo")
    assert_same(native, results(2, ds_config(3, ALL), backend=backend), OPERATIONS[3])


def test_zero_init() -> None:
    native = results(2, ds_config(3, None), zero_init=True)
    assert_same(native, results(2, ds_config(3, ALL), zero_init=True), OPERATIONS[3])


def test_hierarchical_partitioning() -> None:
    """hpZ: secondary shards in sub-groups of two."""
    zero = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    native = results(4, ds_config(3, None, zero=dict(zero)))
    assert_same(native, results(4, ds_config(3, ALL, zero=dict(zero))), OPERATIONS[3])


def test_reductions_inside_of_zero_init() -> None:
    """`zero.Init` replaces torch.empty by one that makes fp32 tensors bf16; ours must not be among them."""

    def run(rank: int, world_size: int) -> None:
        zipccl_deepspeed.install()
        logging.disable(logging.INFO)
        config = ds_config(3, {"strategy": "always"})
        deepspeed.init_distributed(verbose=False)
        parts = [torch.randn(300_000, generator=torch.Generator().manual_seed(r)).to(BF16) for r in range(world_size)]
        with deepspeed.zero.Init(config_dict_or_path=config):
            value = parts[rank].clone()
            ds_comm.all_reduce(value)
        assert same_bits(value, (parts[0].float() + parts[1].float()).to(BF16))
        assert zipccl_deepspeed.stats()["all_reduce"].frames > 0

    run_ranks(run, 2, backend=None, timeout=100)


def test_a_world_destroyed_behind_its_back() -> None:
    """torch.distributed.destroy_process_group, then a new group: the old section is forgotten, a new one may differ."""

    def run(rank: int, world_size: int) -> None:
        from deepspeed.runtime.config import DeepSpeedConfig

        zipccl_deepspeed.install()
        store = dist.group.WORLD.get_group_store()
        deepspeed.init_distributed(verbose=False)
        DeepSpeedConfig(ds_config(1, ALL))
        ds_comm.all_reduce(torch.ones(5000, dtype=BF16))
        frames = zipccl_deepspeed.stats()["all_reduce"].frames
        assert frames > 0
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore("2", store), rank=rank, world_size=world_size)
        ds_comm.all_reduce(torch.ones(5000, dtype=BF16))
        assert zipccl_deepspeed.stats()["all_reduce"].frames == frames, "no section has been read since"
        DeepSpeedConfig(ds_config(1, ALL))
        dist.destroy_process_group()  # without any call since the section
        dist.init_process_group("gloo", store=dist.PrefixStore("3", store), rank=rank, world_size=world_size)
        DeepSpeedConfig(ds_config(1, {"codec": "raw", "strategy": "always"}))
        for _ in range(rank):  # one rank reads the section more often
            DeepSpeedConfig(ds_config(1, {"codec": "raw", "strategy": "always"}))
        ds_comm.all_reduce(torch.ones(5000, dtype=BF16))
        assert zipccl_deepspeed.stats()["all_reduce"].frames > frames

    run_ranks(run, 2, backend="gloo", timeout=100)


def test_comms_logger() -> None:
    logged = {"comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False}}

    def run(rank: int, world_size: int) -> bool:
        train_once = train(rank, world_size, ds_config(1, ALL, **logged))
        assert train_once["compressed"]
        return "all_gather_into_tensor" in ds_comm_impl.comms_logger.comms_dict

    assert run_ranks(run, 2, backend=None, timeout=150) == [True, True]


def test_every_operation_of_the_backend() -> None:
    """deepspeed.comm's own functions, compressed, against torch.distributed."""

    def run(rank: int, world_size: int) -> set[str]:
        zipccl_deepspeed.install()
        deepspeed.init_distributed(verbose=False)
        from zipccl_deepspeed.backend import COMMUNICATORS

        COMMUNICATORS.configure(ZipCCLConfig(**ALL))
        generator = torch.Generator().manual_seed(rank)
        value = torch.randn(6000 * world_size, generator=generator).to(BF16)
        n = value.numel()

        def both(ours: Any, native: Any, *out: torch.Tensor) -> None:
            mine, wanted = [tensor.clone() for tensor in out], [tensor.clone() for tensor in out]
            work = ours(*mine)
            if work is not None:
                work.wait()
            native(*wanted)
            assert all(map(same_bits, mine, wanted))

        for async_op in (False, True):
            kw = {"async_op": async_op}
            gathered = torch.zeros(n * world_size, dtype=BF16)
            both(
                lambda o: ds_comm.all_gather_into_tensor(o, value, **kw),
                lambda o: dist.all_gather_into_tensor(o, value),
                gathered,
            )
            both(
                lambda o: ds_comm.all_gather(list(o.chunk(world_size)), value, **kw),
                lambda o: dist.all_gather_into_tensor(o, value),
                gathered,
            )
            part = torch.zeros(n // world_size, dtype=BF16)
            both(
                lambda o: ds_comm.reduce_scatter_tensor(o, value.clone(), **kw),
                lambda o: dist.reduce_scatter_tensor(o, value.clone()),
                part,
            )
            both(
                lambda o: ds_comm.reduce_scatter(o, list(value.chunk(world_size)), **kw),
                lambda o: dist.reduce_scatter(o, list(value.chunk(world_size))),
                part,
            )
            both(lambda t: ds_comm.all_reduce(t, **kw), dist.all_reduce, value)
            both(
                lambda t: ds_comm.all_reduce(t, op=ds_comm.ReduceOp.AVG, **kw),
                lambda t: dist.all_reduce(t, op=dist.ReduceOp.AVG),
                value,
            )
            both(
                lambda t: ds_comm.all_reduce(t, op=ds_comm.ReduceOp.MAX, **kw),
                lambda t: dist.all_reduce(t, op=dist.ReduceOp.MAX),
                value,
            )
            both(
                lambda a, b: ds_comm.all_reduce_coalesced([a, b], **kw),
                lambda a, b: dist.all_reduce_coalesced([a, b]),
                value,
                value[:77],
            )
            both(lambda o: ds_comm.all_to_all_single(o, value, **kw), lambda o: dist.all_to_all_single(o, value), value)
            splits = [n - 7] + [7] + [0] * (world_size - 2)
            counts = [[n - 7] + [7] + [0] * (world_size - 2) for _ in range(world_size)]
            received = [row[rank] for row in counts]
            out = torch.zeros(sum(received), dtype=BF16)
            both(
                lambda o: ds_comm.all_to_all_single(o, value, received, splits, **kw),
                lambda o: dist.all_to_all_single(o, value, received, splits),
                out,
            )
            both(
                lambda o: ds_comm.all_to_all(list(o.chunk(world_size)), list(value.chunk(world_size)), **kw),
                lambda o: dist.all_to_all(list(o.chunk(world_size)), list(value.chunk(world_size))),
                value,
            )
            both(
                lambda t: ds_comm.broadcast(t, world_size - 1, **kw), lambda t: dist.broadcast(t, world_size - 1), value
            )
        outs = [torch.zeros(n * world_size, dtype=BF16), torch.zeros(5 * world_size, dtype=BF16)]
        ds_comm_impl.cdb.all_gather_coalesced(outs, [value, value[:5]])
        dist.all_gather_into_tensor(wanted := torch.zeros_like(outs[1]), value[:5])
        assert same_bits(outs[1], wanted)

        everyone = [
            torch.randn(6000 * world_size, generator=torch.Generator().manual_seed(r)).to(BF16)
            for r in range(world_size)
        ]
        ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
        work, out = ds_comm.isend(value, ahead), torch.zeros_like(value)
        assert ds_comm.recv(out, behind) == behind
        work.wait()
        assert same_bits(out, everyone[behind])
        if rank == 0:
            out.zero_()
            assert ds_comm_impl.cdb.recv(out) == 1
            assert same_bits(out, everyone[1])
        elif rank == 1:
            ds_comm.send(value, 0)

        # a sub-group, ranks as its members have them, and one of one
        pair = ds_comm.new_group([0, world_size - 1])
        alone = [ds_comm.new_group([r]) for r in range(world_size)][rank]
        if rank in (0, world_size - 1):
            both(
                lambda t: ds_comm.broadcast(t, world_size - 1, group=pair),
                lambda t: dist.broadcast(t, world_size - 1, group=pair),
                value,
            )
        both(lambda t: ds_comm.all_reduce(t, group=alone), lambda t: dist.all_reduce(t, group=alone), value)
        stats = zipccl_deepspeed.stats()
        assert all(stats[op].native_calls == 0 for op in ("all_gather", "reduce_scatter", "all_to_all", "send_recv"))
        assert stats["all_reduce"].native_calls == 2  # the two MAX
        return {str(op) for op in stats if stats[op].frames}

    for frames in run_ranks(run, 3, backend=None, timeout=100):
        assert frames >= {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"}


def test_sequence_parallel_attention() -> None:
    """Ulysses: all-to-all of heads, there and back."""

    def run(rank: int, world_size: int) -> tuple[list[int], int]:
        zipccl_deepspeed.install()
        deepspeed.init_distributed(verbose=False)
        from deepspeed.sequence.layer import DistributedAttention

        from zipccl_deepspeed.backend import COMMUNICATORS

        generator = torch.Generator().manual_seed(rank)
        inputs = [torch.randn(64, 1, 8, 16, generator=generator).to(BF16) for _ in range(3)]
        outcomes = []
        for section in (None, ALL):
            if section is not None:
                COMMUNICATORS.configure(ZipCCLConfig(**section))
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            attention = DistributedAttention(lambda q, k, v: q * k + v, dist.group.WORLD, scatter_idx=2, gather_idx=0)
            out = attention(*leaves, 0)
            out.float().square().sum().backward()
            outcomes.append(torch.cat([out.detach().reshape(-1), *(leaf.grad.reshape(-1) for leaf in leaves)]))
        assert same_bits(*outcomes)
        return outcomes[1].view(torch.int16).tolist()[:3], zipccl_deepspeed.stats()["all_to_all"].frames

    for _, frames in run_ranks(run, 2, backend=None, timeout=100):
        assert frames > 0


def test_pipeline_parallelism() -> None:
    """Activations and gradients by send and receive between two stages."""

    def run(rank: int, world_size: int, section: dict[str, Any] | None) -> tuple[list[str], int]:
        logging.disable(logging.INFO)
        zipccl_deepspeed.install()
        deepspeed.init_distributed(verbose=False)
        from deepspeed.pipe import PipelineModule

        torch.manual_seed(0)
        layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.Linear(256, 8)]
        model = PipelineModule(
            layers=layers, num_stages=2, loss_fn=lambda out, want: nn.functional.mse_loss(out.float(), want.float())
        )
        config = ds_config(0, section, train_batch_size=8, gradient_accumulation_steps=4)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        generator = torch.Generator().manual_seed(7)
        batches = [
            (torch.randn(2, 64, generator=generator).to(BF16), torch.randn(2, 8, generator=generator).to(BF16))
            for _ in range(12)
        ]
        iterator = iter(batches)
        losses = [engine.train_batch(data_iter=iterator).item().hex() for _ in range(3)]
        return losses, zipccl_deepspeed.stats()["send_recv"].frames

    native = run_ranks(run, 2, None, backend=None, timeout=100)
    zipped = run_ranks(run, 2, ALL, backend=None, timeout=100)
    assert [losses for losses, _ in native] == [losses for losses, _ in zipped]
    assert all(frames > 0 for _, frames in zipped)


def test_hf_trainer(tmp_path: Any) -> None:
    """The section in a JSON that transformers' Trainer is given: the group exists before DeepSpeed, and Accelerate
    stands between."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def run(rank: int, world_size: int, section: dict[str, Any] | None) -> tuple[list[str], set[str]]:
        logging.disable(logging.WARNING)
        zipccl_deepspeed.install()
        # Trainer would take a CPU, with use_cpu, or DeepSpeed; only its check for a bf16 GPU stands between it and both
        transformers.training_args.is_torch_bf16_gpu_available = lambda: True
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            use_cache=False,
        )
        json = ds_config(2, section)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), deepspeed=json, bf16=True, max_steps=2, logging_steps=1,
            per_device_train_batch_size=2,
            report_to=[], save_strategy="no", learning_rate=1e-2, disable_tqdm=True, seed=1,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        generator = torch.Generator().manual_seed(3)
        rows = [
            {"input_ids": (tokens := torch.randint(0, 128, (32,), generator=generator)), "labels": tokens}
            for _ in range(16)
        ]
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        losses = [
            entry["loss"].hex() if isinstance(entry["loss"], float) else str(entry["loss"])
            for entry in trainer.state.log_history
            if "loss" in entry
        ]
        stats = zipccl_deepspeed.stats()
        return losses, {str(op) for op in stats if stats[op].frames > stats[op].raw_frames}

    native = run_ranks(run, 2, None, backend=None, timeout=150)
    zipped = run_ranks(run, 2, ALL, backend=None, timeout=150)
    assert [losses for losses, _ in native] == [losses for losses, _ in zipped]
    assert all(operations >= {"all_reduce", "all_gather"} for _, operations in zipped)


# ---------------------------------------------------------------------- configuration, installation


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"codecc": "raw"}, "unknown key 'codecc' .*allowed: enabled, codec"),
        ({"codec": "exponnt"}, "unknown codec 'exponnt'; known: .*exponent, .*raw"),
        ({"reduction": "fp16"}, "reduction = 'fp16'.*'fp32' or 'gloo'"),
        (False, r"must be a mapping: \{\} for the defaults, \{\"enabled\": false\} to switch it off; got False"),
    ],
)
def test_a_wrong_section_fails_at_the_start(section: Any, message: str) -> None:
    def run(rank: int, world_size: int) -> None:
        with pytest.raises(ConfigError, match=message):
            train(rank, world_size, ds_config(1, section))

    run_ranks(run, 1, backend="gloo")


def test_ranks_with_different_sections() -> None:
    def run(rank: int, world_size: int) -> None:
        section = {"reduction": "gloo" if rank else "fp32"}
        if rank == 0:
            zipccl_deepspeed.install()
            deepspeed.runtime.config.DeepSpeedConfig(ds_config(1, section))
        else:
            with pytest.raises(ConfigError, match="rank 1 of group 'world' is configured differently from rank 0"):
                train(rank, world_size, ds_config(1, section))
        dist.destroy_process_group()

    run_ranks(run, 2, backend="gloo")


def test_what_is_logged() -> None:
    """One line that the section is active, from rank 0; a warning for a key that looks like it."""

    def run(rank: int, world_size: int) -> list[str]:
        from deepspeed.runtime.config import DeepSpeedConfig

        zipccl_deepspeed.install()
        deepspeed.init_distributed(verbose=False)
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        deepspeed.utils.logger.addHandler(handler)
        DeepSpeedConfig({**ds_config(1, None), "zipcll": {}})
        DeepSpeedConfig(ds_config(1, {}))
        return [record for record in records if "zipc" in record]

    first, second = run_ranks(run, 2, backend="gloo")
    misspelt = "DeepSpeed ignores the key 'zipcll'; is it meant to be 'zipccl'?"
    assert second == [misspelt]
    assert first[0] == misspelt
    assert "zipccl: deepspeed.comm is compressed" in first[1]
    assert len(first) == 2


def test_disabled_section_and_engines_that_disagree() -> None:
    def run(rank: int, world_size: int) -> None:
        logging.disable(logging.INFO)
        zipccl_deepspeed.install()
        model = LanguageModel()
        for section in ({"enabled": False}, None, {"enabled": False}):
            deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=ds_config(1, section))
        assert not list(zipccl_deepspeed.stats())
        with pytest.raises(ConfigError, match="two engines in one process have different 'zipccl' sections"):
            deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=ds_config(1, ALL))

    run_ranks(run, 2, backend="gloo", timeout=100)


def test_uninstall_restores_deepspeed() -> None:
    def run(rank: int, world_size: int) -> None:
        from deepspeed.comm.torch import TorchBackend
        from deepspeed.runtime.config import DeepSpeedConfig

        zipccl_deepspeed.uninstall()  # where zipccl is installed, it has installed itself
        original = DeepSpeedConfig.__init__
        deepspeed.init_distributed(verbose=False)  # before install: the backend is adopted
        backend = ds_comm_impl.cdb
        for _ in range(2):
            zipccl_deepspeed.install()
            zipccl_deepspeed.install()
            assert type(backend) is not TorchBackend
            assert isinstance(backend, TorchBackend)
            zipccl_deepspeed.uninstall()
            zipccl_deepspeed.uninstall()
            assert type(backend) is TorchBackend
            assert ds_comm_impl.TorchBackend is TorchBackend
            assert DeepSpeedConfig.__init__ is original
        zipccl_deepspeed.install()
        DeepSpeedConfig(ds_config(1, ALL))
        value = torch.ones(5000, dtype=BF16)
        ds_comm.all_reduce(value)
        frames = zipccl_deepspeed.stats()["all_reduce"].frames
        assert frames > 0
        zipccl_deepspeed.uninstall()
        ds_comm.all_reduce(value)
        assert zipccl_deepspeed.stats()["all_reduce"].frames == frames

    run_ranks(run, 2, backend="gloo", timeout=100)


def test_backend_made_after_install_is_restored_too() -> None:
    def run(rank: int, world_size: int) -> None:
        from deepspeed.comm.torch import TorchBackend

        zipccl_deepspeed.install()
        deepspeed.init_distributed(verbose=False)
        assert type(ds_comm_impl.cdb) is not TorchBackend
        zipccl_deepspeed.uninstall()
        assert type(ds_comm_impl.cdb) is TorchBackend

    run_ranks(run, 2, backend=None, timeout=100)


def test_a_batch_of_messages_between_gpus_is_deepspeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One NCCL batch, which it would not be one after another. (Not a CPU is a GPU here.)"""
    from zipccl_deepspeed import backend

    class Base:
        def batch_isend_irecv(self, operations: list[Any]) -> str:
            return "one batch"

    class Backend(backend.ZipCCLBackendMixin, Base):
        def isend(self, *args: Any) -> str:
            return "a message"

    monkeypatch.setattr(backend.COMMUNICATORS, "of", lambda group: object())
    for device, expected in (("meta", "one batch"), ("cpu", ["a message"])):
        operation = SimpleNamespace(op="isend", tensor=torch.empty(3, device=device), peer=1, group=None, tag=0)
        assert Backend().batch_isend_irecv([operation]) == expected

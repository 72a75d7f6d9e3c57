"""The configuration: one value, the same keys everywhere, and errors that say key, value and what is allowed."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zipccl_core import (
    NATIVE,
    AlwaysStrategy,
    Call,
    ConfigError,
    ExponentCodec,
    NeverStrategy,
    Operation,
    Plan,
    RawCodec,
    Strategy,
    ThresholdStrategy,
    ZipCCLConfig,
)

BF16 = torch.bfloat16


def test_defaults() -> None:
    config = ZipCCLConfig()
    assert config.enabled
    assert config.codec == ExponentCodec()
    assert config.strategy == ThresholdStrategy(min_nbytes=64 * 1024)
    assert config.reduction == "fp32"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"codek": 1}, r"unknown key 'codek' \(value 1\); allowed: enabled, codec, strategy, reduction, chunk_nbytes"),
        ({"codec": "exponnt"}, "unknown codec 'exponnt'; known: .*exponent, .*raw"),
        ({"codec": {"sigma": 1}}, "needs an 'id'; known: .*exponent, .*raw"),
        (
            {"codec": {"id": "exponent", "sigm": 2}},
            "codec 'exponent': unknown key 'sigm'.*allowed: id, checksum, sigma",
        ),
        ({"codec": {"id": "exponent", "sigma": -2}}, "codec 'exponent': sigma = -2: .*greater than 0"),
        ({"codec": 3}, "codec = 3"),
        ({"codec": {"id": ["x"]}}, "needs an 'id'"),
        ({"strategy": "sometimes"}, "unknown strategy 'sometimes'; known: adaptive, always, .*never, threshold"),
        ({"strategy": {"id": "threshold", "min_nbytes": -1}}, "min_nbytes = -1: .*greater than or equal to 0"),
        ({"reduction": "fp16"}, "reduction = 'fp16': .*'fp32' or 'gloo'"),
        ({"chunk_nbytes": 5}, "chunk_nbytes = 5: .*greater than or equal to 2048"),
        ({"operations": {"all_gathr": {}}}, "unknown operation 'all_gathr'; allowed: all_gather, reduce_scatter"),
        ({"codec": {"id": "exponent", "table": [1, 2]}}, r"table needs seven different exponents, got \[1, 2\]"),
        (
            {"operations": {"all_gather": {"codc": "raw"}}},
            "operations.all_gather: .*unknown key 'codc'.*allowed: codec",
        ),
        ({"enabled": "perhaps"}, "enabled = 'perhaps'"),
    ],
)
def test_errors_name_key_value_and_what_is_allowed(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ZipCCLConfig(**values)


def test_json_round_trip() -> None:
    config = ZipCCLConfig(
        codec={"id": "exponent", "checksum": "crc32c", "threads": 2},
        strategy={"id": "threshold", "min_nbytes": 1},
        operations={"all_gather": {"codec": "raw"}, "broadcast": {"strategy": "never"}},
    )
    assert ZipCCLConfig(**config.model_dump()) == config
    assert ZipCCLConfig.model_validate_json(config.model_dump_json()) == config
    assert hash(ExponentCodec()) == hash(ExponentCodec())


def test_copies_and_hashes() -> None:
    changed = ZipCCLConfig().model_copy(update={"reduction": "gloo", "strategy": AlwaysStrategy()})
    assert changed.plan(Operation.ALL_REDUCE, BF16, 1, 2).reduction == "gloo"
    assert hash(ZipCCLConfig()) == hash(ZipCCLConfig())
    assert hash(changed) != hash(ZipCCLConfig())


def test_it_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ZipCCLConfig().reduction = "gloo"  # type: ignore[misc]


def test_environment(caplog: pytest.LogCaptureFixture) -> None:
    environ = {
        "ZIPCCL_ENABLED": "false",
        "ZIPCCL_CODEC": '{"id": "exponent", "sigma": 0.5}',
        "ZIPCCL_STRATEGY": "always",
        "ZIPCCL_CHUNK_NBYTES": "8192",
        "ZIPCCL_STRATGY": "ignored",
        "OTHER": "not ours",
    }
    config = ZipCCLConfig.from_env(environ)
    assert config == ZipCCLConfig(enabled=False, codec=ExponentCodec(sigma=0.5), strategy="always", chunk_nbytes=8192)
    assert ZipCCLConfig.from_env({}) == ZipCCLConfig()
    (record,) = caplog.records
    assert "unknown environment variable ZIPCCL_STRATGY is ignored; known: ZIPCCL_ENABLED" in record.getMessage()
    with pytest.raises(ConfigError, match="from the environment .*unknown codec 'zip'"):
        ZipCCLConfig.from_env({"ZIPCCL_CODEC": "zip"})
    with pytest.raises(ConfigError, match="ZIPCCL_CODEC=.* is not JSON"):
        ZipCCLConfig.from_env({"ZIPCCL_CODEC": '{"id": "exponent", checksum}'})


def test_plans_per_operation() -> None:
    config = ZipCCLConfig(
        strategy="always",
        chunk_nbytes=8192,
        operations={
            "all_gather": {"codec": "raw", "chunk_nbytes": 4096},
            "all_reduce": {"strategy": "never"},
            "reduce_scatter": {"reduction": "gloo"},
        },
    )
    plan = {operation: config.plan(operation, BF16, 10_000, 4) for operation in Operation}
    assert plan[Operation.ALL_GATHER] == Plan(RawCodec(), 2048, "fp32")
    assert plan[Operation.ALL_REDUCE] == NATIVE
    assert plan[Operation.REDUCE_SCATTER] == Plan(ExponentCodec(), 4096, "gloo")
    assert plan[Operation.BROADCAST] == Plan(ExponentCodec(), 4096, "fp32")
    assert config.plan(Operation.BROADCAST, torch.float32, 10_000, 4) == NATIVE, "no codec for it"
    assert config.plan(Operation.ALL_GATHER, torch.float32, 10_000, 4).codec == RawCodec()


def test_chunks_are_whole_blocks() -> None:
    for nbytes in (2048, 2049, 4095, 4096, 1_000_000):
        plan = ZipCCLConfig(strategy="always", chunk_nbytes=nbytes).plan(Operation.ALL_GATHER, BF16, 1, 2)
        assert plan.chunk_numel % 1024 == 0
        assert 2048 <= plan.chunk_numel * 2 <= nbytes


def call(numel: int | None, dtype: torch.dtype = BF16) -> Call:
    return Call(Operation.ALL_GATHER, dtype, numel, 2, Plan(ExponentCodec()))


def test_fixed_strategies() -> None:
    assert AlwaysStrategy().choose(call(0)).codec is not None
    assert NeverStrategy().choose(call(1 << 30)) == NATIVE
    threshold = ThresholdStrategy(min_nbytes=4096)
    assert threshold.choose(call(2047)) == NATIVE
    assert threshold.choose(call(2048)).codec is not None
    assert threshold.choose(call(1024, torch.float32)).codec is not None
    assert threshold.choose(call(None)).codec is not None, "sizes that ranks do not share decide nothing"


@given(
    numel=st.one_of(st.none(), st.integers(0, 1 << 40)),
    world_size=st.integers(2, 4096),
    minimum=st.integers(0, 1 << 30),
)
def test_a_choice_is_a_function_of_the_call(numel: int | None, world_size: int, minimum: int) -> None:
    """Two ranks, each with its own copy of the configuration, choose the same."""
    first, second = (
        ZipCCLConfig.model_validate_json(
            ZipCCLConfig(strategy={"id": "threshold", "min_nbytes": minimum}).model_dump_json()
        )
        for _ in range(2)
    )
    for operation in Operation:
        assert first.plan(operation, BF16, numel, world_size) == second.plan(operation, BF16, numel, world_size)


def test_a_strategy_of_ones_own() -> None:
    class LargeGathersRaw(Strategy):
        id: Literal["large-gathers-raw"] = "large-gathers-raw"

        def choose(self, call: Call) -> Plan:
            return call.compressed._replace(codec=RawCodec()) if (call.numel or 0) > 1000 else NATIVE

    config = ZipCCLConfig(strategy="large-gathers-raw")
    assert config.plan(Operation.ALL_GATHER, BF16, 2000, 2).codec == RawCodec()
    assert config.plan(Operation.ALL_GATHER, BF16, 100, 2) == NATIVE


def test_variables_of_the_cuda_kernels_are_not_configuration(caplog: pytest.LogCaptureFixture) -> None:
    assert ZipCCLConfig.from_env({"ZIPCCL_CACHE_DIR": "/tmp", "ZIPCCL_NVCC": ""}) == ZipCCLConfig()
    assert not caplog.records


def test_dynamic_sizes_of_operations() -> None:
    config = ZipCCLConfig(strategy="always", dynamic_cap=0.5, operations={"all_gather": {"dynamic_sizes": "capped"}})
    assert config.plan(Operation.ALL_GATHER, torch.bfloat16, 5000, 2).dynamic_cap == 0.5
    assert config.plan(Operation.ALL_TO_ALL, torch.bfloat16, 5000, 2).dynamic_cap is None
    with pytest.raises(ConfigError, match=r"dynamic_sizes.*'exact' or 'capped'"):
        ZipCCLConfig(dynamic_sizes="guessed")

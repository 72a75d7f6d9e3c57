"""For authors of codecs, strategies and adapters: groups of ranks in a test, and the contract of every codec."""

from zipccl_core.testing.compare import bits, same_bits
from zipccl_core.testing.contract import check_codec, sample_tensors
from zipccl_core.testing.ranks import RankFailedError, run_ranks

__all__ = ["RankFailedError", "bits", "check_codec", "run_ranks", "same_bits", "sample_tensors"]

"""Trains a small Llama from transformers with DeepSpeed, and with ZipCCL where the DeepSpeed configuration says so.

    torchrun --nproc-per-node 2 examples/deepspeed_llama.py \\
        --deepspeed_config examples/configs/llama_zero3.json --steps 10

Add `--native` for the same run without ZipCCL: the losses are the same.
"""

from __future__ import annotations

import common
import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    arguments = common.parse_arguments(__doc__)
    config = common.load_config(arguments)
    common.skip_op_builds()

    torch.manual_seed(arguments.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=common.VOCABULARY,
            hidden_size=arguments.hidden,
            intermediate_size=arguments.hidden * 8 // 3,
            num_hidden_layers=arguments.layers,
            num_attention_heads=6,
            max_position_embeddings=arguments.sequence,
            attn_implementation="eager",
            use_cache=False,
        )
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = common.train(engine, arguments)

    statistics = None
    if "zipccl" in config:
        import zipccl_deepspeed

        statistics = zipccl_deepspeed.stats()
    common.report(engine, arguments, losses, statistics)


if __name__ == "__main__":
    main()

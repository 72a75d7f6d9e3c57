"""Trains a small Qwen3-MoE whose experts DeepSpeed spreads over the ranks, and with ZipCCL where it is configured.

    torchrun --nproc-per-node 2 examples/deepspeed_moe.py \\
        --deepspeed_config examples/configs/moe_zero2.json --steps 10

The model is transformers' own, with its sparse blocks replaced by `deepspeed.moe.layer.MoE`: tokens travel to their
experts and back by all-to-all, four times a layer and step, gradients counted. This MoE goes with ZeRO-0, 1 and 2.
Add `--native` for the same run without ZipCCL: the losses are the same.
"""

from __future__ import annotations

import common
import deepspeed
import torch
from deepspeed.moe.layer import MoE
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP


class ExpertParallelBlock(torch.nn.Module):
    """DeepSpeed's MoE with the interface of the model's own sparse block; keeps the gate's balancing loss."""

    def __init__(self, config: Qwen3MoeConfig, ep_size: int) -> None:
        super().__init__()
        expert = Qwen3MoeMLP(config, intermediate_size=config.moe_intermediate_size)
        experts, k = config.num_experts, config.num_experts_per_tok
        self.moe = MoE(config.hidden_size, expert, num_experts=experts, ep_size=ep_size, k=k, capacity_factor=1.25)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        output, self.balancing_loss, _ = self.moe(hidden_states)
        return output


class MoEForCausalLM(Qwen3MoeForCausalLM):
    """Qwen3-MoE with expert parallelism by DeepSpeed."""

    def __init__(self, config: Qwen3MoeConfig, ep_size: int) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = ExpertParallelBlock(config, ep_size)

    def forward(self, **batch: torch.Tensor) -> object:
        output = super().forward(**batch)
        output.loss = output.loss + 0.01 * sum(layer.mlp.balancing_loss for layer in self.model.layers)
        return output


def main() -> None:
    arguments = common.parse_arguments(__doc__)
    config = common.load_config(arguments)
    common.skip_op_builds()

    torch.manual_seed(arguments.seed)
    model = MoEForCausalLM(
        Qwen3MoeConfig(
            vocab_size=common.VOCABULARY,
            hidden_size=arguments.hidden,
            moe_intermediate_size=arguments.hidden,
            num_hidden_layers=arguments.layers,
            num_attention_heads=6,
            num_key_value_heads=6,
            head_dim=arguments.hidden // 6,
            num_experts=4,
            num_experts_per_tok=1,
            max_position_embeddings=arguments.sequence,
            attn_implementation="eager",
            use_cache=False,
        ),
        ep_size=2,
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

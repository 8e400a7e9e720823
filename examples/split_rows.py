"""A loop of your own around a Hugging Face model whose rows (cp) and layers (tp) are split over ranks.

``torchrun --nproc-per-node 4 examples/split_rows.py 2 2`` trains a tiny Qwen3-MoE from scratch with cp 2 and
tp 2 on rows that hold two random documents each.
"""

import sys

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import fsdmoe
from fsdmoe.context_parallel.config import ContextParallelConfig
from fsdmoe.data import Batch
from fsdmoe.mesh import Axis

CONFIG = AutoConfig.for_model(
    "qwen3_moe", vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    output_router_logits=True,
)  # fmt: skip
LENGTHS = (20, 12)  # documents of a row


def rows(random: torch.Generator, num_rows: int = 2) -> Batch:
    """Whole rows, the same on all ranks of cp and tp: each takes its own tokens."""
    tokens = torch.randint(0, CONFIG.vocab_size, (num_rows, sum(LENGTHS)), generator=random)
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).expand_as(tokens)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)]).expand_as(tokens)
    has_next = torch.cat([torch.arange(n) < n - 1 for n in LENGTHS]).expand_as(tokens)
    return Batch(tokens, tokens.roll(-1, 1).where(has_next, 0), positions, ids, has_next)


def main(cp: int = 1, tp: int = 1, steps: int = 3) -> list[float]:
    meshes = fsdmoe.build_meshes(cp=cp, tp=tp)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    precision = fsdmoe.PrecisionConfig(param_dtype="float32", reduce_dtype="float32")
    policy = fsdmoe.ParallelPolicy(grad_divisor=1.0, precision=precision)  # 1: the loss is already global
    model = fsdmoe.parallelize(model.train(), meshes, policy)
    decoder, feed = (
        fsdmoe.as_causal_lm(model),
        fsdmoe.Feed(meshes, ContextParallelConfig(mode="ring"), own_attention=True),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(meshes.rank(feed.data_axis))
    losses = []
    for _ in range(steps):
        inputs = feed.inputs(feed.prepare([rows(random), rows(random)]))
        counts = feed.count(decoder, inputs)
        loss = torch.zeros((), device=meshes.device)
        for index, each in enumerate(inputs):
            with fsdmoe.engine_of(model).micro_batch(last=index == len(inputs) - 1):
                out = decoder(**each, counts=counts)
                out.loss.backward()
            loss += out.cross_entropy
        dist.all_reduce(loss, group=meshes.group(Axis.LOSS))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("losses", *(f"{loss:.4f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    dist.destroy_process_group()

"""A loop of your own around a wrapped model: accumulation, a schedule, evaluation, weights to a server.

``torchrun --nproc-per-node 2 examples/own_loop.py`` trains a tiny Mixtral from scratch on random tokens.
"""

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, MixtralConfig

import fsdmoe

CONFIG = MixtralConfig(
    vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, num_local_experts=4, output_router_logits=True,
)  # fmt: skip


def main(steps: int = 3, micro_batches: int = 2) -> float:
    meshes = fsdmoe.build_meshes(ep=2 if not dist.is_initialized() or dist.get_world_size() % 2 == 0 else 1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    model = fsdmoe.parallelize(model.train(), meshes)  # the model's own initial weights, shard by shard
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # any torch optimizer
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        for index in range(micro_batches):
            tokens = torch.randint(0, CONFIG.vocab_size, (2, 16), generator=random).to(meshes.device)
            with fsdmoe.engine_of(model).micro_batch(last=index == micro_batches - 1):
                (model(tokens, labels=tokens).loss / micro_batches).backward()
        fsdmoe.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss.item()
    num_sent = sum(len(bucket) for bucket in fsdmoe.iterate_weights(model, dtype=torch.bfloat16))
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f}; {num_sent} tensors for an inference engine")
    return loss


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

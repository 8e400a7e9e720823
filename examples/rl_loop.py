"""Reinforcement learning during training: one process generates with plain transformers, two ranks train.

``torchrun --nproc-per-node 2 examples/rl_loop.py`` teaches a tiny Qwen3-MoE to repeat the last token of its
prompt. Every step::

    generator   samples answers, keeps their log-probabilities and which experts each token visited
    trainer     scores the answers; two clipped policy-gradient updates, routed as generation routed
    refit       the new weights go back, a bucket at a time; both sides' weights are compared bit for bit

While the generator samples, the trainer has given its device memory back: on one GPU both have it in turn.
"""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import fsdmoe
from fsdmoe.huggingface.refit_link import GroupLink, PeerGroup, broadcast, connect, receive_over

CONFIG = Qwen3MoeConfig(
    vocab_size=12, hidden_size=32, moe_intermediate_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    norm_topk_prob=True, eos_token_id=None, pad_token_id=None, bos_token_id=None,
)  # fmt: skip
PROMPT, ANSWER, SAMPLES, PROMPTS = 2, 3, 8, 32
STEPS, UPDATES, RATE, CLIP = 80, 2, 5e-3, 0.2
BUCKET_BYTES = 16 << 10
GENERATOR = 1  # in the group of the generator and the first trainer


def reward_of(tokens_NS: Tensor) -> Tensor:
    """The share of the answer's tokens that repeat the last token of the prompt; 1 is the maximum."""
    return (tokens_NS[:, PROMPT:] == tokens_NS[:, PROMPT - 1 : PROMPT]).float().mean(1)


# The generator: transformers alone


def generate_forever(address: str, folder: str) -> None:
    """Take weights, answer prompts, again and again, until an empty stream of weights comes."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIG).eval()
    group = connect(address, rank=GENERATOR, size=2)
    parameters, step = model.state_dict(), 0
    while load_weights(parameters, group):
        broadcast(digest(parameters), group, GENERATOR)
        rollout, routed = sample(model)
        save_file(rollout, f"{folder}/rollout-{step}.safetensors")
        documents = {f"answer-{n}": ids for n, ids in enumerate(routed)}
        path = f"{folder}/routing-{step}.safetensors"
        fsdmoe.save_routed_experts(path, documents, num_experts=CONFIG.num_experts)
        broadcast(torch.tensor([step]), group, GENERATOR)  # the files are whole
        step += 1


def load_weights(parameters: dict[str, Tensor], group: PeerGroup) -> bool:
    """Copy what arrives; whether anything did."""
    names: set[str] = set()
    for bucket in receive_over(group):
        for name, value in bucket.items():
            parameters[name].copy_(value)
        names |= bucket.keys()
    if names and names != parameters.keys():
        raise AssertionError(f"weights that never came: {parameters.keys() - names}")
    return bool(names)


@torch.no_grad()
def sample(model: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Answers with their log-probabilities, and the experts ``[answers, tokens, layers, K]`` of every token
    that was computed: the last one is only drawn."""
    visited: list[list[Tensor]] = [[] for _ in model.model.layers]
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, given, calls=calls: calls.append(given[1]))
        for layer, calls in zip(model.model.layers, visited, strict=True)
    ]
    prompts = torch.randint(CONFIG.vocab_size, (PROMPTS, PROMPT)).repeat_interleave(SAMPLES, 0)
    out = model.generate(
        prompts,
        max_new_tokens=ANSWER,
        do_sample=True,
        top_k=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for hook in hooks:
        hook.remove()
    logprobs_NAV = torch.stack(out.logits, 1).log_softmax(-1)
    logprobs_NA = logprobs_NAV.gather(2, out.sequences[:, PROMPT:, None])[..., 0]
    layers = [torch.cat([ids.view(len(prompts), -1, ids.shape[-1]) for ids in calls], 1) for calls in visited]
    rollout = {"tokens": out.sequences.contiguous(), "logprobs": logprobs_NA.contiguous()}
    return rollout, torch.stack(layers, 2)


def digest(tensors: dict[str, Tensor]) -> Tensor:
    """32 bytes that name every bit of the weights."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return torch.frombuffer(bytearray(whole.digest()), dtype=torch.uint8)


# The trainer: fsdmoe on all ranks


class Trainer:
    """A sharded model, its optimizer, and, on the first rank, the generator at the other end of a group."""

    def __init__(self, folder: str, group: PeerGroup | None) -> None:
        torch.manual_seed(0)
        self.meshes = fsdmoe.build_meshes(ep=dist.get_world_size())
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG)
        self.model = fsdmoe.parallelize(model.train(), self.meshes)
        self.optimizer = fsdmoe.AdamW(self.model, lr=RATE, weight_decay=0.0)
        self.folder, self.group = folder, group
        self.equal_refits = self.lent_bytes = 0

    def refit(self) -> None:
        """Send the weights, and compare what the generator then has."""
        whole: dict[str, Tensor] = {}
        link = None if self.group is None else GroupLink(self.group)

        def send(bucket: dict[str, Tensor] | None) -> None:
            whole.update(bucket or {})  # for the comparison alone: a trainer keeps no whole model
            if link is not None:
                link(bucket)

        fsdmoe.send_weights(self.model, send, names="memory", bucket_bytes=BUCKET_BYTES)
        if self.group is not None:
            theirs = broadcast(torch.zeros(32, dtype=torch.uint8), self.group, GENERATOR)
            if not torch.equal(theirs, digest(whole)):
                raise AssertionError("the generator's weights are not the trainer's")
            self.equal_refits += 1

    def lend_memory(self) -> None:
        """Have the generator's turn: until its rollout is there, the trainer's state waits in host memory."""
        self.lent_bytes = fsdmoe.engine_of(self.model).release(self.optimizer)
        if self.group is not None:
            broadcast(torch.zeros(1, dtype=torch.int64), self.group, GENERATOR)
        dist.barrier()
        fsdmoe.engine_of(self.model).restore()

    def step(self, number: int) -> float:
        """Train on a rollout; its mean reward."""
        rollout = load_file(f"{self.folder}/rollout-{number}.safetensors")
        tape = fsdmoe.RoutingTape.load(f"{self.folder}/routing-{number}.safetensors")
        rewards_N = reward_of(rollout["tokens"])
        by_prompt = rewards_N.view(PROMPTS, SAMPLES)
        spread = by_prompt.std(1, keepdim=True) + 1e-4
        advantages_N = ((by_prompt - by_prompt.mean(1, keepdim=True)) / spread).flatten()
        mine = torch.arange(len(rewards_N)).chunk(dist.get_world_size())[dist.get_rank()]
        for _ in range(UPDATES):
            self._update(mine, rollout, advantages_N, tape)
        return rewards_N.mean().item()

    def _update(
        self, mine: Tensor, rollout: dict[str, Tensor], advantages_N: Tensor, tape: fsdmoe.RoutingTape
    ) -> None:
        tokens_NS = rollout["tokens"][mine]
        names, length = [f"answer-{n}" for n in mine.tolist()], tokens_NS.shape[1] - 1
        origin = fsdmoe.Origin.of_rows(names, [length] * len(names), length)
        with fsdmoe.routing_tape(self.model, tape, origin):
            logits_NSV = self.model(tokens_NS[:, :-1], use_cache=False).logits
            answers_NAV = logits_NSV[:, PROMPT - 1 :].log_softmax(-1)
            logprobs_NA = answers_NAV.gather(2, tokens_NS[:, PROMPT:, None])[..., 0]
            ratio_NA = (logprobs_NA - rollout["logprobs"][mine]).exp()
            advantages_N1 = advantages_N[mine, None]
            clipped_NA = ratio_NA.clamp(1 - CLIP, 1 + CLIP) * advantages_N1
            loss = -torch.minimum(ratio_NA * advantages_N1, clipped_NA).mean()
            loss.backward()
        fsdmoe.clip_grad_norm(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main(steps: int = STEPS) -> list[float]:
    """The mean reward of every step."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as own:
        shared: list[Any] = [own, free_port()]
        dist.broadcast_object_list(shared)
        folder, address, group, generator = shared[0], f"127.0.0.1:{shared[1]}", None, None
        if dist.get_rank() == 0:
            generator = subprocess.Popen([sys.executable, __file__, address, folder])
            group = connect(address, rank=0, size=2)
        trainer = Trainer(folder, group)
        rewards = []
        for number in range(steps):
            trainer.refit()
            trainer.lend_memory()
            rewards.append(trainer.step(number))
            for path in Path(own).glob(f"*-{number}.safetensors"):
                path.unlink()
            if dist.get_rank() == 0 and (number % 10 == 0 or number == steps - 1):
                print(f"step {number:3d}  reward {rewards[-1]:.3f}", flush=True)
        if group is not None and generator is not None:
            GroupLink(group)(None)  # no weights: the generator ends
            generator.wait(60)
            last = rewards[-10:]
            print(
                f"reward {rewards[0]:.3f} -> {sum(last) / len(last):.3f} (mean of the last {len(last)}); "
                f"weights equal bit for bit after {trainer.equal_refits} of {steps} refits; "
                f"{trainer.lent_bytes / 2**10:.0f} KiB lent to each generation"
            )
    return rewards


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        generate_forever(*sys.argv[1:])
    else:
        main(*map(int, sys.argv[1:]))
        dist.destroy_process_group()

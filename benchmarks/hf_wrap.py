"""A Hugging Face model wrapped with one call, against the same model as it is, on one GPU.

Qwen3-30B-A3B shapes, 4 x 4096 tokens, bf16, as many layers as fit beside each other. Both models are in
memory at once and take turns, eager against eager and compiled against compiled (each decoder layer with
torch.compile); the order is turned round every round, and medians are compared. Printed are

    forward+backward   of the loss that the model computes from labels; the wrapped one chunk by chunk,
                       without logits in its output, unless --own-loss
    step               with fused AdamW: bf16 weights and moments in the plain model; the wrapped one has
                       float32 main weights, gradients and moments unless --same-precision

    python benchmarks/hf_wrap.py [--layers 8] [--rounds 8] [--same-precision] [--own-loss] [--json out.json]
    python benchmarks/hf_wrap.py --tiny          the same on a CPU in seconds, to see that it works
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import milliseconds, require_gpu
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from fsdmoe.fsdp import engine_of
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
BACKEND = "inductor" if DEVICE.type == "cuda" else "aot_eager"  # on a CPU only to see that it works
MODES = ("eager", "compiled")
WARM_UP = 2  # rounds in which things are compiled, also a second time once sizes are seen to change
FULL: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "intermediate_size": 6144, "norm_topk_prob": True,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128,
    "norm_topk_prob": True,
}  # fmt: skip


class Contender:
    """A model with its optimizer, that runs eagerly or with compiled layers."""

    def __init__(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.name, self.model, self.optimizer = name, model, optimizer
        layers: Any = model.model.layers  # type: ignore[union-attr]
        self._forwards = {
            "eager": [(layer, layer.forward) for layer in layers],
            "compiled": [(layer, torch.compile(layer.forward, backend=BACKEND)) for layer in layers],
        }

    def use(self, mode: str) -> None:
        for layer, forward in self._forwards[mode]:
            layer.forward = forward

    def forward_backward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self.model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def drop_gradients(self) -> None:
        """The wrapped model must not profit from weights that did not change."""
        self.optimizer.zero_grad()
        if self.name == "wrapped":
            engine_of(self.model).mark_changed()

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def build_model(settings: argparse.Namespace, layers: int) -> nn.Module:
    config = Qwen3MoeConfig(**(TINY if settings.tiny else FULL), num_hidden_layers=layers)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE, attn_implementation="sdpa")
    return model.train()


def build_contenders(settings: argparse.Namespace, layers: int) -> list[Contender]:
    meshes = build_meshes()
    formats: dict[str, Any] = {"param_dtype": str(DTYPE).removeprefix("torch.")}
    formats["main_dtype"] = formats["reduce_dtype"] = "bfloat16" if settings.same_precision else "float32"
    precision = PrecisionConfig(**formats)
    wrapped = parallelize(
        build_model(settings, layers), meshes, ParallelPolicy(precision=precision),
        fused_loss=not settings.own_loss,
    )  # fmt: skip
    moments = torch.bfloat16 if settings.same_precision else torch.float32
    plain = build_model(settings, layers)
    fused = torch.optim.AdamW(plain.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return [
        Contender("plain", plain, fused),
        Contender("wrapped", wrapped, AdamW(wrapped, lr=1e-5, betas=(0.9, 0.95), moment_dtype=moments)),
    ]


def time_steps(contender: Contender, tokens: torch.Tensor, steps: int) -> tuple[float, float]:
    """Milliseconds of forward and backward, and of the whole step, each over ``steps`` steps."""

    def ending_in(finish: Callable[[], None]) -> float:
        def step() -> None:
            contender.forward_backward(tokens)
            finish()

        return milliseconds(step, steps, DEVICE)

    return ending_in(contender.drop_gradients), ending_in(contender.finish)


def measure(settings: argparse.Namespace, layers: int) -> dict[str, Any]:
    contenders = build_contenders(settings, layers)
    size = (1, 64) if settings.tiny else (settings.batch, 4096)
    vocabulary = (TINY if settings.tiny else FULL)["vocab_size"]
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, size, generator=random).to(DEVICE)
    times: dict[str, list[tuple[float, float]]] = {}
    losses = {}
    for contender in contenders:
        losses[contender.name] = contender.forward_backward(tokens).item()
        contender.drop_gradients()
    order = [(mode, contender) for mode in MODES for contender in contenders]
    for index in range(WARM_UP + settings.rounds):
        for mode, contender in order if index % 2 else reversed(order):
            contender.use(mode)
            found = time_steps(contender, tokens, settings.steps)
            if index >= WARM_UP:
                times.setdefault(f"{contender.name}, {mode}", []).append(found)
    medians = {
        name: {
            "forward+backward": statistics.median(f[0] for f in found),
            "step": statistics.median(f[1] for f in found),
        }
        for name, found in times.items()
    }
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
    return {"layers": layers, "tokens": tokens.numel(), "losses": losses, "ms": medians, "peak_gib": peak}


def measure_what_fits(settings: argparse.Namespace) -> dict[str, Any]:
    for layers in range(2 if settings.tiny else settings.layers, 0, -1):
        try:
            return measure(settings, layers)
        except torch.OutOfMemoryError:
            print(f"{layers} layers of both models do not fit; trying fewer")
        gc.collect()
        torch.cuda.empty_cache()
    raise SystemExit("not even one layer fits: lower --batch")


def report(found: dict[str, Any]) -> None:
    print(
        f"{found['layers']} layers, {found['tokens']} tokens a step, both models together at most "
        f"{found['peak_gib']:.1f} GiB; first losses "
        + ", ".join(f"{name} {loss:.4f}" for name, loss in found["losses"].items())
    )
    for name, ms in found["ms"].items():
        print(f"{name:20s} forward+backward {ms['forward+backward']:9.2f} ms   step {ms['step']:9.2f} ms")
    for mode in MODES:
        for part in ("forward+backward", "step"):
            gain = found["ms"][f"plain, {mode}"][part] / found["ms"][f"wrapped, {mode}"][part]
            print(f"gain, {mode}, {part}: {gain:.3f} (wanted: at least 1)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8, help="fewer where these do not fit")
    parser.add_argument("--batch", type=int, default=4, help="rows of 4096 tokens")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="steps in a row, per contender and round")
    parser.add_argument("--same-precision", action="store_true", help="bf16 main weights and moments in both")
    parser.add_argument("--own-loss", action="store_true", help="parallelize(..., fused_loss=False)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on the CPU where there is no GPU")
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    if not settings.tiny:
        require_gpu("try --tiny")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'CPU'}")
    found = measure_what_fits(settings)
    report(found)
    if settings.json:
        settings.json.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

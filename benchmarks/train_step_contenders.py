"""The contenders of ``train_step.py``: each a model with weights, gradients and moments in one dtype.

All start from the same weights (drawn by name, see ``fsdmoe.models.init``), are stepped by AdamW with the
same settings (matrices are decayed, vectors not) and keep no other copy of the weights.

=======================  ===================================================================================
fsdmoe                   the decoder of fsdmoe, on one rank, memory.recompute = ["norms"], its own AdamW
fsdmoe keeping all       the same with memory.recompute = []
fsdmoe torch             the same with train.kernels = "torch": what the kernels are worth
fsdmoe fp8               the same as fsdmoe, experts and attention's projections in fp8_blockwise, with
                         precision.quantized_weights: AdamW writes codes of weights, both ways round
fsdmoe fp8 keeping all   with memory.recompute = []
fsdmoe fp8 experts       experts alone
fsdmoe fp8 by te         experts and attention's projections by Transformer Engine (precision.backend = "te"),
                         from weights in bf16
fsdmoe fp8 from bf16     the same by fsdmoe's kernels: without precision.quantized_weights
fsdmoe, fp32 main        the same as fsdmoe with main weights, and gradients, in fp32
fsdmoe fp8, fp32 main, fsdmoe fp8 experts, fp32 main
                         where AdamW writes codes instead of bf16
fsdmoe wrapped           transformers' model in ``fsdmoe.parallelize``: layers through fsdmoe's kernels where
                         they compute the same, no whole logits, norms recomputed, fsdmoe's AdamW
fsdmoe wrapped, all kept the same with train.recompute = "none"
fsdmoe wrapped as is     and with train.fused_layers = false: what those layers are worth
transformers             its grouped_mm experts and SDPA attention, torch's fused AdamW
transformers compiled    the whole forward compiled, loss included
torchtitan               0.2.2's Qwen3 model and loss, torch's fused AdamW
torchtitan compiled      compiled as torchtitan's own ``apply_compile`` does, loss included
torchtitan blocks        each decoder block compiled whole, ``torch.compile(block)``, loss too: its fastest
torchtitan blocks fp8 linear
                         the same with its converter "quantize.linear.float8" for attention's projections:
                         torchao's, one scale a tensor
torchtitan blocks fp8    and "quantize.grouped_mm.float8" for experts: torchao's, one scale a row
=======================  ===================================================================================
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from fsdp_world import emulated_meshes
from torch import nn
from train_step_problem import DECAY, SEED, SETTINGS, STD, Problem, Step, plain_step
from train_step_torchtitan import torchtitan_step

from fsdmoe.config.train import TrainConfig
from fsdmoe.data.batch import Batch
from fsdmoe.feed import Feed
from fsdmoe.fsdp import engine_of
from fsdmoe.graphs import build_micro_batches
from fsdmoe.kernels.backend import choose_kernels
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import Meshes, build_meshes
from fsdmoe.models import build_model
from fsdmoe.models.init import Initializer
from fsdmoe.optim import AdamW
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.precision.loss_scale import LossScaler

NAMES = ("fsdmoe", "torchtitan blocks", "torchtitan compiled", "transformers compiled", "transformers",
         "fsdmoe wrapped", "torchtitan", "fsdmoe torch", "fsdmoe keeping all",
         "fsdmoe wrapped, all kept", "fsdmoe wrapped as is", "fsdmoe fp8", "fsdmoe fp8 experts",
         "fsdmoe, fp32 main", "fsdmoe fp8 experts, fp32 main", "fsdmoe fp8, fp32 main",
         "fsdmoe fp8 keeping all", "fsdmoe fp8 with head", "fsdmoe fp8 with head, keeping codes",
         "fsdmoe fp8 by te", "fsdmoe fp8 from bf16",
         "torchtitan blocks fp8", "torchtitan blocks fp8 linear")  # fmt: skip
_KEEPING_ALL = ("fsdmoe wrapped, all kept", "fsdmoe wrapped as is")

_INSTALL = {"torchtitan": "torchtitan==0.2.2", "transformers": "transformers"}


def choose(names: list[str] | None, default: tuple[str, ...]) -> list[str]:
    """The named contenders, all of which must be there, or those of the default that are."""
    found = []
    for name in names or default:
        package = name.split()[0].strip(",")
        if importlib.util.find_spec(package) is not None:
            found.append(name)
            continue
        reason = f"{name!r} needs {_INSTALL[package]}, which is not installed"
        if names:
            raise SystemExit(f"--contenders: {reason}")
        print(f"{reason}; left out", flush=True)
    return found


def build(name: str, problem: Problem) -> Step:
    """A contender's training step; its weights are those of every other."""
    if name.startswith("fsdmoe"):
        return _fsdmoe(name, problem)
    if name.startswith("torchtitan"):
        return torchtitan_step(problem, form=name.removeprefix("torchtitan").strip())
    return _transformers(problem, compiled=name.endswith("compiled"))


def _fsdmoe(name: str, problem: Problem) -> Step:
    choose_kernels("torch" if name == "fsdmoe torch" else "auto")  # another may have chosen in this process
    world = problem.world
    meshes = emulated_meshes(world, 1, problem.device.type) if world else build_meshes()
    formats: dict[str, Any] = dict.fromkeys(("param_dtype", "reduce_dtype", "main_dtype"), problem.dtype)
    has_wide_main = name.endswith("fp32 main")
    formats |= {"main_dtype": "float32"} if has_wide_main else {}
    if name.startswith("fsdmoe fp8"):
        covers = ("experts",) if "experts" in name else ("experts", "attention")
        formats |= {"recipe": "fp8_blockwise", "covers": covers}
        formats |= {"head": "fp8"} if "with head" in name else {}
        formats |= {"backend": "te"} if name.endswith("by te") else {}
        formats |= {"quantized_weights": not name.endswith(("by te", "from bf16"))}
    precision = PrecisionConfig(**formats)
    keeps_all = name in _KEEPING_ALL or name.endswith("keeping all")
    policy = ParallelPolicy(
        precision=precision, seed=SEED, initializer_range=STD,
        memory=MemoryConfig(
            recompute=() if keeps_all else ("norms",),
            keep="codes" if name.endswith("keeping codes") else "values",
        ),
        grad_divisor=1.0,
        fused_layers=not name.endswith("as is"),
    )  # fmt: skip
    wrapped = name.startswith("fsdmoe wrapped")
    if wrapped:
        model: nn.Module = parallelize(_foreign_model(problem, meshes), meshes, policy)
    else:
        model = parallelize(build_model(problem.config), meshes, policy)
    optimizer = AdamW(model, weight_decay=DECAY, moment_dtype=problem.torch_dtype, **SETTINGS)
    if problem.graphs:
        return _graphed(model, optimizer, Feed(meshes, own_attention=wrapped))

    def step(tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        with engine_of(model).micro_batch(last=True):
            if wrapped:
                loss = model(tokens_BS, labels=labels_BS, shift_labels=labels_BS, use_cache=False).loss
            else:
                loss = model(tokens_BS, labels_BS=labels_BS).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _graphed(model: nn.Module, optimizer: AdamW, feed: Feed) -> Step:
    """The step of ``train.py`` with graphs, which are captured in the fourth."""
    causal_lm = as_causal_lm(model)
    runner = build_micro_batches(model, causal_lm, LossScaler(enabled=False), TrainConfig(graphs="step"))

    def step(tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        rows, length = tokens_BS.shape
        batch = Batch(
            tokens_BS=tokens_BS,
            labels_BS=labels_BS,
            positions_BS=torch.arange(length, device=tokens_BS.device).repeat(rows, 1),
            document_ids_BS=torch.zeros(rows, length, dtype=torch.long),  # which the host looks at
            loss_mask_BS=torch.ones_like(tokens_BS, dtype=torch.bool),
        )
        (inputs,) = feed.inputs(feed.prepare([batch]))
        out = runner.run(inputs, feed.count(causal_lm, [inputs]), feed.routing(), last=True)
        optimizer.step()
        optimizer.zero_grad()
        return out.cross_entropy

    return step


@torch.no_grad()
def _fill(model: nn.Module, problem: Problem, meshes: Meshes) -> None:
    """Initial values by Hugging Face name, drawn in fp32 on the device and rounded."""
    initialize = Initializer(SEED, STD, meshes)
    for name, parameter in model.named_parameters():
        wide = torch.empty(parameter.shape, device=problem.device)
        initialize(name, parameter, wide)
        parameter.copy_(wide)


def _foreign_model(problem: Problem, meshes: Meshes) -> nn.Module:
    from transformers import AutoConfig, Qwen3MoeForCausalLM

    c = problem.config
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=c.vocab_size, hidden_size=c.hidden_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim, moe_intermediate_size=c.moe_intermediate_size, num_experts=c.num_experts,
        num_experts_per_tok=c.num_experts_per_tok, norm_topk_prob=c.norm_topk_prob,
        rms_norm_eps=c.rms_norm_eps, max_position_embeddings=problem.length, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, attn_implementation="sdpa",
        experts_implementation="grouped_mm", use_cache=False,
    )  # fmt: skip
    with torch.device(problem.device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(problem.torch_dtype)
        model = Qwen3MoeForCausalLM(config)
        torch.set_default_dtype(before)
    _fill(model, problem, meshes)
    return model.train()


def _transformers(problem: Problem, *, compiled: bool) -> Step:
    model = _foreign_model(problem, build_meshes())

    def loss_of(tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        return model(tokens_BS, labels=labels_BS, shift_labels=labels_BS, use_cache=False).loss

    if compiled:
        loss_of = torch.compile(loss_of, dynamic=False, backend=problem.backend)
    return plain_step(model, loss_of)

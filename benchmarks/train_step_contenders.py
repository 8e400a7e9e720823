"""The contenders of ``train_step.py``: each a model with weights, gradients and moments in one dtype.

All start from the same weights (drawn by name, see ``fsdmoe.models.init``), are stepped by AdamW with the
same settings (matrices are decayed, vectors not) and keep no other copy of the weights.

=======================  ===================================================================================
fsdmoe                   the decoder of fsdmoe, on one rank, memory.recompute = ["norms"], its own AdamW
fsdmoe keeping all       the same with memory.recompute = []
fsdmoe torch             the same with train.kernels = "torch": what the kernels are worth
fsdmoe fp8               the same as fsdmoe, experts and attention's projections in fp8_blockwise, with
                         precision.quantized_weights: AdamW writes codes of weights, both ways round
fsdmoe fp8 fast          the same in fp8_fast
fsdmoe fp8 experts, fsdmoe fp8 fast experts
                         experts alone
fsdmoe, fp32 main        the same as fsdmoe with main weights, and gradients, in fp32
fsdmoe fp8, fp32 main, fsdmoe fp8 fast, fp32 main
fsdmoe fp8 experts, fp32 main, fsdmoe fp8 fast experts, fp32 main
                         where AdamW writes codes instead of bf16
fsdmoe compiled          the same with every layer compiled, nothing recomputed
fsdmoe wrapped           transformers' model in ``fsdmoe.parallelize``: layers through fsdmoe's kernels where
                         they compute the same, no whole logits, norms recomputed, fsdmoe's AdamW
fsdmoe wrapped, all kept the same with train.recompute = "none"
fsdmoe wrapped as is     and with train.fused_layers = false: what those layers are worth
transformers             its grouped_mm experts and SDPA attention, torch's fused AdamW
transformers compiled    the whole forward compiled, loss included
torchtitan               0.2.2's Qwen3 model and loss, torch's fused AdamW
torchtitan compiled      compiled as torchtitan's own ``apply_compile`` does, loss included
torchtitan blocks        each decoder block compiled whole, ``torch.compile(block)``, loss too: its fastest
=======================  ===================================================================================
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fsdp_world import emulated_meshes
from torch import nn

from fsdmoe.auto_model import as_causal_lm
from fsdmoe.config.train import TrainConfig
from fsdmoe.data.batch import Batch
from fsdmoe.feed import Feed
from fsdmoe.fsdp import engine_of
from fsdmoe.graphs import build_micro_batches
from fsdmoe.kernels.backend import choose_kernels
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import Meshes, build_meshes
from fsdmoe.models import build_model
from fsdmoe.models.config import ModelConfig
from fsdmoe.models.init import Initializer
from fsdmoe.optim import AdamW
from fsdmoe.parallel import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.precision.loss_scale import LossScaler

SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}
DECAY, STD, SEED = 0.1, 0.02, 0
NAMES = ("fsdmoe", "torchtitan blocks", "torchtitan compiled", "transformers compiled", "transformers",
         "fsdmoe wrapped", "torchtitan", "fsdmoe torch", "fsdmoe compiled", "fsdmoe keeping all",
         "fsdmoe wrapped, all kept", "fsdmoe wrapped as is", "fsdmoe fp8", "fsdmoe fp8 experts",
         "fsdmoe fp8 fast", "fsdmoe fp8 fast experts", "fsdmoe, fp32 main", "fsdmoe fp8 experts, fp32 main",
         "fsdmoe fp8, fp32 main", "fsdmoe fp8 fast, fp32 main",
         "fsdmoe fp8 fast experts, fp32 main")  # fmt: skip
_KEEPING_ALL = ("fsdmoe compiled", "fsdmoe keeping all", "fsdmoe wrapped, all kept", "fsdmoe wrapped as is")

_INSTALL = {"torchtitan": "torchtitan==0.2.2", "transformers": "transformers"}


@dataclass(frozen=True)
class Problem:
    """What is trained, on what, in which dtype."""

    config: ModelConfig
    batch: int
    length: int
    dtype: str
    device: torch.device
    backend: str
    """Of torch.compile."""
    graphs: bool = False
    """fsdmoe's contenders replay forward and backward as a CUDA graph: train.graphs = "step"."""
    world: int = 0
    """fsdmoe's contenders are one rank of an emulated world of so many (``fsdp_world``); 0: a real one."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Tokens and labels in, the mean loss out; weights have been updated."""


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
        return _torchtitan(problem, form=name.removeprefix("torchtitan").strip())
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
        formats |= {"recipe": "fp8_fast" if "fast" in name else "fp8_blockwise", "covers": covers}
        formats |= {"quantized_weights": True}
    precision = PrecisionConfig(**formats)
    policy = ParallelPolicy(
        precision=precision, compile=name == "fsdmoe compiled", seed=SEED, initializer_range=STD,
        memory=MemoryConfig(recompute=() if name in _KEEPING_ALL else ("norms",)),
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


def _torch_adamw(model: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, fused=True, **SETTINGS)


def _plain_step(model: nn.Module, loss_of: Step) -> Step:
    optimizer = _torch_adamw(model)

    def step(tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        loss = loss_of(tokens_BS, labels_BS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

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
    return _plain_step(model, loss_of)


def _torchtitan(problem: Problem, *, form: str) -> Step:
    _pretend_datasets()
    if problem.device.type == "cpu":
        _count_integers_on_cpu()
    from torchtitan.components.loss import cross_entropy_loss

    model, loss_sum = _torchtitan_model(problem), cross_entropy_loss
    if form:
        _compile_torchtitan(model, form, problem)
        loss_sum = torch.compile(cross_entropy_loss, backend=problem.backend)

    def loss_of(tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        return loss_sum(model(tokens_BS), labels_BS) / labels_BS.numel()

    return _plain_step(model, loss_of)


def _compile_torchtitan(model: nn.Module, form: str, problem: Problem) -> None:
    """Its own way, which leaves permutation and combination out, or each block as a whole."""
    if form == "compiled":
        from torchtitan.config.job_config import Compile
        from torchtitan.models.llama4.infra.parallelize import apply_compile

        apply_compile(model, Compile(enable=True, backend=problem.backend), False)
        return
    layers: nn.ModuleDict = model.layers  # type: ignore[assignment]
    for name, block in layers.named_children():
        compiled: Any = torch.compile(block, backend=problem.backend)  # a module, whatever its stub says
        layers.register_module(name, compiled)


def _torchtitan_model(problem: Problem) -> nn.Module:
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
    from torchtitan.models.qwen3.model.model import Qwen3Model

    c = problem.config
    moe = MoEArgs(
        num_experts=c.num_experts, num_shared_experts=0, top_k=c.num_experts_per_tok, score_func="softmax",
        route_norm=c.norm_topk_prob, score_before_experts=False, load_balance_coeff=None,
        use_grouped_mm=problem.device.type == "cuda",  # it computes in bf16 whatever it is given
    )  # fmt: skip
    args = Qwen3ModelArgs(
        dim=c.hidden_size, n_layers=c.num_hidden_layers, n_heads=c.num_attention_heads,
        n_kv_heads=c.num_key_value_heads, vocab_size=c.vocab_size, head_dim=c.head_dim,
        norm_eps=c.rms_norm_eps, rope_theta=c.rope_theta, max_seq_len=problem.length, moe_enabled=True,
        moe_inter_dim=c.moe_intermediate_size, moe_args=moe,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3Model(args).to(problem.torch_dtype)
    model.to_empty(device=problem.device)
    _fill_torchtitan(model, problem)
    return model


_TITAN_NAMES = {
    "tok_embeddings": "model.embed_tokens", "output": "lm_head", "norm": "model.norm",
    "layers": "model.layers",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attention": "self_attn",
    "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj", "moe.router.gate": "mlp.gate",
    "moe.experts.w1": "mlp.experts.gate_up_proj", "moe.experts.w3": "mlp.experts.gate_up_proj",
    "moe.experts.w2": "mlp.experts.down_proj",
}  # fmt: skip


def _hugging_face_name(name: str) -> str:
    for theirs, ours in _TITAN_NAMES.items():
        name = f".{name}.".replace(f".{theirs}.", f".{ours}.").strip(".")
    return name


@torch.no_grad()
def _fill_torchtitan(model: nn.Module, problem: Problem) -> None:
    initialize = Initializer(SEED, STD, build_meshes())
    for name, parameter in model.named_parameters():
        half = name.endswith(("experts.w1", "experts.w3"))
        num_experts, width, *rest = (*parameter.shape, 0)[:3] if half else (0, 0)
        shape = (num_experts, 2 * width, rest[0]) if half else parameter.shape
        wide = torch.empty(shape, device=problem.device)
        initialize(_hugging_face_name(name), wide, wide)
        if half:
            wide = wide[:, :width] if name.endswith("w1") else wide[:, width:]
        parameter.copy_(wide)
    with torch.device(problem.device):
        model.rope_cache = model._precompute_rope_cache()  # type: ignore[operator]
    for module in model.modules():
        if hasattr(module, "tokens_per_expert"):
            module.tokens_per_expert.zero_()  # type: ignore[operator]


def _count_integers_on_cpu() -> None:
    """torchtitan counts tokens with ``histc`` of integers, which torch has on GPUs only."""
    histc = torch.histc

    def counted(values: torch.Tensor, **options: Any) -> torch.Tensor:
        return histc(values.float(), **options).to(values.dtype)

    torch.histc = counted  # type: ignore[assignment]


def _pretend_datasets() -> None:
    """torchtitan's package of models imports its data loading, which nothing here uses."""
    if importlib.util.find_spec("datasets") is not None:
        return
    for name, attributes in (("datasets", ("Dataset", "load_dataset")),
                             ("datasets.distributed", ("split_dataset_by_node",))):  # fmt: skip
        module = types.ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, object)
        sys.modules[name] = module

"""torchtitan 0.2.2 as a contender of ``train_step.py``: its Qwen3 model, its loss, its fp8."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import torch
from torch import nn
from train_step_problem import SEED, STD, Problem, Step, plain_step

from fsdmoe.mesh import build_meshes
from fsdmoe.models.init import Initializer


def torchtitan_step(problem: Problem, *, form: str) -> Step:
    _pretend_datasets()
    torch._dynamo.reset()  # another of this process may have been compiled
    if problem.device.type == "cpu":
        _count_integers_on_cpu()
    from torchtitan.components.loss import cross_entropy_loss

    model, loss_sum = _model(problem), cross_entropy_loss
    _quantize(model, linear="fp8" in form, experts=form.endswith("fp8"))
    if form:
        _compile(model, form, problem)
        loss_sum = torch.compile(cross_entropy_loss, backend=problem.backend)

    def loss_of(tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        return loss_sum(model(tokens_BS), labels_BS) / labels_BS.numel()

    return plain_step(model, loss_of)


def _quantize(model: nn.Module, *, linear: bool, experts: bool) -> None:
    """By its own converters, which want torchao as it was then (0.16.0): later ones lack what they import."""
    from torchtitan.models.moe.utils import set_token_group_alignment_size_m

    set_token_group_alignment_size_m(8)  # another of this process may have been quantised
    if not linear:
        return
    from torchtitan.components.quantization.float8 import Float8GroupedMMConverter, Float8LinearConverter
    from torchtitan.config import JobConfig

    job, degrees = JobConfig(), types.SimpleNamespace(dp_shard_enabled=False)
    job.compile.enable = True
    job.quantize.linear.float8.filter_fqns = ["output", "router.gate"]
    job.quantize.grouped_mm.float8.fqns = ["experts"]
    for converter in (Float8LinearConverter, Float8GroupedMMConverter)[: 1 + experts]:
        converter(job, degrees).convert(model)


def _compile(model: nn.Module, form: str, problem: Problem) -> None:
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


def _model(problem: Problem) -> nn.Module:
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
    _fill(model, problem)
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
def _fill(model: nn.Module, problem: Problem) -> None:
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
    if "datasets" in sys.modules or importlib.util.find_spec("datasets") is not None:
        return
    for name, attributes in (("datasets", ("Dataset", "load_dataset")),
                             ("datasets.distributed", ("split_dataset_by_node",))):  # fmt: skip
        module = types.ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, object)
        sys.modules[name] = module

"""What a recipe covers, what stays high, and runs with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.moe import GroupedExperts
from fsdmoe.fsdp import engine_of
from fsdmoe.huggingface.wrapped_experts import parallel_forward_of
from fsdmoe.kernels import quantized_linear, recipe_support
from fsdmoe.kernels.fp8_linear import KeptCodes
from fsdmoe.kernels.recipe_support import check_recipe
from fsdmoe.mesh import build_meshes
from fsdmoe.models import build_model
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.parallel.quantized_layers import apply_recipe, layer_number, part_of
from fsdmoe.precision import PrecisionConfig
from fsdmoe.precision.recipes import RECIPES
from fsdmoe.testing import run_ranks
from fsdmoe.train import Run
from tests.support.hf_tiny import tiny_hf
from tests.support.parallel_case import MODELS
from tests.support.tiny_run import tiny_config


def covered(model: nn.Module) -> set[str]:
    return {
        name
        for name, module in model.named_modules()
        if getattr(module, "quantized", None) or (isinstance(module, GroupedExperts) and module.policy.recipe)
    }


def covered_line(model: nn.Module, precision: PrecisionConfig) -> str:
    found = apply_recipe(model, precision)
    assert found is not None
    return found.line


def emulated(recipe: str = "fp8_blockwise", **keys: Any) -> PrecisionConfig:
    return PrecisionConfig(recipe=recipe, emulate=True, param_dtype="float32", **keys)  # type: ignore[arg-type]


def test_every_part_is_covered_and_routers_norms_and_head_are_not() -> None:
    model = build_model(MODELS["deepseek_v3"])
    line = covered_line(model, emulated())
    found = covered(model)
    first, second = "model.layers.0.", "model.layers.1."
    assert {name for name in found if name.startswith(first)} == {
        f"{first}{name}"
        for name in ("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa",
                     "self_attn.kv_b_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
                     "mlp.down_proj")
    }  # fmt: skip
    assert {name for name in found if name.startswith(f"{second}mlp")} == {
        f"{second}mlp.{name}"
        for name in (
            "experts",
            "shared_experts.gate_proj",
            "shared_experts.up_proj",
            "shared_experts.down_proj",
        )
    }
    assert not {name for name in found if "lm_head" in name or "embed" in name or name.endswith(".gate")}
    assert line.startswith(
        "fp8_blockwise (emulated): modules 1 of experts, 10 of attention, 3 of dense, 3 of shared"
    )


def test_codes_are_kept_of_inputs_that_nobody_else_keeps() -> None:
    """Attention keeps its output, and the router what shared experts read."""
    model = build_model(MODELS["deepseek_v3"])
    found = apply_recipe(model, emulated(), keeps_codes=True)
    assert found is not None
    assert found.line.endswith("; codes are kept for backward")
    linears = {name: layer for name, layer in model.named_modules() if getattr(layer, "quantized", None)}
    values = {name for name, layer in linears.items() if not layer.quantized.keeps_codes}
    layers = [f"model.layers.{index}." for index in range(2)]
    assert values == {f"{layer}self_attn.o_proj" for layer in layers} | {
        f"{layers[1]}mlp.shared_experts.{name}_proj" for name in ("gate", "up")
    }
    experts = model.get_submodule(f"{layers[1]}mlp.experts")
    assert isinstance(experts, GroupedExperts)
    assert experts.policy.keeps_codes
    assert not experts.policy.has_own_rows  # of one rank: the router keeps them


def test_parts_layers_and_patterns_are_kept_out() -> None:
    model = build_model(MODELS["deepseek_v3"])
    line = covered_line(model, emulated(covers=("attention",), keep_first_layers=1, keep=("*.o_proj",)))
    assert line.endswith("; 6 kept in float32")
    assert {name.rpartition(".")[0] for name in covered(model)} == {"model.layers.1.self_attn"}
    assert not any(name.endswith("o_proj") for name in covered(model))
    model = build_model(MODELS["qwen3_moe"])
    apply_recipe(model, emulated(keep_last_layers=1))
    assert {layer_number(name) for name in covered(model)} == {0}


def test_a_recipe_without_kernels_or_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no kernels of mxfp8 for a CPU, .* set precision\.emulate"):
        check_recipe(PrecisionConfig(recipe="mxfp8"))
    with pytest.raises(ConfigError, match=r"precision\.keep: no layer .* has a name like 'o_proj'"):
        apply_recipe(build_model(MODELS["qwen3_moe"]), emulated(keep=("o_proj",)))
    with pytest.raises(ConfigError, match="covers no layer"):
        apply_recipe(build_model(MODELS["qwen3_moe"]), emulated(keep=("*",)))


def test_experts_alone_need_no_emulation_where_they_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_support, "has_fp8_kernels", lambda: True)
    experts = PrecisionConfig(recipe="fp8_blockwise", covers=("experts",))
    check_recipe(experts)
    model = build_model(MODELS["qwen3_moe"])
    line = covered_line(model, experts)
    assert line.startswith("fp8_blockwise: modules 2 of experts")
    assert not any(m.policy.emulate for m in model.modules() if isinstance(m, GroupedExperts))
    with pytest.raises(ConfigError, match=r'or precision\.covers = \["experts"\], which have kernels'):
        check_recipe(PrecisionConfig(recipe="fp8_blockwise"))
    monkeypatch.setattr(recipe_support, "has_fp8_products", lambda: True)
    check_recipe(PrecisionConfig(recipe="fp8_blockwise"))
    with pytest.raises(ConfigError, match=r'with experts; .*\["attention", "dense", "shared"\], which have'):
        check_recipe(PrecisionConfig(recipe="fp8_rowwise"))
    with pytest.raises(ConfigError, match="no kernels of fp8_blockwise"):
        check_recipe(PrecisionConfig(recipe="fp8_blockwise", covers=("experts",), gradient_format="e5m2"))


def test_adapters_are_left_alone_and_the_layers_they_adapt_are_not() -> None:
    layer = nn.Linear(4, 4)
    assert part_of("model.layers.0.self_attn.q_proj.base_layer", layer) == "attention"
    assert part_of("model.layers.0.self_attn.q_proj.lora_A.default", layer) is None
    assert part_of("model.layers.0.mlp.shared_expert_gate", layer) is None
    assert part_of("lm_head", layer) is None


def _train(output_dir: str, overrides: dict[str, Any]) -> None:
    config = tiny_config(output_dir, dist.get_world_size(), **overrides)
    run = Run(config, build_meshes(config.mesh))
    run.close(run.loop([]))


def losses(folder: Path, world_size: int, **overrides: Any) -> list[float]:
    folder.mkdir()
    keys = {"train__global_batch_size": 4, "train__eval_interval": -1, "train__steps": 3}
    run_ranks(_train, world_size, str(folder), keys | overrides)
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def test_a_run_with_a_recipe_learns_and_hardly_depends_on_the_layout(tmp_path: Path) -> None:
    """Blocks along tokens depend on which rows stand together, so later steps differ by a rounding; weights
    that travel quantised are quantised in the same blocks, and are so when norms are computed again."""
    small = {"optim__lr": 3e-3, "model__num_hidden_layers": 1}
    keys = {"precision__recipe": "fp8_blockwise", "precision__emulate": True, **small}
    one = losses(tmp_path / "one", 1, **keys)
    others = {"mesh__ep": 2, "precision__quantized_weights": True, "memory__recompute": "norms"}
    two = losses(tmp_path / "two", 2, **others, **keys)
    plain = losses(tmp_path / "plain", 1, **small)
    assert one[0] == pytest.approx(two[0], rel=1e-5)
    assert one == pytest.approx(two, rel=1e-3)
    assert one[-1] < one[0], "it learns"
    assert one[0] != plain[0]
    assert one == pytest.approx(plain, rel=0.02)


def _train_both(output_dir: str, overrides: dict[str, Any]) -> list[float]:
    """On products in fp8, which torch has on a CPU too; quantised weights of layers that stay, in backward
    and in forward."""
    taken: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_linear, "takes_fp8_products", lambda x: True)
        original = quantized_linear.fp8_linear

        def noted(*args: Any, **keys: Any) -> torch.Tensor:
            taken.append(args)
            return original(*args, **keys)

        patch.setattr(quantized_linear, "fp8_linear", noted)
        _train(output_dir, overrides)
    return [len(taken), sum(isinstance(args[-1], KeptCodes) for args in taken)]


def test_a_run_on_products_in_fp8_is_the_emulated_run(tmp_path: Path) -> None:
    """Weights are quantised once a step where they stay: stale ones would show in the second loss."""
    keys = {
        "precision__recipe": "fp8_rowwise", "precision__emulate": True, "precision__covers": "attention",
        "optim__lr": 3e-3, "train__global_batch_size": 4, "train__eval_interval": -1, "train__steps": 3,
    }  # fmt: skip
    expected = losses(tmp_path / "emulated", 1, **keys)
    (counts,) = run_ranks(_train_both, 1, str(tmp_path / "fused"), keys)
    found = [row["loss"] for row in read_metrics(tmp_path / "fused/metrics.jsonl")]
    assert counts[0] == counts[1] > 0, "layers whose weight stays keep its codes"
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_run_on_torchaos_products_follows_our_own_on_other_ranks(tmp_path: Path) -> None:
    keys = {
        "precision__recipe": "mxfp8", "precision__emulate": True, "optim__lr": 3e-3, "model__head_dim": 16,
        "model__moe_intermediate_size": 32, "model__num_hidden_layers": 1,
        "precision__param_dtype": "bfloat16",
    }  # fmt: skip
    own = losses(tmp_path / "own", 1, **keys)
    theirs = losses(tmp_path / "torchao", 2, mesh__ep=2, precision__backend="torchao", **keys)
    assert theirs[-1] < theirs[0], "it learns"
    assert theirs != own
    assert theirs == pytest.approx(own, rel=5e-3)


def test_a_run_may_send_rows_to_experts_in_eight_bits(tmp_path: Path) -> None:
    keys = {"optim__lr": 3e-3, "train__steps": 2, "mesh__ep": 2}
    plain = losses(tmp_path / "plain", 2, **keys)
    packed = losses(
        tmp_path / "packed",
        2,
        experts__dispatch_dtype="float8",
        experts__dispatch_grad_dtype="float8",
        **keys,
    )
    assert packed[0] != plain[0]
    assert packed == pytest.approx(plain, rel=2e-3)


@pytest.mark.full
def test_weights_that_travel_quantised_train_alike_on_any_number_of_ranks(tmp_path: Path) -> None:
    keys = {
        "precision__recipe": "fp8_blockwise", "precision__emulate": True,
        "precision__quantized_weights": True, "optim__lr": 3e-3, "train__steps": 20,
        "train__global_batch_size": 12,
    }  # fmt: skip
    one = losses(tmp_path / "one", 1, **keys)
    assert one[-1] < one[0] - 1
    for world_size, ep in ((2, 2), (3, 1), (4, 2)):
        other = losses(tmp_path / f"{world_size}", world_size, mesh__ep=ep, **keys)
        assert other[0] == pytest.approx(one[0], rel=1e-5)
        assert other == pytest.approx(one, rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES[1:])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"ep": 2, "tp": 2}, {"etp": 2}, {"ep": 4}])
def test_every_recipe_trains_under_every_axis(tmp_path: Path, recipe: str, mesh: dict[str, int]) -> None:
    keys = {"precision__recipe": recipe, "precision__emulate": True, "optim__lr": 3e-3}
    degrees = {f"mesh__{axis}": size for axis, size in mesh.items()}
    found = losses(tmp_path / "run", 4, **degrees, **keys)
    plain = losses(tmp_path / "plain", 1, optim__lr=3e-3)
    assert found == pytest.approx(plain, rel=0.1 if recipe == "nvfp4" else 0.03)


def _compiled(recipe: str, fused: bool) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of a wrapped model whose layers the caller compiles, and of one as it is."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_linear, "takes_fp8_products", lambda x: fused)
        for is_compiled in (False, True):
            policy = ParallelPolicy(precision=emulated(recipe), grad_divisor=1.0)
            model = parallelize(tiny_hf("qwen3_moe"), build_meshes(), policy)
            for layer in model.model.layers if is_compiled else ():
                layer.forward = torch.compile(layer.forward, backend="aot_eager")
            tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(3))
            loss = model(tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
            found.append((loss.item(), gradients))
    return found


@pytest.mark.full
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_blockwise", "fp8_rowwise"])
def test_layers_that_the_caller_compiles_compute_a_recipe_alike(recipe: str, fused: bool) -> None:
    ((plain, expected), (compiled, found)) = run_ranks(_compiled, 1, recipe, fused)[0]
    assert plain == pytest.approx(compiled, rel=1e-6)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def _wrapped(covers: tuple[str, ...]) -> tuple[float, float, int]:
    """The loss of a wrapped model with a recipe and without, and how many modules it covers."""
    found = []
    for precision, packs in (
        (PrecisionConfig(param_dtype="float32"), False),
        (emulated(covers=covers), True),
    ):
        experts = ExpertsConfig(dispatch_dtype="float8" if packs else "same")
        policy = ParallelPolicy(precision=precision, experts=experts)
        model = parallelize(tiny_hf("qwen3_moe"), build_meshes(ep=2), policy)
        dispatchers = [f.dispatcher for m in model.modules() if (f := parallel_forward_of(m)) is not None]
        assert [d.packing.rows for d in dispatchers] == [packs] * 2
        tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(3))
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        found.append(loss.item())
    forwards = [f for module in model.modules() if (f := parallel_forward_of(module)) is not None]
    return *found, len(covered(model)) + sum(f.policy.recipe is not None for f in forwards)  # type: ignore[return-value]


@pytest.mark.parametrize(("covers", "count"), [(("experts",), 2), (("attention",), 8)])
def test_wrapped_models_are_covered_too(covers: tuple[str, ...], count: int) -> None:
    for plain, quantised, number in run_ranks(_wrapped, 2, covers):
        assert plain != quantised
        assert plain == pytest.approx(quantised, rel=0.02)
        assert number == count


def _tied(quantized: bool) -> tuple[torch.Tensor, bool]:
    """The gradient of a weight that a covered layer and one that stays in its precision have in common, and
    whether other weights travel quantised."""
    model: Any = tiny_hf("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    precision = emulated(keep=("*.layers.0.mlp.up_proj",), quantized_weights=quantized)
    model = parallelize(model, build_meshes(), ParallelPolicy(precision=precision))
    tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(3))
    model(tokens, labels=tokens).loss.backward()
    travels = any(group.weights.scales is not None for group in engine_of(model).groups)
    return model.model.layers[0].mlp.up_proj.weight.grad.full_tensor(), travels


def test_a_weight_that_a_layer_in_high_precision_reads_too_does_not_travel_quantised() -> None:
    ((plain, _),), ((found, travels),) = (run_ranks(_tied, 1, quantized) for quantized in (False, True))
    assert travels
    torch.testing.assert_close(found, plain, msg="the gradient of both uses")


def test_a_linear_layer_with_a_forward_of_others_is_refused() -> None:
    model: Any = tiny_hf("llama")
    layer = model.model.layers[0].mlp.up_proj
    original = layer.forward
    layer.forward = lambda x: original(x)
    problem = r"got another one on model\.layers\.0\.mlp\.up_proj .*or keep the layer out by precision\.keep"
    with pytest.raises(ConfigError, match=problem):
        apply_recipe(model, emulated())
    assert apply_recipe(model, emulated(keep=("*.layers.0.mlp.up_proj",))) is not None


def test_the_forward_of_its_class_on_a_layer_is_not_one_of_others() -> None:
    """As accelerate leaves it there when a hook is taken off."""
    model: Any = tiny_hf("llama")
    layer = model.model.layers[0].mlp.up_proj
    layer.forward = layer.forward
    assert apply_recipe(model, emulated()) is not None
    x = torch.randn(4, layer.in_features)
    assert not torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))

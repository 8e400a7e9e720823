"""ShardedTensor: exact on every rank for ragged pieces, element-wise inside one layout, loud elsewhere."""

import copy
import itertools
import math
import random
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Shard

from fsdmoe.core.placement import Placement, halves
from fsdmoe.fsdp import shard_layout
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.mesh import Axis, Meshes, build_meshes
from fsdmoe.testing import run_ranks

GATE_UP = Placement((4, 12, 5), ((Axis.EP, Shard(0)), (Axis.ETP, halves(1))))
PLACEMENTS = {
    "whole matrix": (Placement.whole((7, 13)), Axis.FSDP_TP),
    "scalar": (Placement.whole(()), Axis.FSDP_TP),
    "empty": (Placement.whole((0, 4)), Axis.FSDP_TP),
    "rows over tp": (Placement((8, 6), ((Axis.TP, Shard(0)),)), Axis.FSDP),
    "columns over tp": (Placement((5, 12), ((Axis.TP, Shard(1)),)), Axis.FSDP),
    "gate_up": (GATE_UP, Axis.EDP),
    "down": (Placement((4, 5, 6), ((Axis.EP, Shard(0)), (Axis.ETP, Shard(2)))), Axis.EDP),
}


def whole_values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ragged_range(numel: int, num_ranks: int, rank: int, seed: int) -> tuple[int, int]:
    """The same random cuts on every rank; the first rank gets nothing when there are three or more."""
    cuts = sorted(random.Random(seed).randint(0, numel) for _ in range(num_ranks - 1))
    if num_ranks >= 3:
        cuts[0] = 0
    bounds = [0, *cuts, numel]
    return bounds[rank], bounds[rank + 1]


def shard(
    full: torch.Tensor, placement: Placement, meshes: Meshes, axis: Axis, seed: int = 0
) -> ShardedTensor:
    numel = math.prod(placement.local_shape(meshes))
    start, end = ragged_range(numel, meshes.size(axis), meshes.rank(axis), seed)
    # The piece is a view of a larger buffer.
    buffer = torch.full((end - start + 7,), float("nan")).to(full.dtype)
    made = ShardedTensor(buffer[3 : 3 + end - start], placement, start, end, meshes, axis)
    made.copy_(full)
    return made


def single(values: torch.Tensor, start: int = 0, end: int | None = None) -> ShardedTensor:
    meshes = build_meshes()
    end = values.numel() if end is None else end
    piece = values.flatten()[start:end].clone()
    return ShardedTensor(piece, Placement.whole(values.shape), start, end, meshes, Axis.FSDP_TP)


def check_full_tensors(layouts: list[dict[str, int]], dtype: torch.dtype, max_broadcasts: int = 8) -> None:
    shard_layout.MAX_BROADCASTS, shard_layout.GATHER_BYTES = max_broadcasts, 64
    try:
        for meshes in (build_meshes(**degrees) for degrees in layouts):
            for (name, (placement, axis)), seed in itertools.product(PLACEMENTS.items(), range(2)):
                full = whole_values(placement.global_shape, seed=seed).to(dtype)
                got = shard(full, placement, meshes, axis, seed).full_tensor()
                assert type(got) is torch.Tensor, name
                assert got.shape == full.shape, name
                assert torch.equal(got.float(), full.float()), (name, seed)
    finally:
        shard_layout.MAX_BROADCASTS, shard_layout.GATHER_BYTES = 8, 64 << 20


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (1, [{}]),
        (3, [{}]),
        (4, [{"tp": 2, "ep": 2}, {"dp_outer": 2, "ep": 2}]),
        pytest.param(
            8,
            [{"dp_outer": 2, "tp": 2, "ep": 2, "etp": 2}, {"cp": 2, "tp": 2, "ep": 2, "etp": 2}],
            marks=pytest.mark.full,
        ),
    ],
)
def test_full_tensor_is_exact_on_every_rank_of_every_layout(
    world: int, layouts: list[dict[str, int]]
) -> None:
    run_ranks(check_full_tensors, world, layouts, torch.float32)


def test_full_tensor_gathers_in_bounded_rounds_when_many_ranks_own_a_piece() -> None:
    run_ranks(check_full_tensors, 4, [{"ep": 2}], torch.bfloat16, 0)


def test_full_tensor_moves_dtypes_that_the_backend_cannot_add() -> None:
    run_ranks(check_full_tensors, 2, [{}], torch.float8_e4m3fn)


def check_disagreeing_pieces() -> None:
    meshes = build_meshes()
    made = ShardedTensor(torch.zeros(4), Placement.whole((4, 2)), 0, 4, meshes, Axis.FSDP_TP)
    with pytest.raises(AssertionError, match=r"make up \[0, 8\) once"):
        made.full_tensor()


def test_pieces_that_leave_a_hole_are_an_error_on_every_rank() -> None:
    run_ranks(check_disagreeing_pieces, 2)


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, object]]] = [
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    (torch.optim.Adagrad, {}),
]


def check_training_like_one_process() -> None:
    meshes = build_meshes(etp=2)
    full = whole_values((4, 12, 5))
    grads = [whole_values((4, 12, 5), seed=seed) for seed in range(1, 4)]
    for kind, settings in OPTIMIZERS:
        reference = nn.Parameter(full.clone())
        parameter = nn.Parameter(shard(full, GATE_UP, meshes, Axis.EDP))
        plain = {key: value for key, value in settings.items() if key == "momentum"}
        theirs = kind([reference], lr=0.1, weight_decay=0.1, **plain)  # type: ignore[call-arg]
        ours = kind([parameter], lr=0.1, weight_decay=0.1, **settings)  # type: ignore[call-arg]
        for grad in grads:
            reference.grad, parameter.grad = grad.clone(), shard(grad, GATE_UP, meshes, Axis.EDP)
            want_norm = nn.utils.clip_grad_norm_([reference], 1.0)
            got_norm = nn.utils.clip_grad_norm_([parameter], 1.0)
            torch.testing.assert_close(got_norm, want_norm, rtol=1e-6, atol=0)
            theirs.step()
            ours.step()
        torch.testing.assert_close(parameter.full_tensor(), reference.detach(), rtol=1e-6, atol=1e-7)
        for key, value in theirs.state[reference].items():
            if value is not None and value.dim() > 0:
                state = ours.state[parameter][key]
                assert isinstance(state, ShardedTensor), key
                torch.testing.assert_close(state.full_tensor(), value, rtol=1e-6, atol=1e-7)


def test_torch_optimizers_and_clipping_agree_with_the_unsharded_parameter() -> None:
    run_ranks(check_training_like_one_process, 4)


def check_norms() -> None:
    meshes = build_meshes(tp=2, ep=2)
    for name in ("columns over tp", "gate_up", "whole matrix", "scalar"):
        placement, axis = PLACEMENTS[name]
        full = whole_values(placement.global_shape)
        made = shard(full, placement, meshes, axis)
        for order in (1, 2, 3, math.inf, -math.inf, 0):
            want = torch.linalg.vector_norm(full, order)
            torch.testing.assert_close(torch.linalg.vector_norm(made, order), want, rtol=1e-6, atol=0)
        torch.testing.assert_close(torch._foreach_norm([made])[0], full.norm(), rtol=1e-6, atol=0)


def test_norms_are_global_and_count_nothing_twice() -> None:
    run_ranks(check_norms, 4)


def check_checkpoint(save_degrees: dict[str, int], folder: str, phase: str) -> None:
    meshes = build_meshes(**save_degrees)
    seed = 3 if phase == "save" else 4
    state = {}
    for name, (placement, axis) in PLACEMENTS.items():
        full = whole_values(placement.global_shape, torch.bfloat16)
        state[name] = shard(
            full if phase == "save" else torch.zeros_like(full), placement, meshes, axis, seed
        )
    if phase == "save":
        dcp.save({"m": state}, checkpoint_id=folder + "/sync")
        future = dcp.async_save({"m": state}, checkpoint_id=folder + "/async")
        future.result()  # type: ignore[union-attr]
        return
    for kind in ("sync", "async"):
        for made in state.values():
            made.zero_()
        dcp.load({"m": state}, checkpoint_id=f"{folder}/{kind}")
        for name, made in state.items():
            assert torch.equal(made.full_tensor(), whole_values(tuple(made.shape), torch.bfloat16)), (
                kind,
                name,
            )


def test_torch_distributed_checkpoint_moves_it_between_layouts() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(check_checkpoint, 4, {"dp_outer": 2, "etp": 2}, folder, "save")
        run_ranks(check_checkpoint, 3, {}, folder, "load")
        run_ranks(check_checkpoint, 4, {"tp": 2, "ep": 2}, folder, "load")


@pytest.fixture
def alone() -> object:
    """A world of one rank in this very process."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(Path(folder) / "store"), 1), rank=0, world_size=1
        )
        try:
            yield None
        finally:
            dist.destroy_process_group()


def test_it_is_a_parameter_with_the_global_shape_and_writes_through_to_its_buffer(alone: object) -> None:
    buffer = torch.arange(30.0)
    made = ShardedTensor(buffer[2:22], Placement.whole((4, 5)), 0, 20, build_meshes(), Axis.FSDP_TP)
    module = nn.Linear(5, 4, bias=False)
    module.weight = nn.Parameter(made)
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.shape == (4, 5)
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    with torch.no_grad():
        module.weight.mul_(2)
    assert buffer[:4].tolist() == [0, 1, 4, 6]
    buffer.zero_()
    assert module.weight.piece.abs().sum() == 0
    module.weight.grad = module.weight.detach() + 1
    assert isinstance(module.weight.grad, ShardedTensor)
    assert module.weight.grad.piece.tolist() == [1.0] * 20
    module.zero_grad()
    assert module.weight.grad is None


def test_element_wise_results_keep_layout_and_dtype(alone: object) -> None:
    values = whole_values((3, 4))
    made, other = single(values, 2, 11), single(values.exp(), 2, 11)
    flat = values.flatten()[2:11]
    cases = {
        "add": (made + other, flat + flat.exp()),
        "scalar tensor": (made * torch.tensor(3.0), flat * 3),
        "where": (torch.where(made > 0, made, other), torch.where(flat > 0, flat, flat.exp())),
        "addcmul": (torch.addcmul(made, other, other, value=2), flat + 2 * flat.exp() ** 2),
        "lerp": (torch.lerp(made, other, 0.25), torch.lerp(flat, flat.exp(), 0.25)),
        "to": (made.to(torch.bfloat16), flat.bfloat16()),
        "zeros_like": (torch.zeros_like(made, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)),
        "full_like": (torch.full_like(made, 2.5), torch.full((9,), 2.5)),
        "clone": (made.clone(), flat),
        "new_zeros": (made.new_zeros(made.shape), torch.zeros(9)),
        "foreach": (torch._foreach_add([made], [other], alpha=2)[0], flat + 2 * flat.exp()),
    }
    for name, (got, want) in cases.items():
        assert isinstance(got, ShardedTensor), name
        assert got.same_layout(made), name
        assert got.shape == (3, 4), name
        torch.testing.assert_close(got.piece, want, msg=name)
    assert made.clone().piece.data_ptr() != made.piece.data_ptr()
    assert made.detach().piece.data_ptr() == made.piece.data_ptr()
    assert made.add_(1) is made
    assert type(made.new_zeros(2)) is torch.Tensor


def test_autograd_runs_through_element_wise_operations(alone: object) -> None:
    parameter = nn.Parameter(single(whole_values((3, 4)), 2, 11))
    out = parameter * 3
    out.backward(torch.ones_like(out))
    assert isinstance(parameter.grad, ShardedTensor)
    assert parameter.grad.piece.tolist() == [3.0] * 9


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.sum(),
        lambda p: p[0],
        lambda p: p.view(-1),
        lambda p: p.t(),
        lambda p: p @ torch.ones(4, 2),
        lambda p: nn.functional.linear(torch.ones(2, 4), p),
        lambda p: p + torch.ones(4),
        lambda p: p + torch.ones(3, 4),
        lambda p: torch.ones(3, 4) + p,
        lambda p: torch.ones(3, 4).copy_(p),
        lambda p: p.copy_(torch.ones(4)),
        lambda p: p.normal_(),
        lambda p: torch.rand_like(p),
        lambda p: nn.functional.dropout(p),
        lambda p: torch.softmax(p, -1),
        lambda p: p.cumsum(0),
        lambda p: torch.linalg.vector_norm(p, dim=0),
        lambda p: torch.cat([p, p]),
        lambda p: torch.stack([p, p]),
        lambda p: p.item(),
        lambda p: p.tolist(),
        lambda p: p.numpy(),
        lambda p: torch.equal(p, p),
        lambda p: torch._foreach_max([p]),
        lambda p: p + single(whole_values((3, 4)), 0, 9),
        lambda p: p.copy_(single(whole_values((3, 4)), 0, 9)),
        lambda p: torch._foreach_add_([p], [single(whole_values((3, 4)), 0, 9)]),
        lambda p: torch._foreach_add_([p], [torch.ones(3, 4)]),
        lambda p: setattr(p, "data", torch.ones(3, 4)),
        lambda p: setattr(p, "data", single(whole_values((3, 4)), 0, 9)),
        lambda p: copy.copy(p).__reduce_ex__(2),
    ],
)
def test_what_a_piece_cannot_answer_is_refused(alone: object, use: object) -> None:
    made = single(whole_values((3, 4)), 2, 11)
    before = made.piece.clone()
    with pytest.raises((NotImplementedError, RuntimeError, TypeError)):
        use(made)  # type: ignore[operator]
    assert torch.equal(made.piece, before)


def test_the_refusal_says_what_to_do_instead(alone: object) -> None:
    with pytest.raises(NotImplementedError, match="full_tensor"):
        single(whole_values((3, 4))).sum()


def test_setting_data_exchanges_the_piece(alone: object) -> None:
    parameter, other = nn.Parameter(single(torch.zeros(3, 4))), single(torch.ones(3, 4))
    parameter.data = other
    assert parameter.piece.data_ptr() == other.piece.data_ptr()
    assert parameter.full_tensor().sum() == 12


def test_deepcopy_gives_independent_values_and_pickle_is_refused(alone: object) -> None:
    module = nn.Linear(4, 3, bias=False)
    module.weight = nn.Parameter(single(torch.ones(3, 4)))
    twin = copy.deepcopy(module)
    assert isinstance(twin.weight, nn.Parameter)
    with torch.no_grad():
        twin.weight.zero_()
    assert module.weight.full_tensor().sum() == 12
    with pytest.raises(TypeError, match=r"fsdmoe\.checkpoint"):
        torch.save(module.state_dict(), "/dev/null")


def test_a_state_dict_of_whole_tensors_loads_into_it(alone: object) -> None:
    module = nn.Linear(4, 3, bias=False)
    module.weight = nn.Parameter(single(torch.zeros(3, 4)))
    full = whole_values((3, 4))
    module.load_state_dict({"weight": full})
    assert torch.equal(module.weight.full_tensor(), full)


def test_a_wrong_piece_or_range_is_refused_at_once(alone: object) -> None:
    meshes = build_meshes()
    wrong = [
        (torch.zeros(5), 0, 4),
        (torch.zeros(4, 2), 0, 8),
        (torch.zeros(4), 9, 13),
        (torch.zeros(8)[::2], 0, 4),
    ]
    for piece, start, end in wrong:
        with pytest.raises(AssertionError):
            ShardedTensor(piece, Placement.whole((4, 3)), start, end, meshes, Axis.FSDP_TP)


def test_it_prints_as_a_dtensor_does(alone: object) -> None:
    made = single(torch.arange(12.0).view(3, 4), 2, 11)
    text = repr(made)
    assert text.startswith("ShardedTensor(local_tensor=tensor([ 2.,  3.")
    for part in ("shape=(3, 4)", "device_mesh=DeviceMesh(", "placements=(RaggedShard([2, 11)),)"):
        assert part in text
    assert "requires_grad=True" in repr(nn.Parameter(made))
    assert str(made) == f"{made}" == text


def test_messages_tell_layout_and_not_values(alone: object) -> None:
    text = single(whole_values((3, 4)), 2, 11).describe()
    assert "shape=(3, 4)" in text
    assert "[2, 11)" in text
    assert "3 boxes" in text
    assert "fsdp_tp rank 0 of 1" in text

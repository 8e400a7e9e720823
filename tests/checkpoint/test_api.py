"""save and load of models, optimizers and anything else, in one process and across layouts."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError, LoadPolicy
from fsdmoe.checkpoint.tree import join_tree
from fsdmoe.core.placement import Placement, halves, local_tensor, placed_parameter
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.mesh import Axis, build_meshes
from fsdmoe.testing import run_ranks
from tests.support.checkpoint_states import cut, truth


class Tiny(nn.Module):
    """A tied pair, a matrix, a saved buffer and one that is not saved."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.lin = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("bias_E", torch.arange(3.0))
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.lin(self.embed(ids))))


def train(model: Tiny, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = torch.randint(0, 6, (8,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, kind: Any) -> None:
    extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    model = Tiny()
    optimizer = kind(model.parameters(), lr=0.1, **extra)
    train(model, optimizer, range(5))
    optimizer.param_groups[0]["lr"] = 0.05
    checkpoint.save(tmp_path / "ckpt", model, optimizer, step=5)
    expected = train(model, optimizer, range(5, 15))

    torch.manual_seed(1)
    model = Tiny()
    optimizer = kind(model.parameters(), lr=0.1, **extra)
    assert checkpoint.load(tmp_path / "ckpt", model, optimizer, step=0) == {"step": 5}
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert isinstance(optimizer.param_groups[0].get("betas", ()), tuple)
    assert train(model, optimizer, range(5, 15)) == expected


def test_one_optimizer_of_two_models_keeps_the_states_of_both(tmp_path: Path) -> None:
    def start() -> tuple[nn.Linear, nn.Linear, torch.optim.Optimizer]:
        actor, critic = nn.Linear(2, 2), nn.Linear(2, 2)
        return actor, critic, torch.optim.AdamW([*actor.parameters(), *critic.parameters()])

    actor, critic, optimizer = start()
    (actor(torch.ones(2)) * critic(torch.ones(2))).sum().backward()
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"^weight: the optimizer holds .* of two models"):
        checkpoint.save(tmp_path / "ckpt", actor, optimizer, critic=critic)
    checkpoint.save(tmp_path / "ckpt", nn.ModuleDict({"actor": actor, "critic": critic}), optimizer)
    resumed = start()
    checkpoint.load(tmp_path / "ckpt", nn.ModuleDict({"actor": resumed[0], "critic": resumed[1]}), resumed[2])
    for model, other in ((actor, resumed[0]), (critic, resumed[1])):
        moments = [each.state[m.weight]["exp_avg"] for each, m in ((optimizer, model), (resumed[2], other))]
        assert torch.equal(*moments)


def test_only_the_model_is_loaded_on_request(tmp_path: Path) -> None:
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path / "ckpt", model, optimizer, step=2)
    other = Tiny()
    assert checkpoint.load(tmp_path / "ckpt", other) == {}
    for (name, ours), theirs in zip(other.state_dict().items(), model.state_dict().values()):
        assert torch.equal(ours, theirs), name


def test_dtypes_are_converted_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Tiny()
    checkpoint.save(tmp_path / "ckpt", model)
    other = Tiny().to(torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        checkpoint.load(tmp_path / "ckpt", other)
    assert torch.equal(other.lin.weight, model.lin.weight.bfloat16())
    assert "converted from torch.float32 to torch.bfloat16" in caplog.text
    checkpoint.save(tmp_path / "half", other)
    checkpoint.load(tmp_path / "half", model)
    assert torch.equal(model.lin.weight, other.lin.weight.float())


def test_an_integer_is_not_converted_to_a_float(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "ckpt", part={"x": torch.arange(3)})
    with pytest.raises(CheckpointError, match=r"part/x: torch\.float32 here, torch\.int64"):
        checkpoint.load(tmp_path / "ckpt", part={"x": torch.zeros(3)})


def test_tied_weights_are_saved_once_and_load_into_an_untied_model(tmp_path: Path) -> None:
    model, untied = Tiny(), Tiny(tied=False)
    checkpoint.save(tmp_path / "ckpt", model)
    checkpoint.load(tmp_path / "ckpt", untied)
    assert torch.equal(untied.head.weight, model.embed.weight)
    assert "head.weight" not in checkpoint.parts.model_state(model)


def test_buffers_are_saved_unless_they_are_not_persistent(tmp_path: Path) -> None:
    model, other = Tiny(), Tiny()
    model.bias_E.mul_(3)  # type: ignore[operator]
    model.inv_freq.mul_(3)  # type: ignore[operator]
    checkpoint.save(tmp_path / "ckpt", model)
    checkpoint.load(tmp_path / "ckpt", other)
    assert other.bias_E.tolist() == [0, 3, 6]
    assert other.inv_freq.tolist() == [1, 1]


def test_every_misfit_is_listed_at_once(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "ckpt", part={"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)})
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(
            tmp_path / "ckpt", part={"a": torch.zeros(3), "b": torch.zeros(2), "d": torch.ones(1)}, other={}
        )
    for words in (
        "part/a: shape (3,) here, (2,)",
        "part/d: missing",
        "part/c: in the checkpoint only",
        "other: no such",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("part", "name", "fix"),
    [
        ("optimizer", "state/w/exp_avg", r"frozen in optim\.groups"),
        ("ema", "tensors/w", r"frozen in optim\.groups"),
        ("model", "layers.0.gate.e_score_correction_bias", r"experts\.balance\.bias_rate"),
    ],
)
def test_a_misfit_that_a_setting_makes_names_it(tmp_path: Path, part: str, name: str, fix: str) -> None:
    whole = join_tree({name: torch.zeros(2)}, {})
    checkpoint.save(tmp_path / "ckpt", **{part: whole})
    with pytest.raises(CheckpointError, match=fix):
        checkpoint.load(tmp_path / "ckpt", **{part: {}})


def test_a_lenient_load_takes_what_fits_by_name(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "ckpt", part={"a": torch.ones(2), "c": torch.ones(2)})
    part = {"a": torch.zeros(2), "d": torch.zeros(1)}
    checkpoint.load(tmp_path / "ckpt", policy=LoadPolicy(strict=False), part=part)
    assert part["a"].tolist() == [1, 1]
    assert part["d"].tolist() == [0]


@pytest.mark.parametrize(
    "value",
    [(1, 2), {1: 2}, {"a": object()}, torch.float32, {"x": {"y": b"1"}}, [torch.zeros(2)], {"a/b": 1}],
)
def test_what_json_would_change_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError):
        checkpoint.save(tmp_path / "ckpt", extra=value)
    assert list(tmp_path.iterdir()) == []


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    value = {
        "a": [1, 2.5, None, True, "ü"],
        "nested": {"empty": {}, "list": [], "inf": float("inf")},
        "big": 2**70,
    }
    checkpoint.save(tmp_path / "ckpt", extra=value, n=3)
    assert checkpoint.load(tmp_path / "ckpt", extra={}, n=0) == {"extra": value, "n": 3}


class Counter:
    """Takes part by the names that torch uses."""

    def __init__(self, count: int) -> None:
        self.count, self.seen = count, torch.full((2,), float(count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_objects_tell_and_take_their_state(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "ckpt", counter=Counter(7))
    other = Counter(0)
    assert checkpoint.load(tmp_path / "ckpt", counter=other) == {}
    assert other.count == 7
    assert other.seen.tolist() == [7, 7]


def _save_own(folder: str) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdmoe.checkpoint.planner").addHandler(handler)
    own = torch.full((3,), float(dist.get_rank()))
    checkpoint.save(f"{folder}/ckpt", states={"random": own, "alike": torch.ones(2)})
    return told


def test_plain_tensors_that_ranks_do_not_share_are_named(tmp_path: Path) -> None:
    told, others = run_ranks(_save_own, 2, str(tmp_path))
    (line,) = told
    assert line.startswith("states/random: rank 1 has other values than rank 0; ")
    assert others == []


def test_saving_again_replaces_a_checkpoint_at_once(tmp_path: Path) -> None:
    for value in (1, 2):
        checkpoint.save(tmp_path / "ckpt", n=value, x=torch.full((4,), float(value)))
    assert checkpoint.load(tmp_path / "ckpt", n=0) == {"n": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_large_tensors_are_read_in_windows(tmp_path: Path) -> None:
    """Larger than a window, read whole, by rows, by columns and from the middle."""
    full = torch.arange(12_000_000, dtype=torch.float32).reshape(3000, 4000)
    checkpoint.save(tmp_path / "ckpt", part={"x": full, "y": full.t().contiguous()[:, :7].contiguous()})
    target = torch.zeros_like(full)
    checkpoint.load(tmp_path / "ckpt", policy=LoadPolicy(strict=False), part={"x": target})
    assert torch.equal(target, full)
    strided = torch.zeros(4000, 3000).t()
    checkpoint.load(tmp_path / "ckpt", policy=LoadPolicy(strict=False), part={"x": strided})
    assert torch.equal(strided, full)


def local_experts(degrees: dict[str, int], folder: str, phase: str) -> None:
    """Expert parameters split over EP and ETP but not sharded: DTensors on the axes' mesh."""
    meshes = build_meshes(**degrees)
    placement = Placement((4, 8, 3), ((Axis.EP, Shard(0)), (Axis.ETP, halves(1))))
    full = truth("gate_up", (4, 8, 3))
    module = nn.Module()
    module.weight = placed_parameter(torch.zeros(placement.local_shape(meshes)), placement, meshes)
    held = local_tensor(module.weight)
    local = full.view(4, 2, 4, 3)
    for axis, dim in placement.splits:
        local = local.chunk(meshes.size(axis), dim)[meshes.rank(axis)]
    local = local.reshape(held.shape)
    if phase == "save":
        held.copy_(local)
        with pytest.raises(CheckpointError, match="pass the meshes"):
            checkpoint.save(Path(folder) / "ckpt", module)
        checkpoint.save(Path(folder) / "ckpt", module, meshes=meshes)
    else:
        checkpoint.load(Path(folder) / "ckpt", module, policy=LoadPolicy(meshes=meshes))
        assert torch.equal(held, local)


def test_parameters_that_only_expert_parallelism_splits_need_the_meshes_and_reshard(tmp_path: Path) -> None:
    run_ranks(local_experts, 4, {"ep": 2, "etp": 2}, str(tmp_path), "save")
    run_ranks(local_experts, 2, {"ep": 2}, str(tmp_path), "load")
    run_ranks(local_experts, 4, {"ep": 2, "dp_outer": 2}, str(tmp_path), "load")


def optimizer_across_layouts(degrees: dict[str, int], folder: str, phase: str) -> None:
    """A torch optimizer on sharded parameters: its state appears in the first step, also after a load."""
    meshes = build_meshes(**degrees)
    placement, axis = Placement((4, 6), ((Axis.EP, Shard(0)),)), Axis.EDP
    start, end = cut(placement, meshes, axis, "w")
    full = truth("w", (4, 6))
    module = nn.Module()
    sharded = ShardedTensor(torch.zeros(end - start), placement, start, end, meshes, axis)
    module.weight = nn.Parameter(sharded)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)

    def step(seed: str) -> None:
        module.weight.grad = torch.zeros_like(module.weight.detach()).copy_(truth(seed, (4, 6)))
        optimizer.step()

    if phase == "save":
        module.weight.data.copy_(full)
        step("g1")
        checkpoint.save(Path(folder) / "ckpt", module, optimizer)
        step("g2")
        checkpoint.save(Path(folder) / "next", module, optimizer)
    else:
        checkpoint.load(Path(folder) / "ckpt", module, optimizer)
        step("g2")
        got = module.weight.full_tensor(), optimizer.state[module.weight]["exp_avg"].full_tensor()
        checkpoint.load(Path(folder) / "next", module, optimizer)
        assert torch.equal(got[0], module.weight.full_tensor())
        assert torch.equal(got[1], optimizer.state[module.weight]["exp_avg"].full_tensor())


def test_a_torch_optimizer_goes_on_under_another_layout(tmp_path: Path) -> None:
    run_ranks(optimizer_across_layouts, 4, {"ep": 2}, str(tmp_path), "save")
    run_ranks(optimizer_across_layouts, 3, {}, str(tmp_path), "load")


def dtensors(folder: str, phase: str) -> None:
    """Parameters of torch's own sharding take part too, in the foreground."""
    mesh = build_meshes().dense["dp_shard"]
    full = truth("w", (6, 4))
    made = distribute_tensor(full if phase == "save" else torch.zeros(6, 4), mesh, [Shard(0)])
    if phase == "save":
        checkpoint.save(Path(folder) / "ckpt", part={"w": made})
        one = checkpoint.Checkpointer(checkpoint.CheckpointConfig(asynchronous=True), folder)
        with pytest.raises(CheckpointError, match="DTensors are saved in the foreground only"):
            one.save(1, {"part": {"w": made}})
        one.close()
    else:
        checkpoint.load(Path(folder) / "ckpt", part={"w": made})
        assert torch.equal(made.full_tensor(), full)


def test_dtensors_reshard_as_well(tmp_path: Path) -> None:
    run_ranks(dtensors, 2, str(tmp_path), "save")
    run_ranks(dtensors, 3, str(tmp_path), "load")


def test_replacing_a_checkpoint_is_said_unless_it_is_meant(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = "the checkpoint that is there is replaced once the new one is whole"
    checkpoint.save(tmp_path / "ckpt", step=1)
    assert words not in caplog.text
    checkpoint.save(tmp_path / "ckpt", step=2)
    assert words in caplog.text
    caplog.clear()
    checkpoint.save(tmp_path / "ckpt", step=3, overwrite=True)
    assert words not in caplog.text


class Adapted(nn.Module):
    """A layer as peft leaves it, with its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Module()
        self.q_proj.base_layer = nn.Linear(3, 2)
        self.q_proj.lora_A = nn.ModuleDict({"default": nn.Linear(3, 1, bias=False)})


def test_checkpoints_with_pefts_own_names_of_layers_still_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, loaded = Adapted(), Adapted()
    with monkeypatch.context() as earlier:
        earlier.setattr("fsdmoe.checkpoint.parts.stored_name", lambda name: name)
        checkpoint.save(tmp_path / "ckpt", saved)
    checkpoint.load(tmp_path / "ckpt", loaded)
    for one, other in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, other)

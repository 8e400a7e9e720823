"""Every way in which peft can target a module, and everything that can be done with the adapters then: the
same program on plain peft in one process and on a sharded model, cell by cell.

A *target* is a row: how adapters are put around a tiny model. An *operation* is a column: what is done then,
in the order of :data:`OPERATIONS`, on one model. Each gives named tensors, which must be those of plain peft.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from fsdmoe import checkpoint
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import ShardedTensor
from fsdmoe.mesh import Axis, build_meshes
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.parallel.build import parallelize
from tests.support.hf_pairs import randomize
from tests.support.hf_tiny import VOCABULARY, batch, tiny_hf
from tests.support.lora_case import move, rows

TOLERANCE = 1e-5
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
Tensors = dict[str, torch.Tensor]
Result = Tensors | str
"""What an operation gave, or why it raised."""


@dataclasses.dataclass(frozen=True)
class Target:
    """How adapters are put around a tiny model."""

    settings: dict[str, Any]
    family: str = "qwen3_moe"
    config: str = "LoraConfig"
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the model's configuration."""
    further: tuple[dict[str, Any], ...] = ()
    """Settings of adapters ``second``, ``third`` and so on."""
    active: tuple[str, ...] = ("default",)
    skips: tuple[str, ...] = ()
    """Operations that mean nothing here."""

    def base(self) -> nn.Module:
        if self.family == "gpt2":
            return _tiny_gpt2(**self.changes)
        return tiny_hf(self.family, output_router_logits=False, **self.changes)

    def build(self, seed: int = 3) -> Any:
        """A ``PeftModel`` whose adapters change what it computes."""
        import peft

        base = self.base()
        torch.manual_seed(0)  # peft draws A
        made = getattr(peft, self.config)
        model = peft.get_peft_model(base, made(**copy.deepcopy(self._lora | self.settings)))
        for name, settings in zip(("second", "third"), self.further, strict=False):
            model.add_adapter(name, made(**copy.deepcopy(self._lora | settings)))
        if self.active != ("default",):
            model.base_model.set_adapter(list(self.active))
        move(model, seed)
        return model.train()

    @property
    def _lora(self) -> dict[str, Any]:
        common: dict[str, Any] = {"task_type": "CAUSAL_LM"}
        return common | ({"r": 3, "lora_alpha": 6} if self.config == "LoraConfig" else {})


def _tiny_gpt2(**changes: Any) -> nn.Module:
    """Its projections are transformers' ``Conv1D``, whose weights are transposed."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    config = transformers.GPT2Config(**settings | changes)
    config._attn_implementation = "eager"
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model, 0.3)
    return model.train()


class Plain:
    """peft in one process."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.folder = target, folder
        self.model: Any = target.build()

    def step(self, number: int) -> torch.Tensor:
        tokens, labels = rows(number, 0, 1)
        if number == 0:
            logits = self.model(tokens).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        else:
            loss = self.model(tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    def whole(self, model: nn.Module) -> Tensors:
        return {name: value.detach().clone() for name, value in model.named_parameters()}

    def again(self) -> Any:
        return self.target.build()

    def checkpointed(self) -> torch.Tensor:
        return logits_of(self.model)

    def exported_adapter(self) -> tuple[Tensors, torch.Tensor]:
        """Without the frozen weights inside of adapted embeddings and heads, which peft writes too."""
        self.model.save_pretrained(self.folder / "plain-to-adapter")
        found = read_adapters(self.folder / "plain-to-adapter")
        found = {name: value for name, value in found.items() if not name.endswith("base_layer.weight")}
        return found, logits_of(self.model)

    def exported(self, model: nn.Module) -> torch.Tensor:
        return logits_of(model)


class Sharded:
    """The same on this rank."""

    def __init__(self, target: Target, folder: Path, mesh: dict[str, int]) -> None:
        self.target, self.folder = target, folder
        self.meshes = build_meshes(**mesh)
        self.model: Any = parallelize(target.build(), self.meshes)

    def step(self, number: int) -> torch.Tensor:
        """The first through the loop's interface, the second as a user calls the model."""
        tokens, labels = rows(number, self.meshes.rank(Axis.BATCH), self.meshes.size(Axis.BATCH))
        if number == 0:
            mask = torch.ones_like(labels, dtype=torch.bool)
            loss = as_causal_lm(self.model)(tokens, labels_BS=labels, loss_mask_BS=mask).loss
        else:
            loss = self.model(tokens, labels=tokens).loss
        loss.backward()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    def whole(self, model: nn.Module) -> Tensors:
        return {
            name: (value.full_tensor() if isinstance(value, ShardedTensor) else value).detach().clone()
            for name, value in model.named_parameters()
        }

    def again(self) -> Any:
        return parallelize(self.target.build(), self.meshes)

    def checkpointed(self) -> torch.Tensor:
        """Of a checkpoint that is loaded into a second model."""
        checkpoint.save(self.folder / "checkpoint", self.model)
        again: Any = parallelize(self.target.build(seed=7), self.meshes)
        checkpoint.load(self.folder / "checkpoint", again)
        return logits_of(again)

    def exported_adapter(self) -> tuple[Tensors, torch.Tensor]:
        for name in self.model.peft_config:
            where = self.folder / "to-adapter" / ("" if name == "default" else name)
            checkpoint.to_adapter(self.folder / "checkpoint", where, adapter=name)
        with pytest.raises(checkpoint.CheckpointError, match="got a model with adapters"):
            checkpoint.to_hf(self.folder / "checkpoint", self.folder / "hf-of-adapters")
        return read_adapters(self.folder / "to-adapter"), loaded_by_peft(
            self.target, self.folder / "to-adapter"
        )

    def exported(self, model: nn.Module) -> torch.Tensor:
        import transformers

        checkpoint.save(self.folder / "merged", model)
        checkpoint.to_hf(self.folder / "merged", self.folder / "hf")
        again = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "hf", dtype=torch.float32)
        return logits_of(again)


Side = Plain | Sharded


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    was = model.training
    model.eval()
    try:
        return model(batch(0, 0)).logits.clone()
    finally:
        model.train(was)


def read_adapters(folder: Path) -> Tensors:
    """The tensors of every adapter of a folder."""
    files = sorted(folder.glob("**/adapter_model.safetensors"))
    return {
        f"{file.parent.relative_to(folder)}/{name}": tensor
        for file in files
        for name, tensor in load_file(file).items()
    }


def loaded_by_peft(target: Target, folder: Path) -> torch.Tensor:
    """The logits of plain peft with the adapters of a folder."""
    import peft

    model = peft.PeftModel.from_pretrained(target.base(), folder)
    for name in ("second", "third")[: len(target.further)]:
        model.load_adapter(folder / name, name)
    if target.active != ("default",):
        model.base_model.set_adapter(list(target.active))
    return logits_of(model)


# Operations


def _train(side: Side) -> Tensors:
    found = {}
    trained = [p for p in side.model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    for number in range(2):
        found[f"loss {number}"] = side.step(number)
        optimizer.step()
        optimizer.zero_grad()
    return found | side.whole(side.model) | {"logits": logits_of(side.model)}


def _disable(side: Side) -> Tensors:
    with side.model.disable_adapter():
        inside = logits_of(side.model)
    trained = [float(p.requires_grad) for p in side.model.parameters()]
    return {"inside": inside, "after": logits_of(side.model), "trained": torch.tensor(trained)}


def _save(side: Side) -> Tensors:
    """The files, and what plain peft computes with them."""
    folder = side.folder / f"saved-{type(side).__name__}"
    side.model.save_pretrained(folder)
    if isinstance(side, Sharded):
        dist.barrier()
    return read_adapters(folder) | {"logits": loaded_by_peft(side.target, folder)}


def _merge(side: Side) -> Tensors:
    side.model.merge_adapter()
    return side.whole(side.model) | {"logits": logits_of(side.model)}


def _disable_merged(side: Side) -> Tensors:
    """peft takes merged adapters out then, for good."""
    with side.model.disable_adapter():
        logits_of(side.model)  # peft takes them out layer by layer in this: a tied embedding is too late
        inside = logits_of(side.model)
    after = {"inside": inside, "after": logits_of(side.model)}
    side.model.merge_adapter()
    return after


def _unmerge(side: Side) -> Tensors:
    side.model.unmerge_adapter()
    return side.whole(side.model) | {"logits": logits_of(side.model)}


def _switch(side: Side) -> Tensors:
    """To the first adapter and back."""
    side.model.base_model.set_adapter("default")
    first = logits_of(side.model)
    side.model.base_model.set_adapter(list(side.target.active))
    return {"first": first, "back": logits_of(side.model)}


def _load(side: Side) -> Tensors:
    side.model.load_adapter(side.folder / "other", "default")
    return side.whole(side.model) | {"logits": logits_of(side.model)}


def _checkpoint(side: Side) -> Tensors:
    return {"logits": side.checkpointed()}


def _to_adapter(side: Side) -> Tensors:
    tensors, logits = side.exported_adapter()
    return tensors | {"logits": logits}


def _unload(side: Side) -> Tensors:
    bare = side.again().unload()
    return side.whole(bare) | {"logits": logits_of(bare)}


def _merge_and_unload(side: Side) -> Tensors:
    side.model = side.model.merge_and_unload()
    return side.whole(side.model) | {"logits": logits_of(side.model)}


def _to_hf(side: Side) -> Tensors:
    return {"logits": side.exported(side.model)}


OPERATIONS: dict[str, Callable[[Any], Tensors]] = {
    "train": _train,
    "disable": _disable,
    "save": _save,
    "merge": _merge,
    "disable merged": _disable_merged,
    "unmerge": _unmerge,
    "switch": _switch,
    "load": _load,
    "checkpoint": _checkpoint,
    "to_adapter": _to_adapter,
    "unload": _unload,
    "merge and unload": _merge_and_unload,
    "to_hf": _to_hf,
}


def run_row(side: Side) -> dict[str, Result]:
    """Every operation, one after the other; one that raises gives the reason."""
    found: dict[str, Result] = {}
    for name, operation in OPERATIONS.items():
        if name in side.target.skips:
            continue
        try:
            found[name] = operation(side)
        except Exception as error:  # whatever it is, it is the verdict of this cell
            found[name] = f"{type(error).__name__}: {error}"
    return found


def sharded_row(target: Target, folder: Path, mesh: dict[str, int]) -> dict[str, Result] | str:
    """On this rank; one text where the target is refused before anything is split."""
    try:
        side = Sharded(target, folder, mesh)
    except ConfigError as error:
        return f"ConfigError: {error}"
    return run_row(side)


def plain_row(target: Target, folder: Path) -> dict[str, Result]:
    other = target.build(seed=4)
    other.save_pretrained(folder / "other")
    return run_row(Plain(target, folder))


def verdicts(ours: dict[str, Result] | str, theirs: dict[str, Result]) -> dict[str, str] | str:
    """``equal``, the size of the difference, or the reason of a refusal."""
    if isinstance(ours, str):
        return ours
    return {name: _verdict(ours[name], theirs[name]) for name in OPERATIONS if name in theirs}


def _verdict(ours: Result, theirs: Result) -> str:
    if isinstance(theirs, str):
        return f"peft raises {theirs.splitlines()[0]}; here {ours if isinstance(ours, str) else 'nothing'}"
    if isinstance(ours, str):
        return ours
    if ours.keys() != theirs.keys():
        missing, extra = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
        return f"differs: without {missing[:3]}, with {extra[:3]}"
    worst = max(_distances(ours, theirs), default=(0.0, ""))
    return "equal" if worst[0] <= TOLERANCE else f"differs by {worst[0]:.2g} in {worst[1]}"


def _distances(ours: Tensors, theirs: Tensors) -> Iterator[tuple[float, str]]:
    for name, value in theirs.items():
        if ours[name].shape != value.shape:
            yield float("inf"), name
        else:
            scale = value.abs().max().clamp(min=1.0)
            yield float((ours[name] - value).abs().max() / scale), name

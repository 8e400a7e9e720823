"""A dense model to a Mixture of Experts that computes the same at step 0.

The MLP of a layer is cut along its intermediate width into G shards (the granularity), whose outputs add up
to the dense output; the shards are repeated E times. The G experts of one repetition are a *virtual group*:
they have the same row in the router, hence the same score, hence the router takes whole groups::

    dense MLP  width I  ->  | 0 | 1 |            G = 2 shards of width I/2
    E = 3 groups            | 0 | 1 | 0 | 1 | 0 | 1 |     6 experts
    router rows             | a | a | b | b | c | c |     top-k T = 4 takes two groups

With top-k weights that are renormalised to sum to one, the m = T/G chosen groups have weights that sum to
1/G over each shard, so down-projections scaled by G give back the dense output exactly. Where T is not a
multiple of G this does not hold.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial

import torch

from fsdmoe.checkpoint.agree import together
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.hf_config import CLASSES
from fsdmoe.checkpoint.hf_folder import HFFolder, open_hf_folder
from fsdmoe.checkpoint.hf_import import folder_reader
from fsdmoe.checkpoint.hf_names import Piece
from fsdmoe.checkpoint.hf_understood import not_understood
from fsdmoe.checkpoint.reader import RegionReader
from fsdmoe.checkpoint.saved_box import Boxes, Progress, SavedBox, no_progress
from fsdmoe.checkpoint.session import save_boxes
from fsdmoe.checkpoint.storage import Storage, StrPath, split_address
from fsdmoe.checkpoint.tree import Tree
from fsdmoe.core.errors import refuse
from fsdmoe.core.rules import at_least

# dense families and the MoE family with the same attention and norms
FAMILIES = {"qwen3": "qwen3_moe", "llama": "mixtral", "mistral": "mixtral"}


@dataclass(frozen=True, kw_only=True)
class UpcyclePolicy:
    """The shape of the mixture."""

    groups: int
    """E: repetitions of the whole dense MLP."""
    granularity: int = 1
    """G: experts that one dense MLP is cut into; there are E * G experts."""
    top_k: int
    """T: experts that each token visits."""
    seed: int = 0
    """Of the router's rows."""
    exact: bool = True
    """Refuse shapes whose output at step 0 would differ from the dense model's."""

    def __post_init__(self) -> None:
        problems = at_least("upcycle", vars(self), {"groups": 1, "granularity": 1, "top_k": 1})
        if not problems and self.top_k > self.num_experts:
            problems.append(
                f"upcycle.top_k: expected at most groups * granularity = {self.num_experts}, "
                f"got {self.top_k}; lower it"
            )
        if not problems and self.exact and self.top_k % self.granularity:
            problems.append(
                f"upcycle.top_k: {self.top_k} is not a multiple of granularity = {self.granularity}, so the "
                "output at step 0 would not be the dense model's; choose a multiple, or allow it (--inexact)"
            )
        refuse(problems)

    @property
    def num_experts(self) -> int:
        return self.groups * self.granularity


def upcycle(
    source: StrPath, target: StrPath, policy: UpcyclePolicy, *, progress: Progress = no_progress
) -> None:
    """Write a checkpoint of a mixture of experts made from a dense model. Collective.

    Args:
        source: A Hugging Face folder of a dense model.
        target: The checkpoint to write.
        policy: The shape of the mixture.
        progress: Called with the number of bytes that were done since the last call.
    """
    storage, name = split_address(source)
    folder = together(lambda: _open_dense(storage, name, policy))
    reader = folder_reader(storage, name, folder)
    boxes: Boxes = {}
    for piece in folder.pieces():
        if piece.memory.partition(".mlp.")[2] in ("gate_proj.weight", "up_proj.weight", "down_proj.weight"):
            boxes |= _expert_boxes(reader, folder, piece, policy)
        else:
            box = SavedBox.whole(f"model/{piece.memory}", piece.sizes, folder.readable[piece.disk].dtype)
            boxes[box] = partial(reader.read_tensor, piece.disk)
    dtype, width = folder.readable["model.embed_tokens.weight"].dtype, folder.config["hidden_size"]
    std = float(folder.config.get("initializer_range") or 0.02)
    for number in range(int(folder.config["num_hidden_layers"])):
        name = f"model/model.layers.{number}.mlp.gate.weight"
        box = SavedBox.whole(name, (policy.num_experts, width), dtype)
        boxes[box] = partial(_router, box, number, policy, std)
    about = {"hf_config": moe_config(folder.config, policy), "tied": folder.tied, "from": os.fspath(source)}
    save_boxes(target, boxes, about, progress=progress)


def moe_config(dense: Tree, policy: UpcyclePolicy) -> Tree:
    """config.json of the mixture."""
    kind = FAMILIES[dense["model_type"]]
    width = dense["intermediate_size"] // policy.granularity
    dropped = {
        "architectures",
        "layer_types",
        "max_window_layers",
        "use_sliding_window",
        "mlp_bias",
        "pretraining_tp",
    }
    config = {key: value for key, value in dense.items() if key not in dropped}
    config |= {"model_type": kind, "architectures": [CLASSES[kind]], "num_experts_per_tok": policy.top_k}
    if kind == "qwen3_moe":
        config |= {"num_experts": policy.num_experts, "moe_intermediate_size": width, "norm_topk_prob": True}
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    else:
        config |= {"num_local_experts": policy.num_experts, "intermediate_size": width}
    return config


def _open_dense(storage: Storage, name: str, policy: UpcyclePolicy) -> HFFolder:
    folder = replace(open_hf_folder(storage, name), native=True)
    kind, width = folder.config.get("model_type"), folder.config.get("intermediate_size")
    problems = []
    if kind not in FAMILIES:
        problems.append(
            f"{name}: expected a dense model of {', '.join(FAMILIES)}, got {kind!r}; upcycle one of these"
        )
    else:  # before keys that only dense models have are dropped
        as_mixture = folder.config | {"model_type": FAMILIES[str(kind)]}
        problems += [f"{name}: {line}; choose a model without" for line in not_understood(as_mixture)]
    if folder.config.get("mlp_bias") or (
        FAMILIES.get(str(kind)) == "mixtral" and folder.config.get("attention_bias")
    ):
        problems.append(
            f"{name}: its projections have biases, which the mixture's do not; choose a model without"
        )
    if not isinstance(width, int) or width % policy.granularity:
        problems.append(
            f"upcycle.granularity: expected a divisor of the intermediate size {width}, "
            f"got {policy.granularity}; choose one"
        )
    refuse(problems)
    return folder


def _expert_boxes(reader: RegionReader, folder: HFFolder, piece: Piece, policy: UpcyclePolicy) -> Boxes:
    """One dense projection as its shards in every group."""
    disk = piece.disk
    layer, _, part = piece.memory.partition(".mlp.")
    dtype, shape_on_disk = folder.readable[disk].dtype, folder.readable[disk].shape
    down = part.startswith("down")
    stated = (folder.config["hidden_size"], folder.config["intermediate_size"])
    if shape_on_disk != (stated if down else stated[::-1]):  # a wider one would lose its last rows
        raise CheckpointError(f"{disk}: shape {shape_on_disk}; config.json says (hidden, width) {stated}")
    rows, columns = shape_on_disk
    width = (columns if down else rows) // policy.granularity
    name = f"model/{layer}.mlp.experts.{'down_proj' if down else 'gate_up_proj'}"
    shape = (policy.num_experts, rows, width) if down else (policy.num_experts, 2 * width, columns)
    sizes = (rows, width) if down else (width, columns)
    boxes: Boxes = {}
    for expert in range(policy.num_experts):
        start = expert % policy.granularity * width
        at = (expert, width if part.startswith("up") else 0, 0)
        box = SavedBox(name, shape, dtype, at, (1, *sizes))
        boxes[box] = partial(
            _shard, reader, disk, (0, start) if down else (start, 0), sizes, policy.granularity if down else 1
        )
    return boxes


def _shard(
    reader: RegionReader, disk: str, low: tuple[int, int], sizes: tuple[int, int], scale: int
) -> torch.Tensor:
    return reader.read_tensor(disk, low, sizes).mul(scale)[None]


def _router(box: SavedBox, layer: int, policy: UpcyclePolicy, std: float) -> torch.Tensor:
    """One random row a group, repeated for its experts: equal scores keep a group together."""
    generator = torch.Generator().manual_seed(policy.seed * 1_000_003 + layer)
    rows = torch.randn(policy.groups, box.shape[1], generator=generator) * std
    return rows.repeat_interleave(policy.granularity, 0).to(box.dtype)

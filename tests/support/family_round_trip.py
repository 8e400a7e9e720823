"""A family of transformers through fsdmoe and back: a folder, ``load=``, two steps, ``to_hf``, a folder."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError, to_hf
from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.parallel.build import parallelize
from tests.support.moe_families import VOCABULARY, tiny_model

_LENGTH = 12


def tokens_of(step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCABULARY, (2, _LENGTH), generator=random)


def round_trip(family: str, root: str) -> str:
    """``ok``, what differs, or the refusal. Collective, on two ranks."""
    try:
        return _round_trip(family, Path(root))
    except (CheckpointError, ConfigError) as error:
        return f"refused: {error}"


def _round_trip(family: str, root: Path) -> str:
    import transformers

    plain = tiny_model(family)
    if dist.get_rank() == 0:
        plain.save_pretrained(root / "hf")
    dist.barrier()
    meshes = build_meshes(ep=2)
    # the layers' own code, so that weights alone decide
    model = parallelize(tiny_model(family, seed=1), meshes, load=root / "hf", fused_layers=False)
    seen = tokens_of(0, 0)
    loaded = _difference(model, plain, seen)
    if not loaded <= 1e-5:
        return f"load= differs by {loaded:.1e}"
    optimizer = AdamW(model, lr=1e-2)
    model.train()
    for step in (1, 2):
        tokens = tokens_of(step, dist.get_rank())
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if not _difference(model, plain, seen) > 1e-3:
        return "two steps changed nothing"
    checkpoint.save(root / "checkpoint", model, meshes=meshes)
    to_hf(root / "checkpoint", root / "out")
    read, facts = transformers.AutoModelForCausalLM.from_pretrained(
        root / "out", output_loading_info=True, dtype=torch.float32
    )
    lost = {key: sorted(map(str, names))[:3] for key, names in facts.items() if names}
    if lost:
        return f"from_pretrained says {lost}"
    exported = _difference(model, read, seen)
    return "ok" if exported <= 1e-5 else f"the export differs by {exported:.1e}"


@torch.no_grad()
def _difference(one: torch.nn.Module, other: torch.nn.Module, tokens: torch.Tensor) -> float:
    logits = [model.eval()(input_ids=tokens).logits for model in (one, other)]
    return float((logits[0] - logits[1]).abs().max())

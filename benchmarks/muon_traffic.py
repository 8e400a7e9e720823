"""What Muon sends in a step, for large models and worlds, next to two other ways; from plans, without ranks.

*boundaries*: only matrices that a slice's end cuts travel, to one of the ranks that hold a part, and back.
*an owner each*: every matrix goes to an owner, in turn, and back. *gather all*: every rank gathers all
matrices and computes them all. Bytes are those of bfloat16, of all ranks together.

    python benchmarks/muon_traffic.py --json muon_traffic.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.fsdp import FSDPConfig
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.mesh import MeshConfig, resolve_degrees
from fsdmoe.models.config import preset_config
from fsdmoe.optim.matrix_exchange import assign_blocks
from fsdmoe.plan.parameters import ModelSource, plan_parameters
from fsdmoe.precision.config import PrecisionConfig
from tests.support.matrix_volume import count_volume, planned_matrices

GIB = 2**30
BYTES = 2
MESHES: list[tuple[int, dict[str, Any]]] = [
    (64, {}), (64, {"ep": 8}), (256, {}), (256, {"ep": 8}), (256, {"ep": 64}),
    (256, {"dp_outer": 4, "ep": 8}),
]  # fmt: skip


def measure(preset: str, world: int, mesh: dict[str, Any]) -> dict[str, Any]:
    source = ModelSource(preset_config(preset), ExpertsConfig(), AdapterConfig(), PrecisionConfig())
    plan = plan_parameters(source, resolve_degrees(MeshConfig(**mesh), world), FSDPConfig())
    params = planned_matrices([group for unit in plan.model.units for group in unit.groups])
    blocks = assign_blocks(params, plan.at)
    volume = count_volume(params, blocks, plan.at)
    return {
        "model": preset,
        "mesh": ", ".join([f"{world} ranks", *(f"{axis} {size}" for axis, size in mesh.items())]),
        "matrices": len(blocks),
        "cut": sum(not block.is_whole for block in blocks),
        "all matrices": volume.total * BYTES,
        "boundaries": volume.sent * BYTES,
        "an owner each": volume.owned * BYTES,
        "gather all": volume.gathered * BYTES,
        "busiest rank": volume.busiest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="one small model, to see that it works")
    args = parser.parse_args()
    presets = ["tiny-qwen3"] if args.tiny else ["qwen3-30b-a3b", "deepseek-v3"]
    meshes = MESHES[:2] if args.tiny else MESHES
    rows = [measure(preset, world, mesh) for preset in presets for world, mesh in meshes]
    names = ("all matrices", "boundaries", "an owner each", "gather all")
    print(f"| model | mesh | cut matrices | {', GiB | '.join(names)}, GiB | busiest rank over the mean |")
    print("| --- " * 8 + "|")
    for row in rows:
        sizes = " | ".join(f"{row[name] / GIB:,.2f}" for name in names)
        cut = f"{row['cut']:,} of {row['matrices']:,}"
        print(f"| {row['model']} | {row['mesh']} | {cut} | {sizes} | {row['busiest rank']:.2f} |")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

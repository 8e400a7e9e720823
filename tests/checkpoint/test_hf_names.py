"""Names on disk and in memory are each other's inverse."""

import pytest

from fsdmoe.checkpoint.hf_names import Names

QWEN, MIXTRAL, DEEPSEEK = Names(), Names(mixtral=True, num_layers=32), Names(num_layers=61)


@pytest.mark.parametrize(
    ("names", "disk", "memory", "low"),
    [
        (QWEN, "L.3.mlp.experts.7.up_proj.weight", "L.3.mlp.experts.gate_up_proj", (7, 6, 0)),
        (QWEN, "L.3.mlp.experts.7.gate_proj.weight", "L.3.mlp.experts.gate_up_proj", (7, 0, 0)),
        (QWEN, "L.3.mlp.experts.7.down_proj.weight", "L.3.mlp.experts.down_proj", (7, 0, 0)),
        (QWEN, "L.3.mlp.gate.weight", "L.3.mlp.gate.weight", (0, 0)),
        (MIXTRAL, "L.3.block_sparse_moe.experts.1.w3.weight", "L.3.mlp.experts.gate_up_proj", (1, 6, 0)),
        (MIXTRAL, "L.3.block_sparse_moe.experts.1.w2.weight", "L.3.mlp.experts.down_proj", (1, 0, 0)),
        (MIXTRAL, "L.3.block_sparse_moe.gate.weight", "L.3.mlp.gate.weight", (0, 0)),
        (
            DEEPSEEK,
            "L.60.mlp.shared_experts.up_proj.weight",
            "L.60.mlp.shared_experts.up_proj.weight",
            (0, 0),
        ),
        (DEEPSEEK, "L.61.mlp.experts.2.up_proj.weight", "M.0.mlp.experts.gate_up_proj", (2, 6, 0)),
        (DEEPSEEK, "L.61.eh_proj.weight", "M.0.join.eh_proj.weight", (0, 0)),
        (DEEPSEEK, "L.61.shared_head.norm.weight", "M.0.norm.weight", (0, 0)),
        (DEEPSEEK, "L.61.self_attn.q_a_proj.weight", "M.0.self_attn.q_a_proj.weight", (0, 0)),
    ],
)
def test_a_name_goes_to_memory_and_back(names: Names, disk: str, memory: str, low: tuple[int, ...]) -> None:
    disk = disk.replace("L.", "model.layers.", 1)
    memory = memory.replace("L.", "model.layers.", 1).replace("M.", "model.mtp_layers.", 1)
    piece = names.from_disk(disk, (6, 4))
    assert piece is not None
    assert (piece.memory, piece.low) == (memory, low)
    assert piece.disk_shape == (6, 4)
    shape = (6, 4)
    if len(low) == 3:
        shape = (8, 6, 4) if memory.endswith("down_proj") else (8, 12, 4)  # type: ignore[assignment]
    assert piece in names.to_disk(memory, shape)


def test_copies_and_rotary_tables_are_not_kept() -> None:
    assert DEEPSEEK.from_disk("model.layers.61.embed_tokens.weight", (6, 4)) is None
    assert DEEPSEEK.from_disk("model.layers.61.shared_head.head.weight", (6, 4)) is None
    assert QWEN.from_disk("model.layers.0.self_attn.rotary_emb.inv_freq", (6,)) is None
    assert DEEPSEEK.copies("lm_head.weight", 1) == ["model.layers.61.shared_head.head.weight"]
    assert DEEPSEEK.copies("model.norm.weight", 1) == []


def test_gpt_oss_keeps_its_experts_fused_on_disk() -> None:
    names = Names.of({"model_type": "gpt_oss", "num_hidden_layers": 2})
    name, shape = "model.layers.0.mlp.experts.gate_up_proj", (4, 8, 32)
    (piece,) = names.to_disk(name, shape)
    assert piece == names.from_disk(name, shape)
    assert (piece.disk, piece.disk_shape) == (name, shape)

"""A decoder's sizes as the FLOP counter wants them."""

from fsdmoe.models.config import ModelConfig
from fsdmoe.observe import MLAShape, ModelShape


def model_shape(config: ModelConfig, seq_len: int) -> ModelShape:
    mla = MLAShape(
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        q_lora_rank=config.q_lora_rank,
    )
    return ModelShape(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        seq_len=seq_len,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        shared_intermediate_size=config.n_shared_experts * config.moe_intermediate_size,
        moe_latent_size=config.moe_latent_size or 0,
        num_dense_layers=config.first_k_dense_replace,
        dense_intermediate_size=config.intermediate_size,
        mla=mla if config.is_mla else None,
        window=config.sliding_window,
        num_window_layers=config.num_window_layers,
        num_mtp_layers=config.num_nextn_predict_layers,
    )

"""The models that make.py makes: a `config.json` each, with the spellings that files in the wild have."""

import dataclasses


@dataclasses.dataclass
class Variant:
    """One model."""

    # What stands in config.json.
    config: dict
    # Sequences, and tokens of one.
    ids: tuple = (2, 24)
    # Whether the experts of a layer lie in one tensor, as with save_original_format=False.
    fused: bool = False
    # Whether the weights have a multi-token-prediction module, whose gradients are not expected.
    next_token_module: bool = False
    # Names that end with one of these have gradients that are zero but for rounding.
    rounding: tuple = ()


def config(family, common, changes):
    """A family's base with changes; None as a value stays, `...` takes the key away."""
    merged = {"model_type": family, **common, **changes}
    return {key: value for key, value in merged.items() if value is not ...}


def deepseek(*, ids=(2, 24), fused=False, next_token_module=False, **changes):
    base = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 24,
        "initializer_range": 0.02,
        "intermediate_size": 40,
        "kv_lora_rank": 16,
        "max_position_embeddings": 64,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 2,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": ...,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "v_head_dim": 16,
        "vocab_size": 48,
    }
    heads = changes.get("num_attention_heads", base["num_attention_heads"])
    changes.setdefault("num_key_value_heads", heads)
    return Variant(config("deepseek_v3", base, changes), ids, fused, next_token_module)


def qwen3(*, ids=(2, 24), fused=False, **changes):
    base = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 24,
        "initializer_range": 0.02,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
        "mlp_only_layers": [],
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 48,
    }
    return Variant(config("qwen3_moe", base, changes), ids, fused)


def mixtral(*, ids=(2, 24), fused=False, rounding=(), **changes):
    base = {
        "architectures": ["MixtralForCausalLM"],
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 24,
        "initializer_range": 0.02,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 48,
    }
    return Variant(config("mixtral", base, changes), ids, fused, rounding=rounding)


# Older files: theta on its own, and rope_scaling with `type`.
OLDER = {"rope_parameters": ..., "rope_theta": 10000.0}
LLAMA3 = {"factor": 4.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
# Longer than a tile of keys, and than every original length here.
LONG = (1, 160)

VARIANTS = {
    # Latent attention and its extents.
    "deepseek_plain_queries": deepseek(q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False),
    "deepseek_one_head": deepseek(num_attention_heads=1, kv_lora_rank=12, qk_nope_head_dim=8, v_head_dim=24),
    "deepseek_many_heads": deepseek(num_attention_heads=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, hidden_size=48),
    "deepseek_odd_extents": deepseek(
        hidden_size=44, intermediate_size=20, moe_intermediate_size=12, kv_lora_rank=10, q_lora_rank=6, qk_nope_head_dim=6,
        qk_rope_head_dim=2, v_head_dim=10, vocab_size=61, num_attention_heads=3, ids=(3, 17)
    ),
    "deepseek_usual_heads": deepseek(
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=64, q_lora_rank=96, hidden_size=128
    ),
    "deepseek_long": deepseek(max_position_embeddings=256, ids=LONG),
    # Its mixture of experts.
    "deepseek_dense": deepseek(first_k_dense_replace=3, num_hidden_layers=3),
    "deepseek_dense_by_default": deepseek(first_k_dense_replace=3, num_hidden_layers=1),
    "deepseek_sparse": deepseek(
        first_k_dense_replace=0, num_hidden_layers=1, n_routed_experts=32, n_group=4, topk_group=2, num_experts_per_tok=8,
        n_shared_experts=2
    ),
    "deepseek_five_layers": deepseek(num_hidden_layers=5, first_k_dense_replace=2),
    "deepseek_pairs_of_experts": deepseek(n_group=4, topk_group=3, num_experts_per_tok=3, routed_scaling_factor=1.0),
    "deepseek_two_experts": deepseek(n_routed_experts=2, n_group=1, topk_group=1, num_experts_per_tok=2),
    "deepseek_top_one": deepseek(num_experts_per_tok=1, norm_topk_prob=False, n_group=1, topk_group=1),
    "deepseek_no_shared_expert": deepseek(n_shared_experts=0),
    "deepseek_two_shared_experts": deepseek(n_shared_experts=2, routed_scaling_factor=0.5),
    "deepseek_next_token_module": deepseek(num_nextn_predict_layers=1, next_token_module=True),
    "deepseek_surplus_module": deepseek(num_nextn_predict_layers=0, next_token_module=True),
    "deepseek_fused": deepseek(fused=True),
    # Norms, embeddings.
    "deepseek_eps": deepseek(rms_norm_eps=1e-2),
    "deepseek_tied": deepseek(tie_word_embeddings=True),
    # Rotary positions.
    "deepseek_halves": deepseek(rope_interleave=False, qk_rope_head_dim=12, ids=(2, 48)),
    "deepseek_halves_null": deepseek(
        rope_interleave=None, rope_parameters=YARN | {"rope_type": "yarn", "rope_theta": 10000.0, "mscale_all_dim": 1.3}
    ),
    "deepseek_theta": deepseek(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
    "deepseek_older": deepseek(**OLDER | {"rope_theta": 50000.0, "rope_scaling": None}),
    "deepseek_yarn": deepseek(
        **OLDER,
        rope_scaling=YARN | {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        ids=(2, 48),
    ),
    "deepseek_yarn_mscale": deepseek(
        rope_parameters=YARN | {"rope_type": "yarn", "rope_theta": 10000.0, "mscale": 0.7, "mscale_all_dim": 1.3}, ids=(2, 48)
    ),
    "deepseek_yarn_null_mscale": deepseek(
        rope_parameters=YARN | {"rope_type": "yarn", "rope_theta": 10000.0, "mscale": None, "mscale_all_dim": 0.8}
    ),
    "deepseek_yarn_attention_factor": deepseek(
        rope_parameters=YARN | {
            "rope_type": "yarn", "rope_theta": 10000.0, "attention_factor": 1.5, "mscale_all_dim": 1.0, "truncate": False
        }
    ),
    "deepseek_yarn_original_absent": deepseek(
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 4.0, "beta_slow": 0.5}
    ),
    "deepseek_yarn_wins": deepseek(
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, rope_scaling=YARN | {"rope_type": "yarn"}
    ),
    "deepseek_linear": deepseek(**OLDER, rope_scaling={"type": "linear", "factor": 3.0}),
    "deepseek_llama3": deepseek(rope_parameters=LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}, ids=(2, 48)),
    # Grouped-query attention with norms and its extents.
    "qwen3_one_kv_head": qwen3(num_key_value_heads=1, head_dim=8),
    "qwen3_full_heads": qwen3(num_key_value_heads=4, head_dim=...),
    "qwen3_kv_heads_by_default": qwen3(num_key_value_heads=..., num_attention_heads=8, head_dim=6),
    "qwen3_one_head": qwen3(num_attention_heads=1, num_key_value_heads=1, head_dim=24),
    "qwen3_eight_heads": qwen3(num_attention_heads=8, num_key_value_heads=4, head_dim=4, hidden_size=40),
    "qwen3_odd_extents": qwen3(
        num_attention_heads=6, num_key_value_heads=3, head_dim=10, hidden_size=36, moe_intermediate_size=20, vocab_size=59,
        ids=(3, 19)
    ),
    "qwen3_usual_heads": qwen3(head_dim=128, hidden_size=128, num_experts=128, num_experts_per_tok=8, num_hidden_layers=1),
    "qwen3_longer": qwen3(max_position_embeddings=1024, ids=(1, 1000), rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
    "qwen3_long": qwen3(max_position_embeddings=256, ids=LONG),
    # Its mixture of experts.
    "qwen3_unnormalised": qwen3(norm_topk_prob=False),
    "qwen3_top_one": qwen3(norm_topk_prob=False, num_experts=2, num_experts_per_tok=1),
    "qwen3_top_eight": qwen3(num_experts=32, num_experts_per_tok=8, num_hidden_layers=1),
    "qwen3_all_experts": qwen3(num_experts=4, num_experts_per_tok=4),
    "qwen3_sparse_step": qwen3(decoder_sparse_step=2, num_hidden_layers=4),
    "qwen3_mlp_only": qwen3(mlp_only_layers=[0, 2], num_hidden_layers=3),
    "qwen3_mixed": qwen3(
        mlp_only_layers=[1], num_hidden_layers=3, num_key_value_heads=1, head_dim=8, num_experts=4, norm_topk_prob=False,
        tie_word_embeddings=True, **OLDER, rope_scaling={"type": "linear", "factor": 2.5}
    ),
    "qwen3_dense": qwen3(mlp_only_layers=[0, 1]),
    "qwen3_null_mlp_only": qwen3(mlp_only_layers=None, num_hidden_layers=5),
    "qwen3_other_spelling": qwen3(num_experts=..., num_local_experts=4),
    "qwen3_fused": qwen3(fused=True, decoder_sparse_step=2),
    # Norms, embeddings.
    "qwen3_eps": qwen3(rms_norm_eps=1e-2),
    "qwen3_tied": qwen3(tie_word_embeddings=True),
    # Rotary positions.
    "qwen3_theta": qwen3(rope_parameters=..., rope_theta=1e6, rope_scaling=None),
    "qwen3_linear": qwen3(rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}),
    "qwen3_yarn": qwen3(**OLDER | {"rope_theta": 1e6}, rope_scaling=YARN | {"type": "yarn"}, ids=(2, 64)),
    "qwen3_yarn_untruncated": qwen3(
        rope_parameters=YARN | {"rope_type": "yarn", "rope_theta": 10000.0, "truncate": False, "attention_factor": 2}
    ),
    "qwen3_yarn_mscale": qwen3(
        rope_parameters=YARN | {"rope_type": "yarn", "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    ),
    "qwen3_yarn_null_truncate": qwen3(
        rope_parameters=YARN | {"rope_type": "yarn", "rope_theta": 10000.0, "truncate": None, "beta_fast": None}
    ),
    "qwen3_yarn_null_factor": qwen3(
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 16}
    ),
    "qwen3_yarn_outer_original": qwen3(
        original_max_position_embeddings=16, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    ),
    "qwen3_llama3": qwen3(**OLDER, rope_scaling=LLAMA3 | {"rope_type": "llama3"}, ids=(2, 64)),
    "qwen3_llama3_original_absent": qwen3(
        rope_parameters={k: v for k, v in LLAMA3.items() if k[0] != "o"} | {"rope_type": "llama3", "rope_theta": 10000.0}
    ),
    # Grouped-query attention without norms.
    "mixtral_one_kv_head": mixtral(num_key_value_heads=1, head_dim=None),
    "mixtral_full_heads": mixtral(num_key_value_heads=4, head_dim=6, hidden_size=40),
    "mixtral_kv_heads_by_default": mixtral(num_key_value_heads=..., num_attention_heads=16, head_dim=4),
    "mixtral_eight_heads": mixtral(num_attention_heads=8, num_key_value_heads=2, head_dim=8, intermediate_size=36),
    "mixtral_long": mixtral(max_position_embeddings=256, ids=LONG),
    # Its mixture of experts.
    "mixtral_two_experts": mixtral(num_local_experts=2, num_experts_per_tok=2),
    "mixtral_top_one": mixtral(num_experts_per_tok=1, rounding=("gate.weight",)),
    "mixtral_top_four": mixtral(num_local_experts=16, num_experts_per_tok=4, num_hidden_layers=1),
    "mixtral_five_layers": mixtral(num_hidden_layers=5),
    "mixtral_fused": mixtral(fused=True),
    # Norms, embeddings.
    "mixtral_eps": mixtral(rms_norm_eps=1e-2),
    "mixtral_tied": mixtral(tie_word_embeddings=True),
    # Rotary positions.
    "mixtral_theta": mixtral(rope_parameters=..., rope_theta=1e6),
    "mixtral_theta_by_default": mixtral(rope_parameters=...),
    "mixtral_linear": mixtral(**OLDER, rope_scaling={"rope_type": "linear", "factor": 4}),
    "mixtral_yarn": mixtral(rope_parameters=YARN | {"rope_type": "yarn", "rope_theta": 1e6}, ids=(2, 64)),
    "mixtral_llama3": mixtral(**OLDER, rope_scaling=LLAMA3 | {"rope_type": "llama3", "type": "llama3"}, ids=(2, 64)),
}

# In tests/data/reference.
KEPT = [
    "deepseek_odd_extents",
    "deepseek_plain_queries",
    "deepseek_no_shared_expert",
    "deepseek_next_token_module",
    "deepseek_tied",
    "deepseek_yarn_mscale",
    "deepseek_halves",
    "deepseek_halves_null",
    "qwen3_one_kv_head",
    "qwen3_mixed",
    "qwen3_yarn_untruncated",
    "mixtral_top_one",
    "mixtral_llama3",
    "mixtral_fused",
]

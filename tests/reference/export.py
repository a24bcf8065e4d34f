#!/usr/bin/env python3
"""Trains a small model of each family with this program and lets the transformers library compute its logits.

Made with Python 3.11.7, torch 2.15.0 (CPU), transformers 5.24.0, safetensors 0.8.0, numpy 2.4.6:

    cargo build --release
    python3 tests/reference/export.py target/release/dropless tests/data/exported
    python3 tests/reference/export.py --check DIR...       # directories that `dropless train` wrote

OUT/FAMILY gets the files of the run's last checkpoint that other programs read (`config.json`, `model.safetensors`, and
`generation_config.json`), and `expected.safetensors` with `input_ids`, `logits.f32` and `loss.f32` as the library has them
in float32 with eager attention. `dropless verify` compares. With --check, nothing but `expected.safetensors` is written.

A tensor that the library expects and does not find, or finds in another shape, is an error. What it finds and does not
know may be a multi-token-prediction module, and nothing else.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import tempfile

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

RUN = [
    "train.steps=8",
    "train.batch_size=4",
    "train.micro_batch_size=4",
    "train.grad_shards=1",
    "train.sequence_length=64",
    "train.warmup_steps=2",
    "train.eval_batches=1",
    "train.sample_tokens=0",
    # Weights that 8 steps hardly change are large enough to tell one model from another.
    "model.initializer_range=0.2",
    "model.max_position_embeddings=64",
    "model.hidden_size=32",
    "model.vocab_size=264",
    "model.rms_norm_eps=1e-5",
]

MODELS = {
    "deepseek_v3": [
        "model.intermediate_size=48",
        "model.moe_intermediate_size=16",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=2",
        "model.q_lora_rank=16",
        "model.kv_lora_rank=16",
        "model.qk_nope_head_dim=8",
        "model.qk_rope_head_dim=8",
        "model.v_head_dim=12",
        "model.n_routed_experts=8",
        "model.n_group=2",
        "model.topk_group=1",
        "model.routed_scaling_factor=2.5",
        "model.num_nextn_predict_layers=1",
        'model.rope_scaling={type="yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.7}',
    ],
    "qwen3_moe": [
        'model.family="qwen3_moe"',
        "model.intermediate_size=48",
        "model.moe_intermediate_size=16",
        "model.num_hidden_layers=3",
        "model.mlp_only_layers=[1]",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "model.head_dim=12",
        "model.num_experts=8",
        "model.norm_topk_prob=false",
        "model.tie_word_embeddings=true",
        'model.rope_scaling={type="linear", factor=2.0}',
    ],
    "mixtral": [
        'model.family="mixtral"',
        "model.intermediate_size=24",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=1",
        "model.head_dim=8",
        "model.num_local_experts=4",
        'model.rope_scaling={type="llama3", factor=4.0, original_max_position_embeddings=32, low_freq_factor=1.0, '
        "high_freq_factor=4.0}",
    ],
}


def train(program, settings, out):
    """Trains, and copies what other programs read of the last checkpoint."""
    with tempfile.TemporaryDirectory() as run:
        command = [program, "train", "--out", run]
        for setting in [*RUN, *settings]:
            command += ["--set", setting]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        checkpoint = max(pathlib.Path(run).glob("checkpoints/step-*"))
        out.mkdir(parents=True, exist_ok=True)
        for name in ["config.json", "generation_config.json", "model.safetensors"]:
            if (checkpoint / name).exists():
                shutil.copy(checkpoint / name, out / name)


def expect(directory):
    """Writes `expected.safetensors`."""
    model, found = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    fields = json.loads((directory / "config.json").read_text())
    module = f"model.layers.{fields['num_hidden_layers']}."
    unknown = [name for name in found["unexpected_keys"] if not name.startswith(module)]
    empty = {name for name, tensor in model.state_dict().items() if tensor.numel() == 0}
    missing = set(found["missing_keys"]) - empty
    if unknown or missing or found["mismatched_keys"]:
        raise SystemExit(f"{directory}: missing {missing}, unknown {unknown}, unlike {found['mismatched_keys']}")
    ids = torch.randint(0, 257, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected = {"input_ids": ids, "logits.f32": logits.contiguous(), "loss.f32": loss.reshape(1)}
    save_file(expected, directory / "expected.safetensors")
    print(f"{directory}: loss {float(loss):.3f}, ignored {len(found['unexpected_keys'])} tensors of {module}*")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        for directory in args.paths:
            expect(directory)
        return
    program, out = args.paths
    for family, settings in MODELS.items():
        shutil.rmtree(out / family, ignore_errors=True)
        train(program.resolve(), settings, out / family)
        expect(out / family)


if __name__ == "__main__":
    main()

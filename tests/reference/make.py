#!/usr/bin/env python3
"""Makes small models with the transformers library and what it computes for them, in the form that `dropless verify` takes.

Made with Python 3.11.7, torch 2.15.0 (CPU), transformers 5.24.0, safetensors 0.8.0, numpy 2.4.6:

    python3 -m pip install torch==2.15.0 transformers==5.24.0 safetensors==0.8.0 numpy==2.4.6
    python3 tests/reference/make.py OUT            # every model of variants.py
    python3 tests/reference/make.py OUT NAME...    # these
    python3 tests/reference/make.py tests/data/reference --kept     # those that tests/data/reference has

OUT/NAME gets `config.json` (with the keys and spellings of variants.py, as they stand there), `model.safetensors` and
`expected.safetensors`: `input_ids`, `logits.f32`, `loss.f32` (the mean cross-entropy of the next token) and `grad.*` of
every parameter, in float32 with eager attention. Weights are random, of a size that keeps activations, router logits and
gradients near 1. A model whose routers come near a tie, where another order of sums could choose another expert, is
drawn again.
"""

import argparse
import json
import math
import pathlib
import shutil
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from variants import KEPT, VARIANTS

# Between the last expert that was chosen and the first that was not, in scores; f32 is a hundred times finer.
MARGIN = 2e-5
# A gradient below it would be compared by its rounding errors.
SMALLEST_GRADIENT = 1e-4


def initialise(model, generator):
    """Weights that keep every stage's output near 1, and router logits with a spread near 1.5."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.1 * noise)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * noise)
            elif name.endswith("embed_tokens.weight") and not model.config.tie_word_embeddings:
                tensor.copy_(noise)
            elif name.endswith("gate.weight"):
                tensor.copy_(1.5 * noise / math.sqrt(tensor.shape[-1]))
            else:
                tensor.copy_(noise / math.sqrt(max(tensor.shape[-1], 1)))


def margin(config, router, logits):
    """The smallest distance between a choice and what it was preferred to, over all tokens."""

    def gap(values, k):
        if k >= values.shape[-1]:
            return math.inf
        best = values.topk(k + 1, dim=-1).values
        return float((best[:, k - 1] - best[:, k]).min())

    if config.model_type != "deepseek_v3":
        return gap(logits.softmax(dim=-1), config.num_experts_per_tok)
    scores = logits.sigmoid() + router.e_score_correction_bias
    groups = scores.view(len(scores), config.n_group, -1)
    best = groups.topk(2, dim=-1).values.sum(dim=-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(config.topk_group, dim=-1).indices, True)
    eligible = groups.masked_fill(~chosen.unsqueeze(-1), -1e9).flatten(1)
    return min(gap(best, config.topk_group), gap(eligible, config.num_experts_per_tok))


def compute(model, ids):
    """`expected.safetensors`, and the smallest margin of the routers."""
    margins = []
    hooks = [
        module.register_forward_hook(lambda m, _, out: margins.append(margin(model.config, m, out[0].detach())))
        for module in model.modules()
        if type(module).__name__.lower().endswith("topkrouter")
    ]
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    for hook in hooks:
        hook.remove()
    expected = {"input_ids": ids, "logits.f32": logits.detach(), "loss.f32": loss.detach().reshape(1)}
    for name, parameter in model.named_parameters():
        expected[f"grad.{name}"] = parameter.grad
    return expected, min(margins, default=math.inf)


def add_next_token_module(weights, config, generator):
    """A multi-token-prediction module as the hub's files have it; the transformers library does not train one."""
    layer, source = config.num_hidden_layers, config.num_hidden_layers - 1
    prefix, last = f"model.layers.{layer}.", f"model.layers.{source}."
    noise = lambda *shape: torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])  # noqa: E731
    for name in [n for n in weights if n.startswith(last)]:
        like = weights[name]
        weights[prefix + name.removeprefix(last)] = like.clone() if like.dim() < 2 else noise(*like.shape)
    hidden = config.hidden_size
    for name in ["enorm", "hnorm", "shared_head.norm"]:
        weights[f"{prefix}{name}.weight"] = torch.ones(hidden)
    weights[f"{prefix}eh_proj.weight"] = noise(hidden, 2 * hidden)
    weights[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"].clone()


def weights_on_disk(model, fused):
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch, save_original_format=not fused)
        with safe_open(pathlib.Path(scratch) / "model.safetensors", "pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}


def make(out, name, variant):
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(variant.config, indent=2) + "\n")
    config = AutoConfig.from_pretrained(out)
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
        ).train()
        initialise(model, generator)
        ids = torch.randint(0, config.vocab_size, variant.ids, generator=generator)
        expected, smallest = compute(model, ids)
        sizes = {n: float(t.norm()) for n, t in expected.items() if n.startswith("grad.") and t.numel()}
        least = min(sizes, key=sizes.get)
        ill = {n for n in sizes if n.endswith(variant.rounding)} if variant.rounding else set()
        if smallest > MARGIN and all(size > SMALLEST_GRADIENT for n, size in sizes.items() if n not in ill):
            break
    else:
        raise SystemExit(f"{name}: no draw without ties and tiny gradients")
    weights = weights_on_disk(model, variant.fused)
    if variant.next_token_module:
        add_next_token_module(weights, config, generator)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    save_file({n: t.contiguous() for n, t in sorted(expected.items())}, out / "expected.safetensors")
    loss = float(expected["loss.f32"])
    print(f"{name}: seed {seed}, loss {loss:.3f}, margin {smallest:.1e}, least gradient {sizes[least]:.1e} {least}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--kept", action="store_true", help="the models that tests/data/reference has")
    args = parser.parse_args()
    for name in args.names or (KEPT if args.kept else VARIANTS):
        shutil.rmtree(args.out / name, ignore_errors=True)
        make(args.out / name, name, VARIANTS[name])


if __name__ == "__main__":
    main()

"""Do kveval's pruning methods keep the tokens that kvpress keeps? Two halves, since kvpress pins an older transformers.

    python3.11 -m venv .venv-kvpress
    .venv-kvpress/bin/python -m pip install torch==2.13.0     # first and alone, so that no CUDA build comes
    .venv-kvpress/bin/python -m pip install kvpress==0.5.5
    .venv-kvpress/bin/python benchmarks/pruning_reference.py reference /tmp/pruning.npz
    .venv/bin/python benchmarks/pruning_reference.py compare /tmp/pruning.npz

Both read the same random prompts with the same tiny random Llama (grouped queries). ``reference`` finds the tokens that
each press kept by looking up its keys among the full cache's; ``compare`` asks ``kept_tokens``, then reads a few tokens on
with a cache of those tokens. Bar: in float32 all sets are equal. In bfloat16 (``reference --dtype bfloat16``) they differ
in a few tokens: kvpress rounds attention weights and their means to BF16, where many tie; kveval keeps its scores in float32.

No prompt has a token twice: a token's keys in the first layer have one norm wherever it stands, and which of the
copies knorm keeps at the edge would be a matter of the last bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

PRESSES = {"snapkv": "SnapKVPress", "tova": "TOVAPress", "knorm": "KnormPress", "streaming": "StreamingLLMPress"}
FRACTIONS = (0.25, 0.5)  # exact in binary: kvpress counts int(tokens * (1 - (1 - fraction))), one less for 0.1 of 600
PROMPTS, TOKENS, MORE, WORDS = 4, 600, 8, 1009
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": WORDS,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # weights large enough that attention is not flat
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def made(dtype: torch.dtype) -> Any:
    """The tiny Llama; its weights are overwritten by whoever compares."""
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval().to(dtype)


def read(model: Any, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (kv_heads, tokens kept, head_dim) of each layer after ``ids`` (tokens,) int64 in one pass."""
    cache = DynamicCache()
    model(ids[None], past_key_values=cache, logits_to_keep=1)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def read_on(model: Any, kept: list[tuple[torch.Tensor, torch.Tensor]], ids: torch.Tensor) -> np.ndarray:
    """Logits (tokens, vocabulary) float32 of ``ids`` at the positions after the prompt, one token at a time."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(kept):
        cache.update(keys[None], values[None], index)
    rows = []
    for index, token in enumerate(ids):
        positions = torch.tensor([[TOKENS + index]])
        rows.append(model(token.view(1, 1), past_key_values=cache, position_ids=positions).logits[0, -1].float())
    return torch.stack(rows).numpy()


def places(pruned: torch.Tensor, full: torch.Tensor) -> np.ndarray:
    """(kv_heads, kept) int64 ascending: where each of the ``pruned`` keys stands among the ``full`` ones, exactly."""
    same = (pruned[:, :, None] == full[:, None]).all(dim=-1)  # (kv_heads, kept, tokens)
    assert bool((same.sum(dim=-1) == 1).all()), "a key that is not in the full cache, or is there twice"
    return same.int().argmax(dim=-1).sort(dim=-1).values.numpy()


def reference(path: str, dtype: str) -> None:
    """Run kvpress; write weights, prompts, kept tokens and logits to ``path``."""
    import kvpress  # type: ignore[import-not-found]  # lives in an environment of its own

    torch.manual_seed(0)
    model = made(getattr(torch, dtype))
    random = np.random.default_rng(0)
    ids = np.stack([random.permutation(WORDS)[: TOKENS + MORE] for _ in range(PROMPTS)])
    out: dict[str, Any] = {"ids": ids, "dtype": dtype}
    out |= {f"weight/{name}": tensor.float().numpy() for name, tensor in model.state_dict().items()}
    for prompt, row in enumerate(torch.from_numpy(ids)):
        full = read(model, row[:TOKENS])
        for method, press in PRESSES.items():
            for fraction in FRACTIONS:
                with getattr(kvpress, press)(compression_ratio=1 - fraction)(model):
                    kept = read(model, row[:TOKENS])
                found = [places(keys, whole) for (keys, _), (whole, _) in zip(kept, full, strict=True)]
                out[f"kept/{method}/{fraction}/{prompt}"] = np.stack(found)  # (layers, kv_heads, kept)
                out[f"logits/{method}/{fraction}/{prompt}"] = read_on(model, kept, row[TOKENS:])
    np.savez_compressed(path, **out)
    print(f"{path}: {PROMPTS} prompts of {TOKENS} tokens, {dtype}, {json.dumps({k: v for k, v in SHAPE.items() if v})}")


def with_queries(model: Any, ids: torch.Tensor) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """What ``read`` returns, and each layer's rotated queries (heads, tokens, head_dim)."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    got: list[torch.Tensor] = []

    def keep(projection: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        query = output.view(1, len(ids), -1, model.config.head_dim).transpose(1, 2)
        cos, sin = model.model.rotary_emb(output, torch.arange(len(ids))[None])
        got.append(apply_rotary_pos_emb(query, query, cos, sin)[0][0])

    hooks = [layer.self_attn.q_proj.register_forward_hook(keep) for layer in model.model.layers]
    try:
        return read(model, ids), got
    finally:
        for hook in hooks:
            hook.remove()


def compare(path: str) -> bool:
    """Print how far ``kept_tokens`` agrees with what ``path`` holds; whether all sets are equal."""
    stored = np.load(path)
    model = made(getattr(torch, str(stored["dtype"])))
    model.load_state_dict({name: torch.from_numpy(stored[f"weight/{name}"]) for name in model.state_dict()})
    rows = torch.from_numpy(stored["ids"])
    prompts = [with_queries(model, row[:TOKENS]) for row in rows]
    print(f"{stored['dtype']}, {len(rows)} prompts of {TOKENS} tokens; sets of one layer and KV head")
    print(
        f"{'method':10} {'fraction':>8} {'kept':>5} {'equal sets':>11} {'Jaccard mean':>13} {'least':>7} {'logits max |d|':>15}"
    )
    whole = True
    for method in PRESSES:
        for fraction in FRACTIONS:
            whole &= compare_one(stored, model, prompts, rows[:, TOKENS:], (method, fraction))
    return whole


def compare_one(stored: Any, model: Any, prompts: list[Any], more: torch.Tensor, which: tuple[str, float]) -> bool:
    """One line of the table; whether all its sets are equal."""
    from kveval.cache.pruning import OBSERVED, kept_tokens
    from kveval.formats.pruning import Pruning

    method, fraction = which
    overlaps, differences, counts = [], [], set()
    for prompt, (full, queries) in enumerate(prompts):
        theirs = stored[f"kept/{method}/{fraction}/{prompt}"]
        pruned = []
        for layer, (keys, values) in enumerate(full):
            scale = float(model.model.layers[layer].self_attn.scaling)
            ours = kept_tokens(Pruning(method, fraction), keys, queries[layer][:, -OBSERVED:], scale)
            at = ours[:, :, None].expand(-1, -1, keys.shape[-1])
            pruned.append((keys.gather(1, at), values.gather(1, at)))
            for a, b in zip(ours.tolist(), theirs[layer].tolist(), strict=True):
                counts |= {len(a), len(b)}
                overlaps.append(len({*a} & {*b}) / len({*a} | {*b}))
        logits = read_on(model, pruned, more[prompt])
        differences.append(float(np.abs(logits - stored[f"logits/{method}/{fraction}/{prompt}"]).max()))
    equal = sum(overlap == 1 for overlap in overlaps)
    print(
        f"{method:10} {fraction:8} {'/'.join(map(str, sorted(counts))):>5} {f'{equal} of {len(overlaps)}':>11} "
        f"{np.mean(overlaps):13.5f} {min(overlaps):7.4f} {max(differences):15.2e}"
    )
    return equal == len(overlaps)


def main() -> int:
    """Exit code 1 where a set differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("half", choices=["reference", "compare"])
    parser.add_argument("path")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    given = parser.parse_args()
    # Its new name is not known to the transformers that kvpress pins.
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)
    with torch.inference_mode():
        if given.half == "compare":
            return 0 if compare(given.path) else 1
        reference(given.path, given.dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())

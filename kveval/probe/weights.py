"""The probe's weights, computed rather than trained: a Llama that copies what followed the longest matching suffix.

The residual stream (512 dims) is eight blocks of 64: ``[own code | codes 1..4 tokens back | output | one | spare]``.

- Every token has a code: a unit vector of 64 dims made of 8 equally long pieces of 8 dims (`token_codes`).
- Layer 1 (`_look_back`): head j copies the code of the token j places back into room j. Its keys are one constant
  vector and its queries the same vector turned back by j positions, both in the ten fastest rotary pairs, so that
  the score is ``sum_i cos(f_i (distance - j))``: largest at distance j.
- Layer 2 (`_match_suffix`): all four heads look for the position p whose four predecessors are the current token and
  the three before it, and copy p's own code to the output room. Head h compares piece h of the codes, each distance
  in its own 8 of the 32 slowest rotary dims. Pieces have one length and distances share no dims, so by Cauchy-Schwarz
  no other suffix scores as high as the same suffix, in any head; the slow dims turn by at most 0.26 rad over 262,144
  positions, which costs the same suffix 0.3 nats there. What a format does to keys and values is what can make it
  lose. The four heads vote.
- The MLPs are zero. The unembedding is the codes, on the output room.
- On request, layer 2's keys have a planted outlier (`_match_suffix`): a large constant in a rotary pair in which every
  query is zero. Exact attention does not see it; a format that scales a key's ordinary channels by it does.

Normalisation is exact: an embedding has squared norm 2 (code and one), a position after layer 1 has 2 + 4 (four more
codes), so each RMSNorm is a known factor that the next matrix divides out.

Layout of a rotary pair in transformers' Llama: dims i and i + 32 of a head turn together by ``theta ** (-i / 32)``.
Rotary positions: Su et al. 2021, arXiv:2104.09864; the two-layer circuit is an induction head, Olsson et al. 2022,
arXiv:2209.11895.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 4, 64, 512, 64
POSITIONS = 262_144
ROPE_THETA = 1e12
RMS_EPS = 1e-6

SEED = 20_261_130
PIECES, PIECE = 8, HEAD_DIM // 8  # a code is 8 pieces of 8 dims
OWN, OUT, ONE = 0, 5 * HEAD_DIM, 6 * HEAD_DIM  # first dim of a block; room j starts at j * HEAD_DIM

FAST_PAIRS = 10  # pairs 0..9: from 1 to 4e-4 rad a token
SLOW_PAIR = 16  # pairs 16..31: at most 1e-6 rad a token
OUTLIER_PAIR = 15  # in neither: zero in every query
DISTANCE_SHARPNESS = 20.0  # nats per fast pair: 2e-5 of the attention leaks to other distances over 262,144 positions
SUFFIX_SHARPNESS = 40.0  # nats per unit of match; the whole suffix is worth sum(lambda^2) = 2.94 units
SUFFIX_WEIGHTS = (1.0, 0.9, 0.8, 0.7)  # lambda: the current token counts most, then one, two, three tokens back
CONFIDENCE = 11.0  # logit of a copied token: it gets 0.85 of the probability; a miss costs at most 18 nats
VALUE = 8.0  # stored values are codes times this: elements about 1, the middle of FP8's range
DISTANCE_KEY, SUFFIX_KEY = 2.0, 4.0  # sizes of stored keys, likewise


def token_codes(vocab_size: int) -> NDArray[np.float64]:
    """Unit vectors (vocab_size, 64), each of 8 pieces with norm 1/sqrt(8), pointing every way about equally.

    Sums of four 16-bit uniforms stand for normal draws: integers, so that the codes are the same bits on any machine
    and under any NumPy (PCG64's raw stream is fixed by NEP 19, the distributions of Generator are not). A row depends
    on its index alone: a longer vocabulary keeps the codes of a shorter one.
    """
    raw = np.random.PCG64(SEED).random_raw(vocab_size * HEAD_DIM)
    lanes = sum(((raw >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64) for shift in (0, 16, 32, 48))
    pieces = (2 * np.asarray(lanes) - 4 * 0xFFFF).reshape(vocab_size, PIECES, PIECE)  # centred on 0
    norms = np.sqrt((pieces**2).sum(axis=-1, keepdims=True).astype(np.float64) * PIECES)
    return (pieces / norms).reshape(vocab_size, HEAD_DIM)


def state_dict(vocab_size: int, outlier: float = 0.0) -> dict[str, Array]:
    """All weights by their names in ``LlamaForCausalLM``, float32; matrices are (out_features, in_features).

    ``outlier`` is the size of the planted outlier of layer 2's keys, whose ordinary numbers are at most 4: from
    4 * 1024 * 448 / cos(45 degrees) = 2.6e6 on, E4M3 with one scale for all channels stores those as zeros.
    """
    codes = token_codes(vocab_size)
    embedding = np.zeros((vocab_size, HIDDEN))
    embedding[:, OWN : OWN + HEAD_DIM] = codes
    embedding[:, ONE] = 1.0
    unembedding = np.zeros((vocab_size, HIDDEN))
    unembedding[:, OUT : OUT + HEAD_DIM] = codes * (CONFIDENCE / _normed(squared_norm=7.0))
    weights: dict[str, NDArray[np.float64]] = {"model.embed_tokens.weight": embedding, "lm_head.weight": unembedding}
    for layer, attention in enumerate((_look_back(), _match_suffix(outlier))):
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.self_attn.{name}_proj.weight": matrix for name, matrix in attention.items()}
        weights |= {f"{prefix}.mlp.{name}_proj.weight": np.zeros((INTERMEDIATE, HIDDEN)) for name in ("gate", "up")}
        weights[f"{prefix}.mlp.down_proj.weight"] = np.zeros((HIDDEN, INTERMEDIATE))
        weights |= {f"{prefix}.{norm}_layernorm.weight": np.ones(HIDDEN) for norm in ("input", "post_attention")}
    weights["model.norm.weight"] = np.ones(HIDDEN)
    return {name: np.ascontiguousarray(matrix, dtype=np.float32) for name, matrix in weights.items()}


def _normed(squared_norm: float) -> float:
    """What RMSNorm makes of a 1.0 in a residual vector of this squared norm."""
    return math.sqrt(HIDDEN / squared_norm)


def _empty() -> dict[str, NDArray[np.float64]]:
    """Zero q, k, v (heads * head_dim, hidden) and o (hidden, heads * head_dim)."""
    width = HEADS * HEAD_DIM
    weights = {name: np.zeros((width, HIDDEN)) for name in "qkv"}
    weights["o"] = np.zeros((HIDDEN, width))
    return weights


def _look_back() -> dict[str, NDArray[np.float64]]:
    """Layer 1: head j - 1 brings the code from j places back to room j.

    The constant vector has angle 45 degrees in every pair, so that no group of stored key elements is all zeros.
    """
    weights, one = _empty(), _normed(squared_norm=2.0)
    query = DISTANCE_SHARPNESS * math.sqrt(HEAD_DIM) / DISTANCE_KEY  # attention divides scores by sqrt(head_dim)
    for head in range(HEADS):
        back, row = head + 1, head * HEAD_DIM
        for pair in range(FAST_PAIRS):
            turn = math.pi / 4 - back * ROPE_THETA ** (-2 * pair / HEAD_DIM)
            weights["k"][row + pair, ONE] = DISTANCE_KEY * math.cos(math.pi / 4) / one
            weights["k"][row + pair + HEAD_DIM // 2, ONE] = DISTANCE_KEY * math.sin(math.pi / 4) / one
            weights["q"][row + pair, ONE] = query * math.cos(turn) / one
            weights["q"][row + pair + HEAD_DIM // 2, ONE] = query * math.sin(turn) / one
        for dim in range(HEAD_DIM):
            weights["v"][row + dim, OWN + dim] = VALUE / one
            weights["o"][back * HEAD_DIM + dim, row + dim] = 1 / VALUE
    return weights


def _match_suffix(outlier: float) -> dict[str, NDArray[np.float64]]:
    """Layer 2: head h matches piece h of the last four codes with the four codes before each position.

    A position is found by what preceded it: the query's code j places back meets the key's room j + 1. Every key of
    every head has the constant ``outlier`` in one pair, at 45 degrees before it is turned, so that both halves of a
    head have an outlier channel; no turn makes a channel larger than ``outlier``.
    """
    weights, one = _empty(), _normed(squared_norm=6.0)
    unit = math.sqrt(PIECES) / one  # a piece of a normed code times this has norm 1
    query = SUFFIX_SHARPNESS * math.sqrt(HEAD_DIM) / SUFFIX_KEY
    for head in range(HEADS):
        row = head * HEAD_DIM
        for slot in (row + OUTLIER_PAIR, row + OUTLIER_PAIR + HEAD_DIM // 2):
            weights["k"][slot, ONE] = outlier * math.sqrt(0.5) / one
        for back, weight in enumerate(SUFFIX_WEIGHTS):
            for dim in range(PIECE):
                half, place = divmod(dim, PIECE // 2)
                slot = row + SLOW_PAIR + back * (PIECE // 2) + place + half * (HEAD_DIM // 2)
                source = back * HEAD_DIM + head * PIECE + dim
                weights["q"][slot, source] = query * weight * unit
                weights["k"][slot, source + HEAD_DIM] = SUFFIX_KEY * weight * unit
        for dim in range(HEAD_DIM):
            weights["v"][row + dim, OWN + dim] = VALUE / one
            weights["o"][OUT + dim, row + dim] = 1 / (VALUE * HEADS)
    return weights

"""The probe: what its weights promise, what its tokenizer keeps, and which needles it must find or lose."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from kveval.errors import KvevalError
from kveval.formats.fp8 import Fp8
from kveval.probe import build, build_tokenizer, export, vocabulary, weights
from kveval.samples import lexicon

CHUNK = 1024
CODES_SHA256 = (
    "fa22b00381f6945b9d95e17bc88bae29cdbab1896c918daf2d50096b63607e7c"  # of 100 codes, float64, little endian
)


@cache
def probe() -> LlamaForCausalLM:
    return build()


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="module")
def haystack() -> tuple[list[int], dict[str, str]]:
    """About 4,096 tokens of the lexicon's sentences with 48 needles, every noun and adjective shared by several."""
    rng = random.Random("test_probe")
    keys = [f"{adjective} {noun}" for adjective in lexicon.KEY_ADJECTIVES[:6] for noun in lexicon.KEY_NOUNS[:8]]
    values = {key: str(rng.randrange(10**6, 10**7)) for key in keys}
    sentences = [" " + _fill(rng.choice(lexicon.FRAMES), rng) for _ in range(310)]
    for key, value in values.items():
        sentences.insert(rng.randrange(len(sentences) + 1), lexicon.NEEDLE.format(key=key, value=value))
    return tokenizer()("".join(sentences)).input_ids, values


def _fill(frame: str, rng: random.Random) -> str:
    for slot, entries in lexicon.SLOTS.items():
        while f"{{{slot}}}" in frame:
            frame = frame.replace(f"{{{slot}}}", rng.choice(entries), 1)
    return frame


def read(ids: list[int], stored: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> DynamicCache:
    """A chunked prefill whose cache holds ``stored(keys)`` and ``stored(values)``."""

    class Stored(DynamicCache):
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().update(stored(key_states), stored(value_states), *args, **kwargs)

    kv = Stored(config=probe().config)
    for start in range(0, len(ids), CHUNK):
        forward(torch.tensor([ids[start : start + CHUNK]]), start, kv, logits_to_keep=1)
    return kv


@torch.inference_mode()
def forward(ids: torch.Tensor, start: int, kv: DynamicCache, logits_to_keep: int = 0) -> torch.Tensor:
    """Logits (batch, tokens, vocabulary) of ``ids`` (batch, tokens) at positions from ``start``. The cache is the
    fourth argument: its name differs between the generations of transformers."""
    positions = torch.arange(start, start + ids.shape[1])[None]
    return probe()(ids, None, positions, kv, logits_to_keep=logits_to_keep).logits


def keep(kv: DynamicCache, copies: int, sinks: int = 0, recent: int | None = None) -> DynamicCache:
    """``copies`` of a cache side by side, of the first ``sinks`` and the last ``recent`` (all) of its positions."""
    kept = DynamicCache()
    for index, layer in enumerate(kv.layers):
        first = (layer.keys.shape[2] if recent is None else recent) * -1
        parts = [torch.cat([x[:, :, :sinks], x[:, :, first:]], dim=2) for x in (layer.keys, layer.values)]
        kept.update(*(part.expand(copies, -1, -1, -1) for part in parts), index)
    return kept


def found(kv: DynamicCache, start: int, values: dict[str, str], sinks: int = 0, recent: int | None = None) -> set[str]:
    """The keys whose value is the greedy answer, from one forward of all questions with their right answers: an answer
    is right if and only if each of its tokens is the most probable after those before it."""
    prompts = [tokenizer()(lexicon.QUESTION.format(key=key)).input_ids for key in values]
    answers = torch.tensor([tokenizer()(f" {value}.").input_ids for value in values.values()])  # (questions, 4)
    ids = torch.cat([torch.tensor(prompts), answers], dim=1)
    logits = forward(ids, start, keep(kv, len(values), sinks, recent), logits_to_keep=answers.shape[1] + 1)
    right = (logits[:, :-1].argmax(-1) == answers).all(-1)
    return {key for key, hit in zip(values, right.tolist(), strict=True) if hit}


def digits_start(ids: list[int], value: str) -> int:
    """Position of the first of the three tokens of `` value``."""
    wanted = tokenizer()(f" {value}").input_ids
    places = [i for i in range(len(ids)) if ids[i : i + 3] == wanted]
    assert len(wanted) == 3
    (place,) = places
    return place


# --- weights


def test_codes_are_the_same_bits_on_every_machine() -> None:
    codes = weights.token_codes(100)
    assert hashlib.sha256(codes.tobytes()).hexdigest() == CODES_SHA256
    assert (weights.token_codes(40) == codes[:40]).all()
    np.testing.assert_allclose((codes.reshape(100, 8, 8) ** 2).sum(-1), 1 / 8, rtol=1e-12)


def test_two_processes_build_the_same_bytes() -> None:
    program = (
        "import hashlib; from kveval.probe import build_tokenizer, vocabulary, weights\n"
        "state = weights.state_dict(len(vocabulary()))\n"
        "print(hashlib.sha256(b''.join(state[name].tobytes() for name in sorted(state))).hexdigest())\n"
        "print(hashlib.sha256(build_tokenizer().backend_tokenizer.to_str().encode()).hexdigest())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    state = build().state_dict()
    here = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()
    there = hashlib.sha256(tokenizer().backend_tokenizer.to_str().encode()).hexdigest()
    assert other.stdout.split() == [here, there]


def test_building_leaves_torchs_generator_alone() -> None:
    before = torch.random.get_rng_state()
    build()
    assert torch.equal(before, torch.random.get_rng_state())


def test_look_back_attends_to_its_distance_over_all_positions() -> None:
    """Softmax of the scores, from the weights themselves, over every distance the model can see."""
    layer = weights.state_dict(2)
    q, k = (layer[f"model.layers.0.self_attn.{name}_proj.weight"].reshape(4, 64, 512) for name in "qk")
    one = 16.0 * np.eye(512)[weights.ONE]  # sqrt(512 / 2): what RMSNorm makes of the constant
    query, key = ((matrix @ one)[:, :32] + 1j * (matrix @ one)[:, 32:] for matrix in (q, k))  # (heads, pairs)
    used = np.flatnonzero(np.abs(key).sum(axis=0))
    angle = np.outer(weights.ROPE_THETA ** (-used / 32), np.arange(weights.POSITIONS))  # the query is ahead of the key
    scores = ((query * key.conj())[:, used] @ np.exp(1j * angle)).real / 8  # (heads, distances)
    attention = np.exp(scores - scores.max(axis=1, keepdims=True))
    attention /= attention.sum(axis=1, keepdims=True)
    assert all(attention[head, head + 1] > 0.9999 for head in range(4))


@pytest.mark.parametrize("changed", range(4))
def test_no_other_suffix_scores_as_high_in_any_head(changed: int) -> None:
    """Replace one token of a suffix by every other token of the vocabulary: each scores less, in each head."""
    size = len(vocabulary())
    state = weights.state_dict(size)
    q, k = (state[f"model.layers.1.self_attn.{name}_proj.weight"].reshape(4, 64, 512) for name in "qk")
    codes, suffix = weights.token_codes(size), [900, 1700, 2500, 3300]
    asking = np.zeros(512)
    asking[: 4 * 64] = codes[suffix].ravel()
    keys = np.zeros((size, 512))
    keys[:, 64 : 5 * 64] = codes[suffix].ravel()
    keys[:, 64 * (changed + 1) : 64 * (changed + 2)] = codes
    for head in range(4):
        scores = (keys @ k[head].T) @ (q[head] @ asking)
        others = np.delete(scores, suffix[changed])
        assert scores[suffix[changed]] > others.max()


def test_every_key_of_the_lexicon_stands_out_from_all_the_others() -> None:
    """Were all keys planted at once, four heads together would still give the asked one most of their attention.

    Suffixes ``of ADJECTIVE NOUN is`` differ in the adjective (lambda .8) and the noun (lambda .9) only.
    """
    ids = {token: index for index, token in enumerate(vocabulary())}
    pieces = weights.token_codes(len(ids)).reshape(-1, 8, 8)[:, :4] * np.sqrt(8)
    masses = []
    for words, weight in ((lexicon.KEY_ADJECTIVES, 0.8), (lexicon.KEY_NOUNS, 0.9)):
        codes = pieces[[ids[f"Ġ{word}"] for word in words]]
        cosine = np.einsum("ahd,bhd->hab", codes, codes)
        masses.append(np.exp(-weights.SUFFIX_SHARPNESS * weight**2 * (1 - cosine)).sum(axis=2))
    attention = 1 / (masses[0][:, :, None] * masses[1][:, None, :])  # (heads, adjectives, nouns)
    assert attention.mean(axis=0).min() > 0.8


# --- the planted outlier


def test_an_outlier_is_eight_numbers_of_layer_twos_keys_and_nothing_else() -> None:
    plain, planted = weights.state_dict(300), weights.state_dict(300, outlier=3e6)
    keys = "model.layers.1.self_attn.k_proj.weight"
    assert plain.keys() == planted.keys()
    assert all(np.array_equal(plain[name], planted[name]) for name in plain if name != keys)
    rows, columns = np.nonzero(plain[keys] != planted[keys])
    assert rows.tolist() == [64 * head + dim for head in range(4) for dim in (15, 47)]  # one rotary pair of each head
    assert set(columns) == {weights.ONE}
    assert not plain[keys][rows].any()
    queries = planted["model.layers.1.self_attn.q_proj.weight"]
    assert not queries[rows].any()  # so that no score depends on it
    one = np.sqrt(512 / 6)  # what RMSNorm makes of the constant there
    size = np.hypot(*planted[keys][rows, columns].reshape(4, 2).T) * one
    np.testing.assert_allclose(size, 3e6, rtol=1e-6)


def test_the_probe_without_an_outlier_is_the_probe() -> None:
    state, zero = probe().state_dict(), build(outlier=0.0).state_dict()
    assert all(torch.equal(state[name].view(torch.int32), zero[name].view(torch.int32)) for name in state)
    assert probe().config.kveval_outlier == 0.0
    assert build(outlier=100.0).config.kveval_outlier == 100.0


@pytest.mark.parametrize("outlier", [100.0, 3e6])
def test_exact_attention_does_not_see_the_outlier(haystack: tuple[list[int], dict[str, str]], outlier: float) -> None:
    key, value = next(iter(haystack[1].items()))
    first = digits_start(haystack[0], value)
    ids = haystack[0][max(0, first - 500) : first + 500] + tokenizer()(lexicon.QUESTION.format(key=key)).input_ids
    planted = build(outlier)
    with torch.inference_mode():
        kv = DynamicCache(config=planted.config)
        logits = planted(torch.tensor([ids]), None, None, kv).logits
        assert torch.equal(logits, probe()(torch.tensor([ids])).logits)
    assert tokenizer().decode(logits[0, -1].argmax()) == f" {value[:3]}"
    largest = kv.layers[1].keys.abs().amax(dim=(0, 2))  # (heads, channels)
    assert largest[:, [15, 47]].min() > 0.7 * outlier
    assert largest.max() <= outlier * (1 + 1e-6)
    assert kv.layers[0].keys.abs().max() < 4  # layer 1 has none
    assert max(layer.values.abs().max() for layer in kv.layers) < 4


def test_one_scale_a_tensor_loses_the_keys_beside_the_outlier_and_one_a_channel_keeps_them(
    haystack: tuple[list[int], dict[str, str]],
) -> None:
    """At equal bits, on the keys that layer 2 stores: of their other 62 channels nothing is left, or nearly all."""
    planted = build(outlier=3e6)
    kv = DynamicCache(config=planted.config)
    with torch.inference_mode():
        planted(torch.tensor([haystack[0][:600]]), None, None, kv)
    keys = kv.layers[1].keys[0]
    ordinary = torch.tensor([dim not in (15, 47) for dim in range(64)])
    stored = {}
    for scale in ("tensor", "channel"):
        codec = Fp8(scale).calibrated(keys.abs().amax(dim=1))
        stored[scale] = torch.empty_like(keys)
        codec.decode(codec.encode(keys), stored[scale])
    assert not stored["tensor"][..., ordinary].any()
    assert (stored["channel"] - keys)[..., ordinary].norm() < 0.04 * keys[..., ordinary].norm()


# --- tokenizer


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\t\r.?0123456789aé日"))))
@example(" The access code of amber falcon is 1234567.\n\nNaïve  日本 ½ ٣ \u200d👩‍👩‍👧 <|endoftext|> 007")
def test_text_survives_encoding_and_offsets_point_at_it(text: str) -> None:
    encoded = tokenizer()(text, return_offsets_mapping=True)
    assert tokenizer().decode(encoded.input_ids) == text
    position = 0
    for token, (start, end) in zip(encoded.input_ids, encoded.offset_mapping, strict=True):
        assert start <= position <= end  # no gap, no step back beyond the character a byte belongs to
        position = end
        piece = tokenizer().decode([token])
        assert piece == text[start:end] or (end - start == 1 and len(text[start].encode()) > 1)
    assert position == len(text)


@given(st.integers(10**6, 10**7 - 1))
def test_numbers_of_seven_digits_are_three_tokens(number: int) -> None:
    text = f"is {number}."
    pieces = [tokenizer().decode([token]) for token in tokenizer()(text).input_ids]
    assert pieces[-5:] == ["s" if pieces[-5] == "s" else "is", f" {text[3:6]}", text[6:9], text[9], "."]


def test_every_word_of_the_lexicon_is_one_token_bare_or_after_a_space() -> None:
    words = [space + word for word in lexicon.vocabulary() for space in ("", " ")]
    assert {len(ids) for ids in tokenizer()(words).input_ids} == {1}
    assert len(tokenizer()(" zyzzyva").input_ids) == 8  # a word it does not know: one token a byte


# --- model


def test_it_is_a_stock_llama() -> None:
    model = probe()
    assert type(model) is LlamaForCausalLM
    assert not model.training
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 4, 4)
    assert (config.head_dim, config.hidden_size, config.max_position_embeddings) == (64, 512, 262_144)
    assert config.rope_parameters["rope_theta"] == 1e12
    assert config.vocab_size == len(tokenizer()) == model.lm_head.weight.shape[0]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_every_needle_is_found_at_4k(haystack: tuple[list[int], dict[str, str]], dtype: torch.dtype) -> None:
    ids, values = haystack
    largest = 0.0

    def stored(x: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, float(x.abs().max()))
        return x.to(dtype).to(torch.float32)

    kv = read(ids, stored)
    assert 1.0 < largest < 448 / 16
    assert found(kv, len(ids), dict(list(values.items())[::3])) == set(list(values)[::3])
    assert probe().config._attn_implementation == "sdpa"


def test_generate_copies_the_number_and_stops_at_the_full_stop(haystack: tuple[list[int], dict[str, str]]) -> None:
    ids, values = haystack
    key, value = next(iter(values.items()))
    prompt = torch.tensor([ids + tokenizer()(lexicon.QUESTION.format(key=key)).input_ids])
    output = probe().generate(
        prompt, do_sample=False, max_new_tokens=16, stop_strings=[".", "\n"], tokenizer=tokenizer()
    )
    assert tokenizer().decode(output[0, prompt.shape[1] :]) == f" {value}."


def test_a_needle_is_found_if_and_only_if_its_digits_are_kept(haystack: tuple[list[int], dict[str, str]]) -> None:
    ids, values = haystack
    kv = read(ids)
    first = {key: digits_start(ids, value) for key, value in values.items()}
    for sinks in (0, 4):
        inside = {key for key in values if first[key] >= len(ids) - 512}
        assert 3 <= len(inside) <= len(values) - 3
        assert found(kv, len(ids), values, sinks, 512) == inside
    key, value = next(iter(values.items()))
    recent = len(ids) - first[key]  # the first digits are the oldest position of the window; then they just left it
    assert found(kv, len(ids), {key: value}, 0, recent) == {key}
    assert found(kv, len(ids), {key: value}, 0, recent - 1) == set()


def test_log_probabilities_are_bounded(haystack: tuple[list[int], dict[str, str]]) -> None:
    """Neither certainty nor a hopeless miss: a perplexity ratio of two formats is finite and rests on no outlier."""
    ids = torch.tensor(haystack[0])
    log_probs = forward(ids[None, :2048], 0, DynamicCache(config=probe().config))[0, :-1].log_softmax(-1)
    nll = -log_probs.gather(1, ids[1:2048, None])
    assert 10 < nll.max() < 18
    assert np.log(0.8) < log_probs.max() < np.log(0.95)
    once = torch.arange(1000, 1300)
    twice = torch.cat([once, once])[None]
    copied = forward(twice, 0, DynamicCache(config=probe().config))[0].log_softmax(-1)[303:599]
    assert copied.gather(1, once[4:, None]).min() > np.log(0.8)  # from the fourth token on the whole suffix repeats


# --- checkpoint


def test_the_checkpoint_loads_anywhere_with_the_same_logits(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "probe"
    export(directory)
    assert {path.name for path in directory.parent.iterdir()} == {"probe"}
    assert not list(directory.glob("*.py"))
    assert directory.stat().st_mode == directory.parent.stat().st_mode  # not a temporary directory's own 0700
    model, loaded = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert type(model) is LlamaForCausalLM
    assert model.dtype == torch.float32
    text = " The access code of amber falcon is 1234567.\n\nNaïve 日本"
    assert loaded(text).input_ids == tokenizer()(text).input_ids
    assert loaded.decode(loaded(text).input_ids) == text
    assert (loaded.eos_token_id, loaded.model_max_length) == (0, 262_144)
    ids = torch.tensor([loaded(text).input_ids])
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, probe()(ids).logits)


def test_an_exported_outlier_is_in_its_weights_and_its_config(tmp_path: Path) -> None:
    export(tmp_path / "probe", outlier=3e6)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "probe")
    built = build(outlier=3e6).state_dict()
    assert all(torch.equal(tensor, built[name]) for name, tensor in model.state_dict().items())
    assert (model.config.kveval_probe, model.config.kveval_outlier) == (True, 3e6)


def test_export_takes_an_empty_directory_and_refuses_a_used_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty")
    weights_before = (tmp_path / "empty" / "model.safetensors").read_bytes()
    with pytest.raises(KvevalError, match="empty' exists and is not an empty directory"):
        export(tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").read_bytes() == weights_before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(KvevalError, match="file' exists"):
        export(tmp_path / "file")
    with pytest.raises(KvevalError, match="cannot write"):
        export(tmp_path / "file" / "below")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "file"}

"""The transformers engine as an lm-eval LM, against lm-eval's own hf model and against the run's answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tiny import tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kveval.engines.base import Answer, Memory, Prompt, guard, stop_at
from kveval.engines.head import Head
from kveval.engines.stream import ASKED_TOKENS, packs
from kveval.engines.transformers import Loaded, TransformersLM, prepare
from kveval.errors import KvevalError
from kveval.formats.parse import parse_format

WORDS = [f"w{i}" for i in range(100)]


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each token; w0 ends a text."""
    tok = Tokenizer(models.WordLevel({**{word: i for i, word in enumerate(WORDS)}, "?": 100}, unk_token="?"))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="w0", unk_token="?", model_max_length=4096)


def text(tokens: int, seed: int = 0) -> str:
    return " ".join(WORDS[i] for i in np.random.default_rng(seed).integers(1, 100, tokens))


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return prepare(tiny_llama(), tokenizer())


@pytest.fixture(scope="module")
def stock() -> HFLM:
    return HFLM(pretrained=tiny_llama(attention="sdpa"), tokenizer=tokenizer(), batch_size=1, max_length=4096)


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


def test_loglikelihood_is_lm_evals_own_up_to_bf16_storage(loaded: Loaded, stock: HFLM) -> None:
    """lm-eval reads once in float32; kveval reads back a BF16 cache in chunks of 50."""
    pairs = [(text(120, i), " " + text(9, 100 + i)) for i in range(6)]
    got = TransformersLM(loaded, parse_format("bf16"), chunk_tokens=50).loglikelihood(requests("loglikelihood", pairs))
    expected = stock.loglikelihood(requests("loglikelihood", pairs))
    assert [x for x, _ in got] == pytest.approx([x for x, _ in expected], rel=2e-3)
    assert [g for _, g in got] == [g for _, g in expected]
    lossy = TransformersLM(loaded, parse_format("int4-g32"), chunk_tokens=50).loglikelihood(
        requests("loglikelihood", pairs)
    )
    assert all(abs(a - b) > 1e-3 for (a, _), (b, _) in zip(lossy, got, strict=True))


def test_a_text_alone_is_scored_after_one_start_token_whether_or_not_the_tokenizer_adds_it() -> None:
    adding = tokenizer()
    adding.backend_tokenizer.post_processor = processors.TemplateProcessing(single="w0 $A", special_tokens=[("w0", 0)])
    assert adding.encode("w5 w6") == [0, 5, 6]
    said = text(40)
    plain, with_start = (
        TransformersLM(prepare(tiny_llama(), tok), parse_format("bf16")).loglikelihood(
            requests("loglikelihood", [("", said)])
        )
        for tok in (tokenizer(), adding)
    )
    assert plain == with_start


def test_loglikelihood_rolling_is_lm_evals_own(loaded: Loaded, stock: HFLM) -> None:
    texts = [(text(300, i),) for i in range(3)]
    got = TransformersLM(loaded, parse_format("bf16"), chunk_tokens=64).loglikelihood_rolling(
        requests("loglikelihood_rolling", texts)
    )
    assert got == pytest.approx(stock.loglikelihood_rolling(requests("loglikelihood_rolling", texts)), rel=1e-3)


def test_generate_until_is_lm_evals_own(loaded: Loaded, stock: HFLM) -> None:
    """Compared where BF16 storage does not tip the balance: most of the answers, and all that stop at a string."""
    asked = [(text(60, i), {"until": ["w7"], "max_gen_toks": 12}) for i in range(12)]
    got = TransformersLM(loaded, parse_format("bf16")).generate_until(requests("generate_until", asked))
    expected = stock.generate_until(requests("generate_until", asked), disable_tqdm=True)
    same = sum(a.split() == b.split() for a, b in zip(got, expected, strict=True))
    assert same >= 10
    assert not any("w7 " in answer for answer in got)


def test_sampled_decoding_is_refused(loaded: Loaded) -> None:
    with pytest.raises(KvevalError, match="do_sample: false"):
        TransformersLM(loaded, parse_format("bf16")).generate_until(
            requests("generate_until", [("w1 w2", {"do_sample": True})])
        )


def test_shared_contexts_are_read_once(loaded: Loaded) -> None:
    """Questions at three lengths of one context, given in any order: the context is read once, as far as it is asked about."""
    ids = np.random.default_rng(3).integers(1, 100, 400)
    prompts = [Prompt(ids, prefix, (5, number + 1), (), 4) for prefix in (300, 100, 200) for number in range(4)]
    lm = TransformersLM(loaded, parse_format("fp8"), chunk_tokens=64)
    reading = lm.read(ids, prompts)
    assert sum(span.tokens for span in reading.spans if span.phase == "prefill") == 300
    assert [span.length for span in reading.spans if span.phase == "ask"] == [100, 200, 300]
    alone = TransformersLM(loaded, parse_format("fp8"), chunk_tokens=64)
    for prompt in prompts:
        alone.read(ids, [prompt])
        assert alone.answers.get(prompt.sha256) == lm.answers.get(prompt.sha256)


def test_answers_are_not_asked_again(loaded: Loaded) -> None:
    class Counting(Memory):
        puts = 0

        def put(self, answers: object) -> None:
            self.puts += 1
            super().put(answers)  # type: ignore[arg-type]

    kept = Counting()
    lm = TransformersLM(loaded, parse_format("bf16"), answers=kept)
    asked = requests("generate_until", [(text(30, i), {"until": [], "max_gen_toks": 3}) for i in range(3)])
    first = lm.generate_until(asked)
    assert kept.puts == 3
    assert lm.generate_until(asked) == first
    assert kept.puts == 3


def test_case_7_a_prompt_that_does_not_fit_is_refused_before_it_is_read() -> None:
    """131,010 tokens + 35 of a template + 128 to generate against 131,072 positions."""
    prompt = Prompt(np.zeros(131_010, dtype=np.int32), 131_010, (0,) * 35, (), 128)
    with pytest.raises(KvevalError, match=r"131173.*131072"):
        guard([prompt], 131_072)
    guard([prompt], 131_173)


def test_a_prompt_beyond_the_models_positions_is_refused_before_anything_is_read(loaded: Loaded) -> None:
    ids = np.ones(5000, dtype=np.int32)
    lm = TransformersLM(loaded, parse_format("bf16"))
    with pytest.raises(KvevalError, match=r"5006.*4096"):
        lm.read(ids, [Prompt(ids, 100, (1,), (), 4), Prompt(ids, 5000, (1, 2), (), 4)])


def test_prompt_hash_tells_questions_apart() -> None:
    ids = np.arange(10)
    base = Prompt(ids, 5, (1, 2), (".",), 4)
    assert base.sha256 == Prompt(list(range(7)), 5, (1, 2), (".",), 4).sha256
    others = [Prompt(ids, 6, (1, 2), (".",), 4), Prompt(ids, 5, (1, 3), (".",), 4), Prompt(ids, 5, (1, 2), (), 4)]
    assert len({base.sha256, *(other.sha256 for other in others)}) == 4


def test_packs_keep_order_and_stay_small() -> None:
    prompts = [Prompt([0], 1, (1,) * 100, (), 28) for _ in range(50)]
    grouped = list(packs(prompts))
    assert [prompt for pack in grouped for prompt in pack] == prompts
    assert max(sum(len(p.tail) + p.max_tokens for p in pack) for pack in grouped) <= ASKED_TOKENS
    assert list(packs([])) == []


def test_stop_at_the_first_stop() -> None:
    assert stop_at("ab.c\nd", ["\n", "."]) == ("ab", True)
    assert stop_at("abc", ["\n", ""]) == ("abc", False)


def test_answers_that_end_at_eos_say_so(loaded: Loaded) -> None:
    """The most likely first token, declared the end of text, ends the answer at once."""
    ids = np.random.default_rng(5).integers(1, 100, 50)
    lm = TransformersLM(loaded, parse_format("bf16"))
    prompt = Prompt(ids, 49, (int(ids[49]),), (), 3)
    lm.read(ids, [prompt])
    first = int(lm.answers.get(prompt.sha256).text.split()[0][1:])  # type: ignore[union-attr]
    other = tiny_llama()
    other.generation_config.eos_token_id = first
    lm = TransformersLM(prepare(other, tokenizer()), parse_format("bf16"))
    lm.read(ids, [prompt])
    assert lm.answers.get(prompt.sha256) == Answer(prompt.sha256, 50, 50, "", "eos")


@pytest.mark.parametrize("settings", [{"final_logit_softcapping": 5.0}, {"logit_scale": 0.25}, {"logits_scaling": 4.0}])
def test_head_applies_what_the_config_does_to_logits(settings: dict[str, float]) -> None:
    model = tiny_llama()
    for name, value in settings.items():
        setattr(model.config, name, value)
    hidden = torch.randn(5, 64)
    with torch.inference_mode():
        plain = model.lm_head(hidden)
        got = Head(model)(hidden)
    expected = 5 * torch.tanh(plain / 5) if "final_logit_softcapping" in settings else plain / 4
    torch.testing.assert_close(got, expected)


def test_a_model_that_changes_its_logits_otherwise_is_refused() -> None:
    """This Llama ignores the soft cap that its config declares: kveval's head and the model's own forward disagree."""
    model = tiny_llama()
    model.config.final_logit_softcapping = 0.5
    with pytest.raises(KvevalError, match="changes its logits"):
        prepare(model, tokenizer())


def test_another_attention_is_refused() -> None:
    with pytest.raises(KvevalError, match="loaded with attention 'sdpa'"):
        prepare(tiny_llama(attention="sdpa"), tokenizer())


def test_the_stream_is_gone_after_a_reading(loaded: Loaded) -> None:
    """The cache is owned by the reading: nothing of it is left on the model."""
    import gc

    from kveval.cache.cache import StreamCache

    ids = np.random.default_rng(3).integers(1, 100, 100)
    TransformersLM(loaded, parse_format("fp8")).read(ids, [Prompt(ids, 50, (5,), (), 4)])
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, StreamCache)]

"""Perplexity of long texts: exact lengths, the same text every time, and the number that one forward pass gives."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from test_samples import trained
from tiny import tiny_llama
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kveval import lmtasks, perplexity_tasks
from kveval.engines.transformers import TransformersLM, prepare
from kveval.errors import KvevalError
from kveval.formats.parse import parse_format
from kveval.samples.haystack import haystack

FOLDER = lmtasks.tasks_path() / "perplexity"
LENGTH = 600


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of tokenizers: llama3's adds a BOS by itself, gpt2's does not."""
    found = {}
    for kind in ("llama3", "gpt2"):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=trained(kind).backend_tokenizer, bos_token="<|bos|>", eos_token="<|bos|>"
        )
        found[kind] = str(tmp_path_factory.mktemp(kind))
        tokenizer.save_pretrained(found[kind])
    return found | {"probe": "probe"}


def texts(name: str, **metadata: Any) -> Any:
    settings: dict[str, Any] = {"tokenizer": name, "length": LENGTH} | metadata
    return perplexity_tasks.texts(**settings)["test"]


# Texts


@pytest.mark.parametrize("hay", ["noise", "pydoc"])
@pytest.mark.parametrize("length", [150, "512", "1k", 2000, "4k"])
@pytest.mark.parametrize("kind", ["probe", "gpt2", "llama3"])
def test_lengths_are_exact(models: dict[str, str], kind: str, length: str | int, hay: str) -> None:
    tokenizer = lmtasks.load_tokenizer(models[kind])
    docs = list(texts(models[kind], length=length, haystack=hay))
    for doc in docs:
        text = perplexity_tasks.doc_to_target(doc)
        assert doc["tokens"] == len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert 0.98 * doc["length"] <= doc["tokens"] + 1 <= doc["length"]
        assert doc["tokens"] + 1 > doc["length"] - perplexity_tasks._TRIES
        assert (doc["bytes"], doc["new_share"]) == (len(text.encode()), 1)
        assert doc["haystack_sha256"] == haystack(hay).sha256
        source, whole = haystack(hay).pieces(0, doc["context"]), ""
        while len(whole) <= len(text):
            whole += next(source)
        assert whole.lstrip().startswith(text)  # the haystack and nothing else
    assert len({doc["sha256"] for doc in docs}) == len(docs) == perplexity_tasks.SAMPLES


def test_documents_are_small_and_built_when_they_are_read(models: dict[str, str]) -> None:
    before = perplexity_tasks._text.cache_info().misses
    docs = texts(models["gpt2"], samples=20, seed=77)
    assert perplexity_tasks._text.cache_info().misses == before
    assert len(json.dumps(docs[3])) < 700
    assert perplexity_tasks.doc_to_target(docs[3]) == perplexity_tasks.text_of(docs[3]).text
    assert perplexity_tasks._text.cache_info().misses == before + 1


def test_a_text_is_the_same_in_any_order_subset_and_process(models: dict[str, str]) -> None:
    forward = [doc["sha256"] for doc in texts(models["llama3"], samples=3, seed=5)]
    perplexity_tasks._text.cache_clear()
    perplexity_tasks._facts.cache_clear()
    more = texts(models["llama3"], samples=6, seed=5)
    assert [more[index]["sha256"] for index in (2, 0)] == [forward[index] for index in (2, 0)]
    metadata = {"tokenizer": models["llama3"], "length": LENGTH, "seed": 5}
    code = (
        f"from kveval import perplexity_tasks\nprint(perplexity_tasks.texts(**{metadata!r})['test'][1]['sha256'])\n"
        "import sys; assert 'torch' not in sys.modules and 'lm_eval' not in sys.modules"
    )
    environment = os.environ | {"PYTHONHASHSEED": "4"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.strip() == forward[1], done.stderr
    assert texts(models["llama3"], seed=6)[0]["sha256"] != forward[0]


def test_a_longer_text_begins_with_the_shorter(models: dict[str, str]) -> None:
    short, long = (perplexity_tasks.doc_to_target(texts(models["gpt2"], length=n)[1]) for n in (1000, 2000))
    assert long.startswith(short)


def test_own_files_are_read_and_must_not_be_far_too_short(models: dict[str, str], tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text(" ".join(f"Lantern {number} stood by the road." for number in range(30)), encoding="utf-8")
    doc = texts(models["gpt2"], haystack=str(own))[0]
    assert doc["new_share"] == pytest.approx(len(own.read_text()) / doc["bytes"], rel=1e-3)
    assert 0.5 <= doc["new_share"] < 1
    with pytest.raises(KvevalError, match="repeats itself"):
        _ = texts(models["gpt2"], haystack=str(own), length=4096)[0]
    with pytest.raises(KvevalError, match="does not exist"):
        _ = texts(models["gpt2"], haystack="no/such/file")[0]


# Metadata


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"length": None}, "no length"),
        ({"length": "many"}, "many"),
        ({"length": 100}, "length 100 is too short"),
        ({"samples": 0}, "samples is 0"),
        ({"sampels": 3}, "did you mean 'samples'"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"tokenizer": None}, "no tokenizer"),
        ({"at": "4k"}, "is not the 4k in the task's name"),
        ({"max_length": 599}, "length 600 is more than the model's max_length of 599"),
        ({"base_url": "http://localhost", "length": "4k"}, "max_length of 2,048"),
        ({"add_bos_token": True}, "add_bos_token=False"),
    ],
)
def test_bad_metadata_is_refused(models: dict[str, str], changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(KvevalError, match=problem):
        texts(**{"name": models["gpt2"]} | changes)


def test_defaults(models: dict[str, str]) -> None:
    assert len(texts(models["gpt2"])) == len(texts(models["gpt2"], samples=None)) == 4
    assert [json.loads(texts(name)[0]["plan"])["haystack"] for name in ("probe", models["gpt2"])] == ["noise", "pydoc"]


@pytest.mark.parametrize("key", ["pretrained", "tokenizer", "model"])
def test_a_model_too_short_for_the_text_is_refused(models: dict[str, str], tmp_path: Path, key: str) -> None:
    """Cut into windows, each token would be predicted from less than all before it, and the mean would not show it."""
    lmtasks.load_tokenizer(models["gpt2"]).save_pretrained(tmp_path)
    metadata: dict[str, Any] = {key: str(tmp_path), "length": 600}
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 599}')
    with pytest.raises(KvevalError, match="max_length of 599"):
        perplexity_tasks.texts(**metadata)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 600}')
    assert len(perplexity_tasks.texts(**metadata)["test"]) == 4


# In lm-eval


def evaluate(engine: LM, length: int | None = LENGTH, task: str = "kveval_perplexity", **metadata: Any) -> Any:
    metadata = {"length": length, "samples": 3} | metadata
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=metadata)
    return simple_evaluate(model=engine, tasks=[task], task_manager=manager)


def model_for(name: str, attention: str) -> tuple[PreTrainedModel, Any]:
    tokenizer = lmtasks.load_tokenizer(name)
    return tiny_llama(attention=attention, vocab_size=len(tokenizer)), tokenizer


def one_pass(name: str, docs: Any) -> list[float]:
    """Mean negative log-likelihood (nats) of each text's tokens behind one BOS, in one forward pass of torch."""
    model, tokenizer = model_for(name, "sdpa")
    found = []
    for doc in docs:
        text = tokenizer(perplexity_tasks.doc_to_target(doc), add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[tokenizer.bos_token_id, *text]])
        with torch.inference_mode():
            logits = model(ids).logits[0, :-1]
        found.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])))
    return found


@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
def test_lm_evals_own_engine_gives_what_one_pass_gives(models: dict[str, str], kind: str) -> None:
    name = models[kind]
    model, tokenizer = model_for(name, "sdpa")
    docs = texts(name, samples=3)
    right = one_pass(name, docs)
    engine = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=LENGTH, add_bos_token=False)
    got = evaluate(engine, pretrained=name, add_bos_token=False)
    row, mean = got["results"]["kveval_perplexity"], sum(right) / 3
    assert row["nll_per_token,none"] == pytest.approx(mean, rel=1e-5)
    assert row["token_perplexity,none"] == pytest.approx(math.exp(mean), rel=1e-4)
    bits = [nll * doc["tokens"] / doc["bytes"] / math.log(2) for nll, doc in zip(right, docs, strict=True)]
    assert row["bits_per_byte,none"] == pytest.approx(sum(bits) / 3, rel=1e-5)
    spread = math.sqrt(sum((nll - mean) ** 2 for nll in right) / 2 / 3)
    assert row["nll_per_token_stderr,none"] == pytest.approx(spread, rel=1e-3)
    # The error of exp(x) is exp(x) times that of x.
    assert row["token_perplexity_stderr,none"] == pytest.approx(math.exp(mean) * spread, rel=1e-3)
    assert row["bits_per_byte_stderr,none"] > 0
    assert make_table(got).count("±") == 3


def test_a_second_bos_would_be_scored_and_is_refused(models: dict[str, str]) -> None:
    """What lm-eval does where the tokenizer adds a BOS: another sum, over one token more."""
    name = models["llama3"]
    with pytest.raises(KvevalError, match="add_bos_token=False"):
        texts(name, pretrained=name)
    assert len(texts(name, pretrained=name, add_bos_token=False)) == 4
    assert len(texts(models["gpt2"], pretrained=models["gpt2"])) == 4
    model, tokenizer = model_for(name, "sdpa")
    doc = texts(name)[0]
    request = Instance("loglikelihood_rolling", {}, (perplexity_tasks.doc_to_target(doc),), 0)
    sums = [
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=4096, **options).loglikelihood_rolling(
            [request]
        )[0]
        for options in ({"add_bos_token": False}, {})
    ]
    assert sums[0] / doc["tokens"] == pytest.approx(-one_pass(name, [doc])[0], rel=1e-5)
    assert abs(sums[1] - sums[0]) > 1


@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
def test_kvevals_engine_gives_it_through_the_cache(models: dict[str, str], kind: str) -> None:
    name = models[kind]
    loaded = prepare(*model_for(name, "kveval_split"))
    right = sum(one_pass(name, texts(name, samples=3))) / 3
    got = {
        fmt: evaluate(TransformersLM(loaded, parse_format(fmt), chunk_tokens=128), tokenizer=name)["results"][
            "kveval_perplexity"
        ]["nll_per_token,none"]
        for fmt in ("bf16", "fp8", "int4-g32")
    }
    assert got["bf16"] == pytest.approx(right, rel=1e-3)
    assert got["fp8"] == pytest.approx(right, rel=1e-2)
    assert len(set(got.values())) == 3  # scored through the cache: what is stored tells
    assert abs(got["bf16"] - right) < abs(got["int4-g32"] - right)


class Even(LM):
    """Gives every token of a text of ``length`` tokens the same probability, one in 16."""

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return [-math.log(16) * request.doc["tokens"] for request in requests]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError


def test_a_task_for_each_length(models: dict[str, str]) -> None:
    names = {"kveval_perplexity", *(f"kveval_perplexity_{length}" for length in perplexity_tasks.LENGTHS)}
    assert {file.stem for file in FOLDER.glob("*.yaml")} == names
    assert names <= set(lmtasks.task_manager({}, FOLDER).all_tasks)
    for length in (4, 8, 16, 32, 64, 128):
        task = f"kveval_perplexity_{length}k"
        got = evaluate(Even(), None, task, tokenizer=models["gpt2"], samples=1, haystack="noise")
        row, (sample,) = got["results"][task], got["samples"][task]
        assert sample["doc"]["length"] == length * 1024
        assert row["nll_per_token,none"] == pytest.approx(math.log(16))
        assert row["token_perplexity,none"] == pytest.approx(16)
        assert row["bits_per_byte,none"] == pytest.approx(4 * sample["doc"]["tokens"] / sample["doc"]["bytes"])
        assert row["token_perplexity_stderr,none"] == "N/A"  # one text


def test_the_base_explains_every_key() -> None:
    text = (FOLDER / "_long_text").read_text(encoding="utf-8")
    for key in ("length", "samples", "seed", "haystack", "tokenizer"):
        assert f"\n#   {key} " in text, f"{key} is not explained"
    assert f" default {perplexity_tasks.SAMPLES}\n" in text

"""kveval's tasks in lm-evaluation-harness: loaded loudly, small documents, whole prompts, scores with an error."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from transformers import LlamaConfig, LlamaForCausalLM

from kveval import lmtasks
from kveval.errors import EvidenceError, KvevalError
from kveval.probe.tokenizer import build_tokenizer
from kveval.samples.needles import ANSWER_TOKENS, UNTIL

METADATA: dict[str, Any] = {"pretrained": "probe", "lengths": [512, 1024], "depths": [0, 0.5, 1], "contexts": 2}


@cache
def docs() -> list[dict[str, Any]]:
    return list(lmtasks.needle_grid(**METADATA)["test"])


class Reader(LM):
    """A model that looks the answer up in the last ``sees_chars`` characters of its prompt."""

    def __init__(self, sees_chars: int) -> None:
        super().__init__()
        self.sees_chars = sees_chars

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        answers = []
        for request in requests:
            text, options = request.args
            assert options["until"] == list(UNTIL)
            assert options["max_gen_toks"] == ANSWER_TOKENS
            key = re.findall(r"code of (\w+ \w+) is$", text)[0]
            found = re.findall(rf"code of {key} is (\d+)\.", text[-self.sees_chars :])
            answers.append(f" {int(found[0]):,}" if found else " 12")
        return answers

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError


def evaluate(model: Any, **arguments: Any) -> dict[str, Any]:
    return simple_evaluate(model=model, tasks=[lmtasks.TASK], task_manager=lmtasks.task_manager(METADATA), **arguments)


# The task file


def test_the_file_says_what_the_code_does() -> None:
    text = (lmtasks.tasks_path() / "needles" / f"{lmtasks.TASK}.yaml").read_text(encoding="utf-8")
    plain = yaml.safe_load(text.replace("!function ", ""))
    assert plain["task"] == lmtasks.TASK
    assert plain["generation_kwargs"]["until"] == list(UNTIL)
    assert plain["generation_kwargs"]["max_gen_toks"] == ANSWER_TOKENS
    settings = lmtasks.Settings.of({"pretrained": "probe"})
    for key in (*settings.__dataclass_fields__, "tokenizer"):
        assert re.search(rf"^#   {key} ", text, re.MULTILINE), f"{key} is not explained"
    assert (settings.lengths, settings.contexts, settings.needles_per_cell, settings.seed) == ((4096,), 1, 2, 0)
    assert settings.depths == tuple(tenth / 10 for tenth in range(11))


def test_every_task_file_is_found() -> None:
    manager = lmtasks.task_manager(METADATA)
    assert lmtasks.TASK in manager.all_tasks
    assert not any(name.startswith("mmlu") for name in manager.all_tasks)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("task: [unclosed", "cannot be loaded"),
        ("task: other\ncustom_dataset: !function kveval.lmtasks.no_such_name\n", "cannot be loaded"),
        ("output_type: generate_until\n", "is not known to lm-eval"),
        ("task: twice\n", "is not known to lm-eval"),
    ],
)
def test_a_broken_task_file_is_an_error(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "a.yaml").write_text("task: twice\n")
    (tmp_path / "b.yaml").write_text(text)
    with pytest.raises(KvevalError, match=problem) as caught:
        lmtasks.task_manager({}, tmp_path)
    assert "b.yaml" in str(caught.value)


# Metadata


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lenghts": [512]}, "did you mean 'lengths'"),
        ({"depth": [0]}, "did you mean 'depths'"),
        ({"lengths": "many"}, "is not a number of tokens"),
        ({"lengths": [True]}, "lengths"),
        ({"depths": ["0"]}, "depths"),
        ({"contexts": 0}, "contexts is 0"),
        ({"contexts": 1.5}, "contexts is 1.5"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"needles_per_cell": 0}, "needles_per_cell is 0"),
        ({"haystack": "no/such/file"}, "does not exist"),
        ({"pretrained": None}, "no tokenizer"),
        ({"max_length": 1000}, "length 1,024 is more than the model's max_length of 1,000"),
        ({"base_url": "http://127.0.0.1", "lengths": ["4k"]}, "length 4,096 is more .* of 2,048"),
    ],
)
def test_bad_metadata_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(KvevalError, match=problem):
        lmtasks.needle_grid(**(METADATA | changes))


def test_model_arguments_and_short_forms_are_accepted() -> None:
    arguments = {"dtype": "float32", "device": "cpu", "max_length": 4096, "config_source": "x", "version": 1.0}
    (context,) = {
        doc["context"] for doc in lmtasks.needle_grid(**arguments, tokenizer="probe", lengths="1k", depths=1)["test"]
    }
    assert context == 0
    assert lmtasks.Settings.of({"lengths": ["4k", 512]}).lengths == (512, 4096)


def test_auto_haystack(tmp_path: Path) -> None:
    assert lmtasks.Settings.of({"pretrained": "probe"}).haystack == "noise"
    assert lmtasks.Settings.of({"pretrained": str(tmp_path)}).haystack == "pydoc"
    (tmp_path / "config.json").write_text(json.dumps({"kveval_probe": True}))
    assert lmtasks.Settings.of({"pretrained": str(tmp_path)}).haystack == "noise"
    assert lmtasks.Settings.of({"tokenizer": "probe", "haystack": "pydoc"}).haystack == "pydoc"


# Documents


def test_documents_are_small_and_name_their_question() -> None:
    assert len(docs()) == 2 * 2 * 3 * 2
    assert max(len(json.dumps(doc)) for doc in docs()) < 600
    tokenizer = build_tokenizer()
    contexts = lmtasks.plan_contexts(tokenizer, METADATA)
    for doc in docs():
        context, question = lmtasks.question_of(doc)
        assert context is contexts[doc["context"]]  # the runner's own object
        assert (question.length, question.depth, question.number) == (doc["length"], doc["depth"], doc["number"])
        text = lmtasks.doc_to_text(doc)
        assert text.endswith(f"Answer: The access code of {doc['key']} is")
        assert len(tokenizer(text)["input_ids"]) + ANSWER_TOKENS <= doc["length"]
        assert f"code of {doc['key']} is {lmtasks.doc_to_target(doc)}." in text


def test_documents_of_other_settings_are_not_mixed_up() -> None:
    other = list(lmtasks.needle_grid(**(METADATA | {"seed": 1}))["test"])
    assert [doc["key"] for doc in other] != [doc["key"] for doc in docs()]
    assert lmtasks.doc_to_text(other[0]) != lmtasks.doc_to_text(docs()[0])
    with pytest.raises(EvidenceError, match="no question 99"):
        lmtasks.question_of(docs()[0] | {"number": 99})


def test_process_results() -> None:
    doc = docs()[0]
    assert lmtasks.process_results(doc, [f" {doc['expected']}"]) == {
        "recall": 1.0,
        "recall_stderr": (doc["context"], 1.0),
    }
    assert lmtasks.process_results(doc, [" 0"])["recall"] == 0.0


# lm-eval


def test_a_model_that_reads_everything_recalls_everything() -> None:
    results = evaluate(Reader(sees_chars=10**9))["results"][lmtasks.TASK]
    assert results["recall,none"] == 1.0
    assert results["recall_stderr,none"] == 0.0


def test_a_model_that_sees_the_end_only_misses_the_rest() -> None:
    evaluated = evaluate(Reader(sees_chars=600), log_samples=True)
    results = evaluated["results"][lmtasks.TASK]
    n = len(docs())
    recall = results["recall,none"]
    assert 0 < recall < 1
    assert results["recall_stderr,none"] == pytest.approx(math.sqrt(recall * (1 - recall) / (n - 1)))
    for sample in evaluated["samples"][lmtasks.TASK]:
        assert sample["recall"] == (sample["doc"]["depth"] == 1.0)


@pytest.mark.e2e
def test_stock_hf_model_runs_the_task(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    metadata = {"pretrained": str(tmp_path), "lengths": [512], "depths": [0, 0.5, 1], "contexts": 2}
    evaluated = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(tmp_path), "dtype": "float32"},
        device="cpu",
        tasks=[lmtasks.TASK],
        task_manager=lmtasks.task_manager(metadata),
        log_samples=True,
    )
    samples = evaluated["samples"][lmtasks.TASK]
    assert len(samples) == 2 * 3 * 2
    assert evaluated["results"][lmtasks.TASK]["recall,none"] == 0.0  # random weights
    assert evaluated["results"][lmtasks.TASK]["recall_stderr,none"] == 0.0
    for sample in samples:
        prompt = (
            sample["arguments"]["gen_args_0"]["arg_0"]
            if isinstance(sample["arguments"], dict)
            else sample["arguments"][0][0]
        )
        assert prompt == lmtasks.doc_to_text(sample["doc"])
    with pytest.raises(KvevalError, match="max_length of 512"):
        lmtasks.task_manager(metadata | {"lengths": [513]}).load([lmtasks.TASK])

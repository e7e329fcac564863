"""RULER in lm-evaluation-harness: every task loads, prompts keep their length in a chat too, scores have errors."""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from test_samples import trained
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kveval import lmtasks, ruler_tasks, task_list
from kveval.cli import main
from kveval.errors import KvevalError
from kveval.samples.ruler.registry import FAMILIES, OFFLINE, THIRTEEN

RULER = (
    *(f"niah_single_{number}" for number in (1, 2, 3)),
    *(f"niah_multikey_{number}" for number in (1, 2, 3)),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
)
FOLDER = lmtasks.tasks_path() / "ruler"
CHAT = (
    "<|system|>\n" + "Read with patience and answer in few words. " * 12 + "\n"  # far more than any slack of a prompt
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a tokenizer that adds BOS and has no chat template."""
    return saved(tmp_path_factory.mktemp("tokenizer"), None)


def saved(directory: Path, template: str | None, kind: str = "llama3") -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained(kind).backend_tokenizer, bos_token="<|bos|>", eos_token="<|end|>"
    )
    tokenizer.save_pretrained(directory)
    if template:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return str(directory)


def load(name: str, **metadata: Any) -> Any:
    """The lm-eval task ``name``."""
    return lmtasks.task_manager({"length": "2k", "samples": 3} | metadata).load([name])["tasks"][name]


# Files


@cache
def written() -> dict[str, str]:
    files: dict[str, str] = runpy.run_path(str(FOLDER / "_write.py"))["files"]()
    return files


def test_the_files_are_those_that_are_written() -> None:
    found = {str(file.relative_to(FOLDER)): file.read_text(encoding="utf-8") for file in FOLDER.rglob("*.yaml")}
    assert found == written(), "run python tasks/ruler/_write.py"


def test_thirteen_tasks_at_six_lengths_in_groups() -> None:
    manager = lmtasks.task_manager({})
    assert set(THIRTEEN) == {family.replace("_synthetic", "") for family in OFFLINE} == set(RULER)
    groups = ruler_tasks.groups()
    for group, families in (("kveval_ruler", OFFLINE), ("kveval_ruler13", THIRTEEN)):
        thirteen = [ruler_tasks.task_name(family) for family in families]
        assert len(thirteen) == 13
        for length in ("4k", "8k", "16k", "32k", "64k", "128k"):
            assert groups[f"{group}_{length}"] == [f"{task}_{length}" for task in thirteen]
        assert len(groups[group]) == 6
        assert groups[f"{group}_at_length"] == thirteen
    assert not [
        task for task in groups["kveval_ruler_4k"] if "ruler_qa" in task
    ]  # generated documents are not called RULER's
    assert set(groups) <= set(manager.all_groups)
    assert {f"{ruler_tasks.task_name(name)}_{length}" for name in FAMILIES for length in ruler_tasks.LENGTHS} <= set(
        manager.all_subtasks
    )


def test_the_base_explains_every_key() -> None:
    text = (FOLDER / "_strict").read_text(encoding="utf-8")
    for key in (*ruler_tasks.Settings.__dataclass_fields__, "tokenizer"):
        assert f"\n#   {key} " in text, f"{key} is not explained"
    assert f"default {ruler_tasks.SAMPLES}\n" in text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("group: all\ntask:\n  - one\n  - twoo\n", "group 'all' names 'twoo', which is no task"),
        ("group: all\ntask:\n  - group: none\n", "group 'all' names 'none'"),
        ("group: all\ntask: [one]\naggregate_metric_list:\n  - {metric: score, weight_by: 1}\n", "cannot be loaded"),
        ("group: all\ntask: [one\n", "cannot be loaded"),
        ("include: nowhere\ntask: two\n", "cannot be loaded"),
    ],
)
def test_a_broken_group_is_an_error(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "a.yaml").write_text("task: one\n")
    (tmp_path / "b.yaml").write_text(text)
    with pytest.raises(KvevalError, match=problem) as caught:
        lmtasks.task_manager({}, tmp_path)
    assert "b.yaml" in str(caught.value)


def test_importing_loads_nothing_heavy() -> None:
    code = "import kveval.ruler_tasks, kveval.task_list, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {
        "torch",
        "transformers",
        "datasets",
        "lm_eval",
        "pandas",
        "scipy",
        "pyarrow",
        "nltk",
        "wonderwords",
        "jinja2",
    }
    assert heavy.isdisjoint(done.stdout.split())


def test_the_command_lists_tasks_with_lengths_and_questions() -> None:
    shown = CliRunner().invoke(main, ["tasks"])
    assert shown.exit_code == 0
    assert shown.output.strip() == task_list.listing()
    lines = {line.split()[0]: line for line in shown.output.splitlines() if "questions" in line and "kveval_" in line}
    assert set(lines) >= {lmtasks.TASK, "kveval_ruler", "kveval_ruler_LENGTH", "kveval_ruler_vt[_LENGTH]"}
    tasks = {f"{ruler_tasks.task_name(family)}[_LENGTH]" for family in FAMILIES} | {"kveval_perplexity[_LENGTH]"}
    assert {name for name in lines if name.endswith("[_LENGTH]")} == tasks
    assert " 650 questions" in lines["kveval_ruler_LENGTH"]
    assert " 3,900 questions" in lines["kveval_ruler"]
    assert " 22 questions" in lines[lmtasks.TASK]
    assert "4k 8k 16k 32k 64k 128k" in shown.output
    assert "strict protocol" in shown.output
    path = CliRunner().invoke(main, ["tasks", "--path"])
    assert Path(path.output.strip()) == lmtasks.tasks_path()


# Metadata


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"length": None}, "no length"),
        ({"length": "many"}, "many"),
        ({"length": 0}, "length is 0"),
        ({"length": True}, "length is True"),
        ({"length": 80}, "no room for vt"),
        ({"samples": 0}, "samples is 0"),
        ({"sampels": 3}, "did you mean 'samples'"),
        ({"reserve_token": 3}, "did you mean 'reserve_tokens'"),
        ({"reserve_tokens": -1}, "reserve_tokens is -1"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"pretrained": None}, "no tokenizer"),
        ({"max_length": 2000}, "length 2,048 is more than the model's max_length of 2,000"),
        ({"at": "4k"}, "metadata length 2k is not the 4k in the task's name"),
    ],
)
def test_bad_metadata_is_refused(model: str, changes: dict[str, Any], problem: str) -> None:
    metadata: dict[str, Any] = {"pretrained": model, "length": "2k", "samples": 2} | changes
    with pytest.raises(KvevalError, match=problem):
        _ = ruler_tasks.strict("vt", **metadata)["test"][0]


def test_other_keys_of_the_model_and_of_the_needle_grid_are_accepted(model: str) -> None:
    others = {"dtype": "float32", "lengths": [4096], "depths": [0], "contexts": 2, "config_source": "x", "version": 1.0}
    settings = ruler_tasks.Settings.of({"pretrained": model, **others}, "4k")
    assert settings == ruler_tasks.Settings(length=4096, samples=50, seed=0, haystack="pydoc", reserve_tokens=None)
    assert ruler_tasks.Settings.of({"pretrained": "probe", "length": "4k"}, "4k").haystack == "noise"


# Documents


def test_documents_are_small_and_built_when_they_are_read(model: str) -> None:
    before = ruler_tasks._sample.cache_info().misses
    task = load("kveval_ruler_vt", pretrained=model, samples=20, seed=77)
    assert len(task.eval_docs) == 20
    task.build_all_requests(limit=3)
    assert ruler_tasks._sample.cache_info().misses == before + 3
    for number, instance in enumerate(task.instances):
        doc, (text, options) = instance.doc, instance.args
        built = ruler_tasks.sample_of(doc)
        assert text == built.draft.text
        assert len(json.dumps(doc)) < 1500
        assert (doc["index"], doc["length"], doc["sha256"]) == (number, 2048, built.sha256)
        assert options == {"until": [], "max_gen_toks": FAMILIES["vt"].budget_tokens, "do_sample": False}
        assert ruler_tasks.doc_to_target(doc) == ", ".join(group[0] for group in built.draft.expected)
    assert ruler_tasks._sample.cache_info().misses == before + 3


def test_a_sample_is_the_same_in_any_order_subset_and_process(model: str) -> None:
    metadata: dict[str, Any] = {"pretrained": model, "length": 2048, "seed": 5}
    forward = [doc["sha256"] for doc in ruler_tasks.strict("niah_single_2", samples=4, **metadata)["test"]]
    assert len(set(forward)) == 4
    ruler_tasks._sample.cache_clear()
    ruler_tasks._facts.cache_clear()
    more = ruler_tasks.strict("niah_single_2", samples=6, **metadata)["test"]
    assert [more[index]["sha256"] for index in (3, 1, 0)] == [forward[index] for index in (3, 1, 0)]
    code = (
        "from kveval import ruler_tasks\n"
        f"docs = ruler_tasks.strict('niah_single_2', samples=3, **{metadata!r})['test']\n"
        "print(docs[2]['sha256'])"
    )
    environment = os.environ | {"PYTHONHASHSEED": "4"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == forward[2]
    other = ruler_tasks.strict("niah_single_2", samples=1, **(metadata | {"seed": 6}))["test"]
    assert other[0]["sha256"] != forward[0]


def test_the_haystack_asked_for_is_used_where_ruler_has_essays(model: str, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("Nothing but this one line about lanterns. " * 9, encoding="utf-8")
    metadata: dict[str, Any] = {
        "pretrained": model,
        "length": "2k",
        "samples": 1,
        "haystack": str(tmp_path / "own.txt"),
    }
    texts = {
        family: ruler_tasks.doc_to_text(ruler_tasks.strict(family, **metadata)["test"][0])
        for family in ("niah_single_1", "niah_single_2", "niah_multivalue")
    }
    assert "lanterns" not in texts["niah_single_1"]  # RULER repeats a noise sentence there
    assert texts["niah_single_2"].count("about lanterns") > 20
    assert texts["niah_multivalue"].count("about lanterns") > 20
    with pytest.raises(KvevalError, match="does not exist"):
        _ = ruler_tasks.strict("niah_single_2", **(metadata | {"haystack": "no/such/file"}))["test"][0]


def test_what_is_not_rulers_is_not_called_so() -> None:
    assert ruler_tasks.task_name("niah_single_1") == "kveval_ruler_niah_single_1"
    for family in FAMILIES:
        rulers = family in RULER
        assert ruler_tasks.task_name(family) == ("kveval_ruler_" if rulers else "kveval_") + family


# Prompts as an engine gets them


class Watching(HFLM):
    """lm-eval's own engine for Hugging Face models, which shows the token ids that it would read."""

    seen: list[list[int]]

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **options: Any) -> Any:
        assert context.shape[0] == 1
        self.seen.append(context[0].tolist())
        self.budget = max_length - context.shape[1]
        return context  # an empty answer


@pytest.mark.parametrize(
    ("template", "apply"),
    [("{{ bos_token }}" + CHAT, True), ("{{ bos_token }}" + CHAT, False), (CHAT, True), (CHAT, False), (None, False)],
    ids=["template-bos-chat", "template-bos-plain", "template-chat", "template-plain", "none-plain"],
)
@pytest.mark.parametrize("kind", ["llama3", "gpt2"])
def test_prompts_have_their_length_and_one_bos(tmp_path: Path, kind: str, template: str | None, apply: bool) -> None:
    directory = saved(tmp_path, template, kind)
    tokenizer = lmtasks.load_tokenizer(directory)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    engine = Watching(LlamaForCausalLM(config), tokenizer=tokenizer, device="cpu", max_length=4096)
    engine.seen = []
    simple_evaluate(
        model=engine,
        tasks=["kveval_ruler_niah_single_1"],
        task_manager=lmtasks.task_manager({"pretrained": directory, "length": "2k", "samples": 3}),
        apply_chat_template=apply,
        bootstrap_iters=0,
    )
    assert len(engine.seen) == 3
    reserve = ruler_tasks.chat_tokens(tokenizer)
    assert (reserve > 0) == (template is not None)
    for ids in engine.seen:
        used = len(ids) + engine.budget + (0 if apply else reserve)
        assert 0.98 * 2048 <= used <= 2048
        adds = kind == "llama3" or (apply and template is not None and "bos" in template)
        assert ids.count(tokenizer.bos_token_id) == ids[:1].count(tokenizer.bos_token_id) == adds
    docs = ruler_tasks.strict("niah_single_1", pretrained=directory, length="2k", samples=3)["test"]
    begun = tuple(doc["answer_prefix"].strip() for doc in docs)
    assert all(tokenizer.decode(ids).endswith(begun) for ids in engine.seen)


def test_what_a_template_adds(tmp_path: Path) -> None:
    added = {}
    for kind in ("llama3", "gpt2"):
        for name, template in (("bos", "{{ bos_token }}" + CHAT), ("none", CHAT)):
            (tmp_path / kind / name).mkdir(parents=True)
            tokenizer = lmtasks.load_tokenizer(saved(tmp_path / kind / name, template, kind))
            added[kind, name] = ruler_tasks.chat_tokens(tokenizer)
            user = [{"role": "user", "content": ""}]
            around = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
            tokens = len(tokenizer(around, add_special_tokens=False)["input_ids"])
            assert tokens - 1 <= added[kind, name] <= tokens + 12
    assert added["llama3", "bos"] == added["llama3", "none"]  # the tokenizer's own BOS is counted with the prompt
    assert added["gpt2", "bos"] == added["gpt2", "none"] + 1


def test_more_can_be_reserved_and_a_template_that_fails_is_told(tmp_path: Path) -> None:
    directory = saved(tmp_path, "{{ messages[0]['content'] }}{{ raise_exception('never') }}")
    metadata: dict[str, Any] = {"pretrained": directory, "length": 2048, "samples": 1}
    with pytest.raises(KvevalError, match=r"never.*reserve_tokens"):
        _ = ruler_tasks.strict("vt", **metadata)["test"][0]
    free, kept = (
        ruler_tasks.sample_of(ruler_tasks.strict("vt", **metadata, reserve_tokens=tokens)["test"][0])
        for tokens in (0, 300)
    )
    tokenizer = lmtasks.load_tokenizer(directory)
    shorter = len(tokenizer(free.draft.text)["input_ids"]) - len(tokenizer(kept.draft.text)["input_ids"])
    assert 260 <= shorter <= 340


# Scores


class Knowing(LM):
    """Answers what is expected, but for documents with these numbers."""

    def __init__(self, wrong: set[int]) -> None:
        super().__init__()
        self.wrong = wrong

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [
            "nothing" if request.doc["index"] in self.wrong else " " + ruler_tasks.doc_to_target(request.doc) + "."
            for request in requests
        ]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError


def test_scores_have_errors_and_lengths_not_asked_for_have_no_number() -> None:
    manager = lmtasks.task_manager({"pretrained": "probe", "samples": 4})
    evaluated = simple_evaluate(model=Knowing(wrong={2}), tasks=["kveval_ruler_4k"], task_manager=manager)
    results, error = evaluated["results"], math.sqrt(0.75 * 0.25 / 3)
    tasks = [f"{ruler_tasks.task_name(family)}_4k" for family in OFFLINE]
    assert set(results) == {*tasks, "kveval_ruler_4k"}
    for task in tasks:
        assert results[task]["score,none"] == 0.75
        assert results[task]["score_stderr,none"] == pytest.approx(error)
    group = evaluated["groups"]["kveval_ruler_4k"]
    assert group["score,none"] == 0.75
    assert group["score_stderr,none"] == pytest.approx(error / math.sqrt(13))
    assert "strict" in group["alias"]
    assert all(config["metadata"]["protocol"] == "strict" for config in evaluated["configs"].values())
    assert not [value for row in results.values() for value in row.values() if value == -1]


def test_a_group_weighs_its_tasks_equally() -> None:
    groups = lmtasks.task_manager({"pretrained": "probe", "length": "4k", "samples": 1}).load(
        ["kveval_ruler_at_length"]
    )
    (aggregate,) = groups["groups"]["kveval_ruler_at_length"].aggregate_metric_list
    assert (aggregate.metric, aggregate.weight_by_size) == ("score", False)

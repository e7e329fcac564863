"""Questions about documents: SQuAD's and HotpotQA's formats, the made-up world, exact lengths, golds that move."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_samples import TOKENIZERS, one_byte_a_token

from kveval.errors import KvevalError
from kveval.samples.haystack import haystack
from kveval.samples.ruler import corpora, qa
from kveval.samples.ruler.documents import Document, facts, world
from kveval.samples.ruler.sample import Sample, sample
from kveval.samples.ruler.score import ruler_score, score

ENTRY = re.compile(r"Document (\d+):\n")
FAMILIES = qa.FAMILIES | qa.FAMILIES_SYNTHETIC
VARIABLES = ("KVEVAL_SQUAD", "KVEVAL_HOTPOTQA")


def prose(number: int, sentences: int = 6) -> str:
    pieces = haystack("noise").pieces(7, number)
    return "".join(next(pieces) for _ in range(sentences)).strip()


def squad() -> dict[str, Any]:
    """SQuAD 2.0's format: 12 articles of 4 paragraphs; a question with aliases and one without an answer in each."""
    data = []
    for article in range(12):
        paragraphs = []
        for part in range(4):
            number = 4 * article + part
            aliases = [f"Baron {number}", f"the Baron {number}", f"Baron {number}"]
            asked = {
                "question": f" Who rules town {number}?",
                "id": f"a{number}",
                "answers": [{"text": text, "answer_start": 0} for text in aliases],
                "is_impossible": False,
            }
            nobody = {
                "question": f"Who ruled town {number}?",
                "id": f"b{number}",
                "answers": [],
                "plausible_answers": [{"text": "Baron", "answer_start": 0}],
                "is_impossible": True,
            }
            context = f"Baron {number} rules town {number}. {prose(number)}"
            paragraphs.append({"context": context, "qas": [nobody, asked]})
        data.append({"title": f"Land {article}", "paragraphs": paragraphs})
    data.append(data[3])  # an article that comes twice
    return {"version": "v2.0", "data": data}


def hotpotqa() -> list[dict[str, Any]]:
    """HotpotQA's format, distractor: 8 questions, each with ten documents, some of which come in two of them."""
    rows = []
    for number in range(8):
        context = [[f"Song {number}", [f"Song {number} is by Singer {number}.", " " + prose(number, 3)]]]
        context += [[f"Topic {5 * number + more}", [prose(100 + 5 * number + more)]] for more in range(8)]
        context.append([f"Singer {number}", [prose(300 + number, 2), f" Singer {number} is from Port {number}."]])
        rows.append(
            {
                "_id": f"q{number}",
                "question": f"Where is the singer of Song {number} from?",
                "answer": f"Port {number}",
                "supporting_facts": [[f"Singer {number}", 1], [f"Song {number}", 0], [f"Singer {number}", 0]],
                "context": context,
                "type": "bridge",
                "level": "hard",
            }
        )
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Both data sets under their official names in one folder, as a user would have them."""
    path = tmp_path_factory.mktemp("corpora")
    (path / "dev-v2.0.json").write_text(json.dumps(squad()), encoding="utf-8")
    (path / "hotpot_dev_distractor_v1.json").write_text(json.dumps(hotpotqa()), encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def data(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, folder)


def made(kind: str, name: str, length: int, index: int = 0, reserve: int = 0) -> Sample:
    return sample(TOKENIZERS[kind](), FAMILIES[name], seed=3, length=length, index=index, reserve_tokens=reserve)


def told(text: str) -> list[str]:
    """The documents of a prompt; their numbers are checked."""
    parts = ENTRY.split(text.removeprefix(qa.HEADER).split(qa.QUESTION.split("{")[0])[0])
    assert parts[0] == ""
    assert parts[1::2] == [str(number) for number in range(1, len(parts) // 2 + 1)]
    assert all(part.endswith("\n\n") and not part.endswith("\n\n\n") for part in parts[2::2])
    return [part[:-2] for part in parts[2::2]]


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("length", [1024, 2048, 4096, 8192])
def test_the_length_is_exact_and_used(kind: str, name: str, length: int) -> None:
    tokenizer = TOKENIZERS[kind]()
    for index in range(4):
        built = made(kind, name, length, index, reserve=40 * (index % 2))
        tokens = len(tokenizer(built.draft.text, add_special_tokens=True)["input_ids"])
        assert built.tokens == tokens + 40 * (index % 2)
        assert 0.98 * length <= built.tokens + built.budget_tokens <= length
        assert built.draft.text.endswith(built.draft.answer_prefix)
        assert len(told(built.draft.text)) > 1


def test_budgets_and_metrics_are_rulers() -> None:
    assert {name: (family.budget_tokens, family.any_of) for name, family in FAMILIES.items()} == {
        "qa_1": (32, True),
        "qa_2": (32, True),
        "qa_synthetic_1": (32, True),
        "qa_synthetic_2": (32, True),
    }


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_documents_with_the_answer_move_evenly(name: str) -> None:
    places = [made("probe", name, 8192, index).draft.depths for index in range(40)]
    first = [own[0] for own in places]
    fifths = Counter(min(int(5 * place), 4) for place in first)
    assert min(fifths[fifth] for fifth in range(5)) >= 5  # 8 on average
    assert min(first) < 0.05
    assert max(first) > 0.95
    for own in places:
        assert len(own) == (2 if name.endswith("2") else 1)
        assert len(own) == 1 or abs(abs(own[0] - own[1]) - 0.5) < 0.2
    again = [made("probe", name, 8192, index).draft.depths for index in (39, 7)]
    assert again == [places[39], places[7]]


@pytest.mark.parametrize("name", list(qa.FAMILIES))
def test_real_questions_are_asked_in_their_order(name: str) -> None:
    data = corpora.corpus(FAMILIES[name].corpus)  # type: ignore[attr-defined]
    for index in (0, 5, len(data.questions) + 5):
        asked = data.questions[index % len(data.questions)]
        draft = made("gpt2", name, 4096, index).draft
        assert draft.text.endswith(f"Question: {asked.text} Answer:")
        assert draft.expected == (asked.aliases,)
        documents = told(draft.text)
        for number, depth in zip(asked.gold, draft.depths, strict=True):
            assert documents.count(data.documents[number]) == 1
            place = documents.index(data.documents[number]) / (len(documents) - 1)
            assert depth == pytest.approx(place, abs=0.2)
        # What is on the same subject is there before what is not, as in RULER.
        assert {data.documents[number] for number in asked.near} <= set(documents)
        cut = [text for text in documents if text not in data.documents]
        assert len(cut) <= 1
        assert all(any(text and whole.startswith(text) for whole in data.documents) for text in cut)


def test_distractors_come_again_where_a_corpus_is_too_small() -> None:
    draft = made("gpt2", "qa_1", 16_384).draft
    times = Counter(told(draft.text))
    data = corpora.corpus("squad")
    assert set(data.documents) <= set(times)
    assert times[data.documents[data.questions[0].gold[0]]] == 1
    assert max(times.values()) > 1


def test_squad_is_read_as_ruler_reads_it() -> None:
    data = corpora.corpus("squad")
    assert len(data.documents) == len(set(data.documents)) == 48
    assert len(data.questions) == 52  # those of the article that comes twice too
    question = data.questions[5]
    assert question.text == "Who rules town 5?"
    assert question.aliases == ("Baron 5", "the Baron 5")
    assert question.gold == (5,)
    assert question.near == (4, 6, 7)
    assert (
        score([question.aliases], "baron 5.", any_of=True) == ruler_score([question.aliases], "baron 5.", True) == 1.0
    )


def test_hotpotqa_is_read_as_ruler_reads_it() -> None:
    data = corpora.corpus("hotpotqa")
    assert len(data.documents) == len(set(data.documents)) == 16 + 5 * 7 + 8
    question = data.questions[1]
    assert [data.documents[number].split("\n")[0] for number in question.gold] == ["Singer 1", "Song 1"]
    assert len(question.near) == 8
    assert data.documents[question.gold[1]].startswith("Song 1\nSong 1 is by Singer 1. ")


def test_rows_of_datasets_are_the_official_formats() -> None:
    rows = [
        {
            "title": article["title"],
            "context": part["context"],
            "question": asked["question"],
            "answers": {"text": [answer["text"] for answer in asked["answers"]], "answer_start": []},
        }
        for article in squad()["data"][:-1]
        for part in article["paragraphs"]
        for asked in part["qas"]
    ]
    official = corpora.read_squad(squad() | {"data": squad()["data"][:-1]})
    again = corpora.read_squad(corpora.squad_rows(rows))
    assert (again.documents, again.questions) == (official.documents, official.questions)
    columns = [
        {
            "question": row["question"],
            "answer": row["answer"],
            "context": {"title": [c[0] for c in row["context"]], "sentences": [c[1] for c in row["context"]]},
            "supporting_facts": {
                "title": [fact[0] for fact in row["supporting_facts"]],
                "sent_id": [fact[1] for fact in row["supporting_facts"]],
            },
        }
        for row in hotpotqa()
    ]
    first, second = corpora.read_hotpotqa(hotpotqa()), corpora.read_hotpotqa(corpora.hotpotqa_rows(columns))
    assert (first.documents, first.questions) == (second.documents, second.questions)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "KVEVAL_SQUAD=.* is not a file.*dev-v2.0.json.*qa_synthetic_1"),
        ("{}", "not squad in its official format.*KVEVAL_SQUAD"),
        ("not json", "not squad in its official format"),
        ('{"data": []}', "holds no question"),
    ],
)
def test_a_bad_local_copy_is_said(
    content: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    monkeypatch.setenv("KVEVAL_SQUAD", str(file))
    with pytest.raises(KvevalError, match=message):
        made("probe", "qa_1", 4096)


def test_a_corpus_without_distractors_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"data": [{"paragraphs": [squad()["data"][0]["paragraphs"][0]]}]}
    (tmp_path / "squad.json").write_text(json.dumps(one), encoding="utf-8")  # RULER's own name for it
    monkeypatch.setenv("KVEVAL_SQUAD", str(tmp_path))
    with pytest.raises(KvevalError, match="no other document"):
        made("probe", "qa_1", 4096)


@pytest.mark.parametrize(("name", "variable"), [("qa_1", "KVEVAL_SQUAD"), ("qa_2", "KVEVAL_HOTPOTQA")])
def test_without_data_it_says_how_to_give_it(name: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets  # type: ignore[import-untyped]

    def offline(*_: Any, **__: Any) -> Any:
        raise ConnectionError("offline")

    monkeypatch.delenv(variable)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(KvevalError, match=f"ConnectionError.*set {variable} to .*{name.replace('qa', 'qa_synthetic')}"):
        made("probe", name, 4096)


def test_the_hub_is_asked_for_the_validation_part(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def rows(*names: str, split: str) -> list[dict[str, Any]]:
        asked.append((*names, split))
        return [{"title": "T", "context": f"Text {n}", "question": "Q?", "answers": {"text": ["A"]}} for n in range(3)]

    corpora._corpus.cache_clear()
    monkeypatch.delenv("KVEVAL_SQUAD")
    monkeypatch.setattr(datasets, "load_dataset", rows)
    assert corpora.corpus("squad").documents == ("Text 0", "Text 1", "Text 2")
    assert asked == [("rajpurkar/squad_v2", "validation")]
    corpora._corpus.cache_clear()


# The made-up world


@cache
def small_world(seed: int = 0, count: int = 60) -> tuple[Document, ...]:
    return world(Random(seed), count)


@given(st.integers(0, 2**32), st.integers(1, 60))
@settings(max_examples=15, deadline=None)
def test_a_world_is_consistent(seed: int, count: int) -> None:
    documents = small_world(seed, count)
    assert documents == world(Random(seed), count)
    assert len({document.title for document in documents}) == len(documents) == count
    assert len({fact.question for document in documents for fact in document.facts}) == sum(
        len(document.facts) for document in documents
    )
    for number, document in enumerate(documents):
        assert document.text.startswith(document.title + "\n")
        for fact in document.facts:
            assert fact.documents[0] == number
            own = documents[fact.documents[-1]]
            assert own.text.count(fact.sentence) == 1
            assert sum(fact.sentence in other.text for other in documents) == 1
            assert fact.sentence.endswith(f" {fact.expected[0]}.")
            assert fact.expected[0] not in fact.question
    assert len(facts(documents, 1)) == 4 * count
    assert len(facts(documents, 2)) == (count + 1) // 3


def test_single_hops_end_with_the_words_before_the_value() -> None:
    for fact in facts(small_world(), 1):
        title = small_world()[fact.documents[0]].title
        assert fact.sentence == f"{fact.answer_prefix.strip()} {fact.expected[0]}."
        assert re.search(rf" of {title} (is|was|will be|had been)$", fact.answer_prefix)


def test_two_hops_need_both_documents() -> None:
    documents = small_world()
    for fact in facts(documents, 2):
        ship, person = (documents[number] for number in fact.documents)
        assert f"The builder of {ship.title} is {person.title}." in ship.text
        assert f"The birthplace of {person.title} is {fact.expected[0]}." in person.text
        assert ship.title in fact.question
        assert person.title not in fact.question + fact.answer_prefix
        assert fact.expected[0] not in ship.text
        assert ship.title not in person.text


def test_a_name_in_the_way_of_lists_is_an_alias() -> None:
    people = [fact for fact in facts(small_world(), 1) if " guide " in fact.question]
    first, last = people[0].expected[0].split()
    assert people[0].expected == (f"{first} {last}", f"{last}, {first}")


def test_a_world_of_many_documents_has_unlike_titles() -> None:
    documents = world(Random(0), 9000)
    assert len({document.title for document in documents}) == 9000


@pytest.mark.parametrize("length", [4096, 131_072])
def test_one_hop_can_be_answered_by_matching_four_tokens(length: int) -> None:
    tokenizer = TOKENIZERS["probe"]()
    for index in range(12 if length < 10_000 else 1):
        draft = made("probe", "qa_synthetic_1", length, index).draft
        ids = tokenizer(draft.text)["input_ids"]
        value = tokenizer(f" {draft.expected[0][0]}.")["input_ids"]
        for done in range(len(value)):
            suffix = (ids + value[:done])[-4:]
            found = [ids[at + 4] for at in range(len(ids) - 4) if ids[at : at + 4] == suffix]
            assert set(found) == {value[done]}, (draft.answer_prefix, index)


def test_every_document_of_a_made_up_prompt_is_another() -> None:
    for kind in TOKENIZERS:
        documents = told(made(kind, "qa_synthetic_2", 8192, 1).draft.text)
        titles = [document.split("\n")[0] for document in documents]
        assert len(set(titles)) == len(titles)


class Counting:
    """A tokenizer that keeps count of the tokens it was asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.tokens = tokenizer, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        batch = self.tokenizer(*args, **options)
        self.tokens += sum(len(row) if isinstance(row, list) else 1 for row in batch["input_ids"])
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_128k_is_tokenised_about_once(name: str) -> None:
    for kind in ("probe", "llama3"):
        counting = Counting(TOKENIZERS[kind]())
        built = sample(counting, FAMILIES[name], seed=3, length=131_072, index=1)
        assert counting.tokens < 1.5 * 131_072
        assert built.tokens + built.budget_tokens >= 0.98 * 131_072
        titles = [document.split("\n")[0] for document in told(built.draft.text)]
        assert len(set(titles)) == len(titles) or "synthetic" not in name


def test_a_sample_is_the_same_alone_and_in_any_order() -> None:
    order = [(name, index) for name in FAMILIES for index in range(3)]

    def hashes(asked: list[tuple[str, int]]) -> dict[tuple[str, int], str]:
        return {(name, index): made("probe", name, 2048, index).sha256 for name, index in asked}

    forth = hashes(order)
    assert hashes(order[::-1]) == forth
    assert hashes(order[4:5])[order[4]] == forth[order[4]]
    assert len(set(forth.values())) == len(order)


GOLDEN = {
    ("qa_synthetic_1", 2048): "478dd1c902d233a1",
    ("qa_synthetic_1", 8192): "00398257eaf82db3",
    ("qa_synthetic_2", 2048): "644515ab05b61fe8",
    ("qa_synthetic_2", 8192): "1a200224403fb046",
}


@pytest.mark.parametrize(("name", "length"), GOLDEN)
def test_golden(name: str, length: int) -> None:
    built = sample(one_byte_a_token(), FAMILIES[name], seed=0, length=length, index=0)
    assert built.sha256[:16] == GOLDEN[name, length]


def test_no_room() -> None:
    with pytest.raises(KvevalError, match="ask for a longer length"):
        sample(one_byte_a_token(), FAMILIES["qa_synthetic_2"], seed=0, length=512, index=0)

"""What the lm-eval tasks in tasks/perplexity call: how well a model predicts a long text, each token after all before it.

A document is one text of a haystack, with nothing planted in it. It is small and names the text, which is built when
lm-eval asks for it. Text ``context`` is the same whichever others are built, and the longer one begins with the shorter.

Which tokens count. The engines read one BOS (EOS where there is none), which the tokenizer need not add by itself, and
score every token of the text after it: as many as the text has without special tokens. ``length`` has room for both.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kveval import lmtasks
from kveval.errors import KvevalError
from kveval.lm_stderr import lm_eval_stderr
from kveval.ruler_tasks import LENGTHS, Settings
from kveval.samples.encoded import Encoded, cut, special_prefix
from kveval.samples.haystack import Haystack, haystack
from kveval.samples.ruler.sample import USED_SHARE
from kveval.samples.tokenised import tokenised

__all__ = ["LENGTHS", "SAMPLES", "Text", "doc_to_target", "process_results", "text_of", "texts"]

SAMPLES = 4
SHORTEST = 128  # tokens
_TRIES = 16
NEW_SHARE = 0.5  # of a text, at least, that it does not repeat: what was read before is predicted by copying


@dataclass(frozen=True)
class Text:
    """A haystack's text. ``tokens``: without special tokens. ``new_share``: what of it comes before the haystack is used up."""

    text: str
    tokens: int
    new_share: float
    haystack_sha256: str

    @property
    def sha256(self) -> str:
        """Of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def texts(at: str | None = None, **metadata: Any) -> dict[str, Any]:
    """lm-eval's ``custom_dataset``: split -> datasets.Dataset of ``samples`` documents, each built when it is read.

    ``at``: the length in the task's name; tasks/perplexity/_long_text explains the metadata. Raises KvevalError when it is
    not usable, no tokenizer is named, or the model would not read each text once and whole after a single BOS.
    """
    from datasets import Dataset  # type: ignore[import-untyped]

    name = lmtasks.require_tokenizer_name(metadata)
    given = {key: value for key, value in metadata.items() if value is not None}
    settings = Settings.of({"samples": SAMPLES, **given}, at)
    if settings.length < SHORTEST:
        raise KvevalError(f"length {settings.length:,} is too short for a text: ask for {SHORTEST} tokens or more")
    # lm-eval would cut a longer text into windows, each without what stands before it: another quantity, and not a word of it.
    lmtasks.refuse_short_model({"pretrained": name} | given, settings.length)
    _refuse_second_bos(name, metadata)
    plan = json.dumps(
        {"tokenizer": name, "length": settings.length, "seed": settings.seed, "haystack": settings.haystack}
    )
    rows = [{"length": settings.length, "context": number, "plan": plan} for number in range(settings.samples)]
    return {"test": Dataset.from_list(rows).with_transform(_with_facts)}


def text_of(doc: Mapping[str, Any]) -> Text:
    """The text that a document names."""
    return _text(doc["plan"], doc["context"])


def doc_to_target(doc: Mapping[str, Any]) -> str:
    """The text: what lm-eval asks the log-likelihood of."""
    return text_of(doc).text


def process_results(doc: Mapping[str, Any], results: Sequence[float]) -> dict[str, float]:
    """From ``results[0]``, the log-likelihood (nats) of the whole text: ``nll_per_token`` in nats, ``bits_per_byte`` of the
    UTF-8 text, which compares models with different tokenizers, and what ``token_perplexity`` and its error are made of.

    lm-eval's own aggregation ``perplexity`` finds its error by bootstrap in forked processes, which hang where torch's threads
    run (CPython's documentation of ``multiprocessing``: forking a process with threads).
    """
    nll = -results[0] / doc["tokens"]
    bits = -results[0] / math.log(2) / doc["bytes"]
    return {"nll_per_token": nll, "token_perplexity": nll, "token_perplexity_stderr": nll, "bits_per_byte": bits}


def perplexity(nlls: Sequence[float]) -> float:
    """exp of the mean of the texts' NLL per token (nats)."""
    return math.exp(math.fsum(nlls) / len(nlls))


def perplexity_stderr(nlls: Sequence[float]) -> float | str:
    """Standard error of ``perplexity`` by the delta method: it is exp(mean), and its derivative is itself."""
    error = lm_eval_stderr(list(enumerate(nlls)))
    return error if isinstance(error, str) else perplexity(nlls) * error


def _refuse_second_bos(name: str, metadata: Mapping[str, Any]) -> None:
    """lm-eval puts a BOS before a text and, where the tokenizer adds one too, takes that for the text's first token: it
    scores BOS after BOS, and all that follows stands behind two. Nothing in its sum tells how much that is.

    HFLM adds what the tokenizer adds unless told otherwise; kveval's engine and API models do not.
    """
    adds = metadata.get("add_bos_token")
    if adds is None and metadata.get("pretrained"):
        adds = bool(special_prefix(_tokenizer(name)))
    if adds:
        raise KvevalError(
            "this model's tokenizer puts a BOS before a text, and lm-eval would score it as a token of the text: "
            "add add_bos_token=False to --model_args (the text is still read after one BOS)"
        )


@lru_cache(maxsize=64)  # lm-eval reads all documents of a task, and then asks for all texts
def _text(plan: str, context: int) -> Text:
    values = json.loads(plan)
    length, source = values["length"], _haystack(values["haystack"])
    room = length - 1  # BOS
    tokenizer = _tokenizer(values["tokenizer"])
    hay, _ = tokenised(tokenizer, source.pieces(values["seed"], context), room)
    encoded = _first(tokenizer, hay, room)
    if len(encoded) + 1 < USED_SHARE * length:
        raise _unfilled(length)
    new = 1.0 if source.chars is None else min(1.0, source.chars / len(encoded.text))
    if new < NEW_SHARE:
        raise KvevalError(
            f"haystack '{source.name}' has {source.chars:,} characters and {length:,} tokens take {len(encoded.text):,}: "
            "a text that repeats itself is predicted by copying; give more text or ask for a shorter length"
        )
    return Text(encoded.text, len(encoded), new, source.sha256)


def _first(tokenizer: Any, hay: Encoded, room: int) -> Encoded:
    """The beginning of ``hay`` that takes ``room`` tokens; where a word cut short takes more than it did, a few less."""
    for last in range(room, max(room - _TRIES, 0), -1):
        text = cut(tokenizer, hay, int(hay.ends[last - 1]))
        if len(text) <= room:
            return text
    raise _unfilled(room + 1)


def _unfilled(length: int) -> KvevalError:
    return KvevalError(
        f"no text fills {length:,} tokens with this tokenizer: ask for another length, or report this tokenizer"
    )


@lru_cache(maxsize=100_000)  # small, and asked for again when results come
def _facts(plan: str, context: int) -> dict[str, Any]:
    text = _text(plan, context)
    return {
        "tokens": text.tokens,
        "bytes": len(text.text.encode()),
        "new_share": text.new_share,
        "sha256": text.sha256,
        "haystack_sha256": text.haystack_sha256,
    }


def _with_facts(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What datasets calls with the documents that are read: their columns, with what is known of the texts."""
    facts = [_facts(*names) for names in zip(batch["plan"], batch["context"], strict=True)]
    return batch | {key: [fact[key] for fact in facts] for key in facts[0]}


@lru_cache(maxsize=8)
def _tokenizer(name: str) -> Any:
    return lmtasks.load_tokenizer(name)


@lru_cache(maxsize=8)
def _haystack(name: str) -> Haystack:
    return haystack(name)

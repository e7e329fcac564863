"""What building a RULER sample costs: kveval's and lm-eval's own, side by side in one process. Seconds and tokens made.

    .venv/bin/python benchmarks/samples.py                                   # kveval at 4k, 32k, 128k; lm-eval at 4k, 32k
    .venv/bin/python benchmarks/samples.py --peer-lengths 128k --tasks vt    # minutes: lm-eval's search at 128k

Tokens are those that the tokenizer made while building, over the length asked for. lm-eval searches for the size once for
each task and length and tokenises each sample once more: what is timed is its first sample. Its tasks with essays, SQuAD and
HotpotQA need a hub, the others nltk and wonderwords; those that cannot run are said to be missing.
Bars for kveval at 131,072 tokens: under 1 s, under 1.5 x the length tokenised. Exit code 1 when one is missed.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from kveval.lmtasks import load_tokenizer
from kveval.samples.ruler.registry import FAMILIES, OFFLINE
from kveval.samples.ruler.sample import sample
from kveval.units import parse_tokens

MOST_SECONDS, MOST_TOKENISED = 1.0, 1.5


class Counting:
    """Passes everything on to the tokenizer and counts the tokens it makes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.tokens = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str | list[str], **options: Any) -> Any:
        batch = self.tokenizer(text, **options)
        ids = batch["input_ids"]
        self.tokens += len(ids) if isinstance(text, str) else sum(map(len, ids))
        return batch


@dataclass(frozen=True)
class Cost:
    """Of one sample: seconds, and tokens made over its length."""

    seconds: float
    tokenised: float

    def __str__(self) -> str:
        return f"{self.seconds:9.3f} s {self.tokenised:8.2f} x"


def measured(build: Callable[[Any], object], tokenizer: Any, length: int, repeats: int) -> Cost:
    """The quickest of ``repeats`` builds with ``tokenizer``."""
    seconds = []
    for _ in range(repeats):
        counting = Counting(tokenizer)
        begun = time.perf_counter()
        build(counting)
        seconds.append(time.perf_counter() - begun)
    return Cost(min(seconds), counting.tokens / length)


def ours(task: str, length: int) -> Callable[[Any], object]:
    """Build kveval's first sample."""
    return lambda tokenizer: sample(tokenizer, FAMILIES[task], seed=0, length=length, index=0)


def peer(task: str, length: int) -> Callable[[Any], object] | None:
    """Build lm-eval's first sample; None where it needs a hub. Raises ImportError where a package of its own is missing."""
    if task == "vt":
        from lm_eval.tasks.ruler.vt_utils import sys_vartrack_w_noise_random as chains

        def build(tokenizer: Any) -> object:
            (shot,) = chains(tokenizer, num_samples=1, max_seq_length=500, incremental=5)
            return chains(tokenizer, num_samples=1, max_seq_length=length, icl_example=shot)

        return build
    if task == "cwe":
        from lm_eval.tasks.ruler.cwe_utils import sys_word_pair_random

        return lambda tokenizer: sys_word_pair_random(1, length, tokenizer=tokenizer)
    if task == "fwe":
        from lm_eval.tasks.ruler.fwe_utils import sys_kwext

        return lambda tokenizer: sys_kwext(tokenizer, length, num_samples=1)
    needles = {
        "niah_single_1": ("repeat", "words", "numbers"),
        "niah_multikey_2": ("needle", "words", "numbers"),
        "niah_multikey_3": ("needle", "uuids", "uuids"),
    }
    return _peer_needles(length, *needles[task]) if task in needles else None


def _peer_needles(length: int, haystack: str, keys: str, values: str) -> Callable[[Any], object]:
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE
    from lm_eval.tasks.ruler.prepare_niah import generate_samples, get_haystack

    return lambda tokenizer: generate_samples(
        get_haystack(type_haystack=haystack),
        TOKENIZER=tokenizer,
        max_seq_length=length,
        type_haystack=haystack,
        type_needle_k=keys,
        type_needle_v=values,
        template=TEMPLATE,
        num_samples=1,
    )


def peer_cost(task: str, length: int, tokenizer: Any) -> Cost | str:
    """What lm-eval's first sample costs, or why that is not known."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            build = peer(task, length)
        except ImportError as error:
            return f"no {error.name or 'nltk or wonderwords'}"
        return "needs a hub" if build is None else measured(build, tokenizer, length, repeats=1)


def ratios(own: Cost, other: Cost | str) -> str:
    """How many times lm-eval's seconds and tokens are kveval's."""
    if isinstance(other, str):
        return ""
    return f"{other.seconds / own.seconds:6.1f} x {other.tokenised / own.tokenised:6.1f} x"


def main() -> int:
    """Print a row for each task and length; 1 when kveval misses a bar at 131,072 tokens or more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer")
    parser.add_argument("--tasks", default=",".join(OFFLINE))
    parser.add_argument("--lengths", default="4k,32k,128k")
    parser.add_argument("--peer-lengths", default="4k,32k", help="lengths at which lm-eval's is timed too; '' for none")
    arguments = parser.parse_args()
    lengths, peers = (
        [parse_tokens(part) for part in text.split(",") if part] for text in (arguments.lengths, arguments.peer_lengths)
    )
    tokenizer, missed = load_tokenizer(arguments.model), 0
    print(f"{'task':<20}{'length':>8}   {'kveval':<24}{'lm-eval':<24}faster, tokenises less")
    for task in arguments.tasks.split(","):
        for length in sorted({*lengths, *peers}):
            own = measured(ours(task, length), tokenizer, length, repeats=3)
            other = peer_cost(task, length, tokenizer) if length in peers else ""
            over = length >= parse_tokens("128k") and (own.seconds >= MOST_SECONDS or own.tokenised >= MOST_TOKENISED)
            missed += over
            row = f"{task:<20}{length:>8,}   {own!s:<24}{other!s:<24}{ratios(own, other)}"
            print(row + "  MISSED" * over, flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

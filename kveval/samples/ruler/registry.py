"""Every family by name: RULER's thirteen, and those beside them."""

from __future__ import annotations

from kveval.samples.ruler import hard, niah, qa, vt, words
from kveval.samples.ruler.sample import Family

_RULER: dict[str, Family] = {**niah.FAMILIES, **vt.FAMILIES, **words.FAMILIES, **qa.FAMILIES}

FAMILIES: dict[str, Family] = {**_RULER, **qa.FAMILIES_SYNTHETIC, **hard.FAMILIES_HARD}
THIRTEEN = tuple(_RULER)  # what a table of RULER has, in its order
# The same where SQuAD and HotpotQA are not at hand: questions about generated documents, and named so.
OFFLINE = tuple({"qa_1": "qa_synthetic_1", "qa_2": "qa_synthetic_2"}.get(name, name) for name in THIRTEEN)

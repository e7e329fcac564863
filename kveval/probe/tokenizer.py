"""The probe's tokenizer: one token a word, one token up to three digits, one token a byte for everything else."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from kveval.probe.weights import POSITIONS
from kveval.samples import lexicon

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
# A space belongs to the word or the number after it. Digits go in threes from the left, so ' 1234567' is
# ' 123' '456' '7': inside a number the last four tokens still reach back to the words before it.
_PIECES = r" ?[0-9]{1,3}| ?\p{L}+| ?[^\s\p{L}0-9]+|\s+(?!\S)|\s+"


@cache
def vocabulary() -> tuple[str, ...]:
    """Token texts in the order of their ids: end of text, bytes, numbers, words, in byte-level characters ('Ġ' is a
    space). Numbers and words come bare and after a space."""
    from tokenizers.pre_tokenizers import ByteLevel

    characters = ByteLevel(add_prefix_space=False, use_regex=False)
    groups = [f"{number:0{digits}d}" for digits in (1, 2, 3) for number in range(10**digits)]
    pieces = [space + text for text in (*groups, *lexicon.vocabulary()) for space in ("", " ")]
    tokens = [END, *sorted(ByteLevel.alphabet()), *(characters.pre_tokenize_str(piece)[0][0] for piece in pieces)]
    return tuple(dict.fromkeys(tokens))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer as transformers uses it: it adds no token of its own and decodes to exactly the text it was given.

    A byte-level BPE without merges: a piece that is in the vocabulary is one token, any other is one token a byte.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )

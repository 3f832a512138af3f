"""The tokenizer of tiny-llada: one token per digit, word or sign, no merges.

Spaces and commas are not tokens. The decoder puts them back: a space before each token, except
between digits and before a sentence's end, and a comma before each step of a worked answer. So
``decode(encode(text)) == text`` for every problem that ``lacache_trt.demo.problems`` writes.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lacache_trt.demo.problems import ANSWER_MARK, ORDINALS, words

UNKNOWN = "<unk>"
BOS = "<|startoftext|>"
EOS = "<|endoftext|>"
MASK = "<|mdm_mask|>"

_SIGNS = (".", "?", "+", "-", "*", "=", ANSWER_MARK)


def build_tokenizer() -> Tokenizer:
    """The tokenizer; ids follow from the words of the problems alone."""
    ordinary = [*map(str, range(10)), *_SIGNS, *words()]
    tokens = [*ordinary, UNKNOWN, BOS, EOS, MASK]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Replace(",", "")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex(rf"{ANSWER_MARK}|[0-9.?+*=-]"), behavior="isolated"),
        ]
    )
    steps = "|".join(ordinal.lower() for ordinal in ORDINALS)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="@@", cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(r"(?<=[0-9]) (?=[0-9])"), ""),
            decoders.Replace(Regex(r" (?=[.?])"), ""),
            decoders.Replace(Regex(rf" (?=({steps}) )"), ", "),
        ]
    )
    special = [AddedToken(token, special=True) for token in (UNKNOWN, BOS, EOS, MASK)]
    tokenizer.add_special_tokens(special)
    return tokenizer

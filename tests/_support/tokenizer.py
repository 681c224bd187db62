"""A real fast tokenizer built in memory: byte level, no merges, no files, no network."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests._support.answers import CHAT_TEMPLATE

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
VOCAB_SIZE = 259
"""Three special tokens (ids 0 to 2) and one token per byte; every tiny model needs at least this many rows."""


def tiny_tokenizer(*, chat_template: bool = False, add_bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer: one token per UTF-8 byte, ids 3..258, so lengths can be counted by hand.

    Args:
        chat_template: give it a small chat template (otherwise it has none).
        add_bos: prepend the bos token whenever special tokens are asked for, as LLaMA tokenizers do.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([BOS, EOS, PAD, *alphabet])}
    core = Tokenizer(BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if add_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocab[BOS])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=1_000_000,
    )
    if chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer

"""The tokenizer, and the order of the training sequences."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from demo.books import PLAIN_PUNCTUATION

END_OF_TEXT = "<|endoftext|>"  # id 0, before and after each book
PADDING = "<|padding|>"  # id 1, never trained


def train_tokenizer(books: list[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE with the splitting rule of GPT-2, as in OLMoE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(books, trainer)
    return tokenizer


def prepare(books: list[str], vocabulary: int, folder: Path) -> tuple[Tokenizer, np.ndarray]:
    """Tokenizer and token stream, computed once and cached in `folder`."""
    tokenizer_path, stream_path = folder / "tokenizer.json", folder / "tokens.npy"
    if not stream_path.exists():
        tokenizer = train_tokenizer(books, vocabulary)
        tokenizer.save(str(tokenizer_path))
        stream = [0]
        for book in books:
            stream += tokenizer.encode(book).ids + [0]
        partial = stream_path.with_suffix(".tmp")
        with partial.open("wb") as file:
            np.save(file, np.array(stream, dtype=np.uint16))
        partial.replace(stream_path)
    return Tokenizer.from_file(str(tokenizer_path)), np.load(stream_path)


def save_tokenizer(tokenizer: Tokenizer, context: int, folder: Path) -> None:
    """Saves the tokenizer with a normalizer that applies the plain quotes and dashes of the training text."""
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(*pair) for pair in PLAIN_PUNCTUATION.items()])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=PADDING, model_max_length=context
    ).save_pretrained(folder)


class Chunks:
    """The stream in chunks of `length` tokens and their successors; each epoch cuts and shuffles it differently.

    A chunk depends only on the seed and its number, so a run resumes exactly where it was stopped.
    """

    def __init__(self, stream: np.ndarray, length: int, seed: int):
        self.stream, self.length, self.seed = stream, length, seed
        self.per_epoch = (len(stream) - length - 1) // length
        self.epoch, self.starts = -1, np.empty(0, dtype=np.int64)

    def batch(self, first: int, count: int) -> np.ndarray:
        """Chunks `first` to `first + count` of the run."""
        return np.stack([self._chunk(i) for i in range(first, first + count)])  # [count, length + 1]

    def _chunk(self, number: int) -> np.ndarray:
        epoch, index = divmod(number, self.per_epoch)
        if epoch != self.epoch:
            order = np.random.default_rng([self.seed, epoch])
            self.starts = order.permutation(self.per_epoch) * self.length + order.integers(self.length)
            self.epoch = epoch
        start = self.starts[index]
        return self.stream[start : start + self.length + 1].astype(np.int64)

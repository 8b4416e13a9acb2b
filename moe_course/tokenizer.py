"""Text to token ids and back: bytes for the tiny model, `tokenizer.json` for others. Built in: notebook 13."""

from __future__ import annotations

from pathlib import Path

from moe_course.config import MoEConfig
from moe_course.errors import ConfigError

BYTE_VOCAB = 256


class ByteTokenizer:
    """One token per byte, NUL in front: an empty prompt is one token."""

    bos_token_id = eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [self.bos_token_id, *text.encode()]

    def decode(self, tokens: list[int]) -> str:
        """Bytes that are not UTF-8 are shown as `\\xNN`."""
        return bytes(tokens).decode(errors="backslashreplace")


class FileTokenizer:
    """The `tokenizer.json` of a checkpoint."""

    def __init__(self, path: Path, bos_token_id: int, eos_token_id: int):
        from tokenizers import Tokenizer

        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids or [self.bos_token_id]

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)


def load_tokenizer(model_dir: str | Path, config: MoEConfig) -> ByteTokenizer | FileTokenizer:
    """`tokenizer.json` if the folder has one, bytes if the vocabulary has 256 entries, else ConfigError."""
    path = Path(model_dir) / "tokenizer.json"
    if path.exists():
        return FileTokenizer(path, config.bos_token_id, config.eos_token_id)
    if config.vocab_size == BYTE_VOCAB:
        return ByteTokenizer()
    raise ConfigError(
        f"{model_dir} has no tokenizer.json, and vocab_size {config.vocab_size} is not the {BYTE_VOCAB} of a byte model"
    )

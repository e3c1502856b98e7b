"""Token shards and vocabularies: what a shard is, and how its GPT-2 tokens become a run's ids.

A shard is 256 little-endian int32 (magic 20240520, version 1, token count, zeros), then the tokens
as uint16: GPT-2's ids, a document start (50256) before every document. Needs numpy alone.
"""

import hashlib
import os
from pathlib import Path

import numpy as np

HEADER_BYTES, MAGIC, VERSION = 1024, 20240520, 1
DOCUMENT_START = 50256  # GPT-2's <|endoftext|>
MERGES = "data/gpt2_merges.bin"
# the repository's root: where the merges are, also for a copy of this file that lies deeper
ROOT = next((p for p in Path(__file__).resolve().parents if (p / MERGES).exists()), Path.cwd())
# GPT-2 numbers the bytes that print first
_PRINT = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_ORDER = bytes(_PRINT + [b for b in range(256) if b not in _PRINT])


class ShardError(ValueError):
    """A shard that is missing, damaged, or no shard at all; the message says what mends it."""


def read_shard(path: str | Path) -> np.ndarray:
    """The uint16 tokens of a shard, mapped and not read; ShardError where it is not whole."""
    mend = "fetch it again: `python data/fineweb.py download`, or `git checkout data`"
    if not Path(path).is_file():
        raise ShardError(f"{path}: no such shard; {mend}")
    size = os.path.getsize(path)
    if size < HEADER_BYTES:
        raise ShardError(f"{path}: {size} bytes, too short for a shard's header; {mend}")
    magic, version, count = (int(n) for n in np.fromfile(path, "<i4", 3))
    if (magic, version) != (MAGIC, VERSION):
        raise ShardError(
            f"{path}: begins with {magic}, {version} where a shard has {MAGIC}, {VERSION}; {mend}"
        )
    expected = HEADER_BYTES + 2 * count
    if count < 1 or size != expected:
        raise ShardError(
            f"{path}: {size} bytes, but its header counts {count} tokens ({expected} bytes); {mend}"
        )
    return np.memmap(path, "<u2", "r", offset=HEADER_BYTES)


def inspect_shard(path: str | Path) -> dict:
    """Name, bytes, tokens and sha256 of a shard that is read from end to end.

    ShardError also where a token is none of GPT-2's 50,257 ids.
    """
    tokens = read_shard(path)
    for start in range(0, len(tokens), 2**24):
        piece = tokens[start : start + 2**24]
        if piece.max() > DOCUMENT_START:
            at = int((piece > DOCUMENT_START).argmax())
            raise ShardError(
                f"{path}: token {piece[at]} at {start + at} is none of GPT-2's 50257 ids;"
                " make the shard again"
            )
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = os.path.getsize(path)
    return {"name": Path(path).name, "bytes": size, "tokens": len(tokens), "sha256": digest}


def write_shard(path: str | Path, tokens: np.ndarray) -> None:
    """Write uint16 GPT-2 tokens as a shard, under a temporary name until it is whole."""
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    part = Path(f"{path}.tmp")
    with open(part, "wb") as file:
        file.write(header.tobytes())
        file.write(np.ascontiguousarray(tokens, "<u2").tobytes())
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_merges() -> list[list[int]]:
    """GPT-2's 50,000 merges: row r makes token 256 + r from two earlier ids."""
    return np.fromfile(ROOT / MERGES, "<u2").reshape(-1, 2).tolist()


def gpt2_tokens() -> list[bytes]:
    """The bytes of GPT-2's 50,256 ordinary tokens, by id."""
    tokens = [BYTE_ORDER[i : i + 1] for i in range(256)]
    for left, right in read_merges():
        tokens.append(tokens[left] + tokens[right])
    return tokens


class Vocabulary:
    """GPT-2's first size - 1 ids, and the document start as the last one; 257 means bytes.

    A merge makes its token from two earlier ones, so that a token that is cut off falls back into
    what it was made from: the same as encoding the text with the fewer merges. Token t of GPT-2 is
    ids[offsets[t] : offsets[t + 1]]; `bytes` has the bytes of text in each id.
    """

    def __init__(self, size: int):
        self.size, self.document_start = size, size - 1
        runs, count = [[i] for i in range(256)], [1] * 256
        for left, right in read_merges():
            kept = len(runs) < size - 1
            runs.append([len(runs)] if kept else runs[left] + runs[right])
            count.append(count[left] + count[right])
        runs.append([self.document_start])
        self.offsets = np.cumsum([0] + [len(run) for run in runs])
        self.ids = np.concatenate(runs).astype(np.uint16)
        self.bytes = np.array([*count[: size - 1], 0])

    def expand(self, tokens: np.ndarray) -> np.ndarray:
        """uint16 GPT-2 tokens -> uint16 ids below `size`."""
        if self.size == DOCUMENT_START + 1:
            return np.asarray(tokens)
        pieces = np.array_split(tokens, len(tokens) // 2**20 + 1)  # spares the memory
        return np.concatenate([self._expand(piece) for piece in pieces])

    def _expand(self, tokens: np.ndarray) -> np.ndarray:
        first = self.offsets[tokens]
        count = self.offsets[tokens.astype(np.int64) + 1] - first
        before = np.cumsum(count) - count
        return self.ids[np.repeat(first - before, count) + np.arange(count.sum())]

    def decode(self, ids: list[int]) -> str:
        """Text of ids; the document start is an empty line."""
        tokens = [*gpt2_tokens()[: self.size - 1], b"\n\n"]
        return b"".join(tokens[i] for i in ids).decode("utf-8", "replace")

#!/usr/bin/env python3
"""Token shards for training: fetch FineWeb, make shards of your own text, check what is there.

    python data/fineweb.py download --shards 9
    python data/fineweb.py tokenize my.jsonl --val-every 1000 --out data/mine
    python data/fineweb.py verify data/fineweb10B

A shard is 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros), then that
many uint16 GPT-2 tokens. Every document is preceded by <|endoftext|>, id 50256. A shard has its
final name only when it is whole, and manifest.json beside it holds its size and sha256.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
EOT = 50256  # <|endoftext|>, the last of GPT-2's ids
SHARD_NAME = re.compile(r".+_(train|val)_\d{6}\.bin")

PIECE_CHARS = 1 << 20  # longer documents are tokenized in pieces, so that memory stays bounded
GROUP_CHARS = 1 << 18  # what one task tokenizes: enough that handing it over costs nothing
LINE_BYTES = 1 << 26  # a longer line of JSON is refused, not read
CHUNK_BYTES = 1 << 20
MANIFEST, PROGRESS = "manifest.json", "tokenize.tmp"
LOOKALIKES = {b"version https://git-lfs": "a Git LFS pointer", b"<": "a web page"}


class DataError(ValueError):
    """What a user can mend: one sentence with the value and what to do."""


# ---------------------------------------------------------------------------------------------
# GPT-2's tokenizer, without a network


def gpt2_tokens() -> list[bytes]:
    """GPT-2's 50,256 ordinary tokens by id, built from the merges in gpt2_merges.bin."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [bytes([b]) for b in printable + sorted(set(range(256)) - set(printable))]
    for left, right in np.fromfile(HERE / "gpt2_merges.bin", "<u2").reshape(-1, 2).tolist():
        tokens.append(tokens[left] + tokens[right])
    return tokens


def gpt2_encoding(vocab_size: int = EOT + 1):
    """A tiktoken.Encoding of the first vocab_size - 1 GPT-2 tokens and, last, <|endoftext|>.

    Merge r of GPT-2 makes id 256 + r from two earlier ids, so any prefix of the vocabulary is a
    tokenizer too; 257 means bytes.
    """
    import tiktoken

    # GPT-2's pattern in possessive form: the plain one overflows the stack at a million spaces
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    ranks = {token: i for i, token in enumerate(gpt2_tokens()[: vocab_size - 1])}
    special = {"<|endoftext|>": vocab_size - 1}
    return tiktoken.Encoding(
        f"gpt2-{vocab_size}", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )


# ---------------------------------------------------------------------------------------------
# shards and their manifest


def header(tokens: int) -> bytes:
    """The 1,024 bytes in front of the tokens."""
    words = np.zeros(HEADER_BYTES // 4, "<i4")
    words[:3] = MAGIC, VERSION, tokens
    return words.tobytes()


def examine(path: Path, expected: dict | None = None) -> tuple[dict, str]:
    """A shard's manifest entry (bytes, tokens, sha256) and what is wrong with it, or ""."""
    if not path.is_file():
        return {}, "missing"
    size, digest, problem = path.stat().st_size, hashlib.sha256(), ""
    if expected and size != expected["bytes"]:
        return {}, f"{size:,} bytes instead of {expected['bytes']:,}"
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
        digest.update(head)
        magic, version, tokens = np.frombuffer(head.ljust(12, b"\0"), "<i4", count=3).tolist()
        if magic != MAGIC:
            looks = [kind for start, kind in LOOKALIKES.items() if head.startswith(start)]
            problem = f"{(looks or ['not a shard'])[0]}: it begins with {magic}, not {MAGIC}"
        elif version != VERSION:
            problem = f"version {version} of the shard format, not {VERSION}"
        elif tokens < 1 or size != HEADER_BYTES + 2 * tokens:
            problem = f"{size:,} bytes, but its header counts {tokens:,} tokens of 2 bytes"
        for start in range(HEADER_BYTES, size, CHUNK_BYTES):
            chunk = file.read(CHUNK_BYTES)
            digest.update(chunk)
            ids = np.frombuffer(chunk, "<u2", count=len(chunk) // 2)
            if not problem and ids.max() > EOT:
                at = int((ids > EOT).argmax())
                problem = f"id {ids[at]} at byte {start + 2 * at:,}, above {EOT}"
    entry = {"bytes": size, "tokens": tokens, "sha256": digest.hexdigest()}
    if expected and not problem and entry["sha256"] != expected["sha256"]:
        problem = f"sha256 {entry['sha256']} instead of {expected['sha256']}"
    return entry, problem


def read_manifest(folder: Path) -> dict[str, dict]:
    """What manifest.json says of each shard, by name; nothing where there is none."""
    path = folder / MANIFEST
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        raise DataError(f"{path} is not JSON: delete it") from None


def shards_in(folder: Path) -> list[str]:
    """The names of the shards that lie in a folder."""
    return sorted(path.name for path in folder.glob("*.bin") if SHARD_NAME.fullmatch(path.name))


def write_json(path: Path, value) -> None:
    """Replace a file in one step: whoever reads it sees the old one or the new one, whole."""
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and be alone at work in it; a killed process unlocks it too."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another fineweb.py is at work in {folder}: waiting for it", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------
# tokenize


def cut(text) -> Iterator[tuple[bool, str]]:
    """(does it start a document, text) of an open text, in pieces of about PIECE_CHARS.

    A cut lies before white space, where GPT-2's pattern cuts too: the tokens stay the same.
    """
    starts, rest = True, ""
    while block := text.read(PIECE_CHARS):
        rest += block
        if len(block) < PIECE_CHARS:
            break
        last_space = max(rest.rfind(" "), rest.rfind("\n"))
        end = len(rest[: last_space + 1].rstrip()) or len(rest)
        yield starts, rest[:end]
        starts, rest = False, rest[end:]
    if rest:
        yield starts, rest


def read_rows(path: Path, field: str) -> Iterator[str]:
    """The documents of a .jsonl, .jsonl.gz or .parquet file."""
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError:
            raise DataError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from None
        table = parquet.ParquetFile(path)
        if field not in table.schema_arrow.names:
            raise DataError(
                f"{path} has no column {field!r} but {', '.join(table.schema_arrow.names)}: "
                "name the one with the text by --field"
            )
        for batch in table.iter_batches(batch_size=256, columns=[field]):
            yield from (text or "" for text in batch.column(0).to_pylist())
        return
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
        for number in itertools.count(1):
            line = lines.readline(LINE_BYTES)
            if not line:
                return
            if len(line) == LINE_BYTES:
                raise DataError(f"{path}, line {number}: longer than {LINE_BYTES:,} bytes")
            try:
                text = json.loads(line)[field]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise DataError(
                    f"{path}, line {number}: not a JSON object with a text {field!r}: "
                    "mend the line, or name the key with the text by --field"
                )
            yield text.encode("utf-8", "replace").decode()  # half a surrogate pair becomes "?"


def read_pieces(paths: list[Path], field: str) -> Iterator[tuple[bool, str]]:
    """Every document of the files in order, as pieces; a .txt file is one document."""
    for path in paths:
        try:
            if path.suffix == ".txt":
                with path.open(encoding="utf-8-sig", newline="") as text:
                    yield from cut(text)
            else:
                for text in read_rows(path, field):
                    yield from cut(io.StringIO(text, newline=""))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text ({error.reason}): convert it first") from None


def split_pieces(args, split: str, held_out: set[bytes]) -> Iterator[tuple[bool, str]]:
    """The pieces of one split; exact copies of validation documents are left out of training."""
    paths = args.val if args.val and split == "val" else args.inputs
    document = copies = 0
    for starts, text in read_pieces(paths, args.field):
        if starts:
            in_val = split == "val" if args.val else document % args.val_every == args.val_first - 1
            document += 1
            keep = in_val == (split == "val")
            # a document of many pieces is known by its first: a million equal characters are a copy
            key = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if split == "val" and keep:
                held_out.add(key)
            elif keep and key in held_out:
                keep = False
                copies += 1
        if keep:
            yield starts, text
    if copies:
        print(f"left {copies:,} copies of validation documents out of training")


def encode_groups(
    pieces: Iterator[tuple[bool, str]], skip: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(number of pieces before it, uint16 tokens) of group after group, on all cores, in order."""
    encoding, workers = gpt2_encoding(), os.cpu_count() or 1
    document_start = np.array([EOT], np.uint16)

    def encode(group: list[tuple[bool, str]]) -> np.ndarray:
        parts = []
        for starts, text in group:
            if starts:
                parts.append(document_start)
            parts.append(encoding.encode_to_numpy(text, disallowed_special=()))
        return np.concatenate(parts, dtype=np.uint16, casting="unsafe")

    def groups() -> Iterator[list[tuple[bool, str]]]:
        group, chars = [], 0
        for piece in itertools.islice(pieces, skip, None):
            group.append(piece)
            chars += len(piece[1])
            if chars >= GROUP_CHARS:
                yield group
                group, chars = [], 0
        if group:
            yield group

    queue = deque()
    with ThreadPoolExecutor(workers) as pool:
        for group in itertools.chain(groups(), itertools.repeat(None)):
            if group:
                queue.append((len(group), pool.submit(encode, group)))
            elif not queue:
                return
            if not group or len(queue) > 2 * workers:
                count, tokens = queue.popleft()
                yield skip, tokens.result()
                skip += count


def write_split(args, split: str, pieces: Iterator[tuple[bool, str]], state: dict) -> None:
    """Write what a split lacks; after each shard the state says where the next one begins."""
    from tqdm import tqdm

    skip, used = state["at"][split]

    def slices(used: int) -> Iterator[tuple[np.ndarray, list[int]]]:
        """Tokens that do not cross a shard's end, and the position after them."""
        room = args.shard_tokens
        for before, tokens in encode_groups(pieces, skip):
            while used < len(tokens):
                part = tokens[used : used + room]
                used += len(part)
                room = (room - len(part)) or args.shard_tokens
                yield part, [before, used]
            used = 0

    stream = slices(used)
    done = sum(f"_{split}_" in name for name in state["shards"])
    with tqdm(desc=split, unit=" tokens", unit_scale=True, disable=None) as bar:
        for number in itertools.count(done):
            name = f"{args.out.resolve().name}_{split}_{number:06d}.bin"
            fresh = args.out / f"{name}.tmp"
            tokens = 0
            with fresh.open("wb") as file:
                file.write(header(0))
                for part, position in stream:  # noqa: B007
                    file.write(part)
                    bar.update(len(part))
                    tokens += len(part)
                    if tokens == args.shard_tokens:
                        break
                file.seek(0)
                file.write(header(tokens))
                file.flush()
                os.fsync(file.fileno())
            if not tokens:
                fresh.unlink()
                break
            state["shards"][name], _ = examine(fresh)
            state["at"][split] = position
            fresh.replace(args.out / name)
            write_json(args.out / PROGRESS, state)
            tqdm.write(f"{name}: {tokens:,} tokens")
    if f"{args.out.resolve().name}_{split}_000000.bin" not in state["shards"]:
        raise DataError(f"no document for {split}: give more text or another --val or --val-every")
    state["at"][split] = None


def tokenize(args) -> None:
    """Make train and val shards of texts."""
    job = [
        [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in args.inputs],
        [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in args.val or []],
        [args.val_every, args.val_first, args.field, args.shard_tokens],
    ]
    state = {"job": job, "shards": {}, "at": {"val": [0, 0], "train": [0, 0]}}
    with locked(args.out):
        progress = args.out / PROGRESS
        if progress.exists():
            state = json.loads(progress.read_text())
            if state["job"] != job:
                raise DataError(
                    f"{args.out} holds an unfinished run on other inputs or settings: "
                    "repeat that command to finish it, or delete the folder"
                )
            print(f"going on after {len(state['shards'])} shards")
        elif found := shards_in(args.out):
            raise DataError(f"{args.out} has {found[0]} already: name another --out, or delete it")
        held_out: set[bytes] = set()
        for split in ("val", "train"):  # in this order, so that train can leave val's copies out
            pieces = split_pieces(args, split, held_out)
            if state["at"][split] is None:
                deque(pieces, maxlen=0)  # written before; read again for held_out alone
            else:
                write_split(args, split, pieces, state)
        write_json(args.out / MANIFEST, state["shards"])
        progress.unlink()
    print(f"{args.out.resolve()}: {len(state['shards'])} shards, checked and in {MANIFEST}")


# ---------------------------------------------------------------------------------------------
# verify


def verify(args) -> None:
    """Check every shard of a folder against its manifest; exit 1 with every bad file named."""
    manifest = read_manifest(args.folder)
    names = sorted({*manifest, *shards_in(args.folder)})
    if not names:
        raise DataError(f"no shards in {args.folder}: make some by download or tokenize")
    if not manifest:
        print(f"no {MANIFEST} in {args.folder}: checking the format only, not the content")
    seen: dict[str, str] = {}
    bad = 0
    with ThreadPoolExecutor() as pool:
        results = pool.map(lambda name: examine(args.folder / name, manifest.get(name)), names)
        for name, (entry, problem) in zip(names, results, strict=True):
            twin = seen.setdefault(entry.get("sha256", name), name)
            if manifest and name not in manifest:
                problem = problem or f"not in {MANIFEST}"
            elif twin != name:
                problem = problem or f"the same content as {twin}"
            bad += bool(problem)
            print(f"bad  {name}: {problem}" if problem else f"ok   {name}")
    if bad:
        raise DataError(f"{bad} of {len(names)} shards in {args.folder} are bad")


# ---------------------------------------------------------------------------------------------
# command line


def existing_file(text: str) -> Path:
    """An input of tokenize."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no file")
    if not path.name.endswith((".txt", ".jsonl", ".jsonl.gz", ".parquet")):
        raise argparse.ArgumentTypeError(f"{text} is neither .txt, .jsonl, .jsonl.gz nor .parquet")
    return path


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    sub = commands.add_parser("tokenize", help="make shards of your own text")
    sub.set_defaults(run=tokenize)
    sub.add_argument("inputs", nargs="+", type=existing_file, metavar="INPUT")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR")
    val = sub.add_mutually_exclusive_group(required=True)
    val.add_argument("--val", nargs="+", type=existing_file, metavar="INPUT")
    val.add_argument("--val-every", type=count, metavar="N")
    sub.add_argument("--val-first", type=count, metavar="K")
    sub.add_argument("--field", default="text")
    sub.add_argument("--shard-tokens", type=count, default=100_000_000)

    sub = commands.add_parser("verify", help="check the shards of a folder")
    sub.set_defaults(run=verify)
    sub.add_argument("folder", type=Path, metavar="DIR")

    args = parser.parse_args()
    try:
        args.run(args)
    except (DataError, OSError) as error:
        sys.exit(f"fineweb.py {args.command}: {error}")


if __name__ == "__main__":
    main()

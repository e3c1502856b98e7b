#!/usr/bin/env python3
"""Token shards for training: fetch FineWeb, make shards of your own text, check what is there.

    python data/fineweb.py download --shards 9
    python data/fineweb.py tokenize my.jsonl --val-every 1000 --out data/mine
    python data/fineweb.py verify data/fineweb10B

Shards (shards.py says what one is) get their names when they are whole; manifest.json beside them
has their sizes and sha256. What was interrupted goes on when the same command is given again.
Exit code 0: all is whole; 1: one sentence says what is not; 2: bad usage.
"""

import argparse
import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from manifest import MANIFEST, examine, examine_all, locked, read_manifest, verify, write_json
from shards import UserError, gpt2_encoding
from texts import tokenize

AT_ONCE = 4  # shards on their way
TRIES = 4  # of each request, 2, 4 and 8 s apart
INCOMING = "download.tmp"  # the folder of what is on its way


@dataclass(frozen=True)
class Dataset:
    """A public set of GPT-2 tokens on the Hugging Face hub, 100M in a shard."""

    repo: str
    prefix: str  # of the names: PREFIX_val_000000.bin, PREFIX_train_000001.bin, ...
    shards: int  # for training
    revision: str = "main"
    pins: tuple[str, ...] = ()  # sha256 of val, train 1, ...; those of the others the hub tells


DATASETS = {
    "10B": Dataset(
        "kjj0/fineweb10B-gpt2", "fineweb", 103, "889765ea1f903759787add96995d81171b632d0c",
        ("5b95c8e0966f0861685b307b23dc5ae42b228ef74b28cb499784ae021f201640",
         "771fa4a99b9fe0946ffb6e848b4ba5c6a9b0fe87860ebf03bc2c1c7e45f8178e")),
    "100B": Dataset("kjj0/fineweb100B-gpt2", "fineweb", 1030),
    "edu10B": Dataset("kjj0/finewebedu10B-gpt2", "finewebedu", 99),
}


# ------------------------------------------------------------------------------------------------
# download


def patiently(what: str, action: Callable):
    """The result of action(), tried TRIES times; what no further try can mend ends it at once."""
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
    from tqdm import tqdm

    for number in range(1, TRIES + 1):
        try:
            return action()
        except (OSError, HTTPError) as error:
            if isinstance(error, LocalEntryNotFoundError):
                error = error.__cause__ or error  # what really happened
            response = getattr(error, "response", None)
            status = 0 if response is None else response.status_code
            reason = f"the hub answers {status}" if status else str(error).split("\n")[0]
            if status in (401, 403):
                reason += ", set HF_TOKEN to a token that may read it"
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            refused = 400 <= status < 500 and status not in (408, 429)
            if full or refused or number == TRIES:
                raise UserError(f"{what}: {reason}; the same command goes on from here") from None
            after = response.headers.get("Retry-After", "") if status else ""
            seconds = max(2**number, int(after) if after.isdecimal() else 0)
            tqdm.write(f"{what}: {reason}; once more in {seconds} s")
            time.sleep(seconds)


def ask_hub(dataset: Dataset) -> tuple[str, dict[str, dict]]:
    """The commit of a set, and what the hub says of its files: bytes and sha256 by name."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    def ask():
        try:
            return HfApi().dataset_info(
                dataset.repo, revision=dataset.revision, files_metadata=True, timeout=10)
        except OfflineModeIsEnabled:
            raise UserError("shards are missing and HF_HUB_OFFLINE is set: unset it") from None
        except HTTPError as error:
            if getattr(error, "response", None) is not None:
                raise
            raise UserError(f"no network: {constants.ENDPOINT} gives {error}") from None
        except (ValueError, KeyError, TypeError):  # not the hub's JSON
            raise UserError(f"{constants.ENDPOINT} answers, but not as the hub does: log in to "
                            "this network, or mend HF_ENDPOINT") from None

    info = patiently(dataset.repo, ask)
    return info.sha, {file.rfilename: {"bytes": file.size, "sha256": file.lfs.sha256}
                      for file in info.siblings or () if file.lfs}


def fetch(dataset: Dataset, commit: str, name: str, expected: dict, folder: Path) -> dict:
    """Download a shard, check it and give it its name; its entry."""
    from huggingface_hub import hf_hub_download

    def attempt() -> dict:
        there = folder / INCOMING / name  # the cache too: in the user's own, nothing is checked
        shutil.rmtree(there, ignore_errors=True)  # what the last attempt left
        path = Path(hf_hub_download(dataset.repo, name, repo_type="dataset", revision=commit,
                                    local_dir=there, cache_dir=there))
        entry, problem = examine(path, expected)
        if problem:
            raise OSError(f"damaged on its way, {problem}")
        path.replace(folder / name)
        return entry

    return patiently(name, attempt)


def fetch_all(dataset: Dataset, commit: str, wanted: dict[str, dict], folder: Path) -> None:
    """Download shards, several at once, under one progress bar."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars
    from tqdm import tqdm

    total, free = sum(e["bytes"] for e in wanted.values()), shutil.disk_usage(folder).free
    if total > free:
        raise UserError(f"{total:,} bytes to fetch, but {free:,} free in {folder}: make room, or "
                        "name another --out")
    print(f"fetching {len(wanted)} shards, {total / 1e9:.2f} GB, from {dataset.repo} at "
          f"{commit[:8]} into {folder}", flush=True)
    constants.DOWNLOAD_CHUNK_SIZE = 2**17  # bytes; its own 10 MB at once take twice the CPU time
    disable_progress_bars()  # one for all, by what lies on the disk
    pool, arrived = ThreadPoolExecutor(AT_ONCE), 0
    jobs = {pool.submit(fetch, dataset, commit, *item, folder): item[0] for item in wanted.items()}
    waiting = set(jobs)
    try:
        with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
            while waiting:
                done, waiting = wait(waiting, 0.5, FIRST_COMPLETED)
                for job in done:
                    write_json(folder / MANIFEST, read_manifest(folder) | {jobs[job]: job.result()})
                    arrived += job.result()["bytes"]
                    if bar.disable:
                        print(f"{jobs[job]}: {arrived / total:.0%} of all", flush=True)
                there = arrived
                for path in (folder / INCOMING).rglob("*"):
                    with contextlib.suppress(FileNotFoundError):  # renamed since
                        there += path.stat().st_size
                bar.update(max(0, min(there, total) - bar.n))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    shutil.rmtree(folder / INCOMING)


def download(args) -> None:
    """Make sure that the val shard and the first train shards of a set are here, whole."""
    dataset = DATASETS[args.dataset]
    default = Path(__file__).parent / dataset.repo.split("/")[1].removesuffix("-gpt2")
    folder = (args.out or default).resolve()
    missing = [f"{dataset.prefix}_val_000000.bin"]
    missing += [f"{dataset.prefix}_train_{i:06d}.bin" for i in range(1, args.shards + 1)]
    pins = {n: {"sha256": sha} for n, sha in zip(missing, dataset.pins, strict=False)}

    def survey(expected: dict[str, dict]) -> None:
        """Take whole shards from what is missing, and into the manifest."""
        known = [name for name in missing if name in expected]
        for name, entry, problem in examine_all(folder, known, expected):
            if problem:
                if problem != "missing":
                    print(f"{name}: {problem}: it will be fetched again")
                continue
            missing.remove(name)
            if manifest.get(name) != entry:
                manifest[name] = entry
                write_json(folder / MANIFEST, manifest)

    with locked(folder):
        shutil.rmtree(folder / INCOMING, ignore_errors=True)  # of a run that was stopped
        manifest = read_manifest(folder)
        survey(manifest | pins)
        if missing:
            commit, listing = ask_hub(dataset)
            if absent := [name for name in missing if name not in listing]:
                raise UserError(f"{dataset.repo} at {commit} has no {absent[0]}: fewer --shards?")
            survey({name: listing[name] for name in missing if name not in manifest | pins})
            if missing:
                wanted = {name: listing[name] | pins.get(name, {}) for name in missing}
                fetch_all(dataset, commit, wanted, folder)
    print(f"{folder}: the val shard and {args.shards} train shards are whole")


# ------------------------------------------------------------------------------------------------
# command line


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return int(text)


def text_file(text: str) -> Path:
    if not text.endswith((".txt", ".jsonl", ".jsonl.gz", ".parquet")):
        raise argparse.ArgumentTypeError(f"{text} is neither .txt, .jsonl, .jsonl.gz nor .parquet")
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def parse_args() -> argparse.Namespace:
    raw = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__, **raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    most = ", ".join(f"{dataset.shards} of {name}" for name, dataset in DATASETS.items())

    sub = commands.add_parser("download", **raw, help="fetch public shards", description="""\
Fetch the val shard and the first N train shards of a public set of GPT-2 tokens, 200 MB each.
What is here and whole (size, header, sha256) stays; where all is, no network is needed. Honours
HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and the other variables of huggingface_hub.""")
    sub.set_defaults(run=download)
    sub.add_argument("--dataset", choices=DATASETS, default="10B", help="its tokens [10B]")
    sub.add_argument("--shards", type=int, default=9, metavar="N",
                     help=f"train shards of 100M tokens, 1 to {most} [9]")
    sub.add_argument("--out", type=Path, metavar="DIR", help="[fineweb10B beside this script]")

    sub = commands.add_parser("tokenize", **raw, help="make shards of texts", description="""\
Make DIR/NAME_train_000000.bin, ... and DIR/NAME_val_000000.bin, ... of texts; NAME is the folder's
own. A .txt file is one document; a .jsonl, .jsonl.gz or .parquet file has one a row. They stay in
order; copies of validation documents are left out of training.""")
    sub.set_defaults(run=lambda args: tokenize(args, gpt2_encoding()))
    sub.add_argument("inputs", nargs="+", type=text_file, metavar="INPUT", help="files of text")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder for them")
    val = sub.add_mutually_exclusive_group(required=True)
    val.add_argument("--val", nargs="+", type=text_file, default=[], metavar="INPUT",
                     help="files to validate on")
    val.add_argument("--val-every", type=positive, metavar="N",
                     help="or validate on every Nth document of the inputs")
    sub.add_argument("--val-first", type=positive, metavar="K", help="from the Kth on [N]")
    sub.add_argument("--field", default="text", help="JSON key, or column, of the text [text]")
    sub.add_argument("--shard-tokens", type=positive, default=100_000_000, metavar="N",
                     help="tokens of a shard, 2 bytes each [100000000]")

    sub = commands.add_parser("verify", help="check the shards of a folder", description=(
        "Check format, size, token ids and sha256 of every shard against the folder's manifest."))
    sub.set_defaults(run=lambda args: verify(args.folder))
    sub.add_argument("folder", type=Path, metavar="DIR")

    args = parser.parse_args()
    if args.command == "download":
        last = DATASETS[args.dataset].shards
        if not 1 <= args.shards <= last:
            parser.error(f"--shards {args.shards}: {args.dataset} has train shards 1 to {last}")
    if args.command == "tokenize":
        args.val_first = args.val_first or args.val_every
        if args.val_every and args.val_first > args.val_every:
            parser.error(f"--val-first {args.val_first} is above --val-every {args.val_every}")
        if twice := {p.resolve() for p in args.inputs} & {p.resolve() for p in args.val}:
            parser.error(f"{twice.pop()} is an input and in --val: validate on other text")
    return args


def main() -> None:
    args = parse_args()
    try:
        return args.run(args)
    except (UserError, OSError) as error:
        code, why = 1, error
    except KeyboardInterrupt:
        code, why = 130, "interrupted; the same command goes on from here"
    print(f"fineweb.py {args.command}: {why}", file=sys.stderr, flush=True)
    os._exit(code)  # at once: sys.exit would wait for transfers that may be stalled


if __name__ == "__main__":
    main()

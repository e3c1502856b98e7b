"""A folder of shards and its manifest.json: {name: {"bytes", "tokens", "sha256"}}."""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shards import UserError, inspect_shard

CORES = os.cpu_count() or 1
MANIFEST = "manifest.json"
SHARD_NAME = re.compile(r".+_(train|val)_\d{6}\.bin")


def examine(path: Path, expected: dict | None = None) -> tuple[dict, str]:
    """A shard's entry, and what is wrong with the shard or ""; `expected` may lack keys."""
    expected = expected or {}
    try:
        size = path.stat().st_size
        if size != expected.get("bytes", size):
            return {}, f"{size:,} bytes instead of {expected['bytes']:,}"
        entry = inspect_shard(path)
    except FileNotFoundError:
        return {}, "missing"
    except UserError as error:
        return {}, str(error).removeprefix(f"{path}: ")
    del entry["name"]
    if entry["sha256"] != expected.get("sha256", entry["sha256"]):
        return entry, f"sha256 {entry['sha256']} instead of {expected['sha256']}"
    return entry, ""


def examine_all(folder: Path, names: Iterable[str], expected: dict[str, dict]) -> Iterator[tuple]:
    """(name, entry, problem) of each shard, on all cores: hashing does not hold Python's lock."""
    with ThreadPoolExecutor(CORES) as pool:
        yield from pool.map(
            lambda name: (name, *examine(folder / name, expected.get(name))), names)


def shards_in(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.bin") if SHARD_NAME.fullmatch(path.name)]


def read_manifest(folder: Path) -> dict[str, dict]:
    path = folder / MANIFEST
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        raise UserError(f"{path} is not JSON: delete it") from None


def write_json(path: Path, value) -> None:
    """Replace a file in one step: a reader finds the old one or the new one, whole."""
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and be alone at work in it; the lock goes with the process, even killed."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another fineweb.py is at work in {folder}: waiting for it", flush=True)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(handle)


def verify(folder: Path) -> None:
    """Check every shard of a folder against its manifest, and name the bad ones."""
    manifest = read_manifest(folder)
    names = sorted({*manifest, *shards_in(folder)})
    if not names:
        raise UserError(f"no shards in {folder}: make some by download or tokenize")
    if not manifest:
        print(f"{folder} has no {MANIFEST}: checking the format, not the content")
    same: dict[str, str] = {}  # sha256 -> name
    bad = 0
    for name, entry, problem in examine_all(folder, names, manifest):
        twin = same.setdefault(entry.get("sha256", name), name)
        if not problem and ("_val_" in twin) != ("_val_" in name):
            problem = f"the same content as {twin}"
        if not problem and manifest and name not in manifest:
            problem = f"not in {MANIFEST}"
        bad += bool(problem)
        print(f"bad  {name}: {problem}" if problem else f"ok   {name}")
    if bad:
        raise UserError(f"{bad} of {len(names)} shards in {folder} are bad: make them again")

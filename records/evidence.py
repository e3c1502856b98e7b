"""Evidence: whether a record's folder shows what it says, read strictly, with nothing executed.

What a folder holds was written by strangers. Every check is a generator of (holds, reason if it
does not), or raises ValueError where it cannot go on; record.py puts them together.
"""

import ast
import hashlib
import json
import math
import platform
import re
import stat
import sys
import warnings
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

TRACKS = {  # what every record of a track shares, pinned here and nowhere else
    "gpu": {
        "metric": "loss", "unit": "nats per token", "target": 3.28,
        "val_tokens": {50257: 10_485_760, 50304: 10_485_760},  # predicted, by vocabulary
        "val_bytes": None,  # not known
        "val_sha256": "5b95c8e0966f0861685b307b23dc5ae42b228ef74b28cb499784ae021f201640",
        "train_names": r"fineweb_train_\d{6}\.bin",
        "train_sha256": {  # as far as it is known
            "fineweb_train_000001.bin":
                "771fa4a99b9fe0946ffb6e848b4ba5c6a9b0fe87860ebf03bc2c1c7e45f8178e",
        },
    },
    "cpu": {
        "metric": "bits_per_byte", "unit": "bits per byte",
        "target": 1.365,  # the baseline record's mean, rounded up in the third decimal
        "val_tokens": {257: 495_192, 512: 227_224, 1024: 177_414, 2048: 148_787, 4096: 127_719,
                       8192: 113_271, 50257: 95_721},
        "val_bytes": 495_181,
        "val_sha256": "d9cacfe15d1422b3a315d83033299ec4d190407db604e89de00073bdd995b5b1",
        "train_names": r"sotu_train_000000\.bin",
        "train_sha256": {
            "sotu_train_000000.bin":
                "76f4404a49c8f2ced79350a4fe7a52f2a0f5e64f0a1f00c60b347590b34cbae3",
        },
    },
}
CODE = ("train_gpt.py", "muon.py", "harness.py", "data/shards.py")  # lie side by side in a record
LIBRARIES = {"torch", "numpy", "tiktoken", "tqdm", "triton", *sys.stdlib_module_names}
OFF_CLOCK = "startup data model compile warmup probe validation save sample".split()
FILE_LIMIT, LINE_LIMIT, NUMBER_LIMIT = 2**25, 2**20, 10**15  # bytes, bytes, below this
TO_DO = "to be filled in by a person"
FOLDER = r"[0-9]{4}-[0-9]{2}-[0-9]{2}_[A-Za-z0-9][A-Za-z0-9_-]{0,63}"

# what the lines of a log and of a ledger have to hold; more may stand beside it
LOG = {
    "header": "run_id:str time:str track:str seed:int settings:dict code:dict versions:dict "
              "device:str world_size:int threads:int num_params:int vocab_size:int shards:list "
              "environment:dict",
    "off_clock": "name:str seconds:float",
    "probe": "name:str step:int max_change:float ok:bool",
    "step": "step:int loss:float grad_norm:float lr_multiplier:float tokens:int "
            "train_seconds:float",
    "val": "step:int loss:float bits_per_byte:float tokens:int bytes:int train_tokens:int "
           "train_seconds:float",
    "end": "status:str reason:str steps:int train_seconds:float wall_seconds:float "
           "peak_memory_mib:float",
}
LEDGER = {
    "plan": "previous:str time:str name:str track:str runs:int first_seed:int pairs:int code:dict",
    "start": "previous:str time:str run_id:str arm:str seed:int",
    "end": "previous:str time:str run_id:str status:str",
}
TYPES = {kind.__name__: kind for kind in (str, int, float, bool, list, dict)}
PRIVATE = {
    "a secret": r"\b(hf_|gh[pousr]_|github_pat_|AKIA|glpat-|sk-|xox[abp]-)[\w-]{12}"
                r"|PRIVATE KEY-----|\beyJ[\w-]{16,400}\.[\w-]{16}",
    "a home path": r"(?<![\w.])/((home|Users)/\w|root\b)|\b[A-Za-z]:[\\/]+Users\b",
    "an address": r"(?<![\d.])(?!127\.|0\.0\.0\.0)(\d{1,3}\.){3}\d{1,3}(?!\.?\d)"
                  r"|\b([0-9a-f]{1,4}:){5,7}[0-9a-f]{1,4}\b|\b[0-9a-f]{2,4}::[0-9a-f]",
    "a host name": r"(?i)\bip(-\d+){4}\b|\b[\w-]{1,63}\.(local|internal|lan|corp|intranet)\b"
                   r"|^(host(name)?|node|user(name)?|cwd|argv|environ)$",
}
COMPILER = r"(torch\.)?(_inductor|_dynamo\.config|_functorch\.config)(\.[\w.]+)?"
COMPILER_VARIABLE = r"TORCH(INDUCTOR|DYNAMO)_(?!CACHE_DIR$)\w+"


# ------------------------------------------------------------------------------------------------
# reading what strangers wrote: ValueError says what is wrong


class Number(float):
    """A finite float that remembers how it was written."""

    def __new__(cls, text: str):
        self = super().__new__(cls, text)
        if not math.isfinite(self):
            raise ValueError(f"{text} is not finite")
        self.digits = text.lower().partition("e")[0].partition(".")[2]  # after the point
        return self


def is_a(value, kind: type) -> bool:
    """isinstance, where an int is a float, and a bool no number."""
    number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    return number if kind in (int, float) else isinstance(value, kind)


def read(path: Path, limit: int = FILE_LIMIT) -> bytes:
    """The bytes of a plain file that is not too large."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        raise ValueError(f"{path.name} is missing") from None
    if not stat.S_ISREG(info.st_mode):
        raise ValueError(f"{path.name} is a link or no plain file")
    if info.st_size > limit:
        raise ValueError(f"{path.name} has {info.st_size:,} bytes, the limit is {limit:,}")
    return path.read_bytes()


def parse(data: bytes, fields: str) -> dict:
    """A JSON object with these fields, without NaN, infinity, or a key that stands twice."""

    def unique(pairs: list) -> dict:
        entry = {}
        for key, value in pairs:
            if key in entry:
                raise ValueError(f"{key!r} stands twice in one object")
            entry[key] = value
        return entry

    def refuse(name: str):
        raise ValueError(f"{name} is not a number")

    if data.startswith(b"\xef\xbb\xbf"):
        raise ValueError("starts with a byte order mark")
    if b"\r" in data:
        raise ValueError("has a carriage return: lines end with \\n alone")
    try:
        entry = json.loads(data.decode(), parse_float=Number, parse_constant=refuse,
                           object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    fit(entry, fields)
    return entry


def fit(entry, fields: str) -> None:
    """Raise ValueError unless the object has the fields, all numbers from 0 to NUMBER_LIMIT."""
    if not isinstance(entry, dict):
        raise ValueError(f"is {type(entry).__name__}, not an object")
    for key, kind in (pair.split(":") for pair in fields.split()):
        if not is_a(value := entry.get(key), TYPES[kind]):
            raise ValueError(f"{key} is {value!r}, not {kind}")
        if kind in ("int", "float") and not 0 <= value < NUMBER_LIMIT:
            raise ValueError(f"{key} is {str(value)[:20]}, out of range")


def parse_lines(data: bytes, kinds: dict, whole: bool = True) -> list[dict]:
    """The objects of a log or ledger; `whole=False` forgives a last line that was cut."""
    if whole and not data.endswith(b"\n"):
        raise ValueError("the last line is cut")
    entries = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            if len(line) > LINE_LIMIT:
                raise ValueError(f"has {len(line):,} bytes, the limit is {LINE_LIMIT:,}")
            entry = parse(line, "kind:str")
            if entry["kind"] not in kinds:
                raise ValueError(f"kind is {entry['kind']!r}, not one of {', '.join(kinds)}")
            fit(entry, kinds[entry["kind"]])
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        entries.append(entry)
    return entries


def strings(value):
    """Every string in a parsed object, keys too; no recursion, however deep it is."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, (dict, list)):
            stack += [*value, *value.values()] if isinstance(value, dict) else value


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def instant(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


# ------------------------------------------------------------------------------------------------
# a record and its ledger


@dataclass
class Run:
    """A run that was started: the ledger's two lines, and its log by kind of line."""

    start: dict
    end: dict = field(default_factory=dict)  # empty until it ends
    log: dict = field(default_factory=dict)  # empty unless it finished and reads well

    @property
    def slot(self) -> tuple:
        return self.start["arm"], self.start["seed"]

    @property
    def status(self) -> str:
        return self.end.get("status", "interrupted")


@dataclass
class Record:
    folder: Path
    about: dict = field(default_factory=dict)
    plan: dict = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    @property
    def track(self) -> dict:
        return TRACKS[self.folder.parent.name]

    def arm(self, arm: str) -> list[Run]:
        return [run for run in self.runs if run.log and run.start["arm"] == arm]


def schedule(plan: dict) -> list[tuple]:
    """(arm, seed) in the order of running: pairs as A B B A A B, then seeds without partner."""
    slots = []
    for i, seed in enumerate(range(plan["first_seed"], plan["first_seed"] + plan["runs"])):
        pair = [("record", seed)] + [("baseline", seed)] * (i < plan["pairs"])
        slots += pair[::-1] if i % 2 else pair
    return slots


def read_ledger(folder: Path) -> tuple[dict, list[Run]]:
    """The plan and the runs, links checked. Raises ValueError."""
    data, runs = read(folder / "runs.jsonl"), []
    plan, *entries = parse_lines(data, LEDGER)
    if plan["kind"] != "plan" or not 1 <= plan["runs"] <= 1000 or plan["pairs"] > plan["runs"]:
        raise ValueError("does not start with a plan of 1 to 1000 runs")
    previous = ["0" * 64, *map(sha256, data.split(b"\n"))]
    for number, entry in enumerate([plan, *entries], 1):
        if entry["previous"] != previous[number - 1]:
            raise ValueError(f"line {number} does not hold the sha256 of the line before")
    for entry in entries:
        running = runs[-1] if runs and not runs[-1].end else None
        if entry["kind"] == "start" and not running:
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", entry["run_id"]):
                raise ValueError(f"{entry['run_id']!r} is no run id")
            runs.append(Run(entry))
        elif entry["kind"] == "end" and running and entry["run_id"] == running.start["run_id"]:
            running.end = entry
        else:
            raise ValueError(f"{entry['kind']} at {entry['time']} stands where it cannot")
    return plan, runs


def attempts(plan: dict, runs: list[Run]) -> tuple[list, list[Run]]:
    """[(slot, its runs)] along the schedule, and the runs that are not in their place in it."""
    queue, filled = list(runs), []
    for slot in schedule(plan):
        tries = []
        while queue and queue[0].slot == slot:
            tries.append(queue.pop(0))
        filled.append((slot, tries))
    return filled, queue


# ------------------------------------------------------------------------------------------------
# verify: each check yields (holds, reason if not), or raises ValueError where it cannot go on


def check_about(record: Record):
    """record.json: what a person says, and that the folder's name says the same."""
    about = parse(read(record.folder / "record.json"),
                  "name:str authors:list date:str track:str changed:str")
    optional = {"against": "str", "confirmed_by": "list", "role": "str"}
    fit(about, " ".join(f"{key}:{optional[key]}" for key in optional if key in about))
    record.about = about
    extra = about.keys() - {"name", "authors", "date", "track", "changed", *optional}
    yield not extra, f"{sorted(extra)} are no fields: numbers are computed, never typed"
    yield from check_private(about)
    for key in ("authors", "confirmed_by"):
        good = all(isinstance(who, str) and who.strip() and who.isprintable()
                   for who in about.get(key, []))
        yield good, f"{key} is {about.get(key)}, not a list of names"
    for key in ("authors", "changed"):
        yield about[key] and TO_DO not in about[key], f"{key} is {TO_DO}"
    role, folder = about.get("role", "record"), record.folder
    yield role in ("record", "baseline"), f"role is {role!r}, neither 'record' nor 'baseline'"
    yield about["track"] == folder.parent.name, \
        f"track is {about['track']!r}, but it lies in {folder.parent.name!r}"
    yield folder.name == f"{about['date']}_{about['name']}", \
        f"date and name are {about['date']!r} and {about['name']!r}, the folder is {folder.name!r}"
    yield re.fullmatch(FOLDER, folder.name), f"the folder is {folder.name!r}, not YYYY-MM-DD_Name"
    future = instant(f"{about['date']}T00:00:00Z") > datetime.now(UTC)
    yield not future, f"date {about['date']} is in the future"


def check_ledger(record: Record):
    """The chain, and that every planned seed ran to its end, in order and once."""
    record.plan, record.runs = plan, runs = read_ledger(record.folder)
    entries = [plan, *(line for run in runs for line in (run.start, run.end) if line)]
    yield from check_private(entries)
    for key in ("name", "track", "against") if record.about else ():
        yield plan.get(key) == record.about.get(key), \
            f"{key} is {plan.get(key)!r}, in record.json {record.about.get(key)!r}"
    yield plan["time"][:10] == record.folder.name[:10], f"planned {plan['time']}, not on its date"
    times = [instant(entry["time"]) for entry in entries]
    yield times == sorted(times), "its times run backwards"
    yield times[-1] <= datetime.now(UTC) + timedelta(minutes=5), f"{times[-1]} is in the future"
    yield plan["pairs"] >= 2 if plan.get("against") else plan["pairs"] == 0, \
        f"{plan['pairs']} pairs against {plan.get('against')!r}: a time claim needs two"
    ids = [run.start["run_id"] for run in runs]
    yield len(set(ids)) == len(ids), f"{max(ids, key=ids.count, default='')!r} was started twice"
    filled, unplanned = attempts(plan, runs)
    for (arm, seed), tries in filled:
        *before, last = [run.status for run in tries] or ["interrupted"]
        yield last != "interrupted", f"{arm} seed {seed} was planned and has no finished run"
        yield last in ("ok", "interrupted"), f"{arm} seed {seed} {last}: a failed run counts"
        yield {*before} <= {"interrupted"}, f"{arm} seed {seed} was run again after {before}"
        yield len(before) < 2, f"{arm} seed {seed} was interrupted twice: once is forgiven"
    for run in unplanned:
        yield False, f"{run.start['run_id']} is not in its place in the plan"


def check_private(value):
    """No secrets, no paths of a person, no machines by name."""
    text = "\n".join(strings(value))
    for what, pattern in PRIVATE.items():
        found = re.search(pattern, text, re.MULTILINE)
        yield not found, f"holds {what}: {found[0][:8] if found else ''}..."
    name = platform.node()  # of this machine: who publishes a record checks it where it ran
    telling = re.fullmatch(r"(?=.*[a-z])(?=.*[\d.-]).{4,}", name, re.IGNORECASE)
    yield not (telling and name in text), "holds a host name: this machine's"


def check_files(record: Record):
    """Nothing but what the plan and the ledger name, and no links."""
    known = {"record.json", "runs.jsonl", "README.md", "loss.png"}
    known |= {f"{run.start['run_id']}.jsonl" for run in record.runs}
    known |= record.plan["code"].get("record", {}).keys()
    for path in sorted(record.folder.iterdir()):
        yield path.name in known, f"{path.name} is named neither by the plan nor by the ledger"
        yield not path.is_symlink(), f"{path.name} is a link"


def check_code(record: Record):
    """The stored code is the planned one, and keeps the rule on compile settings."""
    plan, against = record.plan["code"], str(record.plan.get("against") or record.folder.name)
    good = all(is_a(code, dict) and "train_gpt.py" in code and all(
        re.fullmatch(r"[A-Za-z0-9_]+\.py", name) for name in code) for code in plan.values())
    arms = ["baseline", "record"] if record.plan.get("against") else ["record"]
    if not good or sorted(plan) != arms or not re.fullmatch(FOLDER, against):
        record.plan["code"] = {}
        raise ValueError("the plan does not list train_gpt.py and what lies beside it, arm by arm")
    for arm in arms:
        folder = record.folder if arm == "record" else record.folder.parent / against
        for name, planned in plan[arm].items():
            data = read(folder / name, LINE_LIMIT // 4)
            yield sha256(data) == planned, f"{arm}'s {name} is not the code of the plan"
            if arm == "record":
                for line, what in banned(data, {other[:-3] for other in plan[arm]}):
                    yield False, f"{name} line {line} {what}"


def banned(source: bytes, modules: set[str]) -> list[tuple[int, str]]:
    """[(line, what)]: extra compile settings, and what would hide them from this reading.

    By the syntax tree, names followed through imports and assignments: comments and prose are
    free. It stops the usual ways; who wants to hide something is left to those who read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [(getattr(error, "lineno", 0) or 0, f"is not Python: {type(error).__name__}")]
    alias, found = {}, set()

    def full(node) -> str:
        """A dotted name with its first part followed; empty for what is none."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        parts.append(alias.get(node.id, node.id) if isinstance(node, ast.Name) else "")
        return ".".join(parts[::-1])

    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [(item.asname, item.name) for item in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(item.asname or item.name, f"{node.module}.{item.name}")
                     for item in node.names]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            alias.setdefault(node.targets[0].id, full(node.value) or node.targets[0].id)
        for name, module in names:
            alias[name or module.split(".")[0]] = module if name else module.split(".")[0]
            if module.split(".")[0] not in LIBRARIES | modules:
                found.add((node.lineno, f"imports {module}, which is neither stored nor a library"))
            if re.fullmatch(COMPILER, module):
                found.add((node.lineno, f"imports {module}: no extra compile settings"))
    for node in nodes:
        text = node.value if isinstance(node, ast.Constant) else getattr(node, "arg", "")
        text = full(node) if isinstance(node, (ast.Attribute, ast.Name)) else text
        if re.fullmatch(f"{COMPILER}|{COMPILER_VARIABLE}", text if isinstance(text, str) else ""):
            found.add((node.lineno, f"names {text}: no extra compile settings"))
        if isinstance(node, ast.Call):
            name, given = full(node.func), {keyword.arg for keyword in node.keywords}
            compiles = "compile" in (name.split(".")[-1], getattr(node.func, "attr", ""))
            if compiles or "torch.compile" in map(full, node.args):  # such as functools.partial
                for option in given & {"mode", "options", "backend", None}:
                    found.add((node.lineno, f"gives torch.compile {option or '**'}: not allowed"))
            if name in ("exec", "eval", "compile", "__import__") or name.startswith("importlib."):
                found.add((node.lineno, f"calls {name}: code that nobody can read here"))
    return sorted(found)


def check_log(record: Record, run: Run):
    """One log: that the ledger hashed it, its lines, and then what they say."""
    path = record.folder / f"{run.start['run_id']}.jsonl"
    if run.status == "interrupted" and run.end.get("log_sha256") is None and not path.exists():
        return  # it ended before it could write one
    data = read(path)
    yield sha256(data) == run.end.get("log_sha256"), "is not what the ledger hashed at its end"
    entries = parse_lines(data, LOG, whole=run.status != "interrupted")
    yield from check_private(entries)
    log = by_kind(entries)
    if run.status == "interrupted":
        yield is_cut(log), "counts as interrupted, but it finished or failed"
    elif run.status == "ok":
        order = list(check_order(entries, log))
        yield from order
        if all(holds for holds, _ in order):
            run.log = log
            for check in (check_header, check_clock, check_data, check_losses):
                yield from check(record, run)


def by_kind(entries: list[dict]) -> dict[str, list]:
    return {kind: [entry for entry in entries if entry["kind"] == kind] for kind in LOG}


def is_cut(log: dict[str, list]) -> bool:
    """Whether a run showed nothing yet, and may be made again: it took no step, or it was stopped
    from outside before its last validation."""
    last = [header["settings"].get("train_steps") for header in log["header"]]
    stopped = all(end["status"] == "interrupted" for end in log["end"])
    return not log["step"] or (stopped and all(val["step"] not in last for val in log["val"]))


def rising(values: list, strictly: bool = True) -> bool:
    return all(a < b or (a == b and not strictly) for a, b in pairwise(values))


def check_order(entries: list[dict], log: dict):
    """One header, one end, and between them every step and validation in its place."""
    if [len(log["header"]), len(log["end"])] != [1, 1] or entries[0] is not log["header"][0] \
            or entries[-1] is not log["end"][0]:
        raise ValueError("is not one header, the run, and one end")
    settings, end = log["header"][0]["settings"], log["end"][0]
    fit(settings, "seed:int vocab_size:int train_steps:int log_every:int")
    yield end["status"] == "ok", f"ended as {end['status']!r}: {end['reason']}"
    count, every = settings["train_steps"], settings["log_every"]
    yield end["steps"] == count, f"ended after {end['steps']} of {count} steps"
    steps, vals = [[entry["step"] for entry in log[kind]] for kind in ("step", "val")]
    yield [*steps[:1], *steps[-1:]] == [0, count - 1] and all(
        b == min(a + every, count - 1) for a, b in pairwise(steps)), \
        f"does not have the steps 0, {every}, {2 * every} ... {count - 1}"
    yield [*vals[:1], *vals[-1:]] == [0, count], f"has no validation at step 0 or at {count}"
    # a validation at n comes after step n-1 and before step n
    places = [2 * entry["step"] + (entry["kind"] == "step") for entry in entries
              if entry["kind"] in ("step", "val")]
    yield rising(places), "has steps and validations out of order"
    probed = [entry["kind"] for entry in entries if entry["kind"] in ("probe", "val")][:1]
    yield probed == ["probe"] and all(
        entry["ok"] and entry["name"] == "causality" for entry in log["probe"]), \
        "has no passed causality probe before its first validation"


def check_header(record: Record, run: Run):
    """Who ran, when, from which code, and that the settings say so too."""
    header, start, end = run.log["header"][0], run.start, run.end
    settings, code = header["settings"], record.plan["code"].get(start["arm"], {})
    for key, found, wanted in (
            ("run_id", header["run_id"], start["run_id"]), ("seed", header["seed"], start["seed"]),
            ("track", header["track"], record.folder.parent.name),
            ("settings' seed", settings["seed"], start["seed"]),
            ("settings' vocab_size", settings["vocab_size"], header["vocab_size"])):
        yield found == wanted, f"{key} is {found!r}, not {wanted!r}"
    for name in header["code"].keys() | (code.keys() & {Path(path).name for path in CODE}):
        yield header["code"].get(name) == code.get(name), f"ran another {name} than the plan's"
    yield instant(start["time"]) <= instant(header["time"]) <= instant(end["time"]), \
        f"began {header['time']}, not between {start['time']} and {end['time']}"
    for name in header["environment"]:
        yield not re.fullmatch(COMPILER_VARIABLE, name), f"ran with {name}: no compile settings"


def check_clock(record: Record, run: Run):
    """The training clock runs forward; with what was named off it, it fills the wall time."""
    log, end = run.log, run.log["end"][0]
    ticks = sorted((2 * entry["step"] + (kind == "step"), entry["train_seconds"])
                   for kind in ("step", "val") for entry in log[kind])
    yield rising([seconds for _, seconds in ticks] + [end["train_seconds"]], strictly=False) \
        and rising([entry["train_seconds"] for entry in log["step"]]), \
        "its training clock runs backwards or stands still"
    for entry in log["off_clock"]:
        yield entry["name"] in OFF_CLOCK, f"{entry['name']!r} may not be off the clock"
        yield entry["name"] != "warmup" or entry.get("state_restored") is True, \
            "its warm-up does not say that it restored the state"
    off, wall = sum(entry["seconds"] for entry in log["off_clock"]), end["wall_seconds"]
    yield abs(end["train_seconds"] + off - wall) <= 0.05 * wall, \
        f"trained {end['train_seconds']:.1f} s, {off:.1f} s off the clock: not its {wall:.1f} s"
    span = (instant(run.end["time"]) - instant(run.start["time"])).total_seconds()
    yield wall - 2 <= span <= 1.05 * wall + 30, \
        f"took {wall:.1f} s by its own clock and {span:.0f} s by the ledger's"  # + launch, import
    trained = {0: 0} | {entry["step"] + 1: entry["tokens"] for entry in log["step"]}
    agree = [val["train_tokens"] == trained.get(val["step"], val["train_tokens"])
             for val in log["val"]]
    yield rising([*trained.values()]) and all(agree), "its training tokens do not add up"


def check_data(record: Record, run: Run):
    """The track's validation set, whole; the track's training data; nothing in both."""
    shards, track = run.log["header"][0]["shards"], record.track
    for shard in shards:
        fit(shard, "name:str split:str tokens:int bytes:int sha256:str")
    val = [shard for shard in shards if shard["split"] == "val"]
    train = [shard for shard in shards if shard["split"] == "train"]
    yield train and len(val) == 1 == len(shards) - len(train), "does not read one val shard"
    yield all(shard["sha256"] == track["val_sha256"] for shard in val), \
        "its validation shard is not the track's"
    for shard in train:
        name, known = shard["name"], track["train_sha256"].get(shard["name"], shard["sha256"])
        yield re.fullmatch(track["train_names"], name), f"trains on {name}: not the track's data"
        yield shard["sha256"] == known, f"trains on another {name} than the track's"
        yield shard["sha256"] not in [other["sha256"] for other in val], f"{name} is the val shard"
    vals, vocab_size = run.log["val"], run.log["header"][0]["vocab_size"]
    tokens = track["val_tokens"].get(vocab_size)
    yield tokens, f"vocab_size is {vocab_size}, not one of {[*track['val_tokens']]}"
    whole = (tokens, track["val_bytes"] or vals[0]["bytes"])
    for val in vals:
        yield (val["tokens"], val["bytes"]) == whole, f"validates on {val['tokens']:,} tokens, " \
            f"{val['bytes']:,} bytes at step {val['step']}, not {whole[0]} and {whole[1]}"


def check_losses(record: Record, run: Run):
    """Losses as they were measured: unrounded, consistent, and starting from ignorance."""
    vals, first = run.log["val"], run.log["step"][0]["loss"]
    ignorance = math.log(max(2, run.log["header"][0]["vocab_size"]))
    # auxiliary targets may add to the first training loss; nothing may take from it
    yield abs(vals[0]["loss"] / ignorance - 1) <= 0.05 and first >= 0.95 * ignorance, \
        f"starts at {vals[0]['loss']:.4f}, training at {first:.4f}, not near ln(vocab_size)"
    for val in vals:
        bits = val["loss"] * val["tokens"] / max(1, val["bytes"]) / math.log(2)
        yield abs(bits - val["bits_per_byte"]) <= 1e-6 * bits, \
            f"step {val['step']}: loss {val['loss']} is {bits} bits per byte, not what it says"
        for key in ("loss", "bits_per_byte"):
            yield len(getattr(val[key], "digits", "")) >= 6, \
                f"step {val['step']}: {key} {val[key]} has fewer than six decimals"


def check_runs(record: Record):
    """Runs differ in their seed alone, both arms ran on one machine, and no log serves twice."""
    own = ("kind", "run_id", "time", "seed", "settings")
    seen = {}
    for run in record.arm("record") + record.arm("baseline"):
        arm, name, header = run.start["arm"], run.start["run_id"], run.log["header"][0]
        alike = {key: value for key, value in header.items() if key not in own}
        alike |= {f"settings.{key}": value for key, value in header["settings"].items()
                  if key != "seed"}
        machine = {key: alike[key] for key in ("device", "world_size", "threads", "versions")}
        for values, first in ((alike, seen.setdefault(arm, alike)),
                              (machine, seen.setdefault("machine", machine))):
            differ = sorted(key for key in values.keys() | first.keys()
                            if values.get(key) != first.get(key))
            yield not differ, f"{name} differs from the first run in {', '.join(differ)}"
        curve = tuple(entry["loss"] for entry in run.log["step"] + run.log["val"])
        yield seen.setdefault(curve, name) == name, f"{name} has the losses of {seen[curve]}"

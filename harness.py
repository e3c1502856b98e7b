"""What a run needs around it: launcher, flags, ranks, clock and log, checkpoints, a good end.

    python harness.py --nproc_per_node 2 train_gpt.py [flags]         torchrun, with a last sentence

Nothing here knows of a model. A run ends in one of three ways, ok, failed or interrupted; its log
says which and why, its exit code is 0 only for the first, and no process of it stays behind.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import hashlib
import inspect
import itertools
import json
import logging
import math
import os
import platform
import re
import resource
import secrets
import shutil
import signal
import sys
import threading
import traceback
import typing
from pathlib import Path
from time import perf_counter as now
from time import sleep, time
from typing import NamedTuple

STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
if __name__ == "__main__":  # the launcher: torch is long in coming, and listens only then
    for number in STOPS:
        words = f"train_gpt.py: interrupted: {number.name}"
        signal.signal(number, lambda *_, words=words: sys.exit(words))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
# a record's frozen copy lies deeper than the repository's root, and brings its own shards.py
ROOT = next((p for p in (HERE, *HERE.parents) if (p / "data/shards.py").exists()), HERE)
sys.path.append(str(ROOT / "data"))

from shards import UserError

BEAT = 1.0  # seconds between two looks at the launcher, and two signs of life
GRACE = 3.0  # seconds to end in order after the launcher has gone

# ------------------------------------------------------------------------------------------------
# flags


def parse_value(field: dataclasses.Field, text):
    """A flag's text -> the field's value; ValueError where it is not of the field's type."""
    if typing.get_origin(field.type) is tuple:
        kind = typing.get_args(field.type)[0]
        return tuple(kind(part) for part in text.split(",") if part)
    return text if field.type is bool else field.type(text)


def make_parser(first, other) -> argparse.ArgumentParser:
    """A flag for every field of a dataclass; its help is the field's trailing comment."""

    def refuse(message: str):
        raise UserError(f"{message}; `./run.sh --help` lists the flags")

    parser = argparse.ArgumentParser(
        prog="./run.sh",
        allow_abbrev=False,
        description="Train a GPT. Every setting is a flag, tuples are written a,b,c; defaults are"
        f" the {first.preset} preset's, in brackets the {other.preset} preset's where it differs.",
    )
    parser.error, flag = refuse, parser.add_argument
    flag("--run_id", help="name of the log, [A-Za-z0-9._-]{1,64} (the time)")
    flag("--log_dir", type=Path, default=ROOT / "logs", help="folder of the log (logs)")
    flag("--resume", type=Path, help="a checkpoint, or a folder of them: go on from the newest")
    flag("--sample", help="print a text's continuation by the checkpoint of --resume, and stop")
    flag("--check", action="store_true", help="check settings and data, and stop")
    flag("--shards_needed", action="store_true", help="print the FineWeb shards to fetch, and stop")
    source = inspect.getsource(type(first))
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.M))
    for field in dataclasses.fields(first):
        values = [getattr(preset, field.name) for preset in (first, other)]
        default = f"{values[0]}" + (f" [{values[1]}]" if values[0] != values[1] else "")
        how = dict(action=argparse.BooleanOptionalAction) if field.type is bool else {}
        text = f"{comments[field.name]} ({default})".replace("%", "%%")
        flag(f"--{field.name}", help=text, default=None, **how)
    return parser


def read_flags(argv: list[str], presets: dict, default: str, habits: str, checkpoint: set[str]):
    """Flags -> settings, and a namespace of what is none; UserError for a mistake.

    presets: two instances of one dataclass of settings. With --resume the checkpoint's settings
    take the preset's place, only `habits` may change, and args.resume is what the checkpoint holds.
    """
    args = make_parser(*presets.values()).parse_args(argv)
    preset = args.preset or default
    if preset not in presets:
        raise UserError(f"--preset {preset}: there are {', '.join(presets)}")
    base, changes, args.changed = presets[preset], {}, []
    fields = dataclasses.fields(base)
    if args.resume:
        args.resume = read_checkpoint(args.resume, checkpoint)
        if args.resume["settings"].keys() != {field.name for field in fields}:
            raise UserError("--resume: a checkpoint of another version of train_gpt.py")
        base = type(base)(**args.resume["settings"])
        if args.preset not in (None, base.preset):
            raise UserError(f"--preset {preset}: the run to resume has {base.preset}")
    for field in fields[1:]:
        value, old = getattr(args, field.name), getattr(base, field.name)
        try:
            if value is not None:
                changes[field.name] = parse_value(field, value)
        except ValueError:
            kind = getattr(field.type, "__name__", field.type)
            raise UserError(f"--{field.name} {value}: not of type {kind}") from None
        if args.resume and changes.get(field.name, old) != old:
            if field.name not in habits.split():
                raise UserError(f"--{field.name} {value}: the run to resume has {old}")
            args.changed.append(f"--{field.name} {value} (was {old})")
    if args.run_id and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", args.run_id):
        raise UserError(f"--run_id {args.run_id!r}: letters, digits, '.', '_', '-', at most 64")
    if args.sample is not None and not args.resume:
        raise UserError("--sample: needs --resume CHECKPOINT")
    return dataclasses.replace(base, **changes), args


# ------------------------------------------------------------------------------------------------
# ranks


class Ranks(NamedTuple):
    """This process among those that the launcher started."""

    rank: int
    world_size: int
    device: torch.device
    store: dist.Store | None = None  # what the ranks can tell each other when nothing else works

    def sum(self, *values: Tensor | float) -> list[float]:
        """Each value summed over the ranks, in fp64."""
        total = torch.stack([torch.as_tensor(v).to(self.device, torch.float64) for v in values])
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.tolist()

    def from_first(self, make):
        """What make() returns on rank 0, on every rank; a user's mistake there is raised here."""
        box = [None]
        if self.rank == 0:
            try:
                box = [make()]
            except UserError as error:
                box = [error]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, device=self.device)
        if isinstance(box[0], UserError):
            raise box[0]
        return box[0]


def join_ranks(timeout: float) -> Ranks:
    """Join the process group that the launcher's variables describe; without them, one process."""
    rank, local = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    world_size, store = int(os.environ.get("WORLD_SIZE", 1)), None
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local >= (count := torch.cuda.device_count()):
            asked = os.environ.get("LOCAL_WORLD_SIZE", local + 1)
            raise UserError(f"NPROC={asked}, but this machine has {count} GPUs: NPROC={count}")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if world_size > 1:
        wait = datetime.timedelta(seconds=timeout)
        store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=wait))
        backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        group = dict(rank=rank, world_size=world_size, timeout=wait, device_id=device_id)
        dist.init_process_group(backend, store=store, **group)
        store = store.clone()
    return Ranks(rank, world_size, device, store)


def keep_memory() -> None:
    """Let freed memory stay with the process: fetching it anew takes a sixth of a CPU step."""
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        for option, size in ((-3, 2**30), (-1, 2**31 - 1)):  # M_MMAP_ and M_TRIM_THRESHOLD, bytes
            ctypes.CDLL(None).mallopt(option, size)


# ------------------------------------------------------------------------------------------------
# clock and log


def new_log(folder: Path, run_id: str | None, name: str) -> Path:
    """An empty log, called run_id or by the time and `name`, never in place of another."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d_%H%M%S")
    run_id = run_id or f"{date}_{name}_{secrets.token_hex(2)}"
    path = folder.resolve() / f"{run_id}.jsonl"
    if path.exists():
        raise UserError(f"--run_id {run_id}: {path} exists; choose another")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("x").close()
    except OSError as error:
        raise UserError(f"--log_dir {path.parent}: {error.strerror}") from None
    return path


class Run:
    """The training clock and the log: JSON lines on disk, a few words on the terminal."""

    def __init__(self, ranks: Ranks, path: Path, start: float):
        """start: when the process began, on the clock of perf_counter."""
        self.ranks, self.path, self.start, self.step = ranks, path, start, 0
        self.at = 0.0  # the step, and a half more where this rank waits for the others
        self.train_seconds, self.started = 0.0, None
        self.stop_asked: str | None = None  # the signal's name, where it can wait for a checkpoint
        self.patient = False  # whether it can
        self.file, self.bar, self.told = None, None, now()
        if ranks.rank == 0:
            self.file = open(path, "a", encoding="utf-8")

    def write(self, kind: str, **fields) -> None:
        if self.file:
            self.file.write(json.dumps({"kind": kind, **fields}) + "\n")
            self.file.flush()

    def say(self, text: str) -> None:
        if self.ranks.rank == 0:
            try:
                code = sys.stdout.encoding or "utf-8"  # a POSIX terminal's is ASCII
                tqdm.write(text.encode(code, errors="backslashreplace").decode(code))
                sys.stdout.flush()
            except OSError:  # piped into head, or a full disk: the run and its log go on
                sys.stdout = open(os.devnull, "w")

    def waits(self) -> None:
        """From here on this rank waits for the others: late_ranks() does not count it as late."""
        self.at = self.step + 0.5

    def clock(self, runs: bool) -> float:
        """Start or stop the training clock, when the device has done all its work; seconds."""
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        moment = now()
        self.train_seconds += moment - self.started if self.started else 0.0
        self.started = moment if runs else None
        return self.train_seconds

    @contextlib.contextmanager
    def off_clock(self, name: str, **fields):
        """A named section that is not training: the clock stands, its seconds go into the log."""
        was_running = self.started is not None
        self.clock(False)
        start = now()
        yield
        self.clock(False)
        self.write("off_clock", name=name, seconds=now() - start, **fields)
        if was_running:
            self.clock(True)

    def progress(self, step: int, steps: int, text: str) -> None:
        """A bar on a terminal, otherwise a line every five seconds."""
        if self.ranks.rank == 0 and sys.stderr.isatty():
            self.bar = self.bar or tqdm(total=steps, unit="step", dynamic_ncols=True)
            self.bar.set_postfix_str(text)
            self.bar.update(step - self.bar.n)
        elif now() - self.told > 5:
            self.told = now()
            self.say(f"step:{step}/{steps} {text}")

    def log_header(self, settings, presets: dict, sources: list[str], **about) -> None:
        """What a reader must know to judge a run and repeat it; nothing of the user or the host."""
        if self.ranks.rank:
            return
        device, cpu = platform.machine(), Path("/proc/cpuinfo")
        if self.ranks.device.type == "cuda":
            device = torch.cuda.get_device_name()
        elif cpu.exists():
            device = (re.findall(r"model name\s*: (.*)", cpu.read_text()) or [device])[0]
        versions = dict(python=platform.python_version(), torch=torch.__version__)
        versions |= dict(numpy=np.__version__, cuda=torch.version.cuda)
        public = ("OMP_", "MKL_", "TORCH_COMPILE", "TORCHINDUCTOR_", "TORCHDYNAMO_")
        kept = {k: v for k, v in os.environ.items() if k.startswith(public) and "/" not in v}
        main = getattr(sys.modules["__main__"], "__file__", __file__)  # a test's, no record's
        files = dict.fromkeys(Path(path).resolve() for path in (*sources, main, __file__))
        preset = dataclasses.replace(presets[settings.preset], seed=settings.seed)
        self.write(
            "header",
            run_id=self.path.stem,
            time=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            track=settings.preset if settings == preset else "custom",
            **dict(seed=settings.seed, vocab_size=settings.vocab_size),
            settings=dataclasses.asdict(settings),
            code=keep_code(list(files), self.path.parent),
            **dict(versions=versions, device=device, environment=kept),
            **dict(world_size=self.ranks.world_size, threads=torch.get_num_threads()),
            **about,
        )
        size = f"{self.ranks.world_size} ranks, {about['num_params']:,} parameters"
        self.say(f"{settings.preset} track: {device}, {size}; log: {self.path}")

    def log_step(self, step: int, steps: int, loss, tokens, grad_norm, lr_multiplier) -> None:
        seconds = self.clock(True)
        facts = dict(loss=loss, grad_norm=grad_norm, lr_multiplier=lr_multiplier, tokens=tokens)
        self.write("step", step=step, **facts, train_seconds=seconds)
        left = seconds * (steps / (step + 1) - 1)
        text = f"train_loss:{loss:.4f} {tokens / seconds:,.0f} tokens/s, {left:.0f} s left"
        self.progress(step + 1, steps, text)

    def log_validation(self, step: int, steps: int, loss: float, bits: float, **size: int) -> None:
        seconds = self.train_seconds
        self.write("val", step=step, loss=loss, bits_per_byte=bits, train_seconds=seconds, **size)
        self.say(
            f"step:{step}/{steps} val_loss:{loss:.4f} train_time:{seconds * 1e3:.0f}ms"
            f" step_avg:{seconds * 1e3 / max(1, step):.1f}ms bits_per_byte:{bits:.4f}"
        )

    def speed(self, tokens: int, flops: float) -> str:
        """Of the training so far, at so many FLOPs per token, in words."""
        seconds, device = self.train_seconds, self.ranks.device
        share = tokens * flops / seconds / self.ranks.world_size / gemm_rate(device)
        return (
            f"{seconds:.1f} s of training, {tokens / seconds:,.0f} tokens/s ({share:.0%} of what a"
            f" large matrix product reaches here), {peak_memory(device):,.0f} MiB a rank"
        )

    def close(self, status: str, reason: str) -> None:
        seconds = self.train_seconds if self.started is None else self.clock(False)
        facts = dict(steps=self.step, train_seconds=seconds, wall_seconds=now() - self.start)
        memory = peak_memory(self.ranks.device)
        self.write("end", status=status, reason=reason, **facts, peak_memory_mib=memory)
        for closing in filter(None, (self.bar, self.file)):
            closing.close()


def peak_memory(device: torch.device) -> float:
    """Of this rank so far, in MiB: the GPU's where there is one."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else host


def gemm_rate(device: torch.device) -> float:
    """FLOP/s of a large matrix product in the dtype that training has there, at its best."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, moments = torch.ones(size, size, device=device, dtype=dtype), []
    for _ in range(8):
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        moments.append(now())
    return 2 * size**3 / min(b - a for a, b in itertools.pairwise(moments))


def best_record(track: str) -> str:
    """The last line of the track's table in README.md, in words; nothing where there is none."""
    readme = ROOT / "README.md"
    lines = readme.read_text(encoding="utf-8").splitlines() if readme.exists() else []
    cells = [line.split(" | ") for line in lines if f"](records/{track}/" in line][-1:]
    return "".join(f" (the record: {row[3].split()[0]} in {row[4]} s)" for row in cells)


def keep_code(files: list[Path], log_dir: Path) -> dict[str, str]:
    """sha256 of all the code of a run; it is kept beside the log, once for each version."""
    code = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    folder = log_dir / "code" / hashlib.sha256("".join(code.values()).encode()).hexdigest()[:16]
    if log_dir != files[0].parent and not folder.exists():  # a record's folder has it already
        folder.mkdir(parents=True)
        for path in files:
            shutil.copyfile(path, folder / path.name)
    return code


# ------------------------------------------------------------------------------------------------
# checkpoints: one file, complete at any world size, and nothing in it that could run


def save_checkpoint(folder: Path, step: int, state: dict) -> Path:
    """Write folder/step_000350.pt, whole or not at all; the two newest are kept."""
    path, unfinished = folder / f"step_{step:06}.pt", folder / "unfinished"
    try:
        folder.mkdir(exist_ok=True)
        with open(unfinished, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:  # torch has RuntimeErrors for a disk that is full
        why = f"{path.name} cannot be written, is the disk full? {first_line(error)}"
        raise UserError(why) from None
    for older in sorted(folder.glob("step_*.pt"))[:-2]:
        older.unlink()
    return path


def read_checkpoint(path: Path, keys: set[str]) -> dict:
    """A checkpoint with these keys, or a folder's newest; tensors stay on disk until used."""
    if path.is_dir():
        path = max(path.glob("step_*.pt"), default=path / "step_*.pt")
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(state, dict) or state.keys() != keys:
            raise ValueError("it holds something else")
    except Exception as error:  # whatever torch meets in a file that is no checkpoint
        why = first_line(error)
        raise UserError(f"--resume {path}: no checkpoint that can be read: {why}") from None
    return state


@torch.no_grad()
def generate(model, s, loader, prompt: list[int], count: int) -> list[int]:
    """`count` ids that continue the prompt, drawn at temperature 0.8."""
    generator = torch.Generator().manual_seed(s.seed)
    ids, size = list(prompt), min(1024, s.seq_len[-1])
    for _ in range(count):
        row = np.array(ids[-size:], np.uint16)
        batch = loader.batch([[(row, 0, len(row))]], size)
        hidden = model.hidden(batch.ids, batch.segments, s.val_windows)
        logits = model.logits(hidden[0, len(row) - 1])[: s.vocab_size - 1].cpu()
        chance = torch.softmax(logits / 0.8, -1)
        ids.append(int(torch.multinomial(chance, 1, generator=generator)))
    return ids[len(prompt) :]


# ------------------------------------------------------------------------------------------------
# an orderly end


def watch_over(run: Run) -> None:
    """In the background: end with the launcher, and tell the other ranks which step this one is at.

    Python's signal handlers wait for whatever computes or communicates; this thread does not.
    """
    launcher, ranks = os.getppid(), run.ranks

    def watch():
        while True:
            sleep(BEAT)
            if os.getppid() != launcher:
                os.kill(os.getpid(), signal.SIGTERM)
                sleep(GRACE)
                os._exit(1)
            with contextlib.suppress(RuntimeError):  # the store went with rank 0
                ranks.store.set(f"step of rank {ranks.rank}", str(run.at))

    if ranks.store:
        threading.Thread(target=watch, daemon=True).start()


def late_ranks(run: Run) -> str:
    """After a time-out: who has not come as far as this rank, as a part of a sentence."""
    steps, ranks = {}, run.ranks
    with contextlib.suppress(RuntimeError):
        for rank in range(ranks.world_size) if ranks.store else ():
            steps[rank] = float(ranks.store.get(f"step of rank {rank}"))
    late = [f"rank {rank} is at step {at:.0f}" for rank, at in steps.items() if at < run.at]
    return "; " + ", ".join(late) if late else ""


def first_line(error: Exception) -> str:
    """What an exception says: not where in torch, gloo's advice, or a path of the user's."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({Path(error.filename).name})" if error.filename else "")
    line = (str(error).strip() or repr(error)).split("\n")[0]
    return re.sub(r"^\[[^]]*:\d+\][ .]*| This is typically.*|, please.*", "", line)


def finish(run: Run, work) -> int:
    """work(), and whatever happens the log gets its last line; returns the exit code."""

    def stop(number: int, frame) -> None:
        run.stop_asked = signal.Signals(number).name
        if not run.patient:
            run.patient = True  # an orderly end is not interrupted
            raise KeyboardInterrupt(run.stop_asked)

    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup has its way
            signal.signal(number, stop)
    watch_over(run)
    status, reason = "ok", ""
    try:
        try:
            work()
        finally:
            run.patient = True
    except KeyboardInterrupt as signal_name:
        status, reason = "interrupted", f"{signal_name} at step {run.step}"
    except Exception as error:
        if not isinstance(error, (ArithmeticError, UserError, OSError)):
            traceback.print_exc()
        told = first_line(error)
        status, reason = "failed", f"{type(error).__name__} at step {run.step}: {told}"
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in told:
            reason += "; a smaller --micro_batch_tokens needs less memory for the same maths"
        if "imed out" in told:
            reason += late_ranks(run)
    try:
        run.close(status, reason)
    except OSError as error:  # a full disk
        status, reason = "failed", f"the log cannot be written: {first_line(error)}"
    run.say(f"log: {run.path}")
    if reason:
        tell(f"rank {run.ranks.rank}: {status}: {reason}")
    return int(status != "ok")


def tell(reason: str) -> None:
    """Say why it ended, as the last words: under a launcher they are the launcher's to say."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": reason, "timestamp": int(time()), "moment": time()}
        Path(path).write_text(json.dumps(said))
    else:
        print(f"train_gpt.py: {reason}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------
# the launcher


def first_cause(failures: dict) -> tuple[str, int]:
    """The sentence of the rank that failed first, not of those that it took along; exit code.

    failures: torchrun's ProcessFailure by rank.
    """

    def order(failed: tuple) -> tuple:
        killed = failed[1].exitcode < 0 and -failed[1].exitcode != signal.SIGTERM
        return not killed, failed[1].error_file_data.get("moment", math.inf)

    rank, first = min(failures.items(), key=order)
    if "moment" in first.error_file_data:
        return first.message, first.exitcode
    if first.exitcode > 0:
        return f"rank {rank} ended with exit code {first.exitcode}", first.exitcode
    hint = " (memory at its end?)" if -first.exitcode == signal.SIGKILL else ""
    return f"rank {rank} was killed by {first.signal_name()}{hint}", 1


def launch(argv: list[str]) -> int:
    """torchrun, quietly: what it has to say of a failure becomes one sentence, the last."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)
    code = 1
    try:
        torchrun.main(argv)
        return 0
    except ChildFailedError as error:
        reason, code = first_cause(error.failures)
    except (SignalException, KeyboardInterrupt) as error:
        reason = f"interrupted: {getattr(error, 'sigval', signal.SIGINT).name}"
    except Exception as error:
        reason = f"the launcher failed: {type(error).__name__}: {first_line(error)}"
    print(f"train_gpt.py: {reason}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))

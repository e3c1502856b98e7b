"""Does a long run stay as it began? `python tests/long_run.py --minutes 30`

Trains a small model on two CPU ranks, with validations and checkpoints all the while, and prints,
for each third of the time, each rank's memory and open files, and the time of a step. Exit code 1
where the last third has more than 1.02 times the memory of the first after warm-up, or more files.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

from faults import SMALL, processes
from ranks import ROOT, launcher

EVERY = 2.0  # seconds between two looks


def look(pid: int) -> tuple[float, int]:
    """(MiB of resident memory, open files) of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{pid}/fd"))


def ranks_of(launcher: int) -> list[int]:
    """The launcher's children, by age."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return sorted(map(int, children))


def third(values: list, i: int) -> list:
    return values[len(values) * i // 3 : len(values) * (i + 1) // 3]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        more = ["--train_steps", "10000000", "--epochs", "10000000", "--log_every", "50"]
        more += ["--val_every", "200", "--save_every", "500", "--log_dir", folder, "--run_id", "x"]
        command = [*launcher(2), str(ROOT / "train_gpt.py"), *SMALL, *more]
        mark = f"LONG_RUN={time.time_ns()}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict([mark.split("=")])}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        time.sleep(20)  # warm-up
        seen, end = [], time.monotonic() + 60 * args.minutes
        while time.monotonic() < end and process.poll() is None:
            seen.append([look(pid) for pid in ranks_of(process.pid)[:2]])
            time.sleep(EVERY)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        log = [json.loads(line) for line in (Path(folder) / "x.jsonl").read_text().splitlines()]
    assert log[-1]["status"] == "interrupted" and not processes(mark), log[-1]
    steps = [line for line in log if line["kind"] == "step"]
    pace = [(b["train_seconds"] - a["train_seconds"]) / (b["step"] - a["step"]) * 1e3
            for a, b in zip(steps, steps[1:], strict=False)]  # fmt: skip
    print(f"{log[-1]['steps']:,} steps, {sum(x['kind'] == 'val' for x in log)} validations,"
          f" {sum(x.get('name') == 'save' for x in log)} checkpoints")  # fmt: skip
    print(f"{'third':>5} {'rank 0, MiB':>12} {'rank 1, MiB':>12} {'files':>8} {'step, ms':>9}")
    told = []
    for i in range(3):
        memory = [fmean(ranks[rank][0] for ranks in third(seen, i)) for rank in (0, 1)]
        files = max(sum(files for _, files in ranks) for ranks in third(seen, i))
        told.append((*memory, files))
        step = median(third(pace, i))
        print(f"{i + 1:5} {memory[0]:12.1f} {memory[1]:12.1f} {files:8} {step:9.2f}")
    first, last = told[0], told[-1]
    grew = any(b > 1.02 * a for a, b in zip(first[:2], last[:2], strict=True))
    return int(grew or last[2] > first[2])


if __name__ == "__main__":
    sys.exit(main())

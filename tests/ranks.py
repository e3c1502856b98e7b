"""run_ranks: a function on several gloo ranks, forked from the test, none left behind.

launcher: the command that starts a script on several, as run.sh does.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]


def launcher(ranks: int) -> list[str]:
    """The command that a script and its flags are appended to, for so many processes."""
    launch = [str(ROOT / "harness.py"), "--standalone", "--nproc_per_node", str(ranks)]
    return [sys.executable, *(launch if ranks > 1 else [])]


def _child(rank: int, world_size: int, store: str, timeout: float, fn, args, pipe) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout / 2),
        )
        answer = (True, fn(rank, world_size, *args))
        dist.barrier()  # nobody leaves while another still needs it
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    os._exit(0)  # no destructor may wait for a rank that is gone


def run_ranks(world_size: int, fn: Callable, *args: Any, timeout: float = 60) -> list[Any]:
    """fn(rank, world_size, *args) on `world_size` forked gloo ranks of one thread each.

    Returns what each rank returned (picklable; tensors on the CPU), in the order of ranks. A child
    that raises makes this raise RuntimeError with the child's traceback; one that is not done after
    `timeout` seconds makes it raise TimeoutError. In every case all children are gone on return.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        children, pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            child_args = (rank, world_size, f"{folder}/store", timeout, fn, args, theirs)
            child = context.Process(target=_child, args=child_args, daemon=True)
            child.start()
            theirs.close()
            children.append(child)
            pipes.append(ours)
        try:
            return _collect(pipes, time.monotonic() + timeout)
        finally:
            for child in children:
                child.kill()
                child.join()


def _collect(pipes, deadline: float) -> list[Any]:
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(answers) + len(failures) < len(pipes):
        for rank, pipe in enumerate(pipes):
            if rank in answers or rank in failures or not pipe.poll(0.01):
                continue
            try:
                fine, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                fine, value = False, "the process died without a word"
            (answers if fine else failures)[rank] = value
            if failures:  # the first to fail tells why; the others only lost it
                deadline = min(deadline, time.monotonic() + 0.5)
        if time.monotonic() > deadline:
            break
    if failures:
        rank = next(iter(failures))
        raise RuntimeError(f"rank {rank} of {len(pipes)} failed:\n{failures[rank]}")
    if len(answers) < len(pipes):
        late = sorted(set(range(len(pipes))) - set(answers))
        raise TimeoutError(f"ranks {late} of {len(pipes)} were not done in time")
    return [answers[rank] for rank in range(len(pipes))]

"""Reward functions as users write them, good and bad. To `misbehaving`, `solution_str` says what to do."""

import ctypes
import os
import signal
import subprocess
import sys
import time


def exact(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


def misbehaving(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if solution_str in ACTS:
        return ACTS[solution_str](ground_truth)
    return extra_info["returned"][0]


def hang(_):
    while True:
        pass


def ignore_sigterm(_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang(_)


def close_channel(_):
    os.closerange(3, 100)
    time.sleep(3600)


def fail(_):
    raise RuntimeError("the verifier is broken")


def start_child(pid_file):
    child = subprocess.Popen(["sleep", "3600"])
    with open(pid_file, "w") as file:
        file.write(str(child.pid))
    hang(pid_file)


def nap(_):
    time.sleep(0.3)
    return 1.0


def leave_alarm(_):
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return 1.0


ACTS = {
    "hang": hang,
    "sleep": lambda _: time.sleep(3600),
    "ignore SIGTERM": ignore_sigterm,
    "exit": lambda _: os._exit(3),
    "sys.exit": lambda _: sys.exit(3),
    "segfault": lambda _: ctypes.string_at(0),
    "close channel": close_channel,
    "raise": fail,
    "child": start_child,
    "nap": nap,
    "leave alarm": leave_alarm,
    "pid": lambda _: {"score": 1.0, "pid": os.getpid()},
}


def with_alarm(data_source, solution_str, ground_truth, extra_info=None):
    """As math_verify limits itself: possible in the main thread only."""

    def too_slow(signal_number, frame):
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(1)
    try:
        while solution_str == "slow":
            pass
        return float(solution_str == ground_truth)
    except TimeoutError:
        return 0.25
    finally:
        signal.alarm(0)


async def asynchronous(data_source, solution_str, ground_truth, extra_info=None):
    import asyncio

    await asyncio.sleep(0.001)
    return {"score": solution_str == ground_truth, "loop": float(id(asyncio.get_running_loop()))}


def wrong_arguments(prompt, completion):
    return 1.0


def light_start(data_source, solution_str, ground_truth, extra_info=None):
    return float(not {"torch", "ray", "transformers", "numpy", "pyarrow"} & set(sys.modules))


NOT_A_FUNCTION = 3

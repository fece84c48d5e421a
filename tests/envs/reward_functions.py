"""Reward functions as users write them, good and bad. `solution_str` says what to do."""

import ctypes
import os
import signal
import subprocess
import sys
import time


def exact(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


def misbehaving(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    match solution_str:
        case "hang":
            while True:
                pass
        case "sleep":
            time.sleep(3600)
        case "ignore SIGTERM":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                pass
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "close channel":
            os.closerange(3, 100)
            time.sleep(3600)
        case "raise":
            raise RuntimeError("the verifier is broken")
        case "child":
            subprocess.Popen(["sleep", "3600"])
            while True:
                pass
        case "nap":
            time.sleep(0.3)
            return 1.0
        case "leave alarm":
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            return 1.0
        case "pid":
            return {"score": 1.0, "pid": os.getpid()}
    return extra_info["returned"][0]


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

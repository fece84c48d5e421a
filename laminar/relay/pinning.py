"""Pins mapped segments for the accelerator, once, so that copies to and from it run at the speed of the bus."""

import numpy as np
import torch

READ_ONLY = 8
"""cudaHostRegisterReadOnly: a reader's mapping cannot be written."""


class Pinned:
    """Memory that the accelerator may reach directly, until `release`."""

    def __init__(self, view: memoryview) -> None:
        runtime = torch.cuda.cudart()
        assert runtime is not None, "memory is pinned only where there is an accelerator"
        self._runtime = runtime
        self._address = np.frombuffer(view, np.uint8).ctypes.data
        status = int(runtime.cudaHostRegister(self._address, len(view), READ_ONLY if view.readonly else 0))
        if status != 0:
            raise OSError(f"{len(view)} bytes of host memory cannot be pinned: CUDA error {status}")

    def release(self) -> None:
        self._runtime.cudaHostUnregister(self._address)

"""Pins mapped segments for the accelerator, once, so that copies to and from it run at the speed of the bus."""

import numpy as np
import torch

READ_ONLY = 8
"""cudaHostRegisterReadOnly: a reader's mapping cannot be written."""


class Pinned:
    """Memory that the accelerator may reach directly, until `release`."""

    def __init__(self, view: memoryview) -> None:
        self._address = np.frombuffer(view, np.uint8).ctypes.data
        flags = READ_ONLY if view.readonly else 0
        status = torch.cuda.cudart().cudaHostRegister(self._address, len(view), flags)
        if int(status) != 0:
            raise OSError(f"{len(view)} bytes of host memory cannot be pinned: CUDA error {int(status)}")

    def release(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self._address)

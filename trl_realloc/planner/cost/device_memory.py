"""Device memory that is not used by parameters, activations or caches: the contexts of processes, the communicators,
and a share that is left free.

The numbers of bytes are assumptions for NVIDIA GPUs, not measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...common.errors import PlanError


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device.

    Args:
        total: bytes.
        headroom: share of `total` that a plan leaves free for fragmentation and for memory that the estimate does not
            count. 0 or more and below 1.
        context: bytes of one process's CUDA context, with the kernels and workspaces of its libraries.
        communicator: bytes of the buffers of one NCCL communicator.
    """

    total: float
    headroom: float = 0.0
    context: float = 0.0
    communicator: float = 0.0

    @property
    def usable(self) -> float:
        """Bytes that a plan may take, contexts and communicators included."""
        return self.total * (1 - self.headroom)

    @property
    def is_gpu(self) -> bool:
        """True if the device is a GPU, on which each process has a context."""
        return self.context > 0

    def takes_engine(self, share: float) -> bool:
        """True if a vLLM engine can reserve this share of the device beside the contexts of two processes, the engine's
        and the rank's."""
        return share * self.total <= self.usable - 2 * self.context

    def check_engine(self, share: float) -> None:
        """Refuses a share that a vLLM engine cannot reserve (`takes_engine`) even on an otherwise empty device.

        Raises:
            PlanError: names the setting and the largest share that it may have.
        """
        contexts = 2 * self.context
        most = math.floor(100 * (self.usable - contexts) / self.total + 1e-9) / 100
        if most > 0 and not self.takes_engine(share):
            raise PlanError(
                f"vllm_gpu_memory_utilization {share:g} reserves {share * self.total / 1e9:.1f} GB of a device for a "
                f"vLLM engine, but a device has {self.usable / 1e9:.1f} GB for a plan, and the contexts of two "
                f"processes take {contexts / 1e9:.1f} GB of it; set vllm_gpu_memory_utilization to at most {most:g}."
            )


# NVIDIA's driver takes 0.3 to 0.5 GB of a data-centre GPU for a process; kernels and cuBLAS's workspace add as much.
CONTEXT = 0.8e9
# NCCL's default buffers: 4 MiB for each of some 16 to 32 channels and each of the neighbours in a ring or a tree.
COMMUNICATOR = 0.2e9
HEADROOM = 0.1


def gpu_memory(total: float, headroom: float = HEADROOM) -> DeviceMemory:
    return DeviceMemory(total, headroom, CONTEXT, COMMUNICATOR)

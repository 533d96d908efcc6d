"""A stand-in accelerator for tests on machines without a GPU: the device `sim` and the process-group backend `simccl`.

`accelerator()` makes them. The device is compiled from `device.cpp`, which says what is as on CUDA and what is not. It
is for processes of its own, because in a process that has it `torch.accelerator` finds an accelerator; `test_standin`
starts them. With `TRL_REALLOC_TEST_DEVICE=cuda` the same tests run on CUDA and NCCL (`make check-gpu`).
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


NAME = "sim"
SOURCE = Path(__file__).with_name("device.cpp")


def compiler() -> str | None:
    """The C++ compiler; `None` where there is none, so that the stand-in cannot be built."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """The compiled device. It is compiled once for each source and each torch (some 20 s), by one process while the
    others wait, and kept in the folder of temporary files."""
    what = f"{SOURCE.read_text()}{torch.__version__}{sys.version}{torch.compiled_with_cxx11_abi()}"
    folder = Path(tempfile.gettempdir()) / f"trl_realloc_standin_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    library = folder / f"device_{hashlib.sha256(what.encode()).hexdigest()[:16]}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            from torch.utils.cpp_extension import include_paths, library_paths

            command = [compiler() or "g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-w"]
            command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
            command += [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
            command += [f"-L{path}" for path in library_paths()]
            made = library.with_suffix(f".{os.getpid()}")
            command += [str(SOURCE), "-o", str(made), "-lc10", "-ltorch_cpu", "-ltorch"]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise RuntimeError(f"the stand-in device does not compile:\n{result.stderr[-6000:]}")
            made.rename(library)
    return library


@dataclass(frozen=True)
class Counts:
    """What a GPU would have waited for or done, since the process started.

    Args:
        reads: copies to the host and numbers read (`item`, `tolist`, `nonzero`), for which the host waits.
        read_bytes: bytes of them.
        writes: copies from the host.
        streams: streams made.
        late_copies: copies that happened only when their stream was waited for.
    """

    reads: int
    read_bytes: int
    writes: int
    streams: int
    late_copies: int

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class Cuda:
    """CUDA and NCCL in place of the stand-in. Nothing is counted, and no memory is limited."""

    type, backend, is_standin = "cuda", "nccl", False

    @contextmanager
    def counting(self) -> Iterator[list[Counts]]:
        yield [Counts(0, 0, 0, 0, 0)]

    def limit(self, size: int, index: int = 0) -> None:
        pass

    def allocated(self, index: int = 0) -> int:
        """The bytes of a device's memory that tensors have, without those that torch keeps for cuBLAS: up to 32 MiB for
        each stream on which a thread has multiplied matrices."""
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        return int(torch.accelerator.memory_allocated(index))


class Standin:
    """The installed stand-in: counters, and the sizes of the devices' memories."""

    type, backend, is_standin = NAME, "simccl", True

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(library)
        self._library = ctypes.CDLL(str(library))
        for name in ("sim_set_limit", "sim_set_outside"):
            getattr(self._library, name).argtypes = [ctypes.c_int, ctypes.c_int64]

    def counts(self) -> Counts:
        numbers = (ctypes.c_int64 * 5)()
        self._library.sim_counters(numbers)
        return Counts(*numbers)

    @contextmanager
    def counting(self) -> Iterator[list[Counts]]:
        """Gives a list that has, after the block, what was counted in it."""
        before, result = self.counts(), list[Counts]()
        yield result
        result.append(self.counts() - before)

    def allocated(self, index: int = 0) -> int:
        """The bytes of a device's memory that tensors have."""
        gc.collect()
        return int(torch.accelerator.memory_allocated(index))

    def limit(self, size: int, index: int = 0) -> None:
        """Set a device's memory, in bytes."""
        self._library.sim_set_limit(index, size)

    def take_outside(self, size: int, index: int = 0) -> None:
        """Set the bytes of a device's memory that other processes have."""
        self._library.sim_set_outside(index, size)

    def register(self) -> None:
        self._library.sim_register()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor with the memory of a device tensor, which is host memory. For tests and the process group alone."""
    result: torch.Tensor = torch.ops.sim.on_host(tensor.detach())
    return result


def _module() -> types.ModuleType:
    """What PyTorch wants of `torch.sim`, after `torch.cuda`."""
    module = types.ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.uint8)  # random numbers are drawn from the host's generator

    functions: Mapping[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 8,
        "current_device": accelerator.current_device_index,
        "set_device": accelerator.set_device_index,
        "synchronize": accelerator.synchronize,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": get_rng_state,
        "set_rng_state": lambda state, device=None: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda: True,
        "device": accelerator.device_index,
        "current_stream": accelerator.current_stream,
        "get_device_name": lambda device=None: "stand-in accelerator",
        "empty_cache": accelerator.empty_cache,
        "mem_get_info": accelerator.get_memory_info,
        "memory_allocated": accelerator.memory_allocated,
        "memory_reserved": accelerator.memory_reserved,
        "max_memory_allocated": accelerator.max_memory_allocated,
        "reset_peak_memory_stats": accelerator.reset_peak_memory_stats,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def _autocast() -> torch.library.Library:
    """The operations that autocast computes in 16 bits."""
    library = torch.library.Library("aten", "IMPL")
    key = "AutocastPrivateUse1"
    without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def lowered(operation: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            dtype = torch.get_autocast_dtype(NAME)

            def cast(value: Any) -> Any:
                is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
                return value.to(dtype) if is_float and value.device.type == NAME else value

            with torch._C._ExcludeDispatchKeyGuard(without):
                return operation(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

        return run

    aten = torch.ops.aten
    for operation in (aten.linear, aten.matmul, aten.mm, aten.bmm, aten.scaled_dot_product_attention):
        library.impl(operation.default, lowered(operation.default), key)
    return library


_installed: list[Any] = []


def accelerator() -> Cuda | Standin:
    """The device to test on. The stand-in is made in this process by the first call."""
    if os.environ.get("TRL_REALLOC_TEST_DEVICE") == "cuda":
        return Cuda()
    if not _installed:
        torch.utils.rename_privateuse1_backend(NAME)
        device = Standin(build())
        device.register()
        torch._register_device_module(NAME, _module())
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        from . import process_group

        process_group.register()
        _installed.extend([device, _autocast()])
    made: Standin = _installed[0]
    return made


def rank_device() -> torch.device:
    """This rank's accelerator, which becomes torch's and Accelerate's: that of the rank's number, or where the machine
    has fewer, one that ranks share. Called before Accelerate's state is made."""
    device, rank = accelerator(), os.environ.get("RANK")
    index = int(rank or 0) % torch.accelerator.device_count()
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{device.type}:{index}"
    torch.accelerator.set_device_index(index)
    if device.is_standin and rank is not None:  # Accelerate knows accelerators by name
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        PartialState._prepare_backend = lambda *_: (device.backend, DistributedType.MULTI_GPU)  # type: ignore[assignment,method-assign]
    return torch.device(device.type, index)

"""Generation engine with vLLM: starts vLLM in a process, sends it the actor's weights and requests, and ends it.

vLLM is imported only in that process (`vllm_host`), so that the trainer's process keeps its threads, signal handlers
and torch settings.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from transformers.utils import logging

from ...common.notices import working
from ...common.ports import reserve_port
from ...plan.assignment import MEMORY_SHARE
from ..base import BackgroundEngine, Bucket, DecodeStep, EngineError, SourceDigests, Updates
from ..child_process import let_open_memory
from ..requests import Completion, GenerationRequest, Sampling
from .background_generation import BackgroundGeneration
from .engine_process import EngineProcess, TimeLimits, engine_environment
from .sampling_checks import RequestChecks
from .vllm_support import is_vllm_available, why_not_served
from .weight_sender import SentWeights, WeightBuffers, by_cuda_ipc, send_weights


logger = logging.get_logger(__name__)


class VLLMEngine:
    """One vLLM engine in a separate process. Implements `base.BackgroundEngine`. The constructor returns at once; the
    engine starts in the background.

    Args:
        model: a directory with the actor's config.json; weights and a tokenizer are not needed.
        max_model_len: most tokens of a prompt and its response together.
        max_num_seqs: most responses that are generated at the same time.
        tensor_parallel_size: number of processes over which vLLM splits the model.
        dtype: dtype of vLLM's computation: "float32", "bfloat16", "float16".
        cpu_cores: cores to run on, divided evenly among the tensor-parallel processes; `None` for any.
        cuda_devices: one GPU per tensor-parallel process, as torch numbers them in this process; `None` for an engine
            on the CPU.
        kv_cache_gib: memory for keys and values per process, in GiB. CPU only. `None`: the memory of `max_num_seqs`
            samples of `max_model_len` tokens, at most 1 (`vllm_support.cpu_cache_bytes`).
        gpu_memory_utilization: share of each GPU's memory for weights, keys and values.
        repeatable_sampling: use this package's sampler on a GPU, whose draws depend on a sample's seed and on the
            probabilities alone, instead of vLLM's own with vLLM's newest model runner. A CPU always uses it.
        routes: record the experts that a mixture's routers choose, if this vLLM release tells them.
        sleep_level: level of vLLM's sleep mode that `sleep` enters: 1 keeps the weights in host memory, 2 drops them; 0
            for an engine that never sleeps.
        tokenizer: a directory with the actor's tokenizer, for `Sampling.regex` and those `Sampling.extra` that read
            text; `None` for an engine without one. The engine's inputs and outputs are token ids in both cases.
        engine_kwargs: further arguments of vLLM's engine, checked by `vllm_support.engine_argument_problems`.
        log_path: the file that the engine's output is appended to; `None` for a temporary file. Error messages quote
            its end.
        folder: folder for files that this engine's processes share while they run; `None` for the folder of temporary
            files.
        start_timeout_s, step_timeout_s, load_timeout_s, stop_timeout_s: see `TimeLimits`.
        name: name of the engine in messages.

    Raises:
        EngineError: vLLM is not installed, or an argument is invalid. Raised before a process is started.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        max_model_len: int,
        max_num_seqs: int = 256,
        tensor_parallel_size: int = 1,
        dtype: str = "float32",
        cpu_cores: Sequence[int] | None = None,
        cuda_devices: Sequence[int] | None = None,
        kv_cache_gib: float | None = None,
        gpu_memory_utilization: float = MEMORY_SHARE,
        repeatable_sampling: bool = False,
        routes: bool = False,
        sleep_level: int = 0,
        tokenizer: str | os.PathLike[str] | None = None,
        engine_kwargs: Mapping[str, object] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        start_timeout_s: float = TimeLimits.start,
        step_timeout_s: float = TimeLimits.step,
        load_timeout_s: float = TimeLimits.load,
        stop_timeout_s: float = TimeLimits.stop,
        name: str = "actor.generate",
    ) -> None:
        self.name = name
        self.limits = TimeLimits(start_timeout_s, step_timeout_s, load_timeout_s, stop_timeout_s)
        self.version, self.stopped_s = -1, 0.0
        self._sent: SentWeights | None = None  # the latest complete update
        self._frozen: SourceDigests = {}  # of that update
        vocabulary = self._check(model, tensor_parallel_size, cpu_cores, cuda_devices)
        self._checks = RequestChecks(name, max_model_len, vocabulary, tokenizer is not None)
        self._generation: BackgroundGeneration | None = None  # the latest one
        self._decode_steps: list[DecodeStep] = []  # of the generation before it
        self._sampling: Sampling | None = None  # the latest one that vLLM has checked
        self.sleep_level, self._dtype = sleep_level, dtype
        self._devices = cuda_devices
        self._buffers = WeightBuffers(cuda_ipc=by_cuda_ipc(cuda_devices is not None, tensor_parallel_size))
        settings = {
            "model": str(model),
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            "cpu_cores": list(cpu_cores or ()),
            "kv_cache_gib": kv_cache_gib,
            "gpu_memory_utilization": gpu_memory_utilization,
            "repeatable_sampling": repeatable_sampling,
            "routes": routes,
            "sleep_level": sleep_level,
            "tokenizer": None if tokenizer is None else str(tokenizer),
            "engine_kwargs": dict(engine_kwargs or {}),
            "slots": self._buffers.fds,
            "folder": None if folder is None else str(folder),
        }
        environment = engine_environment(
            tensor_parallel_size,
            cpu_cores,
            cuda_devices,
            repeatable=repeatable_sampling,
            compiles=(engine_kwargs or {}).get("enforce_eager") is False,
        )
        try:
            port, reservation = reserve_port()
        except OSError as error:
            raise EngineError(f"{name}: {error.strerror}.") from error
        environment["VLLM_PORT"] = str(port)  # otherwise vLLM takes any free port, and listens only after its imports
        inherited_fds = [*self._buffers.fds, reservation]
        self._process = EngineProcess(name, settings, environment, log_path, inherited_fds, self.limits)

    def _check(
        self, model: str | os.PathLike[str], tp: int, cores: Sequence[int] | None, devices: Sequence[int] | None
    ) -> int | None:
        """Check the arguments. Returns the size of the vocabulary, if the config has it."""
        if not is_vllm_available():
            remedy = (
                "install trl_realloc[vllm], or set generation_engine: transformers (of GRPO and RLOO, use_vllm: false)"
            )
            raise EngineError(f"{self.name}: vLLM is not installed; {remedy}.")
        if cores is not None and devices is not None:
            raise EngineError(f"{self.name}: both cpu_cores and cuda_devices are set; an engine has one kind.")
        if cores is not None and (not cores or len(cores) % tp):
            raise EngineError(
                f"{self.name}: {len(cores)} cores cannot be divided among {tp} processes; give a multiple."
            )
        if devices is not None and len(devices) != tp:
            raise EngineError(f"{self.name}: {len(devices)} GPUs for tensor_parallel_size {tp}; give one for each.")
        try:
            config = json.loads((Path(model) / "config.json").read_text())
        except OSError as error:
            raise EngineError(f"{self.name}: no config.json in {model}; save the actor's config there.") from error
        problem = why_not_served(SimpleNamespace(**(config.get("text_config") or config)), on_cpu=devices is None)
        if problem is not None:
            raise EngineError(f"{self.name}: {problem}; generate by Transformers.")
        size = config.get("vocab_size")
        return size if isinstance(size, int) else None

    def wait_ready(self) -> None:
        """Wait until the engine has started.

        Raises:
            EngineError: it did not start. The message has the end of its log.
        """
        self._process.check_alive()
        if not self._process.is_ready:
            with working("waiting for the vLLM engine to start", "it loads and compiles, 10 to 60 s as a rule"):
                _, dtype, wider, no_routes = self._process.wait_ready()
            if no_routes is not None:
                logger.warning(f"{self.name}: {no_routes}, so a mixture is trained without its router replay.")
            self._buffers.dtype, self._buffers.wider = getattr(torch, dtype), frozenset(wider)
            if self._buffers.cuda_ipc:
                self._probe_ipc()

    def _probe_ipc(self) -> None:
        """Use shared memory for weights if the engine cannot open this process's memory on the GPU."""
        assert self._devices is not None, "the engine is on a GPU"
        let_open_memory(self._process.pid)
        self._process.send("probe", self._buffers.probe(torch.device("cuda", self._devices[0])))
        (problem,) = self._process.expect("probed", "opening memory on the GPU", self.limits.load)
        self._buffers.release_gpu()
        if problem is not None:
            self._buffers.cuda_ipc = False
            logger.warning(f"{self.name}: CUDA IPC does not work here, so weights go through host memory: {problem}")

    def narrower(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """Waits for the engine's start if its dtype is narrower than one of these."""
        dtype: torch.dtype = getattr(torch, self._dtype)
        wide = [name for name, of in dtypes.items() if of.is_floating_point and of.itemsize > dtype.itemsize]
        if not wide:
            return {}
        try:
            self.wait_ready()
        except EngineError:  # raised again by `load`, where all ranks learn of it
            return {}
        return {name: dtype for name in wide if name not in self._buffers.wider}

    def sleep(self) -> None:
        """The next `load` or `generate` takes the memory again. At level 2 `version` is -1 afterwards; at level 0
        nothing is done."""
        if not self.sleep_level:
            return
        self._settle()
        self._process.send("sleep")
        self._process.expect("asleep", "freeing its memory", self.limits.load)
        if self.sleep_level == 2:
            self.version = -1

    @property
    def sent_bytes(self) -> int:
        """Bytes that the latest successful `load` sent; 0 before the first."""
        return 0 if self._sent is None else self._sent.bytes

    def kept(self, frozen: SourceDigests) -> frozenset[str]:
        """See `base.GenerationEngine`. vLLM loads whole layers: q, k and v together."""
        if self.version < 0 or self._sent is None:
            return frozenset()
        same = {name for name, digests in frozen.items() if self._frozen.get(name) == digests}
        return frozenset(name for names in self._sent.together if same.issuperset(names) for name in names)

    def load(self, buckets: Iterable[Bucket], version: int, frozen: SourceDigests | None = None) -> None:
        """See `base.GenerationEngine`. Needs memory for two buckets in this process and for a layer in the engine.
        After an error `version` is -1 and `generate` is refused until a load succeeds. If a generation goes on,
        its `poll` returns the samples that finish during the load.

        Raises:
            EngineError: a parameter was missing, unknown or of the wrong shape, or its memory in the engine differs
                from what was sent.
            EngineDied: the engine's process ended.
        """
        if self._generation is None or not self._generation.takes_updates:
            self._settle()
        kept = {name: self._sent.digests[name] for name in self.kept(frozen or {})} if self._sent else {}
        generation, self.version, self.stopped_s = self._generation, -1, 0.0
        take = (lambda message: False) if generation is None else generation.take
        try:
            sent = send_weights(self._process, self._buffers, buckets, version, take, kept)
            self.stopped_s, unproven = sent.stopped_s, sent.unproven
            if unproven and (self._sent is None or not self._sent.unproven):
                logger.warning(
                    f"{self.name}: vLLM's model has no copy of {', '.join(unproven[:4])} ({len(unproven)} in all), so "
                    f"their values are compared up to the engine's process, and not in the model."
                )
            if sent.problem is not None:
                raise EngineError(f"{self.name}: vLLM could not load the weights of version {version}: {sent.problem}")
        except BaseException as error:
            if generation is not None:  # the engine's process has ended it
                generation.was_ended(f"was ended, because it did not get the weights of version {version}: {error}")
            raise
        self.version, self._sent, self._frozen = version, sent, dict(frozen or {})

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Completion]:
        """See `base.GenerationEngine`. The engine generates in the background, without waiting for the caller. The next
        call of `load` or `generate` aborts an unfinished generation.

        Raises:
            EngineError: a request cannot be served (the message says which and why), or there are no weights.
            EngineDied: the engine's process ended, or was silent for `step_timeout_s`.
        """
        return _completions(self.start(requests, sampling)) if requests else iter(())

    def start(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, updates: Updates = Updates.END
    ) -> BackgroundGeneration:
        if self.version < 0:
            raise EngineError(f"{self.name}: no complete weights; load() has not been called, or has failed.")
        self._checks.check(requests, sampling)
        self._settle()
        if (sampling.extra or sampling.regex is not None) and sampling != self._sampling:
            self._process.send("check", asdict(sampling))
            (problem,) = self._process.expect("checked", "checking the sampling settings", self.limits.step)
            if problem is not None:
                raise EngineError(f"{self.name}: vLLM refuses these sampling settings: {problem}")
            self._sampling = sampling
        self._generation = BackgroundGeneration(self._process, self._checks, requests, sampling, updates, self.version)
        return self._generation

    @property
    def decode_steps(self) -> list[DecodeStep]:
        latest = [] if self._generation is None else self._generation.decode_steps
        return latest or self._decode_steps

    def _settle(self) -> None:
        """Wait until the engine has started, and abort an open generation."""
        self.wait_ready()
        if self._generation is not None:
            # so that its iteration ends with an error instead of normally
            self._generation.end("was ended by a later call of the engine")
            self._decode_steps, self._generation = self.decode_steps, None

    @property
    def pid(self) -> int:
        """Process id of the engine's process. Its session has vLLM's workers too."""
        return self._process.pid

    def close(self) -> None:
        self._process.close()
        self._buffers.clear()
        self.version = -1


def _completions(generation: BackgroundGeneration) -> Iterator[Completion]:
    try:
        while generation.unfinished:
            yield from generation.poll(math.inf)
    finally:
        generation.close()


if TYPE_CHECKING:  # the type checker verifies that the protocol is implemented
    _GENERATES: type[BackgroundEngine] = VLLMEngine

"""Digests of the weights in a vLLM worker, in terms of the tensors that were sent.

vLLM fuses, splits, pads and transposes the tensors that it loads. `LoadedWeights` watches the copies of the model's own
loaders, so it finds the parts of each sent tensor for every family without describing one. `weight_buffers` computes
the sender's digests, `vllm_update` compares them.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..weight_digest import digest, has_digest, numbers, strided_digest
from .vllm_compat import packed_products, processed_layers


PartKey = tuple[Any, ...]  # which elements of a sent tensor: the first one, then strides with sizes; () for all
Digests = dict[str, list[tuple[PartKey, int]]]  # name of a sent tensor -> its parts


class WorkerAnswer(NamedTuple):
    """The state of a worker after an update.

    Args:
        problem: the reason why it has not loaded the weights; `None` if it has.
        digests: digests of the parts of the sent tensors in this worker.
        unproven: sent tensors that the model does not hold, or from which it holds only computed values.
    """

    problem: str | None
    digests: Digests
    unproven: list[str]


class Sent(NamedTuple):
    """A tensor that is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Place(NamedTuple):
    """Elements of a parameter or buffer of the model: offset of the first one in its memory, sizes and strides."""

    parameter: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, memory: Tensor) -> Tensor:
        return memory.data.as_strided(self.sizes, self.strides, memory.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Part:
    """Elements of a sent tensor, `start` + i * `strides`[0] + ..., and their place in the model."""

    sent: Sent
    start: int
    strides: tuple[int, ...]
    place: _Place

    @property
    def key(self) -> PartKey:
        return self.start, *sorted(zip(self.strides, self.place.sizes, strict=True))

    def digest_in(self, memory: Tensor) -> Tensor:
        """The digest of the elements in `memory`, in the dtype in which they were sent."""
        values = self.place.view(memory)
        if values.dtype != self.sent.dtype:  # the model's dtype is wider
            sent = values.to(self.sent.dtype)
            if not torch.equal(sent.to(values.dtype), values):
                return digest(values)  # values that the sent dtype cannot represent
            values = sent
        return strided_digest(values, self.start, self.strides, self.sent.shape)


class LoadedWeights:
    """The parts of the latest update's tensors in a worker's model.

    Args:
        model: model before its first update. Tied parameters must have equal values from now on.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        tied = defaultdict(list)
        for name, tensor in _tensors(model):
            tied[id(tensor)].append(name)
        self._tied = {name: names for names in tied.values() for name in names}
        self._parts: dict[Sent, list[_Part]] = {}  # of all updates: the loaders always do the same
        self._of_parameter: dict[str, dict[_Part, None]] = defaultdict(dict)  # the same, and some that are obsolete
        self._computed: set[Sent] = set()  # tensors from which a loader copies computed values
        self._watching = contextlib.ExitStack()

    def begin(self) -> None:
        """Called when vLLM's layers are ready to load an update."""
        self._received: dict[Sent, None] = {}
        self._noted: set[_Place] = set()
        self._arrived: dict[str, Tensor] = {}  # digests of sent tensors in the bucket
        self._copied: dict[_Place, Tensor] = {}  # digests of computed values when they were copied
        self._unprocessed: dict[_Place, Tensor] = {}  # digests before vLLM processed a layer
        self._processed: dict[str, Tensor] = {}  # digests of the layer's parameters afterwards
        self._changed: list[str] = []  # parameters whose values differ from the copied ones
        # the name of a module that others share is its first one, as in `named_modules`
        self._memory = {_storage(tensor): (name, tensor) for name, tensor in reversed([*_tensors(self._model)])}
        self._products = packed_products(self._model)
        self._processing = dict(processed_layers(self._model))
        names = {id(layer): prefix for prefix, layer in self._processing.items()}
        for method in {id(layer.quant_method): layer.quant_method for layer in self._processing.values()}.values():
            self._watch(method, names)

    def load(self, bucket: Sequence[tuple[Sent, int]], memory: Tensor) -> set[str] | None:
        """Load a bucket by the model's own `load_weights`, and return its result.

        Args:
            bucket: tensors with the offset of each in bytes.
            memory: (bytes,) uint8.
        """
        self._received |= dict.fromkeys(sent for sent, _ in bucket)
        self._bucket = bucket, memory
        is_known = all(sent in self._parts and sent not in self._computed for sent, _ in bucket)
        with contextlib.nullcontext() if is_known else _Copies(self._note):
            for sent, _ in () if is_known else bucket:
                self._parts[sent] = []
            loaded: set[str] | None = self._model.load_weights(self._weights())  # type: ignore[operator]
        for sent, offset in bucket:
            if not self._parts[sent] or sent in self._computed:
                self._arrived[sent.name] = digest(in_memory(memory, sent, offset))
        return loaded

    def end(self) -> None:
        """Called when the update has ended, whether complete or not."""
        self._watching.close()
        self._memory = {}
        self._bucket = (), torch.empty(0)

    def answer(self) -> WorkerAnswer:
        """The digests of the model's weights now."""
        live = dict(_tensors(self._model))
        parts: list[tuple[str, PartKey, Tensor]] = [(name, (), value) for name, value in self._arrived.items()]
        for sent in self._received:
            for part in self._parts[sent] if sent not in self._computed else ():
                values = (
                    [self._unprocessed.get(part.place)]
                    if self._is_processed(part.place)
                    else [part.digest_in(memory) for memory in self._lying(part.place, live)]
                )
                parts += [(sent.name, part.key, value) for value in values if value is not None]
        digests: Digests = {}
        for (name, key, _), number in zip(parts, numbers([value for _, _, value in parts]), strict=True):
            digests.setdefault(name, []).append((key, number))
        without = [s.name for s in self._received if not self._parts[s] and s not in self._computed]
        return WorkerAnswer(self._local_problem(live), digests, without)

    def _local_problem(self, live: dict[str, Tensor]) -> str | None:
        changed = list(self._changed)
        for place, value in self._copied.items():
            if not self._is_processed(place):
                memories = self._lying(place, live)
                changed += [place.parameter for memory in memories if digest(place.view(memory)) != value]
        changed += [
            name for name, value in self._processed.items() if name in live and digest(live[name].data) != value
        ]
        if changed:
            return (
                f"vLLM's {', '.join(sorted(set(changed))[:3])} ({len(set(changed))} in all) has other values than were "
                f"copied into it."
            )
        now = packed_products(self._model)
        if old := [name for name, product in self._products.items() if now.get(name) is product]:
            return f"{', '.join(old[:3])} ({len(old)} in all) computes with a packed copy of earlier weights."
        return None

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        bucket, memory = self._bucket
        for sent, offset in bucket:
            self._current = sent
            yield sent.name, in_memory(memory, sent, offset)

    def _lying(self, place: _Place, live: dict[str, Tensor]) -> list[Tensor]:
        """The model's current memory of a parameter; several tensors if parameters were tied and are no longer."""
        names = self._tied.get(place.parameter, [place.parameter])
        return list({tensor.data_ptr(): tensor for name in names if (tensor := live.get(name)) is not None}.values())

    # --- the copies of the model's loaders ------------------------------------------------------------------------

    def _note(self, target: Tensor, source: Tensor) -> None:
        """Note a copy into a tensor of the model. During an update the parameters of most layers are on the meta
        device; when a layer has all of its weights, vLLM repeats the copies into new memory."""
        name, whole = self._memory.get(_storage(target), (None, target))
        if name is None:
            return
        dims = [d for d, size in enumerate(target.shape) if size > 1]
        sizes, strides = tuple(target.shape[d] for d in dims), tuple(target.stride(d) for d in dims)
        place = _Place(name, int(target.storage_offset() - whole.storage_offset()), sizes, strides)
        part = self._part(source, target.dtype, place)
        if part is not None and part.sent not in self._computed:
            self._parts[part.sent] += [part] if part not in self._parts[part.sent] else []
            self._of_parameter[name][part] = None
        elif source.is_meta:  # computed from values copied before, as vLLM does with Mamba's A
            for sent, parts in self._parts.items():
                self._parts[sent] = [other for other in parts if other.place.parameter != name]
        elif place not in self._noted:
            self._computed.add(self._current)
            self._copied[place] = digest(source.to(target.dtype))
            for other in self._parts[self._current]:  # all of its parts are compared with their sources
                self._copied[other.place] = digest(self._source(other))
        self._noted.add(place)

    def _part(self, source: Tensor, dtype: torch.dtype, place: _Place) -> _Part | None:
        """The part of a sent tensor that is the source of a copy; `None` if the source is something else, or the
        model's dtype does not hold all values of the sent one."""
        bucket, memory = self._bucket
        if source.is_meta or _storage(source) != _storage(memory):
            return None
        position = source.data_ptr() - memory.data_ptr()
        for sent, offset in bucket:
            if not 0 <= position - offset < max(1, sent.dtype.itemsize * torch.Size(sent.shape).numel()):
                continue
            dims = [d for d, size in enumerate(source.shape) if size > 1]
            start, strides = (position - offset) // sent.dtype.itemsize, tuple(source.stride(d) for d in dims)
            sizes = tuple(source.shape[d] for d in dims)
            wider = dtype.is_floating_point and sent.dtype.is_floating_point and dtype.itemsize > sent.dtype.itemsize
            fits = source.dtype == sent.dtype and (dtype == sent.dtype or wider) and sizes == place.sizes
            if fits and has_digest(sizes, start, strides, sent.shape):
                return _Part(sent, start, strides, place)
            return None
        return None

    def _source(self, part: _Part) -> Tensor:
        bucket, memory = self._bucket
        tensor = in_memory(memory, part.sent, dict(bucket)[part.sent])
        return tensor.as_strided(part.place.sizes, part.strides, tensor.storage_offset() + part.start)

    # --- layers whose weights vLLM processes after loading ----------------------------------------------------------

    def _is_processed(self, place: _Place) -> bool:
        return place.parameter.rpartition(".")[0] in self._processing

    def _watch(self, method: Any, names: dict[int, str]) -> None:
        """Take the digests of a layer's weights before vLLM packs or shuffles them, which changes their digests or puts
        them in memory that only a kernel reads; and afterwards the digests of the remaining parameters."""
        process: Callable[[nn.Module], None] = method.process_weights_after_loading

        def watched(layer: nn.Module) -> None:
            prefix = names.get(id(layer))
            if prefix is not None:
                self._digest_unprocessed(prefix, layer)
            process(layer)
            if prefix is not None:
                parameters = layer.named_parameters(prefix, recurse=False)
                self._processed |= {name: digest(tensor.data) for name, tensor in parameters if tensor.numel()}

        method.process_weights_after_loading = watched
        self._watching.callback(lambda: delattr(method, "process_weights_after_loading"))

    def _digest_unprocessed(self, prefix: str, layer: nn.Module) -> None:
        parameters = dict(layer.named_parameters(prefix, recurse=False))
        for part in (part for name in parameters for part in self._of_parameter[name]):
            if part.sent in self._received and part in self._parts[part.sent]:
                self._unprocessed[part.place] = part.digest_in(parameters[part.place.parameter])
        for place, value in self._copied.items():
            if place.parameter in parameters and digest(place.view(parameters[place.parameter])) != value:
                self._changed.append(place.parameter)


def in_memory(memory: Tensor, sent: Sent, offset: int) -> Tensor:
    """A tensor of a bucket with its first byte at `offset`."""
    size = torch.Size(sent.shape).numel() * sent.dtype.itemsize
    return memory[offset : offset + size].view(sent.dtype).view(sent.shape)


class _Copies(TorchDispatchMode):
    """Calls a function with target and source of every copy in its context."""

    def __init__(self, note: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._note_copy = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._note_copy(args[0], args[1])
        return result


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers; tied ones under each name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

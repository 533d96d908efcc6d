"""Digests of the weights in a vLLM worker, in terms of the tensors that were sent, and their comparison with the
sender's.

vLLM fuses, splits, pads and transposes the tensors that it loads. `LoadedWeights` watches the copies of the model's own
loaders, so it finds the parts of each sent tensor for every family without describing one. `weight_sender` computes the
sender's digests. vLLM is imported only where a model is loaded.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..weight_digest import digest, has_digest, hexadecimal, numbers, strided_digest, total


_COMPUTED = ""  # in place of the names of tensors from which values are computed
PartKey = tuple[Any, ...]  # which elements of a sent tensor: the first one, then strides with sizes; () for all
Digests = dict[str, list[tuple[PartKey, int]]]  # name of a sent tensor -> its parts


class WorkerAnswer(NamedTuple):
    """The state of a worker after an update.

    Args:
        problem: the reason why it has not loaded the weights; `None` if it has.
        digests: digests of the parts of the sent tensors in this worker.
        unproven: sent tensors that the model does not hold, or from which it holds only computed values.
        together: names of the tensors that each layer is loaded from, if it holds only copies of their elements.
    """

    problem: str | None
    digests: Digests
    unproven: list[str]
    together: list[list[str]]


def difference(sent: Mapping[str, int], answers: Sequence[WorkerAnswer]) -> str | None:
    """A sentence that says how the workers' weights differ from those sent; `None` if they do not.

    Args:
        sent: digests of whole tensors.
        answers: answers of all workers of the engine. A part that several workers hold must be the same in each.
    """
    wrong: dict[str, str] = {}
    for name, whole in sent.items():
        parts: dict[PartKey, set[int]] = {}
        for answer in answers:
            for key, number in answer.digests.get(name, ()):
                parts.setdefault(key, set()).add(number)
        if len(parts) > 1:  # the whole tensor, from a worker that received it but holds no part of it
            parts.pop((), None)
        if any(len(copies) > 1 for copies in parts.values()):
            differing = next(copies for copies in parts.values() if len(copies) > 1)
            wrong[name] = f"copies of one part of it have the digests {', '.join(map(hexadecimal, sorted(differing)))}"
        elif (loaded := total(number for (number,) in parts.values())) != whole:
            wrong[name] = f"its digest is {hexadecimal(loaded)} in the engine and {hexadecimal(whole)} in the trainer"
    if not wrong:
        return None
    name, how = next(iter(wrong.items()))
    return f"{name} does not lie in the engine as it was sent: {how} ({len(wrong)} of {len(sent)} tensors differ)."


def joined(groups: Iterable[Iterable[str]]) -> list[list[str]]:
    """The names of groups that share a name, in one group each."""
    disjoint: list[set[str]] = []
    for names in map(set, groups):
        touching = [other for other in disjoint if not other.isdisjoint(names)]
        disjoint = [other for other in disjoint if other.isdisjoint(names)]
        disjoint.append(names.union(*touching))
    return [sorted(names) for names in disjoint]


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


class _Bucket:
    """A bucket that the model's `load_weights` reads.

    Args:
        tensors: tensors with the offset of each in bytes.
        memory: (bytes,) uint8.

    Attributes:
        current: the tensor that `load_weights` has read last.
    """

    current: Sent

    def __init__(self, tensors: Sequence[tuple[Sent, int]], memory: Tensor) -> None:
        self._offsets, self._memory = dict(tensors), memory

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for sent in self._offsets:
            self.current = sent
            yield sent.name, self.tensor(sent)

    def tensor(self, sent: Sent) -> Tensor:
        first, size = self._offsets[sent], torch.Size(sent.shape).numel() * sent.dtype.itemsize
        return self._memory[first : first + size].view(sent.dtype).view(sent.shape)

    def part(self, source: Tensor, dtype: torch.dtype, place: _Place) -> _Part | None:
        """The part of a sent tensor that is the source of a copy; `None` if the source is something else, or the
        model's dtype does not hold all values of the sent one."""
        if source.is_meta or _storage(source) != _storage(self._memory):
            return None
        position = source.data_ptr() - self._memory.data_ptr()
        for sent, offset in self._offsets.items():
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

    def source(self, part: _Part) -> Tensor:
        tensor = self.tensor(part.sent)
        return tensor.as_strided(part.place.sizes, part.strides, tensor.storage_offset() + part.start)


@dataclass
class _Update:
    """The state of one update, kept until the next one. A processed layer is one whose weights vLLM packs or shuffles
    after it has loaded them."""

    tensor_of_storage: dict[int, tuple[str, Tensor]]  # the model's tensors with their names; empty after the update
    packed_products: dict[str, Any]  # before the update
    processed_layers: dict[str, Any]  # by name
    in_place: set[str]  # parameters that are loaded into their memory, before or after their layer is processed
    received: dict[Sent, None] = field(default_factory=dict)
    copied_places: set[_Place] = field(default_factory=set)
    received_digests: dict[str, Tensor] = field(default_factory=dict)  # of tensors that are compared in the bucket
    computed_digests: dict[_Place, Tensor] = field(default_factory=dict)  # of computed values when they were copied
    unprocessed_digests: dict[_Place, Tensor] = field(default_factory=dict)  # before vLLM processed a layer
    processed_digests: dict[str, Tensor] = field(default_factory=dict)  # of the layer's parameters afterwards
    changed_parameters: list[str] = field(default_factory=list)  # values differ from the copied ones
    kept_products: dict[str, Any] = field(default_factory=dict)  # of layers that this update leaves out

    def is_processed(self, place: _Place) -> bool:
        return place.parameter.rpartition(".")[0] in self.processed_layers and place.parameter not in self.in_place


class LoadedWeights:
    """The parts of the latest update's tensors in a worker's model.

    Args:
        model: model before its first update. Tied parameters must have equal values from now on.
    """

    _update: _Update  # the latest one, which `begin` creates
    _before: _Update | None  # the one before it

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        tied = defaultdict(list)
        for name, tensor in _tensors(model):
            tied[id(tensor)].append(name)
        self._tied_names = {name: names for names in tied.values() for name in names}
        # of all updates, because the loaders always do the same
        self._parts: dict[Sent, list[_Part]] = {}
        self._parts_of_parameter: dict[str, dict[_Part, None]] = defaultdict(dict)  # and some that are obsolete
        self._watched: set[Sent] = set()  # tensors whose parts are known
        self._computed: set[Sent] = set()  # tensors from which a loader copies computed values
        self._watched_methods = contextlib.ExitStack()

    def begin(self) -> None:
        """Called when vLLM's layers are ready to load an update."""
        from .vllm_compat import loaded_in_place, packed_products, processed_layers

        # the name of a module that others share is its first one, as in `named_modules`
        tensors = {_storage(tensor): (name, tensor) for name, tensor in reversed([*_tensors(self._model)])}
        layers = dict(processed_layers(self._model))
        self._before = getattr(self, "_update", None)
        self._update = _Update(tensors, packed_products(self._model), layers, loaded_in_place(self._model))
        names = {id(layer): name for name, layer in layers.items()}
        for method in {id(layer.quant_method): layer.quant_method for layer in layers.values()}.values():
            self._watch(method, names)

    def load(self, tensors: Sequence[tuple[Sent, int]], memory: Tensor) -> set[str] | None:
        """Load a bucket by the model's own `load_weights`, and return its result.

        Args:
            tensors: tensors with the offset of each in bytes.
            memory: (bytes,) uint8.
        """
        bucket, sent_tensors = _Bucket(tensors, memory), [sent for sent, _ in tensors]
        self._update.received |= dict.fromkeys(sent_tensors)
        is_known = all(sent in self._watched and sent not in self._computed for sent in sent_tensors)
        if not is_known:
            self._parts |= {sent: self._parts.get(sent, []) for sent in sent_tensors}
        with contextlib.nullcontext() if is_known else _Copies(partial(self._note, bucket)):
            loaded: set[str] | None = self._model.load_weights(bucket.weights())  # type: ignore[operator]
        self._watched |= {*sent_tensors}  # not of a bucket with a tensor that the model refuses
        for sent in sent_tensors:
            if not self._parts[sent] or sent in self._computed:
                self._update.received_digests[sent.name] = digest(bucket.tensor(sent))
        return loaded

    def keep(self, names: Sequence[str]) -> set[str]:
        """Take over from the update before what is known of tensors that this one leaves out, as whole layers. Called
        before the end of the update. Returns the names of the layers' parameters."""
        before, update = self._before, self._update
        assert before is not None, "a complete update came before"
        left_out, layers = {*names}, set[str]()
        for sent in [sent for sent in before.received if sent.name in left_out]:
            update.received[sent] = None
            for place in (part.place for part in self._parts[sent]):
                layers |= {name.rpartition(".")[0] for name in self._tied_names.get(place.parameter, [place.parameter])}
                if place in before.unprocessed_digests:
                    update.unprocessed_digests[place] = before.unprocessed_digests[place]
        update.processed_digests |= {
            name: value for name, value in before.processed_digests.items() if name.rpartition(".")[0] in layers
        }
        update.kept_products |= {n: update.packed_products.pop(n) for n in layers & update.packed_products.keys()}
        return {name for name in self._tied_names if name.rpartition(".")[0] in layers}

    def end(self) -> None:
        """Called when the update has ended, whether complete or not."""
        self._watched_methods.close()
        self._update.tensor_of_storage = {}

    def answer(self) -> WorkerAnswer:
        """The digests of the model's weights now."""
        update, live = self._update, dict(_tensors(self._model))
        parts: list[tuple[str, PartKey, Tensor]] = [
            (name, (), value) for name, value in update.received_digests.items()
        ]
        for sent in update.received:
            for part in self._parts[sent] if sent not in self._computed else ():
                values = (
                    [update.unprocessed_digests.get(part.place)]
                    if update.is_processed(part.place)
                    else [part.digest_in(memory) for memory in self._memories(part.place, live)]
                )
                parts += [(sent.name, part.key, value) for value in values if value is not None]
        digests: Digests = {}
        for (name, key, _), number in zip(parts, numbers([value for _, _, value in parts]), strict=True):
            digests.setdefault(name, []).append((key, number))
        unproven = [s.name for s in update.received if not self._parts[s] and s not in self._computed]
        return WorkerAnswer(self._local_problem(live), digests, unproven, self._together())

    def _together(self) -> list[list[str]]:
        """See `WorkerAnswer`. A layer with a computed value is left out, as are layers joined to it by a tensor."""
        of_layer: dict[str, set[str]] = defaultdict(set)
        for sent in self._update.received:
            for part in self._parts[sent]:
                of_layer[part.place.parameter.rpartition(".")[0]].add(sent.name)
        computed = {place.parameter.rpartition(".")[0] for place in self._update.computed_digests}
        for layer in computed:
            of_layer[layer] |= {_COMPUTED, *(sent.name for sent in self._computed)}
        return [names for names in joined(of_layer.values()) if _COMPUTED not in names]

    def _local_problem(self, live: dict[str, Tensor]) -> str | None:
        from .vllm_compat import packed_products

        update = self._update
        changed = set(update.changed_parameters)
        for place, value in update.computed_digests.items():
            if not update.is_processed(place) and any(
                digest(place.view(memory)) != value for memory in self._memories(place, live)
            ):
                changed.add(place.parameter)
        for name, value in update.processed_digests.items():
            if name in live and digest(live[name].data) != value:
                changed.add(name)
        if changed:
            return (
                f"vLLM's {', '.join(sorted(changed)[:3])} ({len(changed)} in all) has other values than were "
                f"copied into it."
            )
        now = packed_products(self._model)
        if new := [name for name, product in update.kept_products.items() if now.get(name) is not product]:
            return f"{', '.join(new[:3])} ({len(new)} in all) got no weights, and was packed again."
        if old := [name for name, product in update.packed_products.items() if now.get(name) is product]:
            return f"{', '.join(old[:3])} ({len(old)} in all) computes with a packed copy of earlier weights."
        return None

    def _memories(self, place: _Place, live: dict[str, Tensor]) -> list[Tensor]:
        """The model's current memory of a parameter; several tensors if parameters were tied and are no longer."""
        names = self._tied_names.get(place.parameter, [place.parameter])
        return list({tensor.data_ptr(): tensor for name in names if (tensor := live.get(name)) is not None}.values())

    # --- the copies of the model's loaders ------------------------------------------------------------------------

    def _note(self, bucket: _Bucket, target: Tensor, source: Tensor) -> None:
        """Note a copy into a tensor of the model. During an update the parameters of most layers are on the meta
        device; when a layer has all of its weights, vLLM repeats the copies into new memory."""
        name, whole = self._update.tensor_of_storage.get(_storage(target), (None, target))
        # vLLM copies a tensor that it has loaded in place to itself
        if name is None or (name in self._update.in_place and _storage(source) == _storage(target)):
            return
        dims = [d for d, size in enumerate(target.shape) if size > 1]
        sizes, strides = tuple(target.shape[d] for d in dims), tuple(target.stride(d) for d in dims)
        place = _Place(name, int(target.storage_offset() - whole.storage_offset()), sizes, strides)
        part = bucket.part(source, target.dtype, place)
        if part is not None and part.sent not in self._computed:
            self._parts[part.sent] += [part] if part not in self._parts[part.sent] else []
            self._parts_of_parameter[name][part] = None
        elif source.is_meta:  # computed from values copied before, as vLLM does with Mamba's A
            for sent, parts in self._parts.items():
                self._parts[sent] = [other for other in parts if other.place.parameter != name]
        elif place not in self._update.copied_places:
            self._computed.add(bucket.current)
            self._update.computed_digests[place] = digest(source.to(target.dtype))
            for other in self._parts[bucket.current]:  # all of its parts are compared with their sources
                self._update.computed_digests[other.place] = digest(bucket.source(other))
        self._update.copied_places.add(place)

    # --- layers whose weights vLLM processes after loading ----------------------------------------------------------

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
                self._update.processed_digests |= {
                    name: digest(tensor.data)
                    for name, tensor in parameters
                    if tensor.numel() and name not in self._update.in_place
                }

        method.process_weights_after_loading = watched
        self._watched_methods.callback(lambda: delattr(method, "process_weights_after_loading"))

    def _digest_unprocessed(self, prefix: str, layer: nn.Module) -> None:
        update, parameters = self._update, dict(layer.named_parameters(prefix, recurse=False))
        for part in (part for name in parameters for part in self._parts_of_parameter[name]):
            if part.sent in update.received and part in self._parts[part.sent]:
                update.unprocessed_digests[part.place] = part.digest_in(parameters[part.place.parameter])
        for place, value in update.computed_digests.items():
            if place.parameter in parameters and digest(place.view(parameters[place.parameter])) != value:
                update.changed_parameters.append(place.parameter)


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

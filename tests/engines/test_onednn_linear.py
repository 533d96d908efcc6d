"""Linear layers by oneDNN: the same results and gradients as torch's, only where they are meant for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.training import onednn_linear
from trl_realloc.engines.training.onednn_linear import fastest_linear, lacks_kernels
from trl_realloc.engines.training.packed_forward import PolicyHead
from trl_realloc.engines.training.replicated import ReplicatedEngine


pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


class Calls(TorchDispatchMode):
    """Counts the products that oneDNN computes inside."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "mkldnn._linear_pointwise" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def preferred(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(onednn_linear, "prefers_onednn", lambda: True)
    torch.manual_seed(0)
    yield
    assert nn.functional.linear is onednn_linear._torch_linear


def gradients(layer: Any, inputs: Tensor, upstream: Tensor) -> list[Tensor]:
    """The layer's output, and its gradients by the input and the parameters."""
    inputs = inputs.detach().requires_grad_()
    output = layer(inputs)
    return [output, *torch.autograd.grad(output, [inputs, *layer.parameters()], upstream)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 131, 256), (3, 67, 256), (201, 256)])
def test_results_and_gradients_are_those_of_float64(shape: tuple[int, ...], bias: bool) -> None:
    layer, inputs, upstream = nn.Linear(256, 160, bias), torch.randn(shape), torch.randn(*shape[:-1], 160)
    with fastest_linear(), Calls() as calls:
        found = gradients(layer, inputs, upstream)
    assert calls.count == 3
    expected = gradients(layer.double(), inputs.double(), upstream.double())
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=2e-6 * exact.abs().max().item())


def test_inputs_in_any_memory_order_and_frozen_weights() -> None:
    layer, inputs = nn.Linear(256, 256, bias=False).requires_grad_(False), torch.randn(256, 300)
    upstream = torch.randn(256, 300).t()
    with fastest_linear(), Calls() as calls:
        ours = gradients_of_input(layer, inputs.t(), upstream)
    assert calls.count == 2, "no gradient of the weight"
    torch.testing.assert_close(ours, gradients_of_input(layer, inputs.t(), upstream), rtol=1e-5, atol=1e-5)


def gradients_of_input(layer: nn.Linear, inputs: Tensor, upstream: Tensor) -> Tensor:
    inputs = inputs.detach().requires_grad_()
    return torch.autograd.grad(layer(inputs), inputs, upstream)[0]


def test_checkpointed_layers_compute_their_forward_again_in_the_same_way() -> None:
    layer, inputs = nn.Linear(256, 256), torch.randn(128, 256, requires_grad=True)
    for reentrant in (False, True):
        with fastest_linear(), Calls() as calls:
            checkpoint(layer, inputs, use_reentrant=reentrant).sum().backward()
        assert calls.count == 4


@pytest.mark.parametrize("case", ["small", "float64", "autocast", "replaced", "vector"])
def test_torch_computes_what_is_not_meant_for_onednn(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, dtype = (16 if case == "small" else 128), (torch.float64 if case == "float64" else torch.float32)
    layer, inputs = nn.Linear(256, 256, dtype=dtype), torch.randn(rows, 256, dtype=dtype)
    if case == "vector":
        layer, inputs = nn.Linear(2100, 2000), torch.randn(2100)
    with monkeypatch.context() as patch:
        if case == "replaced":  # as DeepSpeed does in a training step of stage 3
            patch.setattr(nn.functional, "linear", lambda *a: onednn_linear._torch_linear(*a))
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"), fastest_linear(), Calls() as calls:
            output = layer(inputs)
    assert calls.count == 0 and output.dtype == (torch.bfloat16 if case == "autocast" else dtype)


def test_an_error_inside_puts_torchs_function_back() -> None:
    with pytest.raises(RuntimeError, match="stop"), fastest_linear():
        raise RuntimeError("stop")


def test_it_is_for_amd_processors_with_avx_512() -> None:
    text = "processor\t: 0\nvendor_id\t: {}\nflags\t\t: fpu sse2 {}\n\nprocessor\t: 1\nvendor_id\t: {}\n"
    assert lacks_kernels(text.format("AuthenticAMD", "avx512f", "AuthenticAMD"))
    assert not lacks_kernels(text.format("AuthenticAMD", "avx2", "AuthenticAMD"))
    assert not lacks_kernels(text.format("GenuineIntel", "avx512f", "GenuineIntel"))
    assert not lacks_kernels("Features\t: fp asimd\n")


def test_an_engine_trains_and_scores_by_it_as_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [torch.randint(2, tiny.VOCABULARY, (60,)) for _ in range(4)]
    prompts = Ragged.of([row[:4] for row in rows], torch.long)
    samples = Rollouts(index=torch.arange(4), prompts=prompts, responses=Ragged.of(rows, torch.long))

    def loss(outputs: Any, micro: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return -outputs["logprobs"].values.mean(), {}

    results = []
    for prefers in (True, False):
        monkeypatch.setattr(onednn_linear, "prefers_onednn", lambda prefers=prefers: prefers)
        model = tiny.policy(hidden_size=128, intermediate_size=256)
        engine = ReplicatedEngine(
            PolicyHead(model, 1.0),
            MeshGroup((0,), 0),
            torch.device("cpu"),
            make_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        )
        with Calls() as calls:
            engine.train(samples, loss, 512, 0.1)
            logprobs = engine.forward(samples, 512)["logprobs"].values
        assert (calls.count > 0) == prefers
        results.append([logprobs, *(p.detach() for p in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

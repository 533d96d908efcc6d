"""Real vLLM engines on the CPU, and tiny Llamas: weights, sampling, and the life and death of the engine's process."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_forks import EngineForks
from generating import (
    ENDLESS,
    LENGTH,
    MANY,
    SAMPLING,
    VOCABULARY,
    buckets,
    llama,
    requests,
    samples,
    tokens,
    worst_difference,
)
from holding import held, spoiled
from limits import patience
from peft import LoraConfig, get_peft_model
from rescoring import Models, assert_exact, wait_for
from shared_memory import left, names
from transformers import LlamaConfig, LlamaForCausalLM

from trl_realloc.engines.base import EngineDied, EngineError, Updates
from trl_realloc.engines.child_process import session_members
from trl_realloc.engines.generation import engine_process, vllm
from trl_realloc.engines.generation.engine_process import engine_environment
from trl_realloc.engines.generation.transformers import TransformersEngine
from trl_realloc.engines.generation.vllm import VLLMEngine
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.requests import Completion, GenerationRequest, Sampling
from trl_realloc.engines.training import weight_export
from trl_realloc.engines.training.weight_export import source_digests


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed"),
]

Start = Callable[..., VLLMEngine]


def assert_gone(session: int, shared_before: set[str], within_s: float = 10.0) -> None:
    """No process of an engine is left, and no shared memory has its name in the file system."""
    deadline = time.monotonic() + (patience(within_s) if within_s else 0.0)
    while members := session_members(session):
        assert time.monotonic() < deadline, f"left: processes {members}"
        time.sleep(0.05)
    assert not left(shared_before, within_s)


def unix_sockets(session: int) -> list[str]:
    """The names of a session's sockets; one that begins with @ is no file."""
    inodes = set()
    for pid in session_members(session):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    rows = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7] for row in rows if row[6] in inodes and len(row) > 7]


@pytest.fixture
def engine(vllm_engine: VLLMEngine) -> VLLMEngine:
    return vllm_engine


@pytest.fixture
def loaded(engine: VLLMEngine, model: LlamaForCausalLM) -> VLLMEngine:
    """The engine with `model`'s weights, whatever the test before it has done."""
    engine.load(buckets(model), 1)
    return engine


@pytest.fixture(scope="module")
def pair(start: Start) -> VLLMEngine:
    """An engine of two tensor-parallel processes."""
    cores = sorted(os.sched_getaffinity(0))
    return start(tensor_parallel_size=2, cpu_cores=[cores[0], cores[-1]])


def test_equal_seeds_draw_the_tokens_that_transformers_draws(loaded: VLLMEngine, model: LlamaForCausalLM) -> None:
    reference = TransformersEngine(lambda: contextlib.nullcontext(model), torch.device("cpu"), batch_size=8)
    sampling = Sampling(max_tokens=24, temperature=0.7, stop_token_ids=(3,))
    for one, other in zip(
        samples(loaded, requests(24), sampling), samples(reference, requests(24), sampling), strict=True
    ):
        assert (one.token_ids, one.stopped) == (other.token_ids, other.stopped)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_tokens_come_as_often_as_their_probabilities_say(loaded: VLLMEngine, model: LlamaForCausalLM) -> None:
    count, prompt = 4000, (5, 9, 2)
    asked = [GenerationRequest(i, prompt, seed=i) for i in range(count)]
    drawn = torch.zeros(VOCABULARY, dtype=torch.float64)
    for completion in loaded.generate(asked, Sampling(max_tokens=1, temperature=2.0)):
        drawn[completion.token_ids[0]] += 1
    with torch.no_grad():
        expected = count * (model(torch.tensor([prompt])).logits[0, -1].double() / 2.0).softmax(-1)
    often = expected >= 5
    chi_square = ((drawn - expected)[often].square() / expected[often]).sum().item()
    freedom = int(often.sum())
    assert freedom > 50
    assert abs(chi_square - freedom) < 4.5 * (2 * freedom) ** 0.5


def test_prompts_that_do_not_fit_into_one_step_change_nothing(loaded: VLLMEngine, model: LlamaForCausalLM) -> None:
    asked = requests(60, length=220)  # 13,290 tokens; vLLM takes at most 8,192 at once, so a prompt is cut in two
    got = samples(loaded, asked, Sampling(max_tokens=4, temperature=0.7))
    assert worst_difference(model, asked, got, 0.7) < 1e-4
    assert tokens(got[-20:]) == tokens(samples(loaded, asked[-20:], Sampling(max_tokens=4, temperature=0.7)))


def test_new_weights_change_the_samples_and_agree_with_their_model(loaded: VLLMEngine) -> None:
    asked = requests(8, length=150)  # longer than a block of the prefix cache: keys of the old weights would be found
    before = samples(loaded, asked)
    other = llama(2)
    for version, size in ((7, 1), (8, 100)):  # a parameter at a time, which cuts fused layers; all of them at once
        loaded.load(buckets(other, size), version)
        assert loaded.version == version
        after = samples(loaded, asked)
        assert tokens(after) != tokens(before)
        assert worst_difference(other, asked, after, 0.7) < 1e-4


def assert_without_weights(engine: VLLMEngine) -> None:
    assert engine.version == -1
    with pytest.raises(EngineError, match="no complete weights"):
        engine.generate(requests(1), SAMPLING)


def test_a_torn_update_refuses_to_generate_until_a_whole_one(loaded: VLLMEngine, model: LlamaForCausalLM) -> None:
    def torn() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for number, bucket in enumerate(buckets(llama(3))):
            if number == 2:
                raise ConnectionError("the trainer lost a rank")
            yield bucket

    with pytest.raises(ConnectionError, match="lost a rank"):
        loaded.load(torn(), 2)
    assert_without_weights(loaded)
    loaded.load(buckets(model), 3)
    assert worst_difference(model, requests(4), samples(loaded, requests(4)), 0.7) < 1e-4


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda named: named[:-1], r"lm_head\.weight"),
        (lambda named: [(n, p) for n, p in named if "layers.1.self_attn.k_proj" not in n], r"layers\.1.*qkv_proj"),
        (lambda named: [*named, ("model.layers.7.mlp.up_proj.weight", torch.zeros(96, 64))], r"layers\.7"),
        (lambda named: [(n, p[:-1] if "norm.weight" in n else p) for n, p in named], "size|shape"),
    ],
    ids=["missing", "part of a fused layer missing", "unknown", "of the wrong shape"],
)
def test_weights_that_are_not_the_models_are_refused(
    loaded: VLLMEngine,
    model: LlamaForCausalLM,
    change: Callable[[list[tuple[str, torch.Tensor]]], list[tuple[str, torch.Tensor]]],
    complaint: str,
) -> None:
    with pytest.raises(EngineError, match=f"(?s)weights of version 2.*({complaint})"):
        loaded.load([change(list(model.named_parameters()))], 2)
    assert loaded.version == -1
    loaded.load(buckets(model), 3)
    assert worst_difference(model, requests(4), samples(loaded, requests(4)), 0.7) < 1e-4


def test_one_other_bit_in_the_engine_is_refused_with_both_digests(
    loaded: VLLMEngine, model: LlamaForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    with spoiled(loaded, "model.norm.weight"), pytest.raises(EngineError) as error:
        loaded.load(buckets(model), 4)
    print(error.value)
    assert re.fullmatch(
        r"actor\.generate: vLLM could not load the weights of version 4: model\.norm\.weight does not lie in the "
        r"engine as it was sent: its digest is ([0-9a-f]{16}) in the engine and (?!\1)[0-9a-f]{16} in the trainer "
        r"\(1 of 21 tensors differ\)\.\n",
        capsys.readouterr().out,
    )
    assert_without_weights(loaded)
    loaded.load(buckets(model), 5)
    assert worst_difference(model, requests(4), samples(loaded, requests(4)), 0.7) < 1e-4


@pytest.mark.parametrize("processes", ["loaded", "pair"])
def test_a_layer_that_did_not_change_is_sent_once_and_proven_with_the_others(
    processes: str, model: LlamaForCausalLM, request: pytest.FixtureRequest
) -> None:
    engine: VLLMEngine = request.getfixturevalue(processes)
    lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted: Any = get_peft_model(copy.deepcopy(model), lora)
    fused = ("q_proj.weight", "k_proj.weight", "v_proj.weight")  # vLLM's layer of three
    changed = sum(p.nbytes for name, p in model.named_parameters() if name.endswith(fused))

    def sent_bytes(version: int) -> int:
        frozen = source_digests(adapted)
        engine.load(weight_export.buckets(adapted, without=engine.kept(frozen)), version, frozen)
        assert worst_difference(adapted, requests(4), samples(engine, requests(4)), 0.7) < 1e-4
        return engine.sent_bytes

    with torch.no_grad():
        engine.load(buckets(model), 1)  # from which nothing is known to be kept
        whole = sent_bytes(2)
        for parameter in adapted.parameters():
            parameter.add_(0.1 * parameter.requires_grad)
        assert sent_bytes(3) == changed < whole
        norm = adapted.get_base_model().model.norm.weight
        norm.data.mul_(2.0)  # by hand
        assert sent_bytes(4) == changed + norm.nbytes
        if processes == "loaded":  # the memory of workers cannot be spoiled
            with (
                spoiled(engine, "model.norm.weight"),
                pytest.raises(EngineError, match=r"model\.norm\.weight does not"),
            ):
                sent_bytes(5)
            assert sent_bytes(6) == whole


def test_a_generation_left_unfinished_is_ended_by_the_next_call(loaded: VLLMEngine, model: LlamaForCausalLM) -> None:
    long = Sampling(max_tokens=200, temperature=0.7)
    expected = samples(loaded, requests(8))
    left = loaded.generate(requests(64), long)
    assert samples(loaded, requests(8)) == expected
    with pytest.raises(EngineError, match="ended by a later call"):
        next(left)
    short_and_long = loaded.generate(requests(64), Sampling(max_tokens=200, temperature=0.7, stop_token_ids=(3,)))
    next(short_and_long)
    short_and_long.close()  # type: ignore[attr-defined]
    loaded.load(buckets(model), 1)
    assert samples(loaded, requests(8)) == expected


def test_samples_come_as_they_finish(loaded: VLLMEngine) -> None:
    sampling = Sampling(max_tokens=200, temperature=0.7, stop_token_ids=(3,))
    lengths = [len(completion.token_ids) for completion in loaded.generate(requests(48), sampling)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_the_times_of_decode_steps_are_known_by_their_number_of_samples(loaded: VLLMEngine) -> None:
    start = time.perf_counter()
    few, many = (replace(each, max_tokens=limit) for each, limit in zip(requests(2), (24, 12), strict=True))
    samples(loaded, [few, many])
    seconds = time.perf_counter() - start
    one, two = loaded.decode_steps
    # the first two steps may read prompts; a sample has 7 or 8 tokens of prompt and those drawn before
    assert (one[0], two[0]) == (1, 2)
    assert one[1] == pytest.approx(7 + (12 + 23) / 2, abs=1)
    assert two[1] == pytest.approx(7.5 + (2 + 11) / 2, abs=1)
    assert 0 < 12 * one[2] + 10 * two[2] < seconds


@pytest.mark.parametrize(
    ("request_", "sampling", "complaint"),
    [
        (GenerationRequest(41, (1,) * (LENGTH - 9), 0), Sampling(10, 0.7), "request 41 has 247 tokens.*256"),
        (GenerationRequest(42, (), 0), SAMPLING, "request 42 is empty"),
        (GenerationRequest(43, (1, VOCABULARY), 0), SAMPLING, "request 43.*vocabulary of 128"),
        (GenerationRequest(44, (1,), 0), Sampling(10, 0.0), "temperature 0.0"),
        (GenerationRequest(45, (1,), 0), Sampling(0, 1.0), "max_tokens is 0"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_generated(
    loaded: VLLMEngine, request_: GenerationRequest, sampling: Sampling, complaint: str
) -> None:
    with pytest.raises(EngineError, match=complaint):
        loaded.generate([*requests(2), request_], sampling)
    assert len(samples(loaded, requests(2))) == 2


def test_a_killed_engine_is_reported_at_once_with_name_and_cause(engine: VLLMEngine, model: LlamaForCausalLM) -> None:
    shared_before = names()
    engine.load(buckets(model), 1)
    session = engine.pid
    completions = engine.generate(requests(MANY), ENDLESS)
    os.kill(session, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDied, match="actor.generate: .*SIGKILL, while generating"):
        list(completions)
    assert time.monotonic() - began < patience(5)
    assert_gone(session, shared_before)
    for call in (lambda: engine.load(buckets(model), 2), lambda: engine.wait_ready()):
        with pytest.raises(EngineDied, match="SIGKILL"):
            call()
    with pytest.raises(EngineError):
        engine.generate(requests(1), SAMPLING)
    engine.close()
    engine.close()


def test_tied_embeddings(start: Start) -> None:
    engine = start(tied=True)
    for version in (1, 2):
        tied = llama(10 + version, tied=True)
        assert "lm_head.weight" not in dict(tied.named_parameters())
        engine.load(buckets(tied), version)
        assert worst_difference(tied, requests(8), samples(engine, requests(8)), 0.7) < 1e-4
    session, shared_before = engine.pid, names()
    engine.close()
    engine.close()
    assert_gone(session, shared_before, within_s=0.0)
    with pytest.raises(EngineError, match="closed"):
        engine.load(buckets(tied), 3)


def test_two_tensor_parallel_processes_hold_the_same_model(pair: VLLMEngine, model: LlamaForCausalLM) -> None:
    asked = requests(24)
    for version, weights in enumerate((model, llama(2), model)):
        pair.load(buckets(weights), version)
        got = samples(pair, asked)
        assert worst_difference(weights, asked, got, 0.7) < 1e-4
    with pytest.raises(EngineError, match="weights of version 9"):
        pair.load([list(model.named_parameters())[3:]], 9)
    pair.load(buckets(model), 2)
    assert samples(pair, asked) == got
    # nothing of what the processes share has a name, so nothing can be left behind whoever is killed
    mapped = Path(f"/proc/{pair.pid}/maps").read_text().splitlines()
    named = [line for line in mapped if "/dev/shm/" in line]
    assert named
    assert all(line.endswith("(deleted)") for line in named)
    assert all(name.startswith("@") for name in unix_sockets(pair.pid))


def test_tensor_parallel_processes_take_new_parameters_while_they_generate(pair: VLLMEngine, models: Models) -> None:
    asked = {request.index: request for request in requests(100)}  # of which 64 are decoded at the same time
    pair.load(buckets(models[1]), 1)
    with held(pair, 10):
        generation = pair.start([*asked.values()], ENDLESS, Updates.KEEP)
        wait_for(generation, 10)
        pair.load(buckets(models[2]), 2)
    ended: dict[frozenset[int], list[Completion]] = defaultdict(list)
    while frozenset({2}) not in ended:  # the first that has begun after the update
        for completion in generation.poll(30):
            ended[frozenset(completion.versions)].append(completion)
    generation.close()
    assert ended.keys() == {frozenset({1, 2}), frozenset({2})}
    got = [completion for of_versions in ended.values() for completion in of_versions[:40]]
    assert_exact(models, [asked[completion.index] for completion in got], got)


def test_processes_that_wait_for_each_other_keep_their_core_between_looks(run_with_vllm: Callable[..., str]) -> None:
    """Linux 6.18 lets processes that do so win: the engine's owner had no core for seconds. In a process of its own,
    because vLLM stays out of this one."""
    code = """
        import os
        from vllm.distributed import utils
        from trl_realloc.engines.generation.vllm_compat import wait_without_yielding

        yielded = []
        os.sched_yield = lambda: yielded.append(True)
        utils.sched_yield()
        assert yielded == [True]
        wait_without_yielding()
        utils.sched_yield()
        assert yielded == [True]
        """
    run_with_vllm(code)


def test_workers_are_started_by_the_thread_that_builds_the_engine(run_with_vllm: Callable[..., str]) -> None:
    """On GPUs vLLM 0.33 would start them from threads that end, and the kernel might end workers with those. Earlier
    releases never ask. In a process of its own, as above."""
    code = """
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor
        from trl_realloc.engines.generation.vllm_compat import start_workers_in_turn

        executor = object.__new__(MultiprocExecutor)
        start_workers_in_turn()
        assert not executor._can_start_workers_concurrently(inherited_fds=None)
        """
    run_with_vllm(code)


def test_a_killed_worker_ends_its_engine(pair: VLLMEngine, model: LlamaForCausalLM) -> None:
    shared_before = names()
    pair.load(buckets(model), 11)
    session = pair.pid
    workers = [pid for pid in session_members(session) if "Worker" in Path(f"/proc/{pid}/comm").read_text()]
    assert len(workers) == 2
    completions = pair.generate(requests(MANY), ENDLESS)
    next(completions)
    os.kill(workers[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDied, match=r"vLLM's worker \S+ \(pid \d+\) was ended by SIGKILL, while generating"):
        list(completions)
    assert time.monotonic() - began < patience(10)
    assert_gone(session, shared_before)


@pytest.mark.parametrize("processes", [1, 2])
def test_nothing_outlives_a_killed_parent(processes: int, tmp_path: Path, forks: EngineForks) -> None:
    """Killed with -9 while the engine starts (2 processes), and while it generates (1, whose parent and engine are
    forked)."""
    llama(0).config.save_pretrained(tmp_path)
    generate = processes == 1
    script = f"""
        import sys, time, torch
        from pathlib import Path
        from trl_realloc.engines.child_process import die_with_parent
        from trl_realloc.engines.generation import engine_process
        from trl_realloc.engines.generation.vllm import VLLMEngine
        die_with_parent(int(sys.argv[1]))
        if {generate}:
            from engine_forks import EngineForks
            engine_process.spawn = EngineForks.forked().spawn
        engine = VLLMEngine({str(tmp_path)!r}, max_model_len={LENGTH}, tensor_parallel_size={processes},
                            cpu_cores=[0] * {processes}, kv_cache_gib=0.25)
        Path({str(tmp_path)!r}, "session").write_text(f"{{engine.pid}}\\n")
        if {generate}:
            from transformers import AutoConfig, AutoModelForCausalLM
            from trl_realloc.engines.requests import GenerationRequest, Sampling
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({str(tmp_path)!r}))
            engine.load([list(model.named_parameters())], 1)
            samples = engine.generate([GenerationRequest(i, (1, 2), i) for i in range(5000)], Sampling(200, 1.0))
            next(samples)
            Path({str(tmp_path)!r}, "generates").touch()
        time.sleep(600)
        """
    (tmp_path / "parent_of_engine.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "parent_of_engine", str(os.getpid())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    shared_before, log = names(), tmp_path / "log"
    with log.open("w+b") as file:
        if generate:
            parent: Any = forks.spawn(command, environment, file, [])
        else:
            parent = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    deadline = time.monotonic() + patience(60)

    def wait_until(happened: Callable[[], bool]) -> None:
        while not happened():
            assert parent.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    try:
        told = tmp_path / "session"
        wait_until(lambda: told.exists() and told.read_text().endswith("\n"))
        session = int(told.read_text())
        if generate:
            wait_until((tmp_path / "generates").exists)
        else:
            wait_until(lambda: len(session_members(session)) >= 4)  # host, tracker, two workers
        assert session_members(session)
    finally:
        parent.kill()
        parent.wait()
    assert_gone(session, shared_before)


def test_an_engine_wakes_for_weights_and_for_samples(start: Start, model: LlamaForCausalLM) -> None:
    """On a CPU no memory is given back; the commands and their order are those of a GPU."""
    engine = start(sleep_level=2, engine_kwargs={"max_num_seqs": 16}, dtype="bfloat16")
    frozen = source_digests(copy.deepcopy(model).requires_grad_(False))
    engine.load(buckets(model), 1, frozen)
    assert engine.kept(frozen) == dict(model.named_parameters()).keys()
    expected = samples(engine, requests(8))
    engine.sleep()
    engine.sleep()
    assert_without_weights(engine)
    assert not engine.kept(frozen)
    engine.load(buckets(model), 1)
    assert samples(engine, requests(8)) == expected
    left = engine.generate(requests(64), Sampling(max_tokens=200, temperature=0.7))
    engine.sleep()  # ends it
    with pytest.raises(EngineError, match="ended by a later call"):
        next(left)
    # float32 weights are sent in the dtype that the engine computes in
    dtypes = {"wide": torch.float32, "half": torch.bfloat16, "ids": torch.int64}
    assert engine.narrower(dtypes) == {"wide": torch.bfloat16}


@pytest.fixture(scope="module")
def logged(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[VLLMEngine, Path, set[str]]:
    """An engine with settings of its own, the file of its log, and the names in /dev/shm before it was started."""
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    log.write_text("of an engine before\n")
    shared_before = names()
    kwargs = {"max_num_batched_tokens": 256, "max_num_seqs": 4}
    settings = {"name": "engine 9", "sleep_level": 1, "step_timeout_s": 3}
    return start(engine_kwargs=kwargs, log_path=log, **settings), log, shared_before


def test_an_argument_of_the_users_reaches_the_engine_and_its_log_is_kept(
    logged: tuple[VLLMEngine, Path, set[str]], model: LlamaForCausalLM
) -> None:
    engine, log, _ = logged
    assert_without_weights(engine)
    engine.load(buckets(model), 1)
    engine.sleep()
    assert engine.version == 1, "at level 1 it keeps its weights"
    lengths = [len(c.token_ids) for c in engine.generate(requests(12), Sampling(20, 0.7))]
    assert lengths == [20] * 12
    lines = log.read_text().splitlines()
    assert lines[0] == "of an engine before"
    assert lines[1].startswith("--- engine 9, started 20")


def test_a_stopped_engine_is_told_in_time(logged: tuple[VLLMEngine, Path, set[str]], model: LlamaForCausalLM) -> None:
    engine, _, shared_before = logged
    engine.load(buckets(model), 1)
    session = engine.pid
    completions = engine.generate(requests(MANY), ENDLESS)
    os.kill(session, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(EngineDied, match="engine 9.*no sign of life for 3 s"):
        list(completions)
    assert time.monotonic() - began < patience(10)
    assert_gone(session, shared_before)


def test_a_start_that_fails_says_why(forks: EngineForks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "why_not_served", lambda config, **settings: None)  # it would refuse these heads before
    config = llama(0).config
    monkeypatch.setattr(engine_process, "spawn", forks.spawn)
    config.head_dim = 16  # vLLM finds out at the first token only
    config.save_pretrained(tmp_path)
    engine = VLLMEngine(tmp_path, max_model_len=LENGTH, kv_cache_gib=0.25, name="engine 3")
    session, shared_before = engine.pid, names()
    with pytest.raises(EngineError, match="(?s)engine 3: .*head_dim=16.*while starting.*RuntimeError") as error:
        engine.wait_ready()
    assert not isinstance(error.value, EngineDied)
    assert_gone(session, shared_before)
    engine.close()


def test_an_engines_cache_holds_all_of_its_samples_at_their_greatest_length(tmp_path: Path) -> None:
    llama(0).config.save_pretrained(tmp_path)
    log = tmp_path / "log"
    engine = VLLMEngine(tmp_path, max_model_len=LENGTH, max_num_seqs=24, log_path=log)
    engine.wait_ready()
    engine.close()
    (samples_at_once,) = re.findall(rf"Maximum concurrency for {LENGTH} tokens per request: ([\d.]+)x", log.read_text())
    assert 24 <= float(samples_at_once) <= 25  # with the block that vLLM keeps


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"cpu_cores": [0, 1, 2], "tensor_parallel_size": 2}, "3 cores cannot be divided among 2"),
        ({"cuda_devices": [0], "tensor_parallel_size": 2}, "1 GPUs for tensor_parallel_size 2"),
        ({"cuda_devices": [0], "cpu_cores": [0]}, "one kind"),
        ({}, "no config.json"),
    ],
)
def test_an_impossible_engine_is_refused_without_starting_a_process(
    tmp_path: Path, settings: dict[str, object], complaint: str
) -> None:
    with pytest.raises(EngineError, match=complaint):
        VLLMEngine(tmp_path, max_model_len=LENGTH, **settings)  # type: ignore[arg-type]


def test_the_engine_is_no_rank_of_the_job_and_counts_gpus_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "ACCELERATE_USE_DEEPSPEED", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,9")
    on_gpus = engine_environment(2, None, [2, 0])
    assert on_gpus["CUDA_VISIBLE_DEVICES"] == "9,4"
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "ACCELERATE_USE_DEEPSPEED"} & on_gpus.keys()
    on_cores = engine_environment(2, [0, 2, 4, 6], None)
    assert (on_cores["VLLM_CPU_OMP_THREADS_BIND"], on_cores["OMP_NUM_THREADS"]) == ("0,2|4,6", "2")


def test_a_cpu_engine_compiles_where_asked_and_a_gpus_always(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(vllm, "EngineProcess", lambda *arguments: environments.append(arguments[2]))
    LlamaConfig().save_pretrained(tmp_path)
    for kwargs in ({}, {"enforce_eager": True}, {"enforce_eager": False}):
        vllm.VLLMEngine(tmp_path, max_model_len=8, engine_kwargs=kwargs)
    assert [each.get("TORCH_COMPILE_DISABLE") for each in environments] == ["1", "1", None]
    assert "TORCH_COMPILE_DISABLE" not in engine_environment(1, None, [0])

"""The files and functions of this package that one plain update runs through, counted by a profile hook.

    python benchmarks/follow.py --json benchmarks/results/follow.json

A row for each algorithm: a tiny model under the plan `flatten` in one process, with a vLLM engine on the CPU. PPO has a
reward model, GRPO a function. What runs between the ends of the first and the second update is counted, in the rank and
in the engine's process. A function counts if it was called meanwhile, or called one that was. Modules, class bodies and
generated code do not count.

- `files`: files with such functions; `file_lines`: all lines of these files.
- `path_lines`: lines of these functions, with decorators, docstrings and the functions inside them, each line once;
  `share`: `path_lines` / `file_lines`. `files_with_lines` has both for every file.
- `frames`: functions of this package on the call stack of the message that asks the engine for a generation, from
  `train()` on, and those on the call stack of vLLM's `LLMEngine.step()` in the engine's process; of several stacks the
  one with most. Comprehensions are no functions. `call_stack` lists them with those of TRL and Transformers.
- `hand_overs`: how often two successive functions of the first of these stacks are of this package and of TRL or
  Transformers, or the reverse. Functions of other packages between them are passed over.

A wait that takes longer on a busy machine may run through a function more.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any

import result_file
from rich.console import Console
from rich.table import Table


ALGORITHMS = ("PPO", "GRPO")
PACKAGE = result_file.ROOT / "trl_realloc"
OURS, HOST = "trl_realloc", "TRL, Transformers"
HOST_SPECS = filter(None, map(find_spec, ("trl", "transformers")))
FOLDERS = {PACKAGE: OURS, **{Path(str(spec.origin)).parent: HOST for spec in HOST_SPECS}}
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # the first three are frames up to Python 3.11
MARK = "FOLLOW"  # the variable with the path of a file that exists while calls are counted
Stack = list[tuple[str, str]]  # owner, file and name of each function, from the outermost one


class Trace:
    """The Python functions that this process calls between `begin` and `end`, in the thread of `begin` and in those
    that start after the constructor."""

    def __init__(self) -> None:
        self.codes: dict[int, CodeType] = {}  # by id: equal code of two files compares equal
        # call stacks of messages that ask for a generation, and of calls of `LLMEngine.step`
        self.stacks: dict[str, list[list[CodeType]]] = {"asking": [], "stepping": []}
        self._threads: set[int] = set()
        self.is_on = False
        threading.setprofile(self._note)

    def begin(self) -> None:
        self.is_on = True
        sys.setprofile(self._note)

    def end(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        self.is_on = False

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self.is_on:
            return
        code = frame.f_code
        self.codes[id(code)] = code
        if threading.get_ident() not in self._threads:
            self._threads.add(threading.get_ident())
            self.codes.update((id(caller), caller) for caller in stack_of(frame))
        if code is Connection.send.__code__:
            message = frame.f_locals["obj"]
            if isinstance(message, tuple) and message[:1] == ("generate",):
                self.stacks["asking"].append(stack_of(frame))
        elif code.co_qualname == "LLMEngine.step":
            self.stacks["stepping"].append(stack_of(frame))

    def result(self, folders: Mapping[Path, str] = FOLDERS) -> dict[str, Any]:
        """What is counted, as JSON: `functions` are (file, first line, last line).

        Args:
            folders: the owner of the code below each folder.
        """
        ours = [code for code in self.codes.values() if frames(named([code], folders))]
        functions = [(code.co_filename, code.co_firstlineno, last_line(code)) for code in ours]
        stacks = {name: [named(stack, folders) for stack in stacks] for name, stacks in self.stacks.items()}
        return {"functions": functions, **{name: max(of, key=frames, default=[]) for name, of in stacks.items()}}


def stack_of(frame: FrameType) -> list[CodeType]:
    """The code of a frame and of its callers, the outermost first."""
    return [each.f_code for each, _ in walk_stack(frame)][::-1]


def last_line(code: CodeType) -> int:
    """The last line with code; the first one of a function that has a docstring alone."""
    return max(end for _, end, *_ in code.co_positions() if end is not None)


def named(codes: Iterable[CodeType], folders: Mapping[Path, str]) -> Stack:
    """The functions whose file is below one of the folders."""
    functions = (code for code in codes if code.co_flags & inspect.CO_OPTIMIZED and code.co_name not in COMPREHENSIONS)
    return [
        (name, f"{Path(code.co_filename).relative_to(folder.parent).as_posix()} {code.co_qualname}")
        for code in functions
        for folder, name in folders.items()
        if folder in Path(code.co_filename).parents
    ]


def frames(stack: Stack) -> int:
    return sum(name == OURS for name, _ in stack)


def hand_overs(stack: Stack) -> int:
    return sum(one != other for (one, _), (other, _) in pairwise(stack))


def row_of(algorithm: str, rank: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of an algorithm from the results of both processes' traces."""
    path: dict[str, set[int]] = defaultdict(set)
    for file, first, last in [*rank["functions"], *engine["functions"]]:
        path[file].update(range(first, last + 1))
    lines = {file: len(Path(file).read_text(encoding="utf-8").splitlines()) for file in sorted(path)}
    file_lines, path_lines = sum(lines.values()), sum(map(len, path.values()))
    return {
        "algorithm": algorithm,
        "files": len(path),
        "file_lines": file_lines,
        "path_lines": path_lines,
        "share": round(path_lines / file_lines, 3),
        "frames": frames(rank["asking"]) + frames(engine["stepping"]),
        "hand_overs": hand_overs(rank["asking"]),
        "files_with_lines": {
            os.path.relpath(file, PACKAGE): {"lines": of_file, "path_lines": len(path[file])}
            for file, of_file in lines.items()
        },
        "call_stack": [name for _, name in [*rank["asking"], *engine["stepping"]]],
    }


# --- the two processes ------------------------------------------------------------------------------------------------


def follow_engine() -> None:
    """Count in this process, a vLLM engine's, from one message of its owner to another, while the file of `MARK`
    exists; then write the result beside it. Called by `in_follow/sitecustomize.py`."""
    mark, trace, receive = Path(os.environ[MARK]), Trace(), Connection.recv

    def received(self: Any) -> Any:
        message = receive(self)
        if mark.exists() and not trace.is_on:
            trace.begin()
        elif trace.is_on and not mark.exists():
            trace.end()
            mark.with_suffix(".engine").write_text(json.dumps(trace.result()))
        return message

    Connection.recv = received  # type: ignore[method-assign]


def trainer_of(algorithm: str, folder: Path) -> Any:
    sys.path.append(str(result_file.ROOT / "tests" / "trainer"))
    import tiny

    from trl_realloc import GRPOConfig, GRPOTrainer

    settings: dict[str, Any] = {"plan": "flatten", "max_steps": 3}
    if algorithm == "PPO":
        given = {"reward_model": tiny.classifier(2)}
        return tiny.trainer(folder, given=given, generation_engine="vllm", **settings)
    args = GRPOConfig(str(folder), **tiny.BARE, use_vllm=True, max_completion_length=12, **settings)
    return GRPOTrainer(tiny.policy(), tiny.short, args, tiny.prompts(), processing_class=tiny.tokenizer())


def worker(algorithm: str, mark: Path) -> None:
    """Train, and write the algorithm's row beside the file `mark`."""
    from transformers import TrainerCallback

    trace = Trace()

    class SecondUpdate(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                mark.touch()
                trace.begin()
            elif state.global_step == 2:
                trace.end()
                mark.unlink()

    trainer = trainer_of(algorithm, mark.parent / "output")
    trainer.add_callback(SecondUpdate())
    trainer.train()
    trainer.close()
    engine = json.loads(mark.with_suffix(".engine").read_text())
    mark.with_suffix(".row").write_text(json.dumps(row_of(algorithm, trace.result(), engine)))


def measured(algorithm: str) -> dict[str, Any]:
    """The row of an algorithm, which a process of its own trains."""
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder, "follow")
        path = [str(result_file.ROOT / "benchmarks" / "in_follow"), str(result_file.ROOT), os.environ.get("PYTHONPATH")]
        environment = {MARK: str(mark), "PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--worker", algorithm]
        subprocess.run(command, env={**os.environ, **environment}, check=True)
        row: dict[str, Any] = json.loads(mark.with_suffix(".row").read_text())
        return row


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table("algorithm", "files", "their lines", "lines of the path", "share", "frames", "hand-overs")
    for row in rows:
        counts = [f"{row[name]:,}" for name in ("files", "file_lines", "path_lines")]
        table.add_row(row["algorithm"], *counts, f"{row['share']:.0%}", str(row["frames"]), str(row["hand_overs"]))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--worker", choices=ALGORITHMS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker is not None:
        worker(asked.worker, Path(os.environ[MARK]))
        return
    rows = [measured(algorithm) for algorithm in ALGORITHMS]
    show(rows)
    if asked.json is not None:
        result_file.write(asked.json, {"rows": rows, **result_file.about()})


if __name__ == "__main__":
    main()

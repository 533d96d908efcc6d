"""Two ranks, of which one has sent what the other never receives when their process group is destroyed, as at a change
of plan; what the other receives in the next group under the same tag is written to the folder. Once for each batch of
messages. Also what rank 0 receives of messages that may be empty."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from trl_realloc.runtime.messages import GlooMessages
from trl_realloc.runtime.process_groups import destroy_groups


TAG = 7


def received_after(sizes: list[int], rank: int) -> str:
    """What a rank receives after rank 1 has sent messages of these sizes, in bytes, to a group that is no more."""
    first = dist.new_group(backend="gloo")
    before = GlooMessages(first)
    if rank:
        for size in sizes:
            before.send(b"l" * size, 0, TAG)
    else:
        before.send(b"l", 1, TAG + 1)  # on its way at the receiver's side too
    dist.barrier()
    destroy_groups(first)
    after = GlooMessages(dist.new_group(backend="gloo"))
    if rank:
        after.send(b"new", 0, TAG)
        after.flush()
        received = after.receive(0, TAG + 1)
    else:
        received = after.receive(1, TAG)
        after.send(b"new", 1, TAG + 1)
        after.flush()
    dist.barrier()
    return received.decode()


def exchanged(rank: int) -> list[str]:
    """What rank 0 receives, if rank 1 sends it messages without content before and after another one."""
    messages, contents, received = GlooMessages(dist.new_group(backend="gloo")), (b"", b"abc", b""), list[bytes]()
    if rank:
        for content in contents:
            messages.send(content, 0, TAG)
    else:
        received = [messages.receive(1, TAG), *(messages.receive_any(TAG)[1] for _ in contents[1:])]
    messages.flush()
    dist.barrier()
    return [content.decode() for content in received]


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    received = [received_after(sizes, rank) for sizes in options["batches"]]
    (folder / f"{rank}.json").write_text(json.dumps(received))
    (folder / f"exchanged {rank}.json").write_text(json.dumps(exchanged(rank)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

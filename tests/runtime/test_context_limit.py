"""What becomes of a prompt that is too long for the context."""

from __future__ import annotations

import pytest

from trl_realloc.engines.base import EngineError
from trl_realloc.runtime.samples.context_limit import ContextLimit


def test_a_response_is_shortened_to_the_room_and_the_first_one_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    limit = ContextLimit(100, "leave it out", "raise it")
    assert limit.response(90, 10) is None and not caplog.messages
    assert [limit.response(prompt, 10) for prompt in (91, 99)] == [9, 1]
    (message,) = caplog.messages
    assert all(part in message for part in ("91 tokens", "100", "at most 9, not 10", "raise it"))


def test_a_prompt_without_room_for_a_token_is_refused() -> None:
    told = r"a prompt has 100 tokens, .* 100 with the completion, so nothing can be generated; raise it\."
    with pytest.raises(EngineError, match=told):
        ContextLimit(100, "raise it").response(100, 10)

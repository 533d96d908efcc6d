"""`ContextLimit`: what becomes of a prompt after which the context has no room for a whole response."""

from __future__ import annotations

from transformers.utils import logging

from ..engines.base import EngineError


logger = logging.get_logger(__name__)


class ContextLimit:
    """The context of the engines of a run.

    Args:
        tokens: most of a prompt and its response together.
        remedy: what a user does about a prompt that is too long, for messages.
    """

    def __init__(self, tokens: int, remedy: str) -> None:
        self.tokens, self.remedy = tokens, remedy
        self._has_warned = False

    def response(self, prompt: int, most: int) -> int | None:
        """Most tokens of the response to a prompt; `None` where the context has room for what is asked for. The first
        response that is shortened is logged.

        Args:
            prompt: tokens of the prompt.
            most: tokens of a response that are asked for.

        Raises:
            EngineError: there is no room for a token.
        """
        room = self.tokens - prompt
        if room >= most:
            return None
        text = f"a prompt has {prompt} tokens, and the context {self.tokens} with the completion, so"
        if room < 1:
            raise EngineError(f"{text} nothing can be generated; {self.remedy}.")
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"{text} the completion has at most {room}, not {most}; {self.remedy}. Further ones are not logged."
            )
        return room

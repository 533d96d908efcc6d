"""`ContextLimit`: what becomes of a prompt after which the context has no room for a whole response."""

from __future__ import annotations

from transformers.utils import logging

from ...engines.base import EngineError


logger = logging.get_logger(__name__)


class ContextLimit:
    """The context of the engines of a run.

    Args:
        tokens: most of a prompt and its response together.
        remedy: what a user does about a prompt that is too long, for messages.
        remedy_of_shortened: what a user does about a prompt that leaves room for a shorter response; by default the
            same.
    """

    def __init__(self, tokens: int, remedy: str, remedy_of_shortened: str = "") -> None:
        self.tokens, self.remedy, self.remedy_of_shortened = tokens, remedy, remedy_of_shortened or remedy
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
        if room < 1:
            raise EngineError(self.refusal("a prompt", prompt))
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"{self._room('a prompt', prompt)} the completion has at most {room}, not {most}; "
                f"{self.remedy_of_shortened}. Further ones are not logged."
            )
        return room

    def refusal(self, what: str, prompt: int) -> str:
        """The message for a prompt that leaves no room for a token.

        Args:
            what: the prompt's words, such as "a prompt".
            prompt: its tokens.
        """
        return f"{self._room(what, prompt)} nothing can be generated; {self.remedy}."

    def _room(self, what: str, prompt: int) -> str:
        """The beginning of a message: the tokens of a prompt and of the context."""
        return f"{what} has {prompt} tokens, and the context {self.tokens} with the completion, so"

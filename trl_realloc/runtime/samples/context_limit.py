"""`ContextLimit`: shortens the response to a prompt that leaves too little room in the context."""

from __future__ import annotations

from transformers.utils import logging

from ...engines.base import EngineError


logger = logging.get_logger(__name__)


class ContextLimit:
    """The context length of a run's engines.

    Args:
        tokens: maximum number of tokens of a prompt and its response together.
        remedy: advice on prompts that are too long, for messages.
        remedy_of_shortened: advice on prompts that leave room for a shorter response; by default `remedy`.
    """

    def __init__(self, tokens: int, remedy: str, remedy_of_shortened: str = "") -> None:
        self.tokens, self.remedy, self.remedy_of_shortened = tokens, remedy, remedy_of_shortened or remedy
        self._has_warned = False

    def response(self, prompt: int, most: int) -> int | None:
        """Maximum number of tokens of the response to a prompt; `None` if the context has room for `most`. Logs the
        first response that is shortened.

        Args:
            prompt: number of tokens of the prompt.
            most: requested maximum of a response.

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
            what: the message's word for the prompt, such as "a prompt".
            prompt: number of tokens of the prompt.
        """
        return f"{self._room(what, prompt)} nothing can be generated; {self.remedy}."

    def _room(self, what: str, prompt: int) -> str:
        return f"{what} has {prompt} tokens, and the context {self.tokens} with the completion, so"

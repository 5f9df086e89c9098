"""The greedy answer to a prompt whose KV is in the blocks, word by word, and where it ends."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvflow.nodes.simulated.language import END, answer_length, token_id, word
from kvflow.nodes.simulated.run import Run
from kvflow.nodes.simulated.settings import Settings

_NEW_LINE = token_id("\n")
"""Behind it, as behind the marker that opens an answer, no word has a space before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    text: str
    token: int
    finish: str | None = None
    stop_reason: int | str | None = None


class Answer:
    def __init__(self, run: Run, settings: Settings) -> None:
        self._run = run
        self._job = run.job
        self._settings = settings
        self._text = ""
        self._sent = 0

    def pieces(self) -> Iterator[Piece]:
        """One a token; the last has `finish`. Each is computed when it is asked for."""
        state = self._run.read_prompt()
        length = answer_length(state, self._settings.min_answer, self._settings.max_answer)
        for i in range(self._job.max_tokens):
            if i:
                state = self._run.read_last(state)
            piece = self._end() if self._ends(i, length) else self._word(word(state), i)
            yield piece
            if piece.finish:
                return

    def _ends(self, i: int, length: int) -> bool:
        return i >= max(length, self._job.min_tokens) and not self._job.ignore_eos

    def _end(self) -> Piece:
        token = token_id(END)
        self._run.append(token)
        return Piece(text=self._flush(), token=token, finish="stop")

    def _word(self, text: str, i: int) -> Piece:
        text = text if self._run.tokens[-1] == _NEW_LINE else f" {text}"
        token = token_id(text)
        self._run.append(token)
        self._text += text
        if i + 1 > self._job.min_tokens:
            if (stop := self._stop_string()) is not None:
                self._text = self._text[: self._text.index(stop)]
                return Piece(text=self._flush(), token=token, finish="stop", stop_reason=stop)
            if token in self._job.stop_token_ids:
                return Piece(text=self._flush(), token=token, finish="stop", stop_reason=token)
        if i + 1 == self._job.max_tokens:
            return Piece(text=self._flush(), token=token, finish="length")
        return Piece(text=self._flush(self._held_back()), token=token)

    def _stop_string(self) -> str | None:
        return next((s for s in self._job.stop if s in self._text), None)

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        return max((len(s) - 1 for s in self._job.stop), default=0)

    def _flush(self, keep: int = 0) -> str:
        end = max(self._sent, len(self._text) - keep)
        out, self._sent = self._text[self._sent : end], end
        return out

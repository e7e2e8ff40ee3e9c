"""Text of rollouts for people: their tokens decoded, else the text that was pushed with them, else token ids.

Decoding takes the ``tokenizer.json`` of a model's directory and the `tokenizers` package, which comes with
transformers. Nothing is fetched, and no code of the directory runs. Texts are as a worker wrote them: whoever shows one
makes it harmless (:func:`rlbuffer.state.text.printable`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rlbuffer.client.spoken import Said, Spoken, marks_in, spoken
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import installed_by
from rlbuffer.records.rollout import Rollout

TOKENIZER_FILE = "tokenizer.json"
HALF = "\ufffd"
"""Stands in a decoded text for bytes that are no whole character."""
MOST_TOKENS_OF_A_CHARACTER = 6
CONTINUED = "…"
"""Piece of a token whose bytes are shown with those of the token before."""
META_SPACE = "\u2581"
"""Begins a token of SentencePiece that stands behind a blank; decoding that token alone leaves the blank out."""


class HasTokens(Protocol):
    """A rollout, or the part of one that is needed for its text."""

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Token ids, [T]."""


class Turned(NamedTuple):
    """A turn in a rollout. Places are those of tokens."""

    role: str
    text: str
    opens: int
    """The token that opens the turn."""
    start: int
    end: int


class Texts:
    """Decodes with the tokenizer of a directory, which is loaded when the first text is asked for.

    Example:
        >>> from rlbuffer.testing import make_group
        >>> rollout = make_group(lengths=[8]).rollouts[0]
        >>> texts = Texts()
        >>> texts.whole(rollout), texts.pieces(rollout, 0, 2) == [str(t) for t in rollout.tokens[:2]]
        (None, True)
        >>> texts.origin(rollout)
        'token ids: no text was pushed'
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = None if directory is None else Path(directory).expanduser()
        self._tokenizer: Any = None
        self._lacks = ""
        """Reason why nothing can be decoded; "" when there is none, or no directory."""
        self._cache: dict[int, str] = {}
        self._special: frozenset[int] = frozenset()
        """Ids of the tokenizer's special tokens."""

    @property
    def lacks(self) -> str:
        """The reason why the directory's tokenizer cannot be used; "" when it can, or no directory was given."""
        self._load()
        return self._lacks

    def _load(self) -> Any:
        """The tokenizer; None where there is none."""
        if self._tokenizer is None and not self._lacks and self._directory is not None:
            file = self._directory / TOKENIZER_FILE
            try:
                from tokenizers import Tokenizer

                self._tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else None
                self._lacks = "" if self._tokenizer else f"{self._directory} has no {TOKENIZER_FILE}"
                added = self._tokenizer.get_added_tokens_decoder() if self._tokenizer else {}
                self._special = frozenset(number for number, token in added.items() if token.special)
            except ImportError:
                self._lacks = f"decoding needs the tokenizers package ({installed_by('train')})"
            except Exception as error:  # the package raises nothing more special for a file that it cannot read
                self._lacks = f"{file} cannot be loaded: {error}"
        return self._tokenizer

    # -- a rollout's text ------------------------------------------------------------------------------------------
    def decoded(self, rollout: HasTokens) -> str | None:
        """All tokens as text; None without a tokenizer."""
        return self._decode(rollout.tokens.tolist())

    def whole(self, rollout: Rollout) -> str | None:
        """The tokens decoded, else the text that was pushed, else None."""
        text = self.decoded(rollout)
        return rollout.text if text is None else text

    def part(self, rollout: Rollout, first: int, end: int) -> str | None:
        """The text of tokens [first, end); None where it cannot be laid to tokens."""
        text = self._decode(rollout.tokens[first:end].tolist())
        if text is None and rollout.text is not None and has_characters(rollout):
            return rollout.text[first:end]
        return text

    def pieces(self, rollout: Rollout, first: int, end: int) -> list[str]:
        """Each of the tokens [first, end) as text: decoded, else its character of the pushed text, else its id."""
        tokens = rollout.tokens[first:end].tolist()
        if self._load() is not None:
            return self._pieces(tokens)
        if rollout.text is not None and has_characters(rollout):
            return list(rollout.text[first:end])
        return [str(token) for token in tokens]

    def has_pieces(self, rollout: Rollout) -> bool:
        """True where every token has a text of its own, not only its id."""
        return self._load() is not None or has_characters(rollout)

    def origin(self, rollout: Rollout) -> str:
        """Says where the text comes from, or why there is none."""
        if self._load() is not None:
            return f"tokens decoded with {self._directory}"
        why = f"; {self._lacks}" if self._lacks else ""
        return f"text as it was pushed{why}" if rollout.text is not None else f"token ids: no text was pushed{why}"

    # -- who said what -----------------------------------------------------------------------------------------------
    def turns(self, rollout: Rollout, first: int, end: int) -> list[Turned]:
        """Who said what in tokens [first, end), without what a chat template writes around it: by the tokenizer's
        special tokens, and where these name no role by marks as templates write them. [] where tokens have no text."""
        if not self.has_pieces(rollout):
            return []
        pieces = [piece if piece != CONTINUED else "" for piece in self.pieces(rollout, first, end)]
        edges = [0, *accumulate(map(len, pieces))]
        text, ids = "".join(pieces), rollout.tokens[first:end].tolist()
        marks = [(edges[at], edges[at + 1]) for at, token in enumerate(ids) if token in self._special]
        found = spoken(text, marks)
        if not _names_roles(found) and _names_roles(written := spoken(text, marks_in(text))):
            found = written
        if not _names_roles(found) and rollout.turns:
            shown = ["" if token in self._special else piece for token, piece in zip(ids, pieces, strict=True)]
            return list(_as_pushed(rollout, first, shown))

        def token_at(place: int) -> int:
            return first + bisect_right(edges, place, hi=len(ids)) - 1

        return [
            Turned(turn.role, turn.text, token_at(turn.opens), token_at(turn.start), token_at(turn.end - 1) + 1)
            for turn in found
        ]

    def frame(self, rollout: Rollout) -> NDArray[np.bool_]:
        """[T]; True for tokens that a chat template writes around what is said, and for special tokens."""
        is_frame = np.isin(rollout.tokens, list(self._special))
        turns = self.turns(rollout, 0, rollout.length)
        if _names_roles(turns):
            is_said = np.zeros(rollout.length, np.bool_)
            for turn in turns:
                is_said[turn.start : turn.end] = True
            is_frame |= ~is_said
        return is_frame

    def prompt(self, rollout: Rollout) -> list[Said]:
        """Who said what before anything was sampled; [] where no text says it."""
        if self.has_pieces(rollout):
            return [Said(turn.role, turn.text) for turn in self.turns(rollout, 0, rollout.prompt_tokens)]
        return _pushed(rollout)[0]

    def answer(self, rollout: Rollout, most: int | None = None) -> list[Said]:
        """Who said what from the first sampled token on, or in the first `most` tokens from there."""
        if self.has_pieces(rollout):
            first = rollout.prompt_tokens
            end = rollout.length if most is None else min(rollout.length, first + most)
            return [Said(turn.role, turn.text) for turn in self.turns(rollout, first, end)]
        return _pushed(rollout)[1]

    # -- decoding --------------------------------------------------------------------------------------------------
    def _decode(self, tokens: Sequence[int]) -> str | None:
        tokenizer = self._load()
        return None if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=False))

    def _piece(self, token: int) -> str:
        piece = self._cache.get(token)
        if piece is None:
            name = self._tokenizer.id_to_token(token)
            piece = f"<{token}>" if name is None else str(self._decode([token]))
            if name is not None and name.startswith(META_SPACE) and not piece.startswith(" "):
                piece = f" {piece}"
            self._cache[token] = piece
        return piece

    def _pieces(self, tokens: Sequence[int]) -> list[str]:
        """A piece per token; where several make one character, the first has it and :data:`CONTINUED` follows."""
        out: list[str] = []
        at = 0
        while at < len(tokens):
            piece, count = self._piece(tokens[at]), 1
            while HALF in piece and count < MOST_TOKENS_OF_A_CHARACTER and at + count < len(tokens):
                count += 1
                piece = str(self._decode(tokens[at : at + count]))
            if HALF in piece:
                piece, count = self._piece(tokens[at]), 1
            out += [piece, *[CONTINUED] * (count - 1)]
            at += count
        return out


def _pushed(rollout: Rollout) -> tuple[list[Said], list[Said]]:
    """The prompt and what came after it, by the text that was pushed. Where no mark in it names a role, nothing says
    where the prompt ends: all of it came after, and what looks like a mark is text."""
    text = rollout.text or ""
    found = spoken(text, marks_in(text))
    turns = [Said(turn.role, turn.text) for turn in (found if _names_roles(found) else spoken(text, []))]
    after = max(1, len(rollout.turns) - 1)
    return (turns[:-after], turns[-after:]) if len(turns) > after else ([], turns)


def _names_roles(turns: Iterable[Said | Spoken | Turned]) -> bool:
    return any(turn.role for turn in turns)


def _as_pushed(rollout: Rollout, first: int, pieces: Sequence[str]) -> Iterator[Turned]:
    """The turns that were pushed, as far as they lie in these pieces of the tokens from `first` on."""
    for turn in rollout.turns:
        start, end = max(turn.start, first), min(turn.end, first + len(pieces))
        if start < end:
            yield Turned(turn.role, "".join(pieces[start - first : end - first]).strip(), start, start, end)


def has_characters(rollout: Rollout) -> bool:
    """True where the pushed text has one character for each token."""
    return rollout.text is not None and len(rollout.text) == rollout.length


def tokenizer_directory(settings: RunSettings) -> Path | None:
    """The directory of the run's model, else that which a worker's env names as its tokenizer; None for neither."""
    if settings.model.path:
        return Path(settings.model.path).expanduser()
    named = (options.env_options.get("tokenizer") for options in settings.worker.values())
    return next((Path(name).expanduser() for name in named if isinstance(name, str) and name), None)

"""Standard output of a verb: text and tables for a person, or exactly one JSON document."""

from __future__ import annotations

import io
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from types import TracebackType
from typing import IO, Any, final

from podium.records.recorder import to_json


@final
class Output:
    """Standard output while a verb runs. `say` prints for people, or with `json` only `document` for programs."""

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self._written = False
        self._stack = ExitStack()
        self._documents: IO[str] = sys.stdout

    def __enter__(self) -> Output:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal without ✓ prints a question mark, not a traceback
        if self.json:
            self._documents = self._stack.enter_context(documents_only())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An unforeseen error keeps its traceback, but a reader of JSON still gets a document.
        if isinstance(error, Exception) and not self._written:
            self.document({"error": {"type": type(error).__name__, "message": str(error)}})
        self._stack.close()

    def document(self, value: Mapping[str, Any]) -> None:
        """Print the verb's one JSON document; does nothing without `--json`."""
        if not self.json:
            return
        assert not self._written, "a verb prints one document"
        self._written = True
        print(to_json(value), file=self._documents, flush=True)

    def say(self, *parts: Any) -> None:
        """Print text or anything rich can draw, for a person."""
        if self.json:
            return
        from podium.cli.display import console

        screen = console(sys.stdout)
        for part in parts:
            # Text is not wrapped: a path or a command that is split over two lines cannot be copied.
            screen.print(part, soft_wrap=isinstance(part, str))
        sys.stdout.flush()  # a pipe would buffer all lines until the end

    def note(self, *texts: str) -> None:
        """Print notes before anything runs; each text once, on the error stream."""
        for text in dict.fromkeys(texts):
            print(f"note: {text}", file=sys.stderr, flush=True)


def wrapped(text: str) -> str:
    """Prose in lines of at most 80 columns; names with hyphens and long paths stay whole."""
    lines = text.split("\n")
    return "\n".join(textwrap.fill(line, 80, break_long_words=False, break_on_hyphens=False) for line in lines)


@contextmanager
def documents_only() -> Iterator[IO[str]]:
    """Standard output for the caller alone; all other prints meanwhile go to the error stream.

    Redirects the file descriptor where there is one, since child processes and libraries in C print to it, too.
    """
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # a stream in memory
        kept = sys.stdout
        with redirect_stdout(sys.stderr):
            yield kept
        return
    sys.stdout.flush()
    documents = os.fdopen(os.dup(number), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), number)
    try:
        with redirect_stdout(sys.stderr):
            yield documents
    finally:
        os.dup2(documents.fileno(), number)
        documents.close()

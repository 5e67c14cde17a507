"""The program around the verbs: where errors become messages and exit codes.

0 is success, 1 a failure, 2 a wrong request, 130 an interruption. Of a `PodiumError` only the message is printed;
PODIUM_DEBUG=1 shows the traceback as well. An error that Podium does not raise on purpose keeps its traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from podium.cli.output import Output
from podium.errors import PodiumError, UnknownName


class Program(click.Group):
    """A group of verbs in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and args[0] not in self.commands and not ctx.resilient_parsing:
            raise UnknownName("verb", args[0], self.commands)
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the verb that `args` names and exit with its code."""
        words = list(sys.argv[1:] if args is None else args)
        with Output(json=_wants_json(words)) as out:
            code = self._run(words, prog_name, complete_var, out)
        sys.exit(code)

    def _run(self, words: list[str], prog_name: str | None, complete_var: str | None, out: Output) -> int:
        try:
            return super().main(words, prog_name, complete_var, standalone_mode=False, obj=out) or 0
        except click.ClickException as error:
            where = _usage(error.ctx) if isinstance(error, click.UsageError) and error.ctx else ""
            return _fail(out, error, "UsageError", error.format_message(), error.exit_code, where)
        except PodiumError as error:
            return _fail(out, error, type(error).__name__, str(error), error.exit_code)
        except OSError as error:
            return _fail(out, error, type(error).__name__, str(error), 1)
        except click.Abort as error:  # click's name for a KeyboardInterrupt
            return _fail(out, error, "Interrupted", "stopped at once", 130)


def _wants_json(words: Sequence[str]) -> bool:
    """Checked before the words are parsed, because a parse error must be printed as JSON, too."""
    ours = words[: words.index("--")] if "--" in words else words
    return "--json" in ours and not {"-h", "--help"} & set(ours)


def _usage(ctx: click.Context) -> str:
    return f"{ctx.get_usage()}\nFor more: {ctx.command_path} --help"


def _fail(out: Output, error: BaseException, kind: str, message: str, code: int, where: str = "") -> int:
    if os.environ.get("PODIUM_DEBUG"):
        traceback.print_exception(error)
    if where:
        print(where, file=sys.stderr)
    out.document({"error": {"type": kind, "message": message}})
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code

"""The one error that users are meant to see, and the exit codes of the command line.

Knows nothing of the rest of the package. Every room raises `TrtspecError`; `trtspec.cli` prints it as one line
and exits with its code.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_PARITY_FAILED = 3
EXIT_INTERRUPTED = 130


class TrtspecError(Exception):
    """Something the user can mend, said in one line: where, what is wrong, what was expected, what to do.

    Args:
        problem: what is wrong, in one clause.
        where: file, file:line, key or model that is at fault.
        expected: what a right value looks like.
        fix: what to write or run instead.
    """

    exit_code = EXIT_ERROR

    def __init__(
        self,
        problem: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.problem = problem
        self.where = where
        self.expected = expected
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        if self.expected:
            text += f"; expected {self.expected}"
        if self.fix:
            text += f"; {self.fix}"
        return text

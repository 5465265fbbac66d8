"""A parity report in the forms that people and machines read: text, JSON, JUnit XML, an HTML page with plots, and a
folder with all of them and a script for each fault.

A new form is one file here and one row in `FORMS`. Knows records, not how they came about.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from trtspec.build.output import write_atomic
from trtspec.errors import TrtspecError
from trtspec.parity.report.junit import to_junit
from trtspec.parity.report.page import to_html
from trtspec.parity.report.text import to_json
from trtspec.parity.result import Finding, Report, Verdict
from trtspec.report.plots import require_matplotlib

FORMS: dict[str, Callable[[Report], str]] = {
    ".json": lambda report: to_json(report, indent=2) + "\n",
    ".xml": to_junit,
    ".html": to_html,
}
REPRODUCE = "reproduce"


def check_path(path: Path) -> None:
    """Refuse a place for a report before anything is run.

    Raises:
        TrtspecError: its directory does not exist, no form has that suffix, or matplotlib, which draws the plots of
            the page, is not there.
    """
    if path.suffix and not path.is_dir() and path.suffix not in FORMS:
        raise TrtspecError(
            f"a report cannot be written as {path.suffix}", where=str(path), expected=f"{', '.join(FORMS)}, or a folder"
        )
    if not path.absolute().parent.is_dir():
        raise TrtspecError(f"{path.absolute().parent} is no directory", where=str(path))
    if is_folder(path) or path.suffix == ".html":
        require_matplotlib("--report")
    if path.suffix not in FORMS and path.exists() and not path.is_dir():
        raise TrtspecError("is there, and no folder", where=str(path), fix="give another name")


def is_folder(path: Path) -> bool:
    """Whether a report at `path` is a folder with all forms."""
    return path.suffix not in FORMS or path.is_dir()


def write(report: Report, path: Path) -> None:
    """Write a report in the form that the suffix of `path` names; into a folder, in all forms.

    Raises:
        TrtspecError: matplotlib, which draws the page's plots, is not there.
    """
    if not is_folder(path):
        write_atomic(path, FORMS[path.suffix](report))
        return
    path.mkdir(exist_ok=True)
    for suffix, form in FORMS.items():
        write_atomic(path / f"report{suffix}", form(report))
    _write_scripts(report, path / REPRODUCE)


def _write_scripts(report: Report, folder: Path) -> None:
    """A script for each fault; those of an earlier report are removed."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.sh"):
        old.unlink()
    faults = [(check, finding) for check in report.checks for finding in check.findings]
    faults = [(check, finding) for check, finding in faults if finding.verdict == Verdict.FAULT]
    for number, (check, finding) in enumerate(faults, 1):
        words = [check.subject.split()[0], check.name, finding.part, finding.prompt and f"prompt-{finding.prompt}"]
        name = re.sub(r"[^a-z0-9-]+", "-", "-".join(str(word) for word in words if word).lower())
        script = folder / f"{number:02}-{name}.sh"
        write_atomic(script, _script(report, check.subject, check.name, finding))
        script.chmod(0o755)


def _script(report: Report, subject: str, check: str, finding: Finding) -> str:
    where = "" if finding.prompt is None else f", prompt {finding.prompt}, token {finding.position}"
    problem = " ".join(finding.problem.split())
    return (
        f"#!/bin/sh\n# {report.name}: {subject}, {check}{where}\n# {problem}\n"
        f"cd {shlex.quote(str(Path.cwd()))} || exit 1\nexec {finding.reproduce}\n"
    )

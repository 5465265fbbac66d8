"""JUnit XML: a test case for each check, or for each of its parts, as continuous integration shows them.

A tie passes. What is inconclusive or not applicable is skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree import ElementTree as ET

from trtspec.parity.report.text import finding_lines
from trtspec.parity.result import Check, Report, Verdict
from trtspec.report.page import printable


def to_junit(report: Report) -> str:
    """The whole report."""
    suites = ET.Element("testsuites", name=f"parity of {report.name}")
    for subject in dict.fromkeys(check.subject for check in report.checks):
        checks = [check for check in report.checks if check.subject == subject]
        suite = ET.SubElement(suites, "testsuite", name=f"{report.name}.{printable(subject)}")
        cases = [case for check in checks for case in _cases(report, check)]
        suite.extend(cases)
        _count(suite, cases, checks)
    _count(suites, list(suites.iter("testcase")), report.checks)
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _count(element: ET.Element, cases: Sequence[ET.Element], checks: Sequence[Check]) -> None:
    """Numbers of cases by outcome, and seconds."""
    element.set("tests", str(len(cases)))
    element.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    element.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))
    element.set("errors", "0")
    element.set("time", f"{sum(check.seconds for check in checks):.3f}")


def _cases(report: Report, check: Check) -> Iterator[ET.Element]:
    """One case for each part; for a check without parts, one."""
    whole: list[tuple[str, str | None, Verdict, str]] = [(check.name, None, check.verdict, check.evidence)]
    claims = [(f"{check.name}:{part.name}", part.name, part.verdict, part.evidence) for part in check.parts]
    for name, part, verdict, evidence in claims or whole:
        seconds = check.seconds / max(1, len(claims))
        case = ET.Element("testcase", classname=f"parity.{report.name}.{printable(check.subject)}", name=name)
        case.set("time", f"{seconds:.3f}")
        lines = finding_lines(check, part)
        if verdict == Verdict.FAULT:
            failure = ET.SubElement(case, "failure", message=printable(lines[0] if lines else evidence), type="fault")
            failure.text = printable("\n".join([evidence, *lines]))
        elif verdict in (Verdict.INCONCLUSIVE, Verdict.NOT_APPLICABLE):
            ET.SubElement(case, "skipped", message=printable(f"{verdict.value}: {evidence}"))
        else:
            ET.SubElement(case, "system-out").text = printable("\n".join([evidence, *lines]))
        yield case

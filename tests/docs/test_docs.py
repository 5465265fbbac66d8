"""The handbook holds: its links lead somewhere, its commands and specs are real, and the site can be built."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest
import yaml

from trtspec.cli import main
from trtspec.errors import TrtspecError
from trtspec.spec.load import load_spec
from trtspec.spec.schema import Spec

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md"))
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SEPARATORS = {"&&", "||", "|", ";"}


def hook(name: str) -> ModuleType:
    """A module of docs/, which is no package."""
    described = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert described is not None and described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


REFERENCE = hook("spec_reference")
PLOTS = hook("plots")


def text_of(page: str) -> str:
    return REFERENCE.reference() if page in REFERENCE.PAGES else (DOCS / page).read_text()


def blocks(page: str, *languages: str) -> Iterator[str]:
    """The code blocks of a page in one of these languages, without their indentation."""
    for indent, language, body in _FENCE.findall(text_of(page)):
        if language in languages:
            yield "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))


def commands_in(shell: str) -> Iterator[list[str]]:
    """The arguments of each `trtspec ...` in shell text."""
    for line in shell.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in _SEPARATORS:
                if words[:1] == ["trtspec"]:
                    yield words[1:]
                words = []
            else:
                words.append(word)


def commands(page: str) -> Iterator[list[str]]:
    """Those of code blocks, and those in running text."""
    for block in blocks(page, "sh"):
        yield from commands_in(block)
    for inline in re.findall(r"`(trtspec [^`\n]+)`", _FENCE.sub("", text_of(page))):
        yield from commands_in(inline)


def check_command(args: list[str]) -> None:
    """Parse what a user would type, without running it: commands, options, choices and numbers.

    Raises:
        click.UsageError: no such command or option, a value that it does not take, too many arguments.
    """
    command: click.Command = main
    context = click.Context(main, info_name="trtspec")
    while isinstance(command, click.Group):
        _, rest, _ = command.make_parser(context).parse_args(args)
        if not rest:
            return  # a group by itself, or --help
        _, found, args = command.resolve_command(context, rest)
        assert found is not None
        command, context = found, click.Context(found, parent=context, info_name=found.name)
    values, rest, _ = command.make_parser(context).parse_args(args)
    if rest:
        raise click.UsageError(f"got more arguments than it takes: {rest}", context)
    for parameter in command.params:
        if isinstance(parameter.type, (click.Path, click.File)):
            continue  # files of the reader
        given = values.get(parameter.name)
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, (str, bool)):
                parameter.type.convert(value, parameter, context)


def anchors(page: str) -> set[str]:
    """What can be linked to on a page, by the rule of Python-Markdown."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def problems_of_links(page: str) -> Iterator[str]:
    known = {*PAGES, *REFERENCE.PAGES, *PLOTS.PICTURES}
    for target in _LINK.findall(_FENCE.sub("", text_of(page))):
        file, _, anchor = target.partition("#")
        if file and file not in known:
            yield f"{target}: no such page"
        elif anchor and anchor not in anchors(file or page):
            yield f"{target}: no such heading"


@pytest.mark.parametrize("page", [*PAGES, *REFERENCE.PAGES])
def test_links_lead_to_pages_and_headings(page):
    assert list(problems_of_links(page)) == []


def test_every_page_is_in_the_navigation():
    def named(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in named(part)]

    assert sorted(named(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])) == sorted([*PAGES, *REFERENCE.PAGES])


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_real(page):
    for args in commands(page):
        try:
            check_command(args)
        except click.UsageError as error:
            pytest.fail(f"{page}: trtspec {shlex.join(args)}: {error.format_message()}")


@pytest.mark.parametrize(
    "line",
    [
        "trtspec biuld my.yaml",
        "trtspec build my.yaml --jobs 3",
        "trtspec serve my.yaml --http-port much",
        "trtspec parity my.yaml --subject nobody",
        "trtspec plan my.yaml --batch some",
        "trtspec stop my.yaml your.yaml",
        "make x && trtspec config vaildate my.yaml  # a comment",
    ],
)
def test_commands_that_are_not_real_are_seen(line):
    (args,) = commands_in(line)
    with pytest.raises(click.UsageError):
        check_command(args)


def test_commands_are_found_where_they_stand():
    shell = "cd a && trtspec build \\\n  --dry-run my.yaml | less\n# trtspec none\ntrtspec generate 'a; b'  # words\n"
    assert list(commands_in(shell)) == [["build", "--dry-run", "my.yaml"], ["generate", "a; b"]]
    assert sum(len(list(commands(page))) for page in PAGES) > 60


@pytest.mark.parametrize("page", PAGES)
def test_specs_are_valid(page, tmp_path):
    for number, block in enumerate(blocks(page, "yaml")):
        if block.startswith("version:"):
            path = tmp_path / f"{number}.yaml"
            path.write_text(block)
            try:
                load_spec(path)
            except TrtspecError as error:
                pytest.fail(f"{page}: {error}")


@pytest.mark.parametrize("page", PAGES)
def test_files_of_the_project_are_there(page):
    named = set(re.findall(r"\b(?:configs|docker|benchmarks|tests|trtspec)/[\w./-]*[\w/]", text_of(page)))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_keys_of_the_spec_are_there(page):
    """`serving.host` and its like in running text are keys of the schema."""
    sections = "|".join(name for name in Spec.model_fields if name not in ("version", "name"))
    for key in re.findall(rf"`((?:{sections})(?:\.\w+)+)", text_of(page)):
        assert is_key(key), f"{page}: {key}"


def is_key(dotted: str) -> bool:
    schema = Spec.model_json_schema()
    section = schema
    for part in dotted.split("."):
        if part not in section.get("properties", {}):
            return False
        value = section["properties"][part]
        options = [value, *value.get("anyOf", [])]
        section = next((schema["$defs"][o["$ref"].rpartition("/")[2]] for o in options if "$ref" in o), {})
    return True


def test_keys_that_are_not_there_are_seen():
    assert is_key("serving.kv_cache_bytes.target")
    assert not is_key("serving.hots") and not is_key("serving.host.name")


@pytest.mark.parametrize("page", PAGES)
def test_metrics_and_alerts_are_there(page):
    alerts = (ROOT / "docker/prometheus/alerts.yml").read_text()
    metrics = (ROOT / "trtspec/triton/models/metrics.py").read_text()  # imports what only Triton has
    assert [name for name in re.findall(r"\btrtspec_[a-z_]+[a-z]\b", text_of(page)) if f'"{name}"' not in metrics] == []
    assert [name for name in re.findall(r"\bTrtspec[A-Z]\w+", text_of(page)) if f"alert: {name}\n" not in alerts] == []


def test_the_reference_has_every_key_with_its_meaning():
    page = REFERENCE.reference()
    schema = Spec.model_json_schema()
    for section in [schema, *schema["$defs"].values()]:
        for key in section.get("properties", {}):
            row = next(line for line in page.splitlines() if line.startswith(f"| `{key}` |"))
            assert row.count("|") - row.count("\\|") == 5 and row.split("|")[-2].strip(), row
    assert "whole number (≥ 1, ≤ 65535)" in page and "$ref" not in page


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
@pytest.mark.parametrize("name", PLOTS.PICTURES)
def test_pictures_are_small_and_fetch_nothing(name):
    pytest.importorskip("matplotlib")
    picture = PLOTS.picture(name)
    assert picture.startswith("<svg") and len(picture) < 60_000
    assert picture == PLOTS.picture(name)
    assert not re.search(r"(href|src)=\"http|url\(http", picture)


def test_pictures_are_shown():
    shown = {target for page in PAGES for target in _LINK.findall(text_of(page)) if target.startswith("img/")}
    assert shown == set(PLOTS.PICTURES)


def test_the_site_can_be_built_and_fetches_nothing(tmp_path):
    pytest.importorskip("material")
    pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").glob("*.html"))
    assert {page.name for page in pages} >= {Path(page).with_suffix(".html").name for page in PAGES}
    assert [page.name for page in pages if re.search(r"\|---|```", page.read_text())] == []  # read as plain text
    fetched = re.compile(r"<(?:script|img|iframe)[^>]+src=\"?https?:|<link[^>]+rel=\"?stylesheet[^>]+href=\"?https?:")
    assert [page.name for page in pages if fetched.search(page.read_text())] == []

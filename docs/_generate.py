"""Write the parts of pages that the code knows: a hook of MkDocs.

``<!-- commands -->`` becomes the arguments and options of every command, ``<!-- options NAME -->`` the options for
``--set`` of a preset or command, ``<!-- api -->`` an entry for each public name.
"""

from __future__ import annotations

import re
from typing import Any

import typer

import pyprune
from pyprune.cli.app import app
from pyprune.cli.options import list_options, options_of
from pyprune.runtime.report import Table, markdown_table


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the comments of a page."""
    markdown = markdown.replace("<!-- commands -->", "\n\n".join(_commands()))
    markdown = markdown.replace("<!-- api -->", "\n\n".join(map(_entry, sorted(pyprune._PUBLIC))))
    return re.sub(r"<!-- options (\w+) -->", lambda match: _options(match.group(1)), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Leave out the roles of names in docstrings, such as ``:func:``."""
    return re.sub(r":(?:py:)?(?:attr|class|data|exc|func|meth|mod):(<code>)~?", r"\1", html)


def _commands() -> list[str]:
    """Return a section for each command."""
    group: Any = typer.main.get_command(app)
    return [_section(name, command) for name, command in group.commands.items()]


def _section(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    needed = [f"{p.opts[-1]} {_value(p)}" for p in options if p.required]
    usage = " ".join(["pyprune", name, *(p.metavar or p.name.upper() for p in arguments), *needed, "[OPTIONS]"])
    text = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    text = re.sub(r"Example: (.+)", r"```sh\n\1\n```", text)
    rows = [(f"`{p.metavar or p.name.upper()}`", "", _cell(p)) for p in arguments]
    rows += [(f"`{' / '.join([*p.opts, *p.secondary_opts])}`", _value(p), _cell(p)) for p in options]
    table = markdown_table(Table("", ("option", "value", "meaning"), tuple(rows)))
    return f"## {name}\n\n{text}\n\n```text\n{usage}\n```\n\n{table}"


def _entry(name: str) -> str:
    """Return what mkdocstrings replaces by the docstring of a public name."""
    place = pyprune._PUBLIC[name].replace(":", ".")
    return f"::: {place}\n    options:\n      heading: {name}\n      toc_label: {name}"


def _value(parameter: Any) -> str:
    """Return the kind of value; empty for a switch."""
    if parameter.is_flag:
        return ""
    return str(parameter.metavar or {int: "N", float: "NUMBER"}.get(type(parameter.default), "TEXT"))


def _cell(parameter: Any) -> str:
    """Return the help of a parameter, with its default where the text names none."""
    text = parameter.help or ""
    if parameter.required:
        return f"{text} Required."
    if parameter.default in (None, True, False, ()) or "efault" in text:
        return text
    return f"{text} Default: {parameter.default}."


def _options(name: str) -> str:
    listed = list_options(options_of(name)[0])
    rows = [(f"`{each.name}`", f"`{each.value}`", each.allowed, each.meaning) for each in listed]
    return markdown_table(Table("", ("option", "value", "may be", "meaning"), tuple(rows)))

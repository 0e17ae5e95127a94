# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation: their shell commands, paths, links and headings."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ('rmuscle', 'ros2', 'python', 'pip', 'colcon', 'scripts/', 'bench/')  # first words of a command
SHELL = ('bash', 'sh', 'console')
ENDS = {'&&', '||', '|', ';', '&', '>', '<', '>>'}
PATH = re.compile(r'(?<![\w/.<>~-])(?:scripts|bench|config|launch|test|docs|rmuscle_core|rmuscle_ros|kernels)/'
                  r'[\w][\w./-]*')


@dataclass(frozen=True)
class Command:
    """words: of one command, without its comment. whole: all of it is there; text in a sentence may be a part."""

    words: tuple[str, ...]
    whole: bool
    line: str


@dataclass(frozen=True)
class Page:
    """A page of Markdown. file: where its relative links start from."""

    file: Path
    text: str

    @cached_property
    def blocks(self) -> list[tuple[str, str]]:
        """(language, text) of fenced and indented blocks; indented ones have no language."""
        fenced = re.findall(r'^```(\w*)\n(.*?)^```$', self.text, re.M | re.S)
        rest = re.sub(r'^```.*?^```$', '', self.text, flags=re.M | re.S)
        indented = re.findall(r'(?:\A|\n)\n((?:    .*\n|\n(?=    ))+)', rest)
        return fenced + [('', block) for block in indented]

    @cached_property
    def prose(self) -> str:
        """The page without its blocks."""
        rest = re.sub(r'^```.*?^```$', '', self.text, flags=re.M | re.S)
        return re.sub(r'^    .*$', '', rest, flags=re.M)

    @property
    def commands(self) -> Iterator[Command]:
        """Those of the shell blocks, whole, and those in the running text, of which only a part may be given."""
        for language, block in self.blocks:
            if language in ('', *SHELL):
                for line in block.replace('\\\n', ' ').splitlines():
                    yield from _commands(line.strip().removeprefix('$ '), whole=True)
        for span in re.findall(r'`([^`\n]+)`', self.prose):
            yield from _commands(span, whole=False)

    @property
    def paths(self) -> set[str]:
        """Paths below the repository's root that the page names in code."""
        code = [block for _, block in self.blocks] + re.findall(r'`([^`\n]+)`', self.prose)
        return {match.rstrip('.') for text in code for match in PATH.findall(text)}

    @cached_property
    def links(self) -> list[str]:
        """Targets of links and images that stay in the repository."""
        found = re.findall(r'\]\(([^)\s]+)\)', re.sub(r'`[^`\n]*`', '', self.prose))
        return [target for target in found if not re.match(r'[a-z]+:', target)]

    @cached_property
    def anchors(self) -> set[str]:
        """What a link may point at, as GitHub names headings."""
        names, seen = set(), Counter()
        for heading in re.findall(r'^#+ (.+)$', re.sub(r'^```.*?^```$', '', self.text, flags=re.M | re.S), re.M):
            slug = re.sub(r'[^\w\- ]', '', re.sub(r'\]\([^)]*\)', '', heading).lower()).strip().replace(' ', '-')
            names.add(f'{slug}-{seen[slug]}' if seen[slug] else slug)
            seen[slug] += 1
        return names


def pages() -> list[Page]:
    """README, CONTRIBUTING and everything below docs."""
    files = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').rglob('*.md'))]
    return [Page(file, file.read_text()) for file in files]


def _commands(line: str, whole: bool) -> Iterator[Command]:
    if not line.startswith(PROGRAMS) and not re.match(r'[A-Z_]+=\S+ ', line):
        return
    lexer = shlex.shlex(line, posix=True, punctuation_chars='();<>|&')
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*_words(lexer, line), ';']:
        if word in ENDS:
            yield from _command(words, whole, line)
            words = []
        else:
            words.append(word)


def _words(lexer: shlex.shlex, line: str) -> list[str]:
    try:
        return list(lexer)
    except ValueError as error:
        raise AssertionError(f'no shell can read: {line} ({error})') from error


def _command(words: list[str], whole: bool, line: str) -> Iterator[Command]:
    words = [word.strip('[]') if word.startswith('[') or word.endswith(']') else word for word in words]
    while words and (re.fullmatch(r'[A-Z_]+=.*', words[0]) or words[0] in ('scripts/run', 'sudo', 'time')):
        words = words[1:]
    if words and words[0].startswith(PROGRAMS):
        yield Command(tuple(words), whole and '...' not in words and '…' not in words, line)


def messages() -> str:
    """Every string of the source, one a line; what is filled in is "…"."""
    found = []
    for file in (*(ROOT / 'rmuscle_core').rglob('*.py'), *(ROOT / 'rmuscle_ros').rglob('*.py')):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(''.join(part.value if isinstance(part, ast.Constant) else '…' for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return '\n'.join(found)

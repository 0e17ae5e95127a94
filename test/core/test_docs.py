# SPDX-License-Identifier: Apache-2.0
"""What the documentation tells a user to type exists: commands, options, parameters, names, files, links."""

from __future__ import annotations

import argparse
import ast
import re

import pytest
from doc_commands import PARSERS, misfit
from doc_pages import ROOT, Page, messages, pages

from rmuscle_core.command_docs import ADDED, markdown, table_row

PAGES = pages()
EVERY_PAGE = pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.file.relative_to(ROOT)))


@EVERY_PAGE
def test_every_command_can_be_typed_as_it_is_written(page):
    wrong = {command.line: found for command in page.commands if (found := misfit(command))}
    assert not wrong


@EVERY_PAGE
def test_every_path_exists(page):
    assert not {path for path in page.paths if not (ROOT / path).exists()}


@EVERY_PAGE
def test_every_program_imports_what_there_is(page):
    for block in (text for language, text in page.blocks if language == 'python'):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith('rmuscle_'):
                source = (ROOT / node.module.replace('.', '/')).with_suffix('.py').read_text()
                defined = re.findall(r'^(?:class|def) (\w+)', source, re.M)
                assert not {name.name for name in node.names} - {*defined}


@EVERY_PAGE
def test_every_link_leads_somewhere(page):
    known = {p.file: p for p in PAGES}
    dead = []
    for link in page.links:
        path, _, anchor = link.partition('#')
        target = (page.file.parent / path).resolve() if path else page.file
        if not target.exists() or (anchor and anchor not in known[target].anchors):
            dead.append(link)
    assert not dead


def test_every_page_can_be_reached_from_the_readme():
    seen, todo = set(), [ROOT / 'README.md']
    known = {page.file: page for page in PAGES}
    while todo:
        page = known.get(todo.pop())
        if page and page.file not in seen:
            seen.add(page.file)
            todo += [(page.file.parent / link.partition('#')[0]).resolve() for link in page.links]
    assert seen == set(known)


def test_the_messages_that_troubleshooting_quotes_are_said():
    page = next(page for page in PAGES if page.file.name == 'troubleshooting.md')
    said = messages()
    quoted = [part.strip() for quote in re.findall(r'"([^"\n]+)"', page.prose) for part in quote.split('…')]
    assert quoted and not [part for part in quoted if part not in said]


def test_the_page_of_the_command_line_is_up_to_date():
    assert (ROOT / 'docs' / 'cli.md').read_text() == markdown(), \
        'run python -m rmuscle_core.command_docs > docs/cli.md'


def test_the_page_of_the_command_line_leaves_out_what_only_some_versions_of_argparse_add():
    action = argparse.BooleanOptionalAction(['--fast'], 'fast', default=False)
    action.help = 'quick' + ADDED
    assert table_row(action) == '| `--fast`, `--no-fast` |  | quick |'


@pytest.mark.parametrize(('name', 'parser'), PARSERS.items(), ids=PARSERS)
def test_every_option_is_explained(name, parser):
    assert not [action.dest for action in parser._actions if not action.help]


@pytest.mark.parametrize('line', [
    'rmuscle library biuld --checkpoint DIR --episodes BAG --out LIB', 'rmuscle library build --checkpoint DIR',
    'rmuscle bench --size huge', 'rmuscle replay BAG --checkpoint DIR --profile quick', 'rmuscle eval --rows denser',
    'rmuscle replay BAG --checkpoint DIR --token-ratio 1.5', 'scripts/run rmuscle dance',
    'ros2 param set /policy_node token_ration 0.4', 'ros2 launch rmuscle robot.launch.py',
    'ros2 launch rmuscle rmuscle.launch.py model:=DIR', 'ros2 service call /policy_node/begin std_srvs/srv/Trigger',
    'ros2 service call /policy_node/stop std_srvs/srv/SetBool', 'ros2 topic echo /policy_node/cache',
    'ros2 run rmuscle policy', 'ros2 run rmuscle policy_node --ros-args -p ratio:=0.4',
    'ros2 lifecycle set /policy_node start', 'ros2 bag record /policy_node/chunks', 'python bench/soak --hours 1',
    'A=1 rmuscle dance', 'rmuscle doctor && rmuscle dance'])
def test_a_command_that_cannot_be_typed_is_found(line):
    page = Page(ROOT / 'README.md', f'# Title\n\n    {line}   # what it does\n\nText.\n')
    assert [misfit(command) for command in page.commands][-1]


def test_blocks_links_anchors_and_paths_are_read():
    page = Page(ROOT / 'README.md', '# A `b` of C\n\n```bash\nrmuscle doctor \\\n    --json\n```\n\n## A b of C\n\n'
                'See [it](docs/x.md#y), `test/none.py`, `rmuscle tune`.\n\n    rmuscle library info LIB  # more\n')
    assert [command.words for command in page.commands] == [
        ('rmuscle', 'doctor', '--json'), ('rmuscle', 'library', 'info', 'LIB'), ('rmuscle', 'tune')]
    assert page.links == ['docs/x.md#y'] and page.paths == {'test/none.py'}
    assert page.anchors == {'a-b-of-c', 'a-b-of-c-1'}

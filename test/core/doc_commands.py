# SPDX-License-Identifier: Apache-2.0
"""Whether a command of the documentation would be accepted: asked of the parsers, and of the source of the nodes."""

from __future__ import annotations

import ast
import re

from doc_pages import ROOT, Command

from rmuscle_core.cli import COMMANDS, build_parser
from rmuscle_core.command_docs import commands
from rmuscle_core.errors import RMuscleError
from rmuscle_core.evaluation import rows as evaluation
from rmuscle_core.options import given_settings
from rmuscle_core.settings import Settings, check, rows

NODES = {path.stem: path.read_text() for path in (ROOT / 'rmuscle_ros').glob('*.py')}
SETTINGS = {row.name for row in rows()}
STATES = {'configure', 'activate', 'deactivate', 'cleanup', 'shutdown'}
PARSERS = dict(commands())


def node_parameters() -> set[str]:
    """Parameters of the two nodes, read from their source: ROS may be missing here."""
    tree = ast.parse(NODES['params'])
    table = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == 'NodeSettings')
    own = {n.target.id for n in table.body if isinstance(n, ast.AnnAssign)}
    return {*SETTINGS, *own, *re.findall(r"declare(?:_parameter)?\('(\w+)'", NODES['cell_node']), 'use_sim_time'}


def names(pattern: str) -> dict[str, str]:
    """name -> type of what the nodes make, as the source says."""
    return {name: kind for text in NODES.values() for kind, name in re.findall(pattern, text)}


PARAMETERS = node_parameters()
SERVICES = names(r"create_service\((\w+), '(~?/?\w+(?:/\w+)*)'")
EPISODES = re.search(r"EPISODES_TOPIC = '(.*)'", (ROOT / 'rmuscle_core/workcell/bag.py').read_text())[1]
TOPICS = names(r"(?:publisher|subscribe|subscription)\((\w+), '(~?/?\w+(?:/\w+)*)'")


def misfit(command: Command) -> str:
    """What is wrong with a command, empty if nothing."""
    program, *words = command.words
    if program == 'rmuscle':
        return wrong_usage(words, command.whole)
    if program == 'ros2':
        return wrong_ros(words)
    if program == 'python':
        return wrong_script(words)
    return ''


def wrong_usage(words: list[str], whole: bool) -> str:
    if not words or words[0].startswith('-') or words[0] == 'COMMAND':
        return ''
    if words[0] not in COMMANDS:
        return f'there is no command {words[0]}'
    if not whole:  # a part, as in "rmuscle library build --episodes": its options must exist
        name = ' '.join(words[:2] if ' '.join(words[:2]) in PARSERS else words[:1])
        known = {option for key, parser in PARSERS.items() if key.startswith(name)
                 for option in parser._option_string_actions}
        unknown = [word for word in words if word.startswith('--') and word not in known]
        return f'{unknown} are no options' if unknown else ''
    try:
        args = build_parser(words[0]).parse_args(words)
        if hasattr(args, 'token_ratio'):
            Settings().with_values(**given_settings(args))
    except (SystemExit, RMuscleError) as error:
        return f'refused: {error}'
    if words[0] == 'eval':
        unknown = {*(args.rows or ())} - {row.name for row in evaluation.ROWS} - {row.group for row in evaluation.ROWS}
        return f'there are no rows {unknown}' if unknown else ''
    return ''


def wrong_ros(words: list[str]) -> str:
    parameters = re.findall(r'-p (\S+?):=', ' '.join(words))
    match words:
        case ['param', 'set', _, name, value]:
            if name in SETTINGS:
                check(name, type(getattr(Settings(), name))(value))
            parameters.append(name)
        case ['param', 'get' | 'describe', _, name]:
            parameters.append(name)
        case ['launch', package, file, *arguments]:
            launch = ROOT / 'launch' / file
            if package != 'rmuscle' or not launch.is_file():
                return f'there is no launch file {file}'
            declared = set(re.findall(r"DeclareLaunchArgument\('(\w+)'", launch.read_text()))
            unknown = {word.partition(':=')[0] for word in arguments if ':=' in word} - declared
            return f'{file} has no argument {unknown}' if unknown else ''
        case ['run', 'rmuscle', executable, *_] if not (ROOT / 'rmuscle_ros/scripts' / executable).is_file():
            return f'there is no executable {executable}'
        case ['service', 'call', name, kind, *_]:
            made = SERVICES.get(own(name))
            return '' if made == kind.rpartition('/')[2] else f'{name} is of type {made}'
        case ['topic', 'echo' | 'hz' | 'info' | 'pub', *arguments]:
            unknown = [word for word in arguments if word.startswith('/') and not known_topic(word)]
            return f'there is no topic {unknown}' if unknown else ''
        case ['lifecycle', 'set', _, state] if state not in STATES:
            return f'there is no transition {state}'
        case ['bag', *arguments]:
            unknown = [word for word in arguments if re.match(r'/\w*_node/', word) and not known_topic(word)]
            return f'there are no topics {unknown}' if unknown else ''
    unknown = [name for name in parameters if name not in PARAMETERS and not name.startswith('image_topics.')]
    return f'there are no parameters {unknown}' if unknown else ''


def own(name: str) -> str:
    """/cell_a/policy_node/stop as the node calls it: ~/stop."""
    return re.sub(r'^.*\w*_node/', '~/', name)


def known_topic(name: str) -> bool:
    last = name.rpartition('/')[2]  # in any namespace
    return own(name) in TOPICS or name in (*TOPICS, EPISODES) or last in (*TOPICS, 'image_raw', 'compressed')


def wrong_script(words: list[str]) -> str:
    """Every option of ours is written in the script, or in one of the files of its folder."""
    script = ROOT / (words[1].replace('.', '/') if words[0] == '-m' else words[0])
    script = next((path for path in (script, script.with_suffix('.py')) if path.exists()), None)
    if script is None or not words[0].startswith(('bench/', '-m')):
        return '' if script or not words[1:2] or not words[1].startswith('rmuscle') else f'there is no {words[1]}'
    text = ''.join(path.read_text() for path in ([script] if script.is_file() else script.glob('*.py')))
    unknown = [word for word in words if word.startswith('--') and f"'{word}'" not in text]
    return f'{unknown} are no options of {script.name}' if unknown else ''

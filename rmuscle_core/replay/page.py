# SPDX-License-Identifier: Apache-2.0
"""The report: one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rmuscle_core.replay.page_style import STYLE


class Html(str):
    """Markup; any other text is escaped where it enters the page."""


@dataclass(frozen=True)
class Shown:
    """One of the worst calls. account: of measures.summarise. views: row -> camera -> PNG. chunks: joint -> PNG."""

    account: dict
    views: Mapping[str, Mapping[str, bytes]]
    chunks: Mapping[str, bytes]


def render(summary: dict, pictures: Mapping[str, bytes], worst: Sequence[Shown]) -> str:
    """summary: of measures.summarise, with 'title', 'command', 'skipped', 'min_similarity' and 'made_with' added.
    pictures: time, latency, jumps. worst: the worst calls, the worst first."""
    sections = {
        'Limits': _limits(summary['limits']),
        'In short': _short(summary),
        'Joints': _joints(summary['joints']),
        'Episodes': _episodes(summary),
        'Paths and similarity': _wide(_image(pictures['time'], 'Similarity, path, action difference and latency of '
                                                               'every call')),
        'Latency and chunk boundaries': Html('<div class=row>' + _image(pictures['latency'], 'Histogram of latency')
                                             + _image(pictures['jumps'], 'Histogram of jumps between chunks')
                                             + '</div>'),
        'Worst calls': _worst_calls(worst),
        'Made with': Html(_table([[key, str(value)] for key, value in summary['made_with'].items()])
                          + f'<p><code>{escape(summary["command"])}</code></p>')}
    body = ''.join(f'<section id="{_anchor(title)}"><h2>{title}</h2>{content}</section>'
                   for title, content in sections.items())
    title = escape(summary['title'])
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<style>{STYLE}</style></head><body><h1>{title}</h1>{_verdict(summary["limits"])}{body}</body></html>\n')


def _verdict(limits: Sequence[dict]) -> Html:
    broken = [row['name'] for row in limits if not row['holds']]
    if not limits:
        return Html('<p class="verdict">No limits were given, so nothing was judged.</p>')
    if broken:
        return Html(f'<p class="verdict no">Exceeded: {escape(", ".join(broken))}</p>')
    return Html('<p class="verdict yes">Every limit holds</p>')


def _limits(limits: Sequence[dict]) -> Html:
    if not limits:
        return Html('<p class=s>Ask for some with --max-action-difference, --max-boundary-ratio, --min-hit-ratio or '
                    '--min-speedup.</p>')
    mark = {True: Html('<span class=yes>holds</span>'), False: Html('<span class=no>exceeded</span>')}
    return _table([[mark[row['holds']], row['name'], f'{"at least" if row["at_least"] else "at most"} '
                    f'{row["limit"]:g}', f'{row["found"]:.4g}'] for row in limits], ['', 'limit', 'asked', 'found'])


def _short(summary: dict) -> Html:
    difference, jump, ms = summary['action_difference'], summary['boundary_jump'], summary['milliseconds']
    return _table([
        ['calls', f'{summary["calls"]} in {summary["episodes"]} episodes, {summary["executed_steps"]} actions of each '
                  'executed'],
        ['served by', _paths(summary['paths'])],
        ['similarity of the references, mean', _number(summary['similarity'], 3)],
        ['speedup of a call, median', f'{summary["speedup"]:.2f}'],
        ['ms a call, dense and cached, p50 (p95)', ' and '.join(
            f'{ms[kind]["p50"]:.1f} ({ms[kind]["p95"]:.1f})' for kind in ('dense', 'cached'))],
        ['action difference, mean / p95 / worst call, in half ranges',
         ' / '.join(f'{difference[key]:.4f}' for key in ('mean', 'p95', 'max'))],
        ['jump between chunks, p95, dense and cached, in half ranges',
         ' and '.join(f'{jump[kind]["p95"]:.4f}' for kind in ('dense', 'cached'))]])


def _joints(joints: Mapping[str, dict]) -> Html:
    shares = {name: [row[key] / row['half_range'] if row['half_range'] else 0.0 for key in ('mean', 'p95')]
              for name, row in joints.items()}
    full = max((p95 for _, p95 in shares.values()), default=0.0) or 1.0

    def bars(mean: float, p95: float) -> Html:
        return Html('<div class=bars>' + ''.join(
            f'<div class={kind} style="width:{100 * min(value / full, 1):.1f}%"></div>'
            for kind, value in (('p95', p95), ('mean', mean))) + '</div>')

    rows = [[name, bars(*shares[name]), *(f'{joints[name][key]:.5f}' for key in ('mean', 'p95', 'max')),
             f'{joints[name]["half_range"]:.4f}'] for name in joints]
    return Html('<p class=s>|cached - dense| of the executed actions, in the units of the checkpoint. Bars: '
                '<span class="key mean"></span> mean and <span class="key p95"></span> 95th percentile, as a share of '
                f'the half range; a full bar is {full:.3g}.</p>'
                + _table(rows, ['joint', '', 'mean', 'p95', 'largest', 'half range']))


def _episodes(summary: dict) -> Html:
    rows = [[row['episode'], str(row['calls']), _paths(row['paths']), _number(row['similarity'], 3),
             f'{row["difference"]:.4f}', f'{row["worst"]:.4f}'] for row in summary['by_episode']]
    left_out = ''.join(f'<li>{escape(name)}: {escape(reason)}</li>' for name, reason in summary['skipped'])
    return Html(_table(rows, ['episode', 'calls', 'served by', 'similarity', 'difference', 'worst call'])
                + (f'<p>Left out:</p><ul>{left_out}</ul>' if left_out else ''))


def _worst_calls(worst: Sequence[Shown]) -> Html:
    if not worst:
        return Html('<p class=s>No call moved an action.</p>')
    return Html(
        '<p class=s>Recomputed: <span class="key bright"></span> by every layer <span class="key dark"></span> by '
        'none, whose outputs were reused. Chunks: <span class="key dense"></span> dense '
        '<span class="key mean"></span> cached, in the units of the checkpoint over the step; the executed '
        'steps are shaded.</p>'
        + ''.join(_worst(shown) for shown in worst))


def _worst(shown: Shown) -> str:
    account = shown.account
    line = (f'{account["path"]}, reference {account["reference"] or "none"}, similarity '
            f'{_number(account["similarity"], 3)}: {account["reason"]}')
    title = f'{account["episode"]}, call {account["call"]}: difference {account["difference"]:.4f}'
    columns = max((len(row) for row in shown.views.values()), default=1)
    views = ''.join(f'<figure>{_image(png, f"{camera}, {row}")}<figcaption>{escape(f"{camera}, {row}")}</figcaption>'
                    '</figure>' for row, cameras in shown.views.items() for camera, png in cameras.items())
    chunks = ''.join(f'<figure>{_image(png, f"Chunks of {joint}")}<figcaption>{escape(joint)}</figcaption></figure>'
                     for joint, png in shown.chunks.items())
    return (f'<article><h3>{escape(title)}</h3><p class=s>{escape(line)}</p>'
            f'<div class=views style="grid-template-columns:repeat({columns},minmax(0,14rem))">{views}</div>'
            f'<div class="row chunks">{chunks}</div></article>')


def _paths(paths: Mapping[str, int]) -> str:
    return ', '.join(f'{path} {count}' for path, count in paths.items())


def _number(value: float | None, digits: int) -> str:
    return 'none' if value is None else f'{value:.{digits}f}'


def _anchor(title: str) -> str:
    return title.lower().replace(' ', '-')


def _table(rows: Sequence[Sequence[str]], heading: Sequence[str] = ()) -> Html:
    def cell(text: str) -> str:
        return text if isinstance(text, Html) else escape(text)

    head = f'<tr>{"".join(f"<th>{h}</th>" for h in heading)}</tr>' if heading else ''
    lines = ''.join(f'<tr>{"".join(f"<td>{cell(text)}</td>" for text in row)}</tr>' for row in rows)
    return Html(f'<div class=wide><table>{head}{lines}</table></div>')


def _wide(image: Html) -> Html:
    return Html(f'<div class=wide>{image}</div>')


def _image(png: bytes, text: str) -> Html:
    return Html(f'<img alt="{escape(text)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">')

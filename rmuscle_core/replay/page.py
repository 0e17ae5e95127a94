# SPDX-License-Identifier: Apache-2.0
"""The report: one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #dde3e8 }
table { border-collapse: collapse; margin: .6rem 0 } td, th { padding: .15rem .9rem .15rem 0; text-align: left;
vertical-align: top } td.n { text-align: right; font-variant-numeric: tabular-nums }
.yes { color: #15803d } .no { color: #c2410c; font-weight: 600 } img { max-width: 100% } p.s { color: #52606d }
code { background: #f1f4f7; padding: 0 .25rem }
"""


def render(summary: dict, pictures: dict[str, bytes], worst: Sequence[tuple[dict, bytes]]) -> str:
    """summary: of measures.summarise, with 'title', 'command' and 'made_with' added. pictures: joints, time,
    distributions. worst: the worst calls with their pictures."""
    limits = summary['limits']
    verdict = ('<p class=s>No limits were given.</p>' if not limits else
               _table([[_mark(row['holds']), row['name'], f'{"at least" if row["at_least"] else "at most"} '
                        f'{row["limit"]:g}', f'{row["found"]:.4g}'] for row in limits],
                      ['', 'limit', 'asked', 'found']))
    difference, jump, ms = summary['action_difference'], summary['boundary_jump'], summary['milliseconds']
    sections = [
        ('Limits', verdict),
        ('In short', _table([
            ['calls', f'{summary["calls"]} in {summary["episodes"]} episodes'],
            ['served by', ', '.join(f'{path} {n}' for path, n in summary['paths'].items())],
            ['speedup of a call, median', f'{summary["speedup"]:.2f}'],
            ['ms a call, dense and cached, p50 (p95)', ' and '.join(
                f'{ms[kind]["p50"]:.1f} ({ms[kind]["p95"]:.1f})' for kind in ('dense', 'cached'))],
            ['action difference, mean / p95 / worst call, in half ranges',
             ' / '.join(f'{difference[key]:.4f}' for key in ('mean', 'p95', 'max'))],
            ['jump between chunks, p95, dense and cached',
             ' and '.join(f'{jump[kind]["p95"]:.4f}' for kind in ('dense', 'cached'))]])),
        ('Joints', _picture(pictures['joints'], 'Action difference per joint')
         + _table([[name, f'{row["mean"]:.5f}', f'{row["max"]:.5f}', f'{row["half_range"]:.4f}']
                   for name, row in summary['joints'].items()],
                  ['joint', 'mean difference', 'largest', 'half range'])),
        ('Paths and similarity', _picture(pictures['time'], 'Similarity, path and action difference by call')),
        ('Latency and chunk boundaries', _picture(pictures['distributions'], 'Histograms')),
        ('Worst calls', '<p class=s>Dark patches were reused from the reference, bright ones recomputed.</p>'
         + ''.join(_worst(account, image) for account, image in worst)),
        ('Made with', _table([[key, escape(str(value))] for key, value in summary['made_with'].items()])
         + f'<p><code>{escape(summary["command"])}</code></p>')]
    body = ''.join(f'<section id="{_anchor(title)}"><h2>{title}</h2>{content}</section>' for title, content in sections)
    title = escape(summary['title'])
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<style>{STYLE}</style></head><body><h1>{title}</h1>{body}</body></html>\n')


def _worst(account: dict, image: bytes) -> str:
    similarity = 'none' if account['similarity'] is None else f'{account["similarity"]:.3f}'
    line = (f'episode {account["episode"]}, call {account["call"]}: difference {account["difference"]:.4f}, '
            f'{account["path"]}, reference {account["reference"] or "none"}, similarity {similarity}. '
            f'{account["reason"]}')
    return f'<p>{escape(line)}</p>{_picture(image, line)}'


def _anchor(title: str) -> str:
    return title.lower().replace(' ', '-')


def _mark(holds: bool) -> str:
    return '<span class=yes>holds</span>' if holds else '<span class=no>exceeded</span>'


def _table(rows: Sequence[Sequence[str]], heading: Sequence[str] = ()) -> str:
    head = f'<tr>{"".join(f"<th>{h}</th>" for h in heading)}</tr>' if heading else ''
    lines = ''.join(f'<tr>{"".join(f"<td>{cell}</td>" for cell in row)}</tr>' for row in rows)
    return f'<table>{head}{lines}</table>'


def _picture(png: bytes, text: str) -> str:
    return f'<img alt="{escape(text, quote=True)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'

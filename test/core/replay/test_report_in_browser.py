# SPDX-License-Identifier: Apache-2.0
"""The replay's report as a browser shows it: complete, readable on a desk and on a phone, and by itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
from chromium import BINARY, Chromium
from tiny_policy import CAMERAS

from rmuscle_core.cli import main
from rmuscle_core.observation import CallReport
from rmuscle_core.replay import measures, report
from rmuscle_core.replay.calls import ReplayedCall

pytestmark = pytest.mark.skipif(BINARY is None, reason='needs chromium or google-chrome')
DESK, PHONE = 1280, 390
SECTIONS = ['limits', 'in-short', 'joints', 'episodes', 'paths-and-similarity', 'latency-and-chunk-boundaries',
            'worst-calls', 'made-with']
SEEN = """
(async () => {
  await Promise.all([...document.images].map(image => image.decode().catch(() => 0)));
  const channels = text => text.match(/[\\d.]+/g).map(Number);
  const light = colour => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const c = colour[i] / 255;
    return sum + weight * (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  }, 0);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = channels(getComputedStyle(element).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const texts = [...document.querySelectorAll('body *')].filter(
    element => [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  const faint = texts.filter(element => {
    const both = [light(channels(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => b - a);
    return (both[0] + 0.05) / (both[1] + 0.05) < 4.5;
  });
  const shown = element => element.checkVisibility({opacityProperty: true, visibilityProperty: true})
    && element.getBoundingClientRect().height > 0 && element.getBoundingClientRect().width > 0;
  const parts = [...document.querySelectorAll('section')];
  return {sections: parts.filter(shown).map(part => part.id), images: document.images.length,
          undecoded: [...document.images].filter(image => !image.naturalWidth).map(image => image.alt),
          hidden: [...document.images, ...texts].filter(element => !shown(element)).map(e => e.outerHTML.slice(0, 60)),
          tiny: texts.filter(e => parseFloat(getComputedStyle(e).fontSize) < 11).map(e => e.textContent),
          faint: faint.map(element => element.textContent.slice(0, 60)),
          overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth};
})()
"""


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp('profile')) as opened:
        yield opened


def faults(browser, page, width):
    """What is wrong with a page: a dictionary of the checks that failed."""
    browser.open(page, width)
    seen = browser.evaluate(SEEN)
    found = {name: seen[name] for name in ('undecoded', 'hidden', 'tiny', 'faint') if seen[name]}
    if seen['overflow'] > 0:
        found['overflow'] = seen['overflow']
    if seen['sections'] != SECTIONS:
        found['sections'] = seen['sections']
    said = browser.named('Runtime.consoleAPICalled', 'Runtime.exceptionThrown', 'Log.entryAdded')
    left = [event['request']['url'] for event in browser.named('Network.requestWillBeSent')]
    left = [url for url in left if url != page.as_uri() and not url.startswith('data:image/png;base64,')]
    failed = browser.named('Network.loadingFailed')
    return found | {name: events for name, events in (('console', said), ('left', left), ('failed', failed)) if events}


@pytest.fixture(scope='module')
def replayed(record, tiny_checkpoint, tmp_path_factory):
    """report.html of a replay by the command, with one limit that holds and one that does not."""
    folder = tmp_path_factory.mktemp('replayed')
    assert main(['replay', str(record(folder)), '--checkpoint', str(tiny_checkpoint), '--token-ratio', '0.3', '--out',
                 str(folder), '--max-action-difference', '9', '--min-speedup', '1000']) == 1
    return folder / 'report.html'


@pytest.mark.parametrize('width', [DESK, PHONE])
def test_the_report_is_complete_and_readable(browser, replayed, width):
    assert faults(browser, replayed, width) == {}
    captions = browser.evaluate('[...document.querySelectorAll("article")].map(call => [...call.querySelectorAll('
                                '"figcaption")].map(caption => caption.textContent))')
    accounts = json.loads((replayed.parent / 'report.json').read_text())['worst_calls']
    assert len(captions) == len(accounts) == 5
    for caption, account in zip(captions, accounts):
        rows = ['now', 'recomputed', 'reference'] if account['path'] != 'dense' else ['now']
        assert caption[:-4] == [f'{camera}, {row}' for row in rows for camera in CAMERAS]
        assert set(caption[-4:]) < set('abcde')  # the joints that differ most
    top, first = (browser.evaluate(f'document.querySelector("{name}").getBoundingClientRect().top')
                  for name in ('.verdict.no', 'section'))
    assert top < first and 'speedup' in browser.evaluate(
        'document.querySelector(".verdict").textContent')


def drawn(folder, joints, episode, changed):
    """A report of made-up calls: 12 of one episode, moved by ``changed``."""
    random, cameras = np.random.default_rng(0), ('top', 'a-wrist-camera-with-a-very-long-name-that-has-no-end')
    calls = []
    for number in range(12):
        dense = random.normal(size=(8, len(joints))).astype(np.float32)
        images = {camera: random.integers(0, 255, (480, 640, 3)).astype(np.uint8)
                  for camera in cameras[:1 + number % 2]}
        path = ('library', 'previous_call', 'dense')[number % 3]
        call = CallReport(path=path, reason='most similar of 3 ready', reference='' if path == 'dense' else 'task/e#1',
                          similarity=float('nan') if path == 'dense' else 0.9, milliseconds={'total': 1.0 + number})
        calls.append(ReplayedCall(episode, number, 0.0, images, dense, dense + changed, 2.0, call, {}))
    found = measures.summarise(calls, joints, 4, np.ones(len(joints)), measures.Limits())
    found |= {'title': f'rMuscle replay of {episode}', 'skipped': [['<i>odd</i>', 'it has no observations']],
              'min_similarity': 0.6, 'command': 'rmuscle replay ' + 'x' * 300,
              'made_with': {'checkpoint': '/' + 'y' * 300}}
    report.write(folder, found, calls, np.ones(len(joints)), lambda references: {})
    return folder / 'report.html'


@pytest.mark.parametrize('width', [DESK, PHONE])
@pytest.mark.parametrize('case', ['one joint', 'thirty joints', 'nothing moved'])
def test_any_robot_fits(browser, tmp_path, case, width):
    thirty = [f'left_arm_of_the_cell_{"very_" * 10}long_joint_{number}' for number in range(30)]
    joints = ['elbow'] if case == 'one joint' else thirty
    page = drawn(tmp_path, joints, 'execution-' * 10, 0.0 if case == 'nothing moved' else 0.1)
    assert faults(browser, page, width) == {}
    text = browser.evaluate('document.body.innerText')
    assert ('No call moved an action' in text) == (case == 'nothing moved')
    assert 'No limits were given' in text and '<i>odd</i>' in text and joints[-1] in text


@pytest.mark.parametrize(('broken', 'fault'), [
    ('<img alt="a" src="data:image/png;base64,bm8=">', 'undecoded'),
    ('<img alt="a" src="http://127.0.0.1:9/a.png">', 'left'),
    ('<img alt="a" src="http://192.0.2.1/a.png">', 'failed'),
    ('<script>console.warn("odd")</script>', 'console'),
    ('<script>nothing()</script>', 'console'),
    ('<p style="color:#aaa">faint</p>', 'faint'),
    ('<p style="opacity:0">gone</p>', 'hidden'),
    ('<p style="font-size:8px">tiny</p>', 'tiny'),
    ('<div style="width:3000px">wide</div>', 'overflow'),
    ('<style>#joints { display: none }</style>', 'sections')])
def test_each_fault_would_be_seen(browser, replayed, tmp_path, broken, fault):
    page = tmp_path / 'broken.html'
    page.write_text(replayed.read_text().replace('</body>', f'{broken}</body>'))
    assert fault in faults(browser, page, DESK)

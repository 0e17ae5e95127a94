# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, asked over its pipe: what a page loads, says and looks like."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from pathlib import Path

NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable')
BINARY = next(filter(None, map(shutil.which, NAMES)), None)
REFUSED = '127.0.0.1:9'  # the proxy of every request: nobody listens there
PATIENCE_S = 60


class Chromium:
    """One browser process with one tab; a context."""

    def __init__(self, profile: Path) -> None:
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4, each message ended by a zero byte.
        self._process = subprocess.Popen(
            ['bash', '-c', f'exec "$@" 3<&{commands} 4>&{answers}', 'bash', BINARY, '--headless=new', '--no-sandbox',
             '--disable-gpu', '--no-first-run', f'--user-data-dir={profile}', f'--proxy-server={REFUSED}',
             '--proxy-bypass-list=<-loopback>', '--disable-background-networking', '--remote-debugging-pipe'],
            pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(answers)
        self._left, self._sent, self._session = b'', 0, None
        self.events: list[dict] = []
        target = self.ask('Target.createTarget', url='about:blank')['targetId']
        self._session = self.ask('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            self.ask(f'{domain}.enable')
        self.ask('Page.setLifecycleEventsEnabled', enabled=True)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)  # the browser ends when its commands do
        os.close(self._from)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, method: str, **parameters) -> dict:
        """Send a command and return its result; events that come before it are kept."""
        self._sent += 1
        message = {'id': self._sent, 'method': method, 'params': parameters}
        if self._session:
            message['sessionId'] = self._session
        os.write(self._to, json.dumps(message).encode() + b'\0')
        while (answer := self._receive()).get('id') != self._sent:
            self.events.append(answer)
        assert 'error' not in answer, f'{method}: {answer["error"]}'
        return answer['result']

    def open(self, page: Path, width: int) -> None:
        """Load a file, with the events of this page alone, until everything it names was loaded or has failed."""
        self.ask('Emulation.setDeviceMetricsOverride', width=width, height=900, deviceScaleFactor=1,
                 mobile=width < 600)
        self.events.clear()
        loader = self.ask('Page.navigate', url=page.as_uri())['loaderId']
        while not any(event['name'] == 'load' and event['loaderId'] == loader
                      for event in self.named('Page.lifecycleEvent')):
            self.events.append(self._receive())

    def evaluate(self, expression: str):
        """Value of a JavaScript expression in the page."""
        found = self.ask('Runtime.evaluate', expression=expression, returnByValue=True, awaitPromise=True)
        assert 'exceptionDetails' not in found, found['exceptionDetails']
        return found['result'].get('value')

    def screenshot(self, path: Path) -> None:
        """The whole page, not only what the window shows."""
        found = self.ask('Page.captureScreenshot', captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found['data']))

    def named(self, *methods: str) -> list[dict]:
        """Parameters of the events so called."""
        return [event['params'] for event in self.events if event.get('method') in methods]

    def _receive(self) -> dict:
        while b'\0' not in self._left:
            assert select.select([self._from], [], [], PATIENCE_S)[0], f'the browser said nothing for {PATIENCE_S} s'
            received = os.read(self._from, 1 << 20)
            assert received, 'the browser ended'
            self._left += received
        message, _, self._left = self._left.partition(b'\0')
        return json.loads(message)

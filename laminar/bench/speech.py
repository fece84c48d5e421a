"""Speaks to the process that started this one (child.py): JSON lines, which nothing else that prints can disturb."""

import json
import os
import sys
import threading


class Speech:
    """Takes stdout for itself; whatever a library prints goes to stderr from then on. Any thread may speak."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(self, to_order: object) -> None:
        self.tell({"reply": to_order})

    def tell(self, news: dict[str, object]) -> None:
        with self._lock:
            self._pipe.write(json.dumps(news) + "\n")
            self._pipe.flush()

"""The last of what a process prints, however much that is."""

import os
import threading

KEPT = 1 << 16  # bytes


class Tail:
    """Reads a pipe to its end in the background. `writer` is the end to write to; close it in this process once
    whoever writes has it."""

    def __init__(self):
        self.reader, self.writer = os.pipe()
        os.set_inheritable(self.writer, True)
        self.kept, self.total, self.lock = b"", 0, threading.Lock()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        while block := os.read(self.reader, KEPT):
            with self.lock:
                self.kept, self.total = (self.kept + block)[-KEPT:], self.total + len(block)
        os.close(self.reader)

    def since(self, total: int) -> tuple[str, int]:
        """(what came after the first `total` bytes, as far as it is kept; how many there are now)."""
        with self.lock:
            new = self.total - total
            text = self.kept[-new:] if new else b""
            return text.decode("utf-8", "backslashreplace"), self.total

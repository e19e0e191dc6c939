"""Runs the cases of a device script in child processes: a kernel that hangs or kills its context costs one case, not the run.

The script calls itself with `--child DIRECTORY WHAT ARGUMENT... SKIPPED` (SKIPPED: comma-separated). The child prints `@NAME` before
every case; what it prints besides is passed on. It ends with 3 where a launch failed, so that it is started again behind that case.
"""
import os
import select
import subprocess
import sys
import time

MOST_SKIPPED = 6


def supervise(script, directory, whats, arguments):
    """The exit status: 0 where every child ended with 0 and no case hung."""
    status = 0
    for what in whats:
        skip = []
        while True:
            child = subprocess.Popen([sys.executable, os.path.abspath(script), "--child", directory, what, *arguments, ",".join(skip)],
                                     stdout=subprocess.PIPE, bufsize=0)
            current, hung = _follow(child, 40 if what in ("time", "beside") else 20)
            if hung:
                child.kill()
                child.wait()
                print(f"  {current or '?':18s} HANG", flush=True)
                status += 1
            elif child.wait() == 3:
                status += 1
            else:
                status += child.returncode != 0
                if child.returncode not in (0, 1):
                    print(f"  {current or '?':18s} child ended with {child.returncode}", flush=True)
                break
            if current is None or len(skip) + 1 >= MOST_SKIPPED:
                break
            skip.append(current)
    return 1 if status else 0


def _follow(child, patience):
    """Passes the child's lines on until it ends: the case it was at, and whether `patience` seconds went by without an answer (90
    before the first case)."""
    current, buffer, deadline = None, b"", time.time() + 90
    while True:
        ready, _, _ = select.select([child.stdout], [], [], max(0, deadline - time.time()))
        if not ready:
            return current, True
        data = os.read(child.stdout.fileno(), 65536)
        if not data:
            return current, False
        buffer += data
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            line = line.decode()
            if line.startswith("@"):
                current, deadline = line[1:], time.time() + patience
            else:
                print(line, flush=True)

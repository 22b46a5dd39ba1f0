"""`python SCRIPT` and `torchrun --standalone SCRIPT` in shell commands of documents, forked.

`programs` makes a folder with these two programs, for a PATH. Each sends its arguments, its
directory and its environment to this process, which forks the run (see forked.py) and answers with
what it printed. What cannot be forked is executed: other arguments, and other programs."""

import json
import os
import re
import socket
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path


def processes_and_words(program, words):
    """The number of processes and the words from the script on. None: not to be forked."""
    number = None
    if program == "torchrun":
        if words[:1] != ["--standalone"]:
            return None
        number, words = 1, words[1:]
        if words[:1] == ["--nproc-per-node"]:
            number, words = int(words[1]), words[2:]
    if words and re.fullmatch(r"[^-].*\.py", words[0]):
        return number, words
    return None


def serve(listener, fork):
    with suppress(OSError):  # the listener is closed
        while True:
            connection, _ = listener.accept()
            # A shell that is killed does not wait for its answer.
            with suppress(OSError), connection, connection.makefile("rwb") as file:
                number, words, cwd, variables = json.loads(file.readline())
                run = fork(
                    Path(cwd, words[0]), number, *words[1:], cwd=cwd, short=False, **variables
                )
                out, err = run.communicate()
                file.write(json.dumps([run.returncode, out, err]).encode())


@contextmanager
def programs(folder, fork):
    """Yields `folder`, with `python` and `torchrun` in it."""
    folder.mkdir()
    for name in ("python", "torchrun"):
        words = [sys.executable, "-SE", __file__, name, str(folder / "socket"), '"$@"']
        (folder / name).write_text(f"#!/bin/sh\nexec {' '.join(words)}\n")
        (folder / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        threading.Thread(target=serve, args=(listener, fork), daemon=True).start()
        yield folder
        listener.shutdown(socket.SHUT_RDWR)


def main(program, address, *words):
    request = processes_and_words(program, list(words))
    if request is None:
        path = Path(sys.executable).parent / program
        os.execv(path, [str(path), *words])
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(address)
        with one.makefile("rwb") as file:
            file.write(json.dumps([*request, os.getcwd(), dict(os.environ)]).encode() + b"\n")
            file.flush()
            code, out, err = json.loads(file.read())
    sys.stdout.write(out)
    sys.stderr.write(err)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(*sys.argv[1:])

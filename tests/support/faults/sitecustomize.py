"""Put first on a run's path, this strikes at a chosen file operation. It changes no function.

STRIKE is "ACTION EVENT PART N": at the N-th audit event EVENT of the process that has PART in its
first arguments, it kills the process (ACTION kill; ACTION once: unless there is a file GATE, which
it leaves), fills the disk under FILL (ACTION fill), waits for a file GATE (ACTION wait) or for some
seconds (ACTION sleep:SECONDS), or lets the operation fail (ACTION is the name of an error, such as
ESTALE). An audit event is raised before the operation itself:
https://docs.python.org/3/library/audit_events.html
STRIKE_RANK is the rank that it strikes.
"""

import errno
import os
import signal
import sys
import time

if "STRIKE" in os.environ and os.environ.get("RANK", "0") == os.environ.get("STRIKE_RANK", "0"):
    action, event_name, part, left = os.environ["STRIKE"].split()
    left = int(left)

    def strike(event, args):
        global left
        if event != event_name or part not in " ".join(map(str, args)):
            return
        left -= 1
        if left == 0 and action == "once" and not os.path.exists(os.environ["GATE"]):
            os.close(os.open(os.environ["GATE"], os.O_CREAT))
            os.kill(os.getpid(), signal.SIGKILL)
        if left == 0 and action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if left == 0 and action.startswith("sleep:"):
            time.sleep(float(action.removeprefix("sleep:")))
        if left == 0 and hasattr(errno, action):
            raise OSError(getattr(errno, action), os.strerror(getattr(errno, action)))
        while left == 0 and action == "wait" and not os.path.exists(os.environ["GATE"]):
            time.sleep(0.05)
        if left == 0 and action == "fill":
            filler = os.open(os.path.join(os.environ["FILL"], "filler"), os.O_CREAT | os.O_WRONLY)
            try:
                while True:
                    os.write(filler, bytes(1 << 16))
            except OSError:
                os.close(filler)

    sys.addaudithook(strike)

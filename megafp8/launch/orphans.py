"""A rank ends when the torchrun that started it ends, however it does and however early.

Standard library only: a rank calls this before its imports, which take seconds, and minutes on a busy file system.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from megafp8.errors import PeerLost
from megafp8.launch.process import end_with_parent

# For a connection within this machine.
CONNECT_S = 5.0


def is_under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_torchrun() -> None:
    """Have the kernel kill this process when torchrun ends, and end it now if torchrun has ended already.

    SIGKILL, since a rank that has not met the others has nothing to save; `save_at_end_of_torchrun` is for afterwards.
    The kernel watches the thread that started this process, which in torchrun is the main one.
    """
    if not is_under_torchrun():
        return
    end_with_parent(signal.SIGKILL)
    if is_torchrun_gone():
        print("torchrun, which started this rank, is gone: the rank ends too", file=sys.stderr, flush=True)
        sys.exit(PeerLost.exit_status)


def save_at_end_of_torchrun() -> None:
    """From now on the end of torchrun is a SIGTERM to this process, which saves."""
    if is_under_torchrun():
        end_with_parent(signal.SIGTERM)


def is_torchrun_gone() -> bool:
    """Whether this process was orphaned before it could ask the kernel for anything.

    The parent's number does not say so: a torchrun may be process 1, and an orphan's new parent may be any subreaper.
    But the torchrun of the first node listens on the ranks' store from before it starts them. Elsewhere it does not,
    and this is False.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("GROUP_RANK") != "0":
        return False
    try:
        with socket.create_connection(("localhost", int(os.environ["MASTER_PORT"])), timeout=CONNECT_S):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False

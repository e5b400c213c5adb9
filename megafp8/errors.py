"""The errors that megafp8 raises at its users, and the exit status that each gives a command line.

Exit statuses follow BSD's sysexits where one fits, so that a launcher can tell bad input from a bad run.
"""


class Megafp8Error(ValueError):
    """Base of every error that a user can mend. Its text says what is wrong, the values, the flag and the mend."""

    exit_status = 70


class ConfigError(Megafp8Error):
    """Flags that contradict each other or the machine. `problems` holds all of them, not the first only."""

    exit_status = 64

    def __init__(self, problems: "str | list[str]"):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__(f"{head} with what was asked for:\n" + "\n".join(f"  - {text}" for text in self.problems))


class CapabilityError(ConfigError):
    """Something that this machine cannot do (a missing device, library or kernel)."""


class DataError(Megafp8Error):
    """Input data that is missing, damaged or does not fit the tokenizer or the model."""

    exit_status = 66


class NumericsError(Megafp8Error):
    """A loss or gradient that is not finite."""

    exit_status = 65


class CheckpointError(Megafp8Error):
    """A checkpoint that is missing, damaged or does not fit the model."""

    exit_status = 74


class RunFolderInUse(Megafp8Error):
    """Another run writes to the same folder."""

    exit_status = 73


class PeerLost(Megafp8Error):
    """Another rank of this run is gone. A restart may help."""

    exit_status = 70


# Ends that are no errors of the user's.
INTERNAL = 70
HUNG = 71
PREEMPTED = 75

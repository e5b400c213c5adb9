"""What keeps a run alive or ends it cleanly: locks, run state, watchdog, fault injection. Standard library only."""

"""What can be said about runs afterwards, from their records alone: no torch, no engine, any machine."""

"""Many runs from one file: a grid expanded to runs with ids that stay, their state, and running them here."""

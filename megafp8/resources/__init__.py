"""Memory of a run, and the settings that follow from it and from the machine."""

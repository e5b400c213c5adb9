"""Checks of a machine and its installation. They work where much is broken."""

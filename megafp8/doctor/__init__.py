"""What this machine has, whether that set was tested, and what mends what is wrong. Works where much is broken."""

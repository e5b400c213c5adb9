"""One module for each subcommand of the `megafp8` command."""

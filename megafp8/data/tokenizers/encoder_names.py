"""What `--encoder` can say, without the libraries that encode: for `--help`."""

AUTO, GIGATOKEN, LIBRARY = "auto", "gigatoken", "library"
ENCODERS = (AUTO, GIGATOKEN, LIBRARY)

"""What is low, general and needs the standard library only: reading small files, checking paths."""

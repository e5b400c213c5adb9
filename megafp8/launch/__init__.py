"""Around a run, without torch: what state it is in, whose the folder is, and starting it again."""
